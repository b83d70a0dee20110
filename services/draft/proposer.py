"""What every drafter offers: mirrors of sequences, and guesses at what follows them. Pure.

A mirror is the drafter's copy of one sequence's tokens, kept by `DraftUpdate`s. Messages may be lost, so an update that
doesn't join on to the mirror is refused, and the decode worker sends the sequence whole again. n-grams are the first kind
(`ngram.py`); a draft model is another (`drafting.py`), whose proposals come from steps that it plans for all mirrors together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from common.protocol.draft_messages import DraftBranch, DraftSampling
from common.protocol.handles import WorkerRef

MirrorKey = tuple[WorkerRef, str]
"""One sequence of one life of one decode worker."""


class Proposer(Protocol):
    def __len__(self) -> int:
        """Mirrors held."""
        ...

    @property
    def max_sequences(self) -> int:
        """Mirrors held at most; then the one that was updated least recently goes."""
        ...

    def update(self, key: MirrorKey, base: int, tokens: Sequence[int], sampling: DraftSampling | None = None) -> bool:
        """The sequence's tokens from index `base` on are `tokens`; base 0 opens the mirror anew. `sampling` comes with base 0:
        how the sequence's tokens are drawn.

        False: there is a gap, or no such mirror. It proposes nothing then, and must be sent whole.

        :raises ProtocolError: for what can't be token ids; the mirror is gone then too.
        """
        ...

    def propose(self, keys: Sequence[MirrorKey], num_tokens: int) -> list[list[int]]:
        """For each mirror, at most `num_tokens` tokens that may follow it; [] for no guess or no such mirror."""
        ...

    def table(self, key: MirrorKey) -> list[DraftBranch]:
        """What may come where the next `propose` of the mirror fails; [] for nothing new. Ask before `propose`."""
        ...

    def length(self, key: MirrorKey) -> int:
        """Tokens of the mirrored sequence, 0 when there is no such mirror."""
        ...

    def close(self, key: MirrorKey) -> None:
        """Harmless twice."""
        ...

    def close_worker(self, decode: WorkerRef) -> int:
        """Close every mirror of a decode worker. Returns how many there were."""
        ...

    def clear(self) -> None: ...


class NoProposals:
    """A `Proposer` that holds no mirrors: of a worker whose model is being loaded, or can't be used."""

    max_sequences = 0

    def __len__(self) -> int:
        return 0

    def update(self, key: MirrorKey, base: int, tokens: Sequence[int], sampling: DraftSampling | None = None) -> bool:
        return False

    def propose(self, keys: Sequence[MirrorKey], num_tokens: int) -> list[list[int]]:
        return [[] for _ in keys]

    def table(self, key: MirrorKey) -> list[DraftBranch]:
        return []

    def length(self, key: MirrorKey) -> int:
        return 0

    def close(self, key: MirrorKey) -> None:
        """There is none."""

    def close_worker(self, decode: WorkerRef) -> int:
        return 0

    def clear(self) -> None:
        """There is nothing to clear."""
