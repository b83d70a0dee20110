"""What an edge asks the core for: tokens in, tokens out."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from common.protocol.messages import Pooling, SamplingParams


class Arrival(NamedTuple):
    """How a request came to an edge: what its client calls it, when it came (on `time.monotonic`), and the traceparent of its
    span, empty if it is not traced."""

    shown_id: str = ""
    at: float = 0.0
    trace: str = ""


UNKNOWN_ARRIVAL = Arrival()

READING = "-prompt"
"""What the id of a request ends with that only reads the prompt of another, for its scores."""


class GenerationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What an edge asks for. `id` is unique among what runs here; `deadline_s` counts from now; `salt` separates tenants'
    prefix caches. Waiting tenants share workers by `weight`. Within a tenant, each step of `priority` lets pass what comes in
    PRIORITY_STEP_S; lower is earlier. `background`: nobody waits for the answer, so it is behind its tenant's other requests,
    and no room is kept for it.

    With `given` or `pooling` the prompt is read, not continued: the tokens of `given` come back as if they had been generated,
    each with its log-probabilities; or the prompt's embedding comes back. `sampling.max_tokens` is then how many tokens are
    given, 1 at least, and `sampling` has no stop tokens. `trace`: the traceparent of the span around it; empty: not traced.
    `shown_id`: what its client calls it; empty: `id`. `received_at`: when its edge got it, on the core's clock; 0.0: now.
    `prediction`: see `Generation`."""

    id: str
    prompt: list[int]
    sampling: SamplingParams
    deadline_s: float
    salt: bytes = b""
    tenant: str = ""
    weight: float = 1.0
    priority: int = 0
    background: bool = False
    given: list[int] = []
    pooling: Pooling = ""
    trace: str = ""
    shown_id: str = ""
    received_at: float = 0.0
    prediction: list[int] = []

    @property
    def is_read(self) -> bool:
        return bool(self.given or self.pooling)
