"""Settings of a decode worker."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from common.engine.settings import EngineServiceConfig


class DecodeConfig(EngineServiceConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Decode workers."""

    speculation_tokens: Annotated[
        int,
        Meta(
            ge=-1,
            le=63,
            description="proposed tokens verified per sequence; 0: off; -1: 7 on a GPU, whose steps hardly take longer "
            "for them, 4 on a CPU",
        ),
    ] = -1
    slo_itl_ms: Annotated[
        float,
        Meta(
            ge=0,
            description="objective for the time between tokens, ms: prompts are computed in parts that keep the answers beside "
            "them within it; 0: parts of the token budget",
        ),
    ] = 0.0
    verify: Annotated[
        Literal["measured", "always"],
        Meta(description="proposed tokens are verified where that is faster by measured time, or always: for tests"),
    ] = "measured"
    max_verify_tokens: Annotated[int, Meta(ge=0, description="tokens of a step that verifies, at most")] = 256
    lookup: Annotated[
        Literal["auto", "on", "host", "off"],
        Meta(
            description="proposes what followed the same words before: in the request and recent answers on a CPU, or with "
            "host; in the request alone, within the engine's steps, on a GPU; auto: on"
        ),
    ] = "auto"
    head: Annotated[
        str,
        Meta(
            description="a head that drafts from the model's hidden states in this process: its folder, off, or auto: the "
            "model's own MTP layer, or on a CPU what is shipped for the model"
        ),
    ] = "auto"

    def max_proposal(self, *, on_gpu: bool) -> int:
        """Return `speculation_tokens`, or what suits."""
        return self.speculation_tokens if self.speculation_tokens >= 0 else 7 if on_gpu else 4

    @property
    def head_setting(self) -> str:
        """`head`, or off where nothing could come of it. Random weights have no head, and with `zero_retention` there
        is none: its cache is never cleared."""
        is_vain = not self.speculation_tokens or self.zero_retention or (self.head == "auto" and self.load_format == "dummy")
        return "off" if is_vain else self.head
