"""A sequence that a draft worker mirrors, as decode keeps it, and what of its proposals still holds. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from common.protocol.draft_messages import DraftSampling
from common.protocol.handles import WorkerRef
from services.decode.exchange import Exchange
from services.decode.speculation_policy import Pace

MAX_PROPOSAL = 64
"""Tokens of one proposal that are kept; more would be stale before it is used."""
RESYNC_TOKENS = 16
"""A sequence is sent whole again only after this many new tokens, and twice as many each time."""


def align(base: int, proposal: Sequence[int], tokens: Sequence[int], length: int | None = None) -> list[int]:
    """What a proposal made for the first `base` of `tokens` still proposes now: [] if it disagrees or is used up.

    length: only so many of `tokens` count.
    """
    end = len(tokens) if length is None else length
    late = end - base
    if not 0 <= late < len(proposal) or list(tokens[base:end]) != list(proposal[:late]):
        return []
    return list(proposal[late:])


def holds(base: int, proposal: Sequence[int], tokens: Sequence[int]) -> bool:
    """Whether none of a proposal's tokens that are decided was decided otherwise."""
    late = max(0, min(len(tokens) - base, len(proposal)))
    return list(tokens[base : base + late]) == list(proposal[:late])


@dataclass(slots=True)
class MirroredSequence:
    """`worker` mirrors this sequence and was sent its first `sent` tokens. `tokens` is the sequence's own, growing list, of
    which `known` were there after the last step. `table`: whole proposals behind `table_base`, each for a place where the
    proposal may fail. `quiet`: tokens sent since anything was proposed. `answered`: so was something, since the worker was sent
    more than a proposal's tokens at once."""

    tokens: Sequence[int]
    sampling: DraftSampling
    pace: Pace
    worker: WorkerRef | None = None
    sent: int = 0
    base: int = 0
    proposal: Sequence[int] = ()
    table_base: int = 0
    table: Sequence[Sequence[int]] = ()
    whole_at: int = 0
    resync_tokens: int = RESYNC_TOKENS
    quiet: int = 0
    answered: bool = False
    known: int = 0
    exchange: Exchange = field(default_factory=Exchange)
