"""A scheduler and its proposers around a runner, as in a decode worker, but that all that is drafted is verified."""

from __future__ import annotations

from dataclasses import dataclass, field

from services.decode.proposers import Proposers
from tests.models.test_device_lookup_step import World


@dataclass
class DraftingWorld(World):
    """Who derives from it makes `proposers`, and connects them to the scheduler."""

    proposers: Proposers = field(init=False)

    def step(self) -> bool:
        known = len(self.progress)
        for sequence in self.scheduler._running:
            if sequence.request not in self.proposers._rows:
                self.proposers.open(sequence)
        stepped = super().step()
        for done in self.progress[known:]:
            self.proposers.record(done)
            if done.sequence.finish is not None:
                self.proposers.close(done.sequence)
        return stepped
