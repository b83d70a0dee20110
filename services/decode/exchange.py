"""What passes between one sequence and the draft workers that mirror it, for `penstock explain`. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from common.protocol.explain_messages import RequestContext
from common.protocol.handles import WorkerRef


@dataclass(slots=True)
class Exchange:
    """`context`: what draft workers are told of the request. `workers`: those that mirrored the sequence. `num_updates`: sent
    to them; `num_received`: proposals that came; `num_late`: those of them of which every token was already decided."""

    context: RequestContext = field(default_factory=RequestContext)
    workers: list[WorkerRef] = field(default_factory=list)
    num_updates: int = 0
    num_received: int = 0
    num_late: int = 0

    def opened(self, worker: WorkerRef) -> None:
        """The sequence is sent whole to a draft worker."""
        if worker not in self.workers:
            self.workers.append(worker)

    def facts(self) -> list[tuple[str, int]]:
        """Return the numbers by name; none where nobody was told of the sequence."""
        if not self.num_updates:
            return []
        return [
            ("updates_sent", self.num_updates),
            ("proposals_received", self.num_received),
            ("late_proposals", self.num_late),
        ]
