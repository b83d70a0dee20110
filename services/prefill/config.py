"""Settings of a prefill worker."""

from __future__ import annotations

from typing import Annotated, ClassVar

from msgspec import Meta

from common.engine.settings import EngineServiceConfig, Limits
from common.runtime.nixl_settings import StagingMb


class PrefillConfig(EngineServiceConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Prefill workers."""

    handoff_timeout_s: Annotated[float, Meta(gt=0, description="how long a decode worker may take to answer")] = 2.0
    staging_mb: StagingMb = 128

    cpu_limits: ClassVar[Limits] = Limits(32, 256)
    gpu_limits: ClassVar[Limits] = Limits(64, 8192)
