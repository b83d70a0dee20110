"""`penstock status`: every worker on the bus, its load and its KV use, from its own heartbeats."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Annotated, get_args

import anyio
import msgspec
import typer
from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from common.cache.usage import fullest, used_share
from common.cli import status_tenants
from common.cli.client import connected, decode_presence, watch_presence
from common.cli.console import DEFAULT_NATS_URL, NatsUrl, err, out, run
from common.cli.sizes import short, size_text
from common.cli.status_kv import kv_lines, traffic_fields
from common.protocol import subjects
from common.protocol.errors import Forbidden, NoWorkers
from common.protocol.handles import Role
from common.protocol.messages import KvUsage, Presence
from common.runtime.bus import Bus, BusMessage
from common.runtime.registry import Registry

LISTEN_S = 0.8
"""Three heartbeats: who is alive was heard by then."""
DEAD_AFTER_S = 2.0
REFRESH_S = 0.5
MIN_COLUMNS = 80
"""The width of a table: on a narrower terminal its lines wrap or are cut."""

_STATE_STYLES = {"ready": "green", "starting": "yellow", "draining": "magenta"}


def command(
    once: Annotated[bool, typer.Option("--once", help="Print one table and end.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON list and end.")] = False,
    tenants: Annotated[
        bool, typer.Option("--tenants", help="Print also what each model and tenant holds of the KV stores, and end.")
    ] = False,
    api_keys: Annotated[
        Path | None,
        typer.Option(envvar="PENSTOCK_API_KEYS", help="The gateways' file of keys, for the names of tenants instead of ids."),
    ] = None,
    nats_url: NatsUrl = DEFAULT_NATS_URL,
) -> None:
    """A live table of workers; Ctrl-C ends it. Not on a terminal: one table."""

    async def show() -> None:
        names = status_tenants.names_in(api_keys) if tenants else {}
        async with connected(nats_url, "status") as bus:
            if once or as_json or tenants or not out.is_terminal:
                heard = await watch_presence(bus, LISTEN_S)
                _check_hears(bus, heard)
                stores = await status_tenants.read(heard.values(), names) if tenants else []
                _print_once(heard.values(), stores, as_json=as_json)
            else:
                await _live(bus)

    run(show)


def _check_hears(bus: Bus, heard: Collection[object]) -> None:
    """:raises Forbidden: nobody was heard, and the server let this user hear nobody."""
    if not heard and getattr(bus, "denied", ()):
        raise Forbidden("this user of the bus may not hear who is there: use the credentials of `client`")


def _print_once(workers: Iterable[Presence], stores: Sequence[status_tenants.Store], *, as_json: bool) -> None:
    ordered = in_order(workers)
    if as_json:
        held = {store.worker: {"held": store.held, "held_problem": store.problem} for store in stores}
        fields = [as_fields(worker) | held.get(worker.worker.id, {}) for worker in ordered]
        out.print(msgspec.json.format(msgspec.json.encode(fields)).decode(), markup=False)
    elif ordered:
        out.print(table(ordered, out.width))
        for line in status_tenants.lines(stores):
            out.print(Text(line, style="dim"), soft_wrap=True)
    else:
        raise NoWorkers("no worker on this bus: start some with `penstock up`, or name another bus with --nats-url")


async def _live(bus: Bus) -> None:
    registry = Registry(DEAD_AFTER_S)

    def arrived(message: BusMessage) -> None:
        if presence := decode_presence(message):
            registry.observe(presence, time.monotonic())

    subscription = await bus.subscribe(subjects.any_presence(), arrived)
    with Live(table([]), console=out, refresh_per_second=4, screen=False) as live:
        try:
            while True:
                await anyio.sleep(REFRESH_S)
                now = time.monotonic()
                _check_hears(bus, registry.alive(None, now))
                for lost in registry.lost(now):
                    err.print(f"[red]lost[/] {lost.worker.id}")
                live.update(table(in_order(registry.alive(None, now)), out.width))
        finally:
            with anyio.CancelScope(shield=True):
                await subscription.unsubscribe()


def in_order(workers: Iterable[Presence]) -> list[Presence]:
    """Along the way of a request: gateways, prefill, decode, draft, kvstore."""
    rank = {role: number for number, role in enumerate(get_args(Role))}
    return sorted(workers, key=lambda presence: (rank.get(presence.worker.role, len(rank)), presence.worker.id))


def table(workers: list[Presence], columns: int = MIN_COLUMNS) -> RenderableType:
    """One row per worker, within `columns` (80 at least), and what speculation gave; of several models one table each."""
    by_model: dict[str, list[Presence]] = {}
    for worker in workers:
        for part in _by_model(worker):
            by_model.setdefault(part.model, []).append(part)
    if len(by_model) < 2:
        return _of_one_model(workers, columns)
    parts: list[RenderableType] = []
    for model, members in by_model.items():
        parts += [Text(model or "no model", style="bold"), _of_one_model(members, columns), Text()]
    return Group(*parts[:-1])


def _by_model(worker: Presence) -> list[Presence]:
    """A gateway of several models once for each, with what runs and waits there; any other worker as it is."""
    if len(worker.models) < 2:
        return [worker]
    replace = msgspec.structs.replace
    return [replace(worker, model=each.name, running=each.running, waiting=each.waiting) for each in worker.models]


def _of_one_model(workers: list[Presence], columns: int) -> RenderableType:
    said = [line for line in (_speculation(workers), *map(_drafts, workers), *_tiers(workers), *kv_lines(workers)) if line]
    shown = _rows(workers, columns)
    return Group(shown, *(Text(line, style="dim") for line in said)) if said else shown


def _speculation(workers: list[Presence]) -> str:
    """Of all decode workers since their starts; empty where nothing was verified."""
    proposed, accepted = (sum(getattr(worker, name) for worker in workers) for name in ("draft_tokens", "accepted_tokens"))
    return f"speculation: {accepted / proposed:.0%} of {short(proposed)} proposed tokens accepted" if proposed else ""


def _drafts(worker: Presence) -> str:
    """What a draft worker drafts with, for how many sequences, and how busy it is, or why it drafts nothing; the head of a
    decode worker; else empty."""
    if worker.worker.role == "decode" and worker.drafting.model:
        return f"{worker.worker.id}: drafts with a head: {worker.drafting.model}"
    if worker.worker.role != "draft":
        return ""
    if worker.drafting.problem:
        return f"{worker.worker.id}: drafts nothing: {worker.drafting.problem}"
    with_what = worker.drafting.model or "n-grams"
    sequences = f"{worker.running:,} sequence{'' if worker.running == 1 else 's'}"
    return f"{worker.worker.id}: {with_what}, {sequences}, busy {worker.drafting.busy_share:.0%} of the time"


def _tiers(workers: list[Presence]) -> list[str]:
    """What each tier of a kvstore holds, and below that what came of it since its start."""
    lines: list[str] = []
    for worker in workers:
        for tier in worker.tiers:
            if tier.problem:
                lines.append(f"{worker.worker.id}: {tier.name} off: {tier.problem}")
                continue
            held = f"{tier.blocks:,} blocks, {size_text(tier.bytes)} of {size_text(tier.capacity_bytes)}"
            counts = {"evicted": tier.evicted_blocks, "to write": tier.queued_blocks, "damaged": tier.damaged_blocks}
            more = "".join(f", {count:,} {name}" for name, count in counts.items() if count)
            lines += [f"{worker.worker.id}: {tier.name} {held}", f"  {tier.hit_blocks:,} hits{more}"]
    return lines


def _rows(workers: list[Presence], columns: int) -> Table:
    """`room`: how many more requests a worker would take. `used`, `cached`: shares of its KV blocks; where these are of several
    cache groups, of the fullest."""
    # rich would shorten the numbers on a narrower terminal
    shown = Table(box=None, header_style="bold", pad_edge=False, width=MIN_COLUMNS if columns < MIN_COLUMNS else None)
    widths = {"state": 8, "runs": 4, "waits": 5, "room": 4, "KV used": 7, "cached": 6, "step": 7, "tok/s": 5}
    id_columns = max(columns, MIN_COLUMNS) - sum(widths.values()) - 2 * len(widths)
    shown.add_column("worker", no_wrap=True)
    for title in widths:
        shown.add_column(title, justify="left" if title == "state" else "right", no_wrap=True)
    for presence in workers:
        worker_id, kv = presence.worker.id, fullest(presence.kv)
        style = _STATE_STYLES.get(presence.state, "")
        state = f"load {100 * presence.loaded:.0f}%" if presence.loaded < 1 else presence.state
        shown.add_row(
            worker_id if len(worker_id) <= id_columns else worker_id[: id_columns - 1] + "…",
            f"[{style}]{state}[/]" if style else state,
            short(presence.running),
            short(presence.waiting),
            short(presence.credits),
            f"{100 * used_share(kv):.0f}%" if kv.total else "-",
            f"{100 * kv.cached / kv.total:.0f}%" if kv.total else "-",
            f"{presence.step_ms:.{0 if presence.step_ms >= 1000 else 1}f}ms" if presence.step_ms else "-",
            short(round(presence.tokens_per_s)) if presence.tokens_per_s else "-",
        )
    return shown


def as_fields(presence: Presence) -> dict[str, object]:
    """A heartbeat with named fields, for --json (on the wire some of it is positional)."""
    fields = {name: getattr(presence, name) for name in presence.__struct_fields__}
    worker, kv = presence.worker, presence.kv
    fields["kv"] = _blocks(kv) | {"groups": [_blocks(group) for group in kv.groups]}
    fields["worker"] = {"role": worker.role, "id": worker.id, "epoch": worker.epoch}
    fields["drafting"] = {name: getattr(presence.drafting, name) for name in presence.drafting.__struct_fields__}
    fields["tiers"] = [{name: getattr(tier, name) for name in tier.__struct_fields__} for tier in presence.tiers]
    fields["traffic"] = traffic_fields(presence.traffic)
    fields["models"] = [{name: getattr(model, name) for name in model.__struct_fields__} for model in presence.models]
    return fields


def _blocks(kv: KvUsage) -> dict[str, object]:
    return {name: getattr(kv, name) for name in ("total", "free", "owned", "leased", "cached")}
