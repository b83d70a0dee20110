"""What an edge asks the core for: tokens in, tokens out."""

from __future__ import annotations

import msgspec

from common.protocol.messages import Pooling, SamplingParams


class GenerationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What an edge asks for. `id` is unique among what runs here; `deadline_s` counts from now; `salt` separates tenants'
    prefix caches. Waiting tenants share workers by `weight`. Within a tenant, each step of `priority` lets pass what comes in
    PRIORITY_STEP_S; lower is earlier.

    With `given` or `pooling` the prompt is read, not continued: the tokens of `given` come back as if they had been generated,
    each with its log-probabilities; or the prompt's embedding comes back. `sampling.max_tokens` is then how many tokens are
    given, 1 at least, and `sampling` has no stop tokens. `trace`: the traceparent of the span around it; empty: not traced."""

    id: str
    prompt: list[int]
    sampling: SamplingParams
    deadline_s: float
    salt: bytes = b""
    tenant: str = ""
    weight: float = 1.0
    priority: int = 0
    given: list[int] = []
    pooling: Pooling = ""
    trace: str = ""

    @property
    def is_read(self) -> bool:
        return bool(self.given or self.pooling)
