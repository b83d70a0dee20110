"""What the placement keeps of a request while it is at this gateway."""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec

from common.protocol.handles import WorkerRef
from services.gateway.prompt_chain import Prompt


class Seat(msgspec.Struct):
    """`order`: the request's age. `waits_since`: when it began to wait for a worker that takes it, 0 while one has it. Where it
    counts as load; which worker computes its prompt, `uncached_tokens` of it; which one is reserved for it. `charged`: tokens
    that its tenant was charged for it, 0 before it was placed; `charged_prompt` of them are the prompt's, which its next
    workers, if it loses some, compute at nobody's cost. keys, prompt: see `Job`. offered: the worker that has been asked to
    take over its KV because it has blocks for it. holds_blocks: its decode worker has taken it.
    kept: the worker that gets nothing else until it has this request. is_overdue: it has let others pass for long enough.
    cached: how many tokens of its prompt each worker holds, by serial, as was believed at `cached_at`."""

    order: int
    keys: list[int]
    prompt: Prompt | None = None
    waits_since: float = 0.0
    kept: WorkerRef | None = None
    offered: WorkerRef | None = None
    holds_blocks: bool = False
    prefill: WorkerRef | None = None
    decode: WorkerRef | None = None
    computing: WorkerRef | None = None
    reserved: WorkerRef | None = None
    uncached_tokens: int = 0
    charged: float = 0.0
    charged_prompt: int = 0
    is_overdue: bool = False
    cached: Mapping[int, int] = {}
    cached_at: float = -math.inf
