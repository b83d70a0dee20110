"""What the router is asked, what it answers, and why: the reasons are kept for `penstock explain`. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import msgspec

from common.protocol.handles import WorkerRef
from services.gateway.actions import Path
from services.gateway.pools import Worker
from services.gateway.prompt_chain import Prompt

Part = Literal["prefill", "decode", "direct"]
"""What a worker was compared for: the prompt, the answer, or both."""
Reason = Literal[
    "",
    "path_given",
    "prompt_is_read",
    "runs_alone",
    "short_uncached_prompt",
    "long_uncached_prompt",
    "no_prefill_worker",
    "too_long_for_prefill",
    "no_room_at_prefill",
    "no_room_at_prefill_for_long",
    "direct_is_cheaper",
    "prefill_is_cheaper",
    "prefill_would_be_late",
    "sooner_at_decode",
    "decode_pool_is_full",
    "no_working_path",
    "late_in_a_gap",
    "late_for_long",
]
"""Why a request took its path: see `WORDS`."""

WORDS: Mapping[Reason, str] = {
    "": "",
    "path_given": "this path was asked for",
    "prompt_is_read": "the prompt is read, not continued",
    "runs_alone": "it lost a worker before, and runs alone",
    "short_uncached_prompt": "the uncached part of the prompt is short",
    "long_uncached_prompt": "the uncached part of the prompt is long",
    "no_prefill_worker": "no prefill worker shares a host with a decode worker",
    "too_long_for_prefill": "the prompt is longer than what a prefill worker's KV pool holds",
    "no_room_at_prefill": "no prefill worker has room, and the uncached part of the prompt is not long",
    "no_room_at_prefill_for_long": "no prefill worker has had room for some seconds",
    "direct_is_cheaper": "a decode worker alone costs less than prefill and a hand-off",
    "prefill_is_cheaper": "prefill and a hand-off cost less than a decode worker alone",
    "prefill_would_be_late": "prefill may miss the objective for first tokens, a decode worker keeps it",
    "decode_pool_is_full": "no decode worker has room within its objective, and a prefill worker has no prompts",
    "no_working_path": "the paths between the hosts of prefill and decode workers fail",
    "late_in_a_gap": "late anyhow, it let prompts pass that keep the objective for first tokens, until a worker had a gap",
    "late_for_long": "late anyhow, it has let prompts pass for long that keep the objective for first tokens",
    "sooner_at_decode": "the objective for first tokens is missed anyhow, and a decode worker is sooner",
}


class Costed(msgspec.Struct, frozen=True, gc=False):
    """What a part of a request was expected to cost on a worker. `cached_tokens`: of the prompt, expected in its cache.
    `ttft_s`: how soon the first token was expected from it; 0 where that was not asked."""

    part: Part
    worker: str
    cost_s: float
    cached_tokens: int
    ttft_s: float = 0.0


class Job(msgspec.Struct, frozen=True):
    """What the router needs to know of a request.

    keys: of its prompt, see `prefix_keys`. prompt: what is looked up where workers tell what they hold. avoid: ids of workers
    to take only when there is no other. only: the worker whose path this is, prefill or decode. request: its id. patient: it
    waits for a prefill worker rather than have a decode worker compute its prompt. now: when it is asked, seconds.
    cached: tokens of the prompt that each worker holds, by serial, where that is known already.
    """

    keys: Sequence[int]
    num_tokens: int
    max_tokens: int
    path: Path = "auto"
    avoid: frozenset[str] = frozenset()
    patient: bool = True
    only: WorkerRef | None = None
    request: str = ""
    prompt: Prompt | None = None
    now: float = 0.0
    cached: Mapping[int, int] | None = None


class Choice(msgspec.Struct, frozen=True):
    """`uncached_tokens`: what prefill, or decode on the direct path, is to compute. `costs`: of all that were compared.
    `ttft_s`: how soon the first token is expected."""

    prefill: WorkerRef | None
    decode: WorkerRef
    uncached_tokens: int
    costs: Sequence[Costed] = ()
    reason: Reason = ""
    ttft_s: float = 0.0

    def because(self, reason: Reason, *others: Choice | None) -> Choice:
        """Return this choice with why it was made, and what the others would have cost."""
        costs = [*self.costs, *(cost for other in others if other is not None for cost in other.costs)]
        return Choice(self.prefill, self.decode, self.uncached_tokens, costs, reason, self.ttft_s)


class ReadChoice(msgspec.Struct, frozen=True):
    """The worker that is to read a prompt, of which so many tokens are computed. `prefill` is a decode worker where there is no
    prefill worker."""

    prefill: WorkerRef
    uncached_tokens: int
    decode: None = None
    costs: Sequence[Costed] = ()
    reason: Reason = "prompt_is_read"


def costed(
    part: Part, costs: Iterable[tuple[float, Worker]], cached: Mapping[int, int], ttft_s: Mapping[Worker, float] | None = None
) -> list[Costed]:
    """Return what is kept of a comparison. `cached`: tokens of the prompt by the worker's serial."""
    soon = ttft_s or {}
    return [
        Costed(part, worker.ref.id, cost_s, cached.get(worker.serial, 0), soon.get(worker, 0.0)) for cost_s, worker in costs
    ]
