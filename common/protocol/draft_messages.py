"""Messages between decode and draft workers: what became of sequences, and what may come next."""

from __future__ import annotations

import msgspec

from common.protocol.explain_messages import RequestContext
from common.protocol.handles import WorkerRef


class DraftRow(msgspec.Struct, frozen=True, array_like=True):
    """What became of one sequence: its tokens from index `base` on are `tokens`. `base=0` (re)opens the mirror."""

    sequence: str
    base: int
    tokens: list[int]


class DraftSampling(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How a sequence's tokens are drawn, so that a drafter can draw with the same noise: fields of `SamplingParams`.

    The first `prompt_tokens` tokens are the prompt. Penalties, biases and grammars are not told: a drafter that does not know
    them proposes tokens that are accepted less often.
    """

    seed: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    prompt_tokens: int = 1


class DraftUpdate(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """decode → draft, once a step: the tokens that this step fixed. Propose what may come next.

    `sampling`, `contexts`: by sequence, for each row with base 0. A sequence that is missing in `sampling` is drawn greedily.
    """

    decode: WorkerRef
    rows: list[DraftRow]
    sampling: dict[str, DraftSampling] = {}
    contexts: dict[str, RequestContext] = {}


class DraftClose(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """decode → draft: forget these sequences."""

    decode: WorkerRef
    sequences: list[str]


class DraftBranch(msgspec.Struct, frozen=True, array_like=True):
    """Where the first `accepted` tokens of a proposal hold and the next one does not: `tokens` may come instead."""

    accepted: int
    tokens: list[int]


class Proposals(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """draft → decode: in each row, `tokens` may follow the first `base` tokens. Token ids only; wrong ones cost speed alone.

    `tables`: by sequence, what may come where its row fails. A table holds until the next one for that sequence. With its row
    it takes less than 1 KB.
    """

    draft: WorkerRef
    rows: list[DraftRow]
    tables: dict[str, list[DraftBranch]] = {}


class DraftResync(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """draft → decode: my mirrors of these have a gap; send them whole (base=0)."""

    draft: WorkerRef
    sequences: list[str]


class Drafting(msgspec.Struct, frozen=True, array_like=True):
    """What a draft worker says of itself in its `Presence`: its model's name, empty for n-grams, and the share of the last
    seconds in which it drafted, 0 to 1. A decode worker says the name of the head that drafts in its process, if it has one.

    `problem`: why the draft model can't be used, so that nothing is drafted; empty where it can. `longest`: tokens of a text
    behind which it drafts nothing, since its model's context is not longer; 0: any text will do.
    """

    model: str = ""
    busy_share: float = 0.0
    problem: str = ""
    longest: int = 0
