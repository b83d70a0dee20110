"""What speculation gave during a load, by decode worker and draft worker: the figures, and a table of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from common.cli.speculation_counts import DRAFTS, Counts, Key, Reading, growth

_VERIFIED = "penstock_speculation_draft_tokens_total"
_ACCEPTED = "penstock_speculation_accepted_tokens_total"
_VERIFIED_AT = "penstock_speculation_verified_tokens_per_pos_total"
_ACCEPTED_AT = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
_BUSY = Key("penstock_draft_busy_seconds_total")


class Drafter(msgspec.Struct, kw_only=True):
    """What was verified of one kind of drafter. verified_at, accepted_at: of tokens, by their position in a proposal."""

    drafts: float = 0.0
    verified: float = 0.0
    accepted: float = 0.0
    verified_at: list[float] = []
    accepted_at: list[float] = []

    @property
    def acceptance(self) -> list[float]:
        """By position: how many of the tokens verified there were accepted, 0 to 1, as far as any was verified."""
        return [accepted / verified for accepted, verified in zip(self.accepted_at, self.verified_at, strict=True) if verified]

    @property
    def mean_accepted(self) -> float:
        """Tokens accepted of a proposal."""
        return self.accepted / self.drafts if self.drafts else 0.0


class DecodeWorker(msgspec.Struct, kw_only=True):
    """What a decode worker counted during the load, `counts`, and what follows from it."""

    worker: str
    model: str
    counts: Counts

    def total(self, name: str) -> float:
        return self.counts[Key(name)]

    def speculation(self, name: str) -> float:
        return self.total(f"penstock_speculation_{name}_total")

    @property
    def drafters(self) -> dict[str, Drafter]:
        """By name, those that have counters here."""
        found: dict[str, Drafter] = {}
        for name in {key.drafter: None for key in self.counts if key.name == DRAFTS}:
            places = range(1 + max((key.place for key in self.counts if key.drafter == name), default=-1))
            found[name] = Drafter(
                drafts=self.counts[Key(DRAFTS, name)],
                verified=self.counts[Key(_VERIFIED, name)],
                accepted=self.counts[Key(_ACCEPTED, name)],
                verified_at=[self.counts[Key(_VERIFIED_AT, name, place)] for place in places],
                accepted_at=[self.counts[Key(_ACCEPTED_AT, name, place)] for place in places],
            )
        return found

    @property
    def generated(self) -> float:
        return self.total("penstock_engine_generation_tokens_total")

    @property
    def accepted(self) -> float:
        """Proposed tokens of all drafters that were accepted: each saved its sequence a step. What a last step accepts behind
        the end of an answer is among them."""
        return sum(one.accepted for one in self.drafters.values())

    @property
    def engine_steps(self) -> float:
        return self.total("penstock_engine_step_seconds_count")


class DraftWorker(msgspec.Struct, kw_only=True):
    """What a draft worker did during the load. busy_share: of the time, 0 to 1."""

    worker: str
    model: str
    busy_share: float
    counts: Counts

    def draft(self, name: str) -> float:
        return self.counts[Key(f"penstock_draft_{name}_total")]


class Speculation(msgspec.Struct, kw_only=True):
    """What all workers counted during the load. unread: workers that can't be read any more, so that what they
    counted is missing."""

    decode: list[DecodeWorker] = []
    draft: list[DraftWorker] = []
    unread: list[str] = []


def between(before: Iterable[Reading], after: Iterable[Reading], model: str) -> Speculation:
    """Return what was counted between two readings: by decode workers of `model`, by others that generated tokens meanwhile,
    and by draft workers. A worker that was not there before has counted from zero."""
    earlier = {reading.source.worker: reading for reading in before}
    began = min((reading.at for reading in earlier.values()), default=0.0)
    found = Speculation()
    later: set[str] = set()
    for reading in after:
        source = reading.source
        later.add(source.worker)
        was = earlier.get(source.worker)
        counts = reading.counts if was is None else growth(was.counts, reading.counts)
        if source.role == "draft":
            elapsed_s = reading.at - (began if was is None else was.at)
            busy = min(1.0, (share(counts[_BUSY], elapsed_s) or 0.0))
            found.draft.append(DraftWorker(worker=source.worker, model=source.model, busy_share=busy, counts=counts))
            continue
        worker = DecodeWorker(worker=source.worker, model=source.model, counts=counts)
        if source.model == model or worker.generated:
            found.decode.append(worker)
    found.decode.sort(key=lambda one: (one.model, one.worker))
    found.unread = sorted(earlier.keys() - later)
    return found


def share(part: float, whole: float) -> float | None:
    """Return `part` / `whole`; None where `whole` is 0."""
    return part / whole if whole else None


def speculation_table(found: Speculation) -> RenderableType:
    """Return a table and a few lines for each decode worker, and a table of draft workers."""
    parts: list[RenderableType] = []
    for worker in found.decode:
        parts += [Text(), Text(f"{worker.worker}, {worker.model}", style="bold"), _drafters(worker)]
        parts += [Text(line, style="dim") for line in _lines(worker)]
    if found.draft:
        parts += [Text(), _draft_workers(found.draft)]
    return Group(*parts)


def _drafters(worker: DecodeWorker) -> Table:
    shown = Table(box=None, header_style="bold", pad_edge=False)
    for title in ("drafter", "proposals", "tokens verified", "accepted", "of a proposal", "by position"):
        shown.add_column(title, justify="left" if title in ("drafter", "by position") else "right")
    for name, one in worker.drafters.items():
        shown.add_row(
            name,
            f"{one.drafts:,.0f}",
            f"{one.verified:,.0f}",
            _percent(one.accepted, one.verified),
            f"{one.mean_accepted:.2f}" if one.drafts else "-",
            " ".join(f"{share:.0%}" for share in one.acceptance) or "-",
        )
    return shown


def _percent(part: float, whole: float) -> str:
    return f"{part / whole:.0%}" if whole else "-"


def _lines(worker: DecodeWorker) -> list[str]:
    """Return a line for each kind of figure that is not all zeros."""
    count, generated, steps = worker.speculation, worker.generated, worker.engine_steps
    lines: list[str] = []
    if sequence_steps := count("sequence_steps"):
        saved = f"{worker.accepted:,.0f} steps saved ({_percent(worker.accepted, generated)} of the tokens)"
        lines.append(f"{generated / sequence_steps:.2f} tokens a step of a sequence; {saved}")
    if received := count("received_proposals"):
        late = count("late_proposals")
        line = f"draft workers: {received:,.0f} proposals received, {late:,.0f} too late ({_percent(late, received)}"
        line += f", by {count('lateness_seconds') / late * 1000:.1f} ms on average)" if late else ")"
        if (round_trip_s := mean_round_trip_s(worker)) is not None:
            line += f"; {round_trip_s * 1000:.1f} ms from a step to its answer"
        lines.append(line)
    hits, misses = count("table_hits"), count("table_misses")
    if hits or misses:
        lines.append(f"outcome tables: {hits:,.0f} hits, {misses:,.0f} misses ({_percent(hits, hits + misses)} hits)")
    if tokens := count("head_tokens"):
        spent_s = count("head_seconds")
        of_steps = _percent(spent_s, worker.total("penstock_engine_step_seconds_sum"))
        lines.append(f"head: {tokens:,.0f} tokens drafted in {spent_s:.2f} s, {of_steps} of the steps' time")
    probes, trials, drafts = count("probe_steps"), count("trial_steps"), count("head_probes")
    if probes or trials or drafts:
        line = f"probing: {probes:,.0f} steps without proposals, {trials:,.0f} in trials of draft workers, "
        line += f"{_percent(probes + trials, steps)} of {steps:,.0f} steps"
        lines.append(line + (f"; {drafts:,.0f} short drafts of the head" if drafts else ""))
    if quiet := count("quiet_steps"):
        lines.append(
            f"draft workers were told nothing in {quiet:,.0f} of {steps:,.0f} steps, since that was faster or was tried"
        )
    return lines


def mean_round_trip_s(worker: DecodeWorker) -> float | None:
    """Return the mean time from a step's update of a draft worker to the proposal that answers it; None without proposals."""
    name = "penstock_speculation_round_trip_seconds"
    return share(worker.total(f"{name}_sum"), worker.total(f"{name}_count"))


def _draft_workers(workers: Sequence[DraftWorker]) -> Table:
    shown = Table(box=None, header_style="bold", pad_edge=False)
    for title in ("draft worker", "busy", "proposals sent", "tokens", "drafted by its model", "in vain"):
        shown.add_column(title, justify="left" if title == "draft worker" else "right")
    for one in workers:
        drafted = one.draft("model_tokens")
        sent = f"{one.draft('proposals'):,.0f}", f"{one.draft('proposed_tokens'):,.0f}"
        in_vain = _percent(one.draft("model_tokens_in_vain"), drafted)
        shown.add_row(one.worker, f"{one.busy_share:.0%}", *sent, f"{drafted:,.0f}" if drafted else "-", in_vain)
    return shown
