"""What a run of `bench.engine` found, as Markdown and as a plot: ours, the card's limit, the peer, the goal."""

from __future__ import annotations

import textwrap
from pathlib import Path

import msgspec

from bench.common.machine import Machine
from bench.common.plot import bars, figure
from bench.common.table import markdown, number, percent, ratio
from bench.engine.cells import CeilingsLine, Cell, Failed, FirstToken, Line, Measured, Opened
from bench.engine.goals import NOTHING, Figures

METHOD = textwrap.fill(
    "Method: token ids in and out in one process, no bus; greedy, random prompts, all requests at once; the least of a few"
    " times counts. Cells are rows x prompt x output; ~: ragged. decode tok/s = rows · (output - 1) / (b - a), b the whole run,"
    ' a the same with one token out ("first"); prefill tok/s = prompt tokens / a. p99: of decode steps, ms. Limit: bytes or'
    " FLOPs of the cell (bench/engine/limits.py) at the ceilings measured in the same run. A * marks a figure of the peer that"
    " is recorded (bench/engine/goals.toml), not of this run; a dash, what was not measured, or was lost in noise.",
    width=120,
)


class Side(msgspec.Struct, kw_only=True):
    """Ours or the peer's: the lines of one process, in order, and how long it took."""

    lines: list[Line] = []
    seconds: float = 0.0
    error: str = ""

    def measured(self) -> dict[str, Measured]:
        return {line.cell: line for line in self.lines if isinstance(line, Measured)}

    def opened(self) -> Opened | None:
        return next((line for line in self.lines if isinstance(line, Opened)), None)

    def first_token(self) -> FirstToken | None:
        return next((line for line in self.lines if isinstance(line, FirstToken)), None)


class Start(msgspec.Struct, kw_only=True):
    """Starts of a process that generated one token: with empty caches of compiled kernels, and again."""

    kind: str
    opened: Opened


class Part(msgspec.Struct, kw_only=True):
    """One model in one precision."""

    model: str
    precision: str
    ours: Side
    peer: Side | None = None
    starts: list[Start] = []
    goals: Figures = NOTHING


class Report(msgspec.Struct, kw_only=True):
    machine: Machine
    command: str
    parts: list[Part] = []


def render(report: Report) -> str:
    return "\n\n".join(
        [f"# Engine benchmark\n\n{report.machine}\n\n    {report.command}", METHOD, *map(render_part, report.parts)]
    )


def render_part(part: Part) -> str:
    lines = [f"## {part.model}, {part.precision}"]
    opened = part.ours.opened()
    if opened:
        ahead = "one step ahead of the device" if opened.ahead else "step by step"
        lines.append(f"{opened.name} on {opened.device}, room for {opened.kv_tokens:,} tokens of KV, {ahead}.")
    lines += [f"Ceilings: {line.text}." for line in part.ours.lines if isinstance(line, CeilingsLine)]
    lines.append(_cells(part))
    lines.append(_first_tokens(part))
    lines.append(_starts(part))
    for name, side in (("ours", part.ours), ("peer", part.peer)):
        if side is not None:
            lines += [f"{name}: {line.cell or 'no result'}: {line.error}" for line in side.lines if isinstance(line, Failed)]
            lines += [f"{name}: {side.error}"] if side.error else []
    return "\n\n".join(line for line in lines if line)


def peer_name(part: Part) -> str:
    opened = part.peer.opened() if part.peer else None
    return (opened.version if opened else "") or part.goals.peer or "peer"


