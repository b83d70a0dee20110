"""What an edge asks the core for: tokens in, tokens out."""

from __future__ import annotations

import msgspec

from common.protocol.messages import SamplingParams


class GenerationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What an edge asks for. `id` is unique among what runs here; `deadline_s` counts from now; `salt` separates tenants'
    prefix caches."""

    id: str
    prompt: list[int]
    sampling: SamplingParams
    deadline_s: float
    salt: bytes = b""
