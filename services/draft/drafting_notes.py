"""What a draft worker remembers of the requests whose sequences it mirrored, for `penstock explain`.

    opened ─► updated, proposed … ─► closed: an event in the records, and a span

Numbers alone: how often it was told of a sequence, and what it proposed.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from common.protocol.explain_messages import Explained, RequestContext, WorkerEvent, WorkerRecord
from common.runtime.request_records import RequestRecords
from services.draft.proposer import MirrorKey

MAX_OPEN = 4096
"""Mirrors that are noted at a time; what is opened beyond them is not."""


@dataclass(slots=True)
class _Note:
    context: RequestContext
    began_at: float
    num_updates: int = 0
    num_proposals: int = 0
    num_tokens: int = 0
    num_resyncs: int = 0

    def event(self, peer: str, now: float) -> WorkerEvent:
        facts = [("updates", self.num_updates), ("proposals_sent", self.num_proposals), ("proposed_tokens", self.num_tokens)]
        if self.num_resyncs:
            facts.append(("resyncs", self.num_resyncs))
        return WorkerEvent("drafting", self.began_at, now, peer=peer, facts=tuple(facts))


class DraftingNotes:
    """One event loop only. Mirrors whose decode worker names no request are left out."""

    def __init__(self, records: RequestRecords) -> None:
        self._records = records
        self._open: dict[MirrorKey, _Note] = {}

    def __len__(self) -> int:
        return len(self._open)

    def updated(self, key: MirrorKey, context: RequestContext | None, now: float) -> None:
        """A decode worker told what a step fixed. `context`: comes with a sequence that is sent whole."""
        note = self._open.get(key)
        if note is None:
            if context is None or not context.request or len(self._open) >= MAX_OPEN:
                return
            note = self._open[key] = _Note(context, now)
        note.num_updates += 1

    def proposed(self, key: MirrorKey, num_tokens: int) -> None:
        """A proposal of so many tokens is sent."""
        if (note := self._open.get(key)) is not None:
            note.num_proposals += 1
            note.num_tokens += num_tokens

    def resynced(self, key: MirrorKey) -> None:
        """The mirror has a gap: the sequence is asked for as a whole."""
        if (note := self._open.get(key)) is not None:
            note.num_resyncs += 1

    def closed(self, key: MirrorKey, now: float) -> None:
        """The mirror is gone. Harmless twice."""
        if (note := self._open.pop(key, None)) is not None:
            self._records.note(note.context, note.event(key[0].id, now))

    def all_closed(self, now: float) -> None:
        """Every mirror is gone."""
        for key in list(self._open):
            self.closed(key, now)

    def explain(self, request: str, now: float) -> Explained:
        """Return what is remembered of a request, of mirrors that are still held, too."""
        told = self._records.explain(request)
        held = [
            WorkerRecord(attempt=note.context.attempt, admitted_at=note.began_at, events=[note.event(key[0].id, now)])
            for key, note in self._open.items()
            if note.context.request == request
        ]
        return msgspec.structs.replace(told, records=[*told.records, *held])
