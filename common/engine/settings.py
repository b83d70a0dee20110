"""The settings of a service that runs an engine: prefill and decode."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, NamedTuple

from msgspec import Meta

from common.engine.load.precision import DtypeSetting, KvSetting, QuantizationSetting
from common.protocol.errors import ConfigError
from common.runtime.nixl_settings import NixlSettings
from common.runtime.settings import ServiceConfig


class Limits(NamedTuple):
    """max_running: sequences in work at once. token_budget: tokens of prompts and proposals that a step computes at most,
    beside a token of each sequence that decodes."""

    max_running: int
    token_budget: int


class EngineServiceConfig(NixlSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Engines of prefill and decode workers."""

    dtype: Annotated[DtypeSetting, Meta(description="compute precision; auto: bfloat16 on a GPU, 8-bit weights on a CPU")] = (
        "auto"
    )
    quantization: Annotated[
        QuantizationSetting, Meta(description="of the linears' weights at load: int8 on a CPU, fp8 on a GPU; auto: what suits")
    ] = "auto"
    quantization_max_loss: Annotated[
        float,
        Meta(
            ge=0,
            description="nats a token that fp8 may cost on sample text, with KV; linears beyond it are left alone; 0: any",
        ),
    ] = 0.006
    kv_cache_dtype: Annotated[KvSetting, Meta(description="KV precision; auto: as computed; fp8: GPU only")] = "auto"
    batch_invariant: Annotated[
        bool, Meta(description="a GPU gives a request the same tokens whatever it is batched with, at a cost")
    ] = False
    device: Annotated[str, Meta(description="auto, cpu, cuda or cuda:N; auto: a GPU if there is one")] = "auto"
    load_format: Annotated[Literal["auto", "dummy"], Meta(description="dummy: random weights, only config.json is read")] = (
        "auto"
    )
    engine: Annotated[Literal["torch", "simulated"], Meta(description="simulated: no weights, times from a roofline model")] = (
        "torch"
    )
    profile: Annotated[str, Meta(description="roofline profile of the simulated engine")] = "instant"
    time_scale: Annotated[float, Meta(ge=0, description="simulated engine: 1 real time, 0 no waiting")] = 1.0
    kv_cache_mb: Annotated[
        int,
        Meta(ge=0, le=1 << 30, description="memory for KV blocks, MiB; 0: 1024 on a CPU, gpu-memory-utilization on a GPU"),
    ] = 0
    gpu_memory_utilization: Annotated[
        float, Meta(gt=0, le=1, description="share of a GPU's memory for this worker: weights, workspace, KV")
    ] = 0.9
    num_blocks: Annotated[int, Meta(ge=0, description="KV blocks; 0: what their memory holds")] = 0
    block_tokens: Annotated[int, Meta(ge=1, le=1024, description="tokens a KV block holds")] = 16
    kv_event_backlog: Annotated[
        int, Meta(ge=0, description="changes of cached KV blocks that may wait to be told to gateways; 0: they are told none")
    ] = 65536
    kv_stage_mb: Annotated[
        int,
        Meta(
            ge=0,
            le=65536,
            description="pinned host memory through which a GPU's KV passes to kvstores and other hosts, MiB; 0: to neither",
        ),
    ] = 128
    kv_pin_kvstore: Annotated[
        bool,
        Meta(
            description="have the GPU's driver pin the memory of this host's kvstores, so that KV is copied without the host's "
            "processors; false: all of it through kv_stage_mb"
        ),
    ] = True
    threads: Annotated[int, Meta(ge=0, description="CPU threads of the engine; 0: all usable cores")] = 0
    step_timeout_s: Annotated[
        float, Meta(gt=0, description="least time before a step counts as hung; it is 20 times the slowest of late, or more")
    ] = 5.0
    compile_timeout_s: Annotated[float, Meta(gt=0, description="time of a step that may have to compile kernels")] = 300.0
    max_running: Annotated[int, Meta(ge=0, description="sequences in work at once; more are refused; 0: what suits")] = 0
    token_budget: Annotated[
        int, Meta(ge=0, description="prompt tokens a step computes at most, beside one of each running sequence; 0: what suits")
    ] = 0

    nixl_min_gb_per_s: Annotated[
        float,
        Meta(ge=0, description="a path between hosts that is measured to be slower is an error, and not used; 0: any speed"),
    ] = 0.0
    nixl_timeout_s: Annotated[
        float, Meta(gt=0, le=600, description="time for copying 8 MiB of KV between hosts; afterwards they are computed anew")
    ] = 2.0

    cpu_limits: ClassVar[Limits] = Limits(64, 256)
    gpu_limits: ClassVar[Limits] = Limits(256, 2048)

    def limits(self, *, on_gpu: bool) -> Limits:
        suits = self.gpu_limits if on_gpu else self.cpu_limits
        return Limits(self.max_running or suits.max_running, self.token_budget or suits.token_budget)


def check_objectives(decode: ServiceConfig | None) -> None:
    """`decode`: the settings of decode workers, if there are any.

    :raises ConfigError: they are to part prompts by what runs beside them, and always alike.
    """
    if getattr(decode, "slo_itl_ms", 0) and getattr(decode, "batch_invariant", False):
        raise ConfigError(
            "--slo-itl-ms parts prompts by what runs beside them, and --batch-invariant forbids that: leave one out",
            param="slo_itl_ms",
        )