def _cells(part: Part) -> str:
    ours, peers = part.ours.measured(), part.peer.measured() if part.peer else {}
    rows = []
    for name in dict.fromkeys([*ours, *peers]):
        cell, own, peer = Cell.parse(name), ours.get(name), peers.get(name)
        recorded = 0.0 if peer else part.goals.recorded.get(name, 0.0)
        theirs = peer.tok_s if peer else recorded
        goal = part.goals.goal.get(name, 0.0)
        tok_s = own.tok_s if own else 0.0
        step_ms = (own.total_s - own.first_s) / (cell.out - 1) * 1e3 if own and tok_s and cell.out > 1 else 0.0
        rows.append(
            (
                name,
                "decode" if cell.out > 1 else "prefill",
                number(tok_s, 0 if tok_s > 99 else 1),
                number(step_ms, 2),
                number(own.step_ms.p99 if own else 0.0, 2),
                number(own.first_s * 1e3 if own else 0.0, 1),
                number(own.limit_tok_s if own else 0.0),
                own.limit_by if own else "",
                percent(tok_s, own.limit_tok_s if own else 0.0),
                number(theirs, 0 if theirs > 99 else 1) + ("*" if recorded else ""),
                ratio(tok_s, theirs),
                number(goal),
                ("yes" if tok_s >= goal else "no") if goal and tok_s else "—",
            )
        )
    titles = ("cell", "kind", "tok/s", "ms/step", "p99", "first, ms", "limit", "by", "of limit", peer_name(part), "ours/peer")
    return markdown((*titles, "goal", "met"), rows) if rows else ""


def _first_tokens(part: Part) -> str:
    rows = []
    for name, side in (("ours", part.ours), (peer_name(part), part.peer)):
        found = side.first_token() if side else None
        if found:
            rows.append((name, str(found.prompt), number(found.ms.p50, 2), number(found.ms.p90, 2), number(found.ms.p99, 2)))
    if len(rows) == 1 and part.goals.recorded_first_token_ms:
        rows.append((part.goals.peer + "*", "128", number(part.goals.recorded_first_token_ms, 1), "—", "—"))
    return markdown(("first token of an idle engine", "prompt", "p50 ms", "p90", "p99"), rows) if rows else ""


def _starts(part: Part) -> str:
    rows = [
        (
            f"ours, {start.kind}",
            *(number(s, 1) for s in (start.opened.import_s, start.opened.load_s, start.opened.first_token_s)),
        )
        for start in part.starts
    ]
    opened = part.ours.opened()
    if opened and not rows:
        rows.append(("ours", *(number(s, 1) for s in (opened.import_s, opened.load_s, opened.first_token_s))))
    peer = part.peer.opened() if part.peer else None
    if peer:
        rows.append((peer_name(part), "—", number(peer.load_s, 1), number(peer.first_token_s, 1)))
    elif part.goals.recorded_start_s:
        rows.append((part.goals.peer + "*", "—", "—", number(part.goals.recorded_start_s, 1)))
    return markdown(("start", "imports, s", "weights, s", "first token after, s"), rows) if rows else ""


def draw(report: Report, path: Path) -> bool:
    """One row per part: decode, prefill. False: there was nothing to draw, or nothing to draw with."""
    parts = [part for part in report.parts if part.ours.measured()]
    if not parts:
        return False
    with figure(path, str(report.machine), columns=2, rows=len(parts)) as axes:
        if axes is None:
            return False
        for index, part in enumerate(parts):
            for offset, kind in enumerate(("decode", "prefill")):
                axis = axes[2 * index + offset]
                axis.set_title(f"{part.model}, {part.precision}: {kind}", fontsize=8)
                _draw_part(axis, part, decode=kind == "decode")
    return True


def _draw_part(axis: object, part: Part, *, decode: bool) -> None:
    ours, peers = part.ours.measured(), part.peer.measured() if part.peer else {}
    names = [name for name in ours if (Cell.parse(name).out > 1) == decode]
    theirs = [peers[name].tok_s if name in peers else part.goals.recorded.get(name) for name in names]
    limits = [ours[name].limit_tok_s for name in names]

    def share(values: list[float | None]) -> list[float | None]:
        return [value / limit if value and limit else None for value, limit in zip(values, limits, strict=True)]

    series = {
        "Penstock": share([ours[name].tok_s for name in names]),
        peer_name(part): share(list(theirs)),
        "goal": share([part.goals.goal.get(name) for name in names]),
    }
    bars(axis, names, {name: values for name, values in series.items() if any(values)}, "share of the card's limit")
