"""Settings of a prefill worker."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from common.engine.settings import EngineServiceConfig


class PrefillConfig(EngineServiceConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    max_running: Annotated[int, Meta(ge=1, description="prompts in work at once; more are refused")] = 32
    token_budget: Annotated[int, Meta(ge=1, description="prompt tokens a step computes at most")] = 256
    handoff_timeout_s: Annotated[float, Meta(gt=0, description="how long a decode worker may take to answer")] = 2.0
