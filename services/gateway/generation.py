"""What an edge asks the core for: tokens in, tokens out."""

from __future__ import annotations

import msgspec

from common.protocol.messages import SamplingParams


class GenerationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What an edge asks for. `id` is unique among what runs here; `deadline_s` counts from now; `salt` separates tenants'
    prefix caches. Waiting tenants share workers by `weight`. Within a tenant, each step of `priority` lets pass what comes in
    PRIORITY_STEP_S; lower is earlier."""

    id: str
    prompt: list[int]
    sampling: SamplingParams
    deadline_s: float
    salt: bytes = b""
    tenant: str = ""
    weight: float = 1.0
    priority: int = 0
