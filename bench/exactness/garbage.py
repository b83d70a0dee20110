"""A draft worker that proposes garbage: `python -m bench.exactness.garbage`, with the settings of `services.draft`.

Some of what it says is right, so that speculation goes on; the rest are other tokens, ids of no vocabulary, proposals far too
long, tables of outcomes that fit nothing, and answers about tokens that are long decided.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from common.protocol.draft_messages import DraftBranch
from common.runtime.bus import Bus
from common.runtime.service import main
from services.draft.actor import DraftActor
from services.draft.config import DraftConfig
from services.draft.ngram import NgramProposer
from services.draft.proposer import MirrorKey

_HIGHEST = 1 << 31


class GarbageProposer(NgramProposer):
    """Guesses of n-grams, spoilt."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__(
            max_sequences=config.max_sequences,
            max_tokens=config.max_sequence_tokens,
            min_match=config.min_match,
            max_match=config.max_match,
        )
        self._random = random.Random(config.worker_id)

    def propose(self, keys: Sequence[MirrorKey], num_tokens: int) -> list[list[int]]:
        return [self._spoilt(guess, num_tokens) for guess in super().propose(keys, num_tokens)]

    def table(self, key: MirrorKey) -> list[DraftBranch]:
        return [
            DraftBranch(accepted=self._random.randint(-2, 9), tokens=self._anything(self._random.randint(0, 9)))
            for _ in range(self._random.choice((0, 0, 3, 40)))
        ]

    def length(self, key: MirrorKey) -> int:
        length = super().length(key)
        return max(0, length - self._random.choice((0, 0, 0, 1, 5))) if length else 0

    def _spoilt(self, guess: list[int], num_tokens: int) -> list[int]:
        right = guess[: self._random.randint(0, num_tokens)]
        return right + self._anything(self._random.choice((0, 1, num_tokens, 200)))

    def _anything(self, count: int) -> list[int]:
        highest = self._random.choice((49_000, 49_000, 49_000, _HIGHEST))
        return [self._random.randint(0, highest) for _ in range(count)]


def make(bus: Bus, config: DraftConfig) -> DraftActor:
    return DraftActor(bus=bus, config=config, proposer=GarbageProposer(config))


if __name__ == "__main__":
    main(DraftConfig, make, section="draft")
