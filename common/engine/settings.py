"""The settings of a service that runs an engine: prefill and decode."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from common.runtime.settings import ServiceConfig


class EngineServiceConfig(ServiceConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    dtype: Annotated[Literal["auto", "float32", "bfloat16", "float16"], Meta(description="compute and KV precision")] = "auto"
    device: Annotated[str, Meta(description="auto, cpu, cuda or cuda:N")] = "auto"
    engine: Annotated[Literal["torch", "simulated"], Meta(description="simulated: no weights, times from a roofline model")] = (
        "torch"
    )
    profile: Annotated[str, Meta(description="roofline profile of the simulated engine")] = "instant"
    time_scale: Annotated[float, Meta(ge=0, description="simulated engine: 1 real time, 0 no waiting")] = 1.0
    kv_cache_mb: Annotated[int, Meta(ge=1, description="memory for KV blocks, MiB")] = 1024
    num_blocks: Annotated[int, Meta(ge=0, description="KV blocks; 0: what kv-cache-mb holds")] = 0
    block_tokens: Annotated[int, Meta(ge=1, le=1024, description="tokens a KV block holds")] = 16
    threads: Annotated[int, Meta(ge=0, description="CPU threads of the engine; 0: all cores")] = 0
    max_running: Annotated[int, Meta(ge=1, description="sequences in work at once; more are refused")] = 64
    token_budget: Annotated[int, Meta(ge=1, description="tokens a step computes at most")] = 256
