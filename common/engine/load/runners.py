"""From a model's files and a few settings to a runner. Torch is imported only by `load_runner` of the torch engine."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from common.cache.spec import CacheLayout, GroupSpec
from common.engine.load.layout import EngineConfig, cache_layout, check_pool, limit_context, resolve_engine_precision
from common.engine.load.precision import FP8_SINCE, Precision
from common.engine.plan import Runner
from common.models.config import ModelConfig, load_config
from common.models.source import ModelFiles
from common.protocol.errors import ConfigError
from common.runtime import logs
from common.runtime.cores import usable_cores

if TYPE_CHECKING:
    import torch

    from common.engine.cpu.runner import CpuRunner
    from common.engine.load.fp8_choice import Fp8Choice
    from common.models.decoder import Decoder
    from common.ops.linear.linear_tuning import LinearShape
    from common.ops.moe.experts_tuning import TunedExperts

log = logs.get("engine")

_DEVICE = re.compile(r"auto|cuda(:(?P<index>\d{1,3}))?")


def announce_pool(model: ModelConfig, engine: EngineConfig, layout: CacheLayout) -> None:
    """Log when the KV pool holds less than the model's context. :raises ConfigError: see `check_pool`."""
    longest = check_pool(model, engine, layout)
    if longest < model.max_context:
        log.warning("kv_pool_limits_context", tokens=longest, model_tokens=model.max_context, kv_blocks=layout.num_blocks)


def resolve_device(engine: EngineConfig) -> str:
    """`cpu` or `cuda:N`. Imports torch where `auto` has to be decided, or a GPU checked.

    :raises ConfigError: for an unknown device, or a GPU that is not there.
    """
    if engine.engine == "simulated" or engine.device == "cpu":
        return "cpu"
    match = _DEVICE.fullmatch(engine.device)
    if match is None:
        raise ConfigError(f"device {engine.device!r} is not known; use auto, cpu, cuda or cuda:N", param="device")
    import torch

    index = int(match["index"] or 0)
    if torch.cuda.is_available() and index < torch.cuda.device_count():
        return f"cuda:{index}"
    if engine.device == "auto":
        return "cpu"
    raise ConfigError(f"device {engine.device}: torch {torch.__version__} sees no such GPU; use cpu or auto", param="device")


def load_runner(
    files: ModelFiles,
    engine: EngineConfig,
    segment_blocks: Sequence[NDArray[np.uint8]] = (),
    on_progress: Callable[[int, int], None] | None = None,
    *,
    model: ModelConfig | None = None,
    drafts: bool = False,
) -> Runner:
    """Load the weights; block for as long as that takes. `on_progress(done_bytes, total_bytes)` is called meanwhile.
    model: what the files say, if that was read before. drafts: the model only drafts for another one. Its head is FP8 then
    where its weights are and FP8's cost was not measured.

    segment_blocks: of each cache group, uint8 [num_blocks, block_bytes], writable; `cache_layout` gives the sizes. A runner on
    the CPU keeps KV in it, or in memory of its own without it. On a GPU it is not used: the pool is what the weights leave of
    the GPU's memory.

    :raises ConfigError: if the settings or the memory don't fit the model, or its files are damaged (`WeightsError`).
    """
    model = model or load_config(files)
    limited = limit_context(model, engine)
    device = resolve_device(engine)
    if device != "cpu":
        return _device_runner(files, model, engine, device, on_progress, drafts=drafts)
    layout = cache_layout(model, engine, device)
    blocks = list(segment_blocks) or [np.zeros((count, group.block_bytes), np.uint8) for group, count in layout.pools]
    for group, mine in zip(layout.groups, blocks, strict=True):
        if mine.dtype != np.uint8 or mine.ndim != 2 or mine.shape[1] != group.block_bytes:
            raise ConfigError(f"KV memory must be uint8 [num_blocks, {group.block_bytes}], not {list(mine.shape)}")
    if engine.engine == "simulated":
        return _simulated_runner(limited, engine, layout, blocks)
    return _cpu_runner(files, model, engine, layout, blocks, on_progress)


def _simulated_runner(
    model: ModelConfig, engine: EngineConfig, layout: CacheLayout, blocks: Sequence[NDArray[np.uint8]]
) -> Runner:
    from common.engine.simulated.runner import SimulatedRunner, TokenRule

    first, *others = (group.retention for group in layout.groups)
    return SimulatedRunner(
        engine.profile,
        storage=blocks[0],
        block_tokens=engine.block_tokens,
        max_context=model.max_context,
        vocab_size=model.vocab_size,
        fingerprint=layout.fingerprint,
        time_scale=engine.time_scale,
        rule=TokenRule(model.vocab_size, reads=first),
        more=list(zip(blocks[1:], others, strict=True)),
    )


def _cpu_runner(
    files: ModelFiles,
    model: ModelConfig,
    engine: EngineConfig,
    layout: CacheLayout,
    blocks: Sequence[NDArray[np.uint8]],
    on_progress: Callable[[int, int], None] | None,
) -> Runner:
    import torch

    from common.engine.layer_group import LayerGroup

    threads = engine.threads or usable_cores()
    torch.set_num_threads(threads)
    decoder, precision, _ = _decoder(files, model, engine, "cpu", on_progress)
    groups = [
        LayerGroup(
            kv_pool(mine, model, group, getattr(torch, precision.kv)),
            [member.layer for member in group.members],
            group.retention,
        )
        for group, mine in zip(layout.groups, blocks, strict=True)
    ]
    if precision.weights == "int8":
        from common.engine.cpu.int8_runner import Int8Runner

        runner: CpuRunner = Int8Runner(decoder, groups, fingerprint=layout.fingerprint, threads=threads)
    else:
        from common.engine.cpu.torch_runner import TorchRunner

        runner = TorchRunner(decoder, groups, fingerprint=layout.fingerprint, threads=threads)
    runner.warm_up()
    return runner


def _device_runner(
    files: ModelFiles,
    model: ModelConfig,
    engine: EngineConfig,
    device: str,
    on_progress: Callable[[int, int], None] | None,
    *,
    drafts: bool,
) -> Runner:
    import torch

    from common.engine.gpu.memory import measured_kv_room, new_groups, room_beside_tables, workspace_bytes
    from common.engine.gpu.runner import DeviceRunner
    from common.ops import backend
    from common.ops.attention.settings import AttentionSettings
    from common.ops.linear.linear_tuning import tune_linears
    from common.ops.moe.experts_tuning import tune_experts

    gpu = torch.device(device)
    torch.cuda.set_device(gpu)
    decoder, precision, choice = _decoder(files, model, engine, device, on_progress, drafts=drafts)
    if not engine.batch_invariant:
        begun = time.perf_counter()
        tuned = tune_linears(tuned_shapes(decoder), dtype=decoder.dtype, device=gpu)
        log.info("linears_tuned", measured=len(tuned.seconds), failed=len(tuned.failed), seconds=_since(begun))
        begun = time.perf_counter()
        if layers := tuned_experts(decoder):
            tuned = tune_experts(layers)
            log.info("experts_tuned", measured=len(tuned.seconds), failed=len(tuned.failed), seconds=_since(begun))
    room = 0
    if not engine.num_blocks and not engine.kv_cache_mb:
        copies = backend.has_warpgroup_products(gpu)
        workspace = workspace_bytes(model, engine.max_running, engine.token_budget, copies_prefixes=copies)
        room = measured_kv_room(gpu, engine.gpu_memory_utilization, workspace)
    sized = partial(cache_layout, model, engine, device, fp8_choice=choice.digest() if choice else "")
    layout = sized(kv_bytes=room)
    if room:
        context = decoder.config.max_context
        layout = sized(kv_bytes=room_beside_tables(room, layout, context, engine.max_running, engine.token_budget))
    announce_pool(decoder.config, engine, layout)
    groups = new_groups(model, layout, precision.kv, gpu)
    torch.cuda.synchronize(gpu)  # the runner works on a stream of its own
    begun = time.perf_counter()
    runner = DeviceRunner(
        decoder,
        groups,
        fingerprint=layout.fingerprint,
        max_rows=engine.max_running,
        token_budget=engine.token_budget,
        attention=AttentionSettings(batch_invariant=engine.batch_invariant),
    )
    log.info("graphs_captured", kv_blocks=layout.num_blocks, seconds=_since(begun))
    return runner


def tuned_shapes(decoder: Decoder) -> list[LinearShape]:
    """The linears of a decoder, as `tune_linears` wants them: each once."""
    from common.models.blocks.moe import ExpertsBlock
    from common.ops.linear.linear_tuning import tuned_format

    shapes: dict[LinearShape, None] = {}
    for role, weight in decoder.linears:
        shapes[tuned_format(weight), weight.out_features, weight.in_features, role] = None
    for layer in decoder.layers:
        if isinstance(layer.mlp, ExpertsBlock):
            router = layer.mlp.router
            shapes[tuned_format(router), router.out_features, router.in_features, "router"] = None
    return list(shapes)


def tuned_experts(decoder: Decoder) -> list[TunedExperts]:
    """Return the experts of each layer that has any, as `tune_experts` wants them."""
    from common.models.blocks.moe import ExpertsBlock
    from common.ops.moe.experts_tuning import TunedExperts
    from common.ops.moe.form import ExpertActivation

    found: list[TunedExperts] = []
    for layer in decoder.layers:
        block = layer.mlp
        if isinstance(block, ExpertsBlock) and block.weights.on_gpu is not None:
            activation = ExpertActivation(block.spec.activation, block.spec.alpha, block.spec.limit)
            found.append(TunedExperts(*block.weights.on_gpu, activation, block.spec.router.top_k, decoder.dtype))
    return found


def _since(begun: float) -> float:
    return round(time.perf_counter() - begun, 2)


def _decoder(
    files: ModelFiles,
    model: ModelConfig,
    engine: EngineConfig,
    device: str,
    on_progress: Callable[[int, int], None] | None,
    *,
    drafts: bool = False,
) -> tuple[Decoder, Precision, Fp8Choice | None]:
    import torch

    from common.models.registry import load_decoder

    precision = resolve_engine_precision(model, engine, device)
    load = partial(
        load_decoder,
        files,
        model,
        dtype=getattr(torch, precision.compute),
        device=torch.device(device),
        dummy=engine.load_format == "dummy",
        batch_invariant=engine.batch_invariant,
    )
    knows_fp8 = precision.weights == "fp8" or (
        precision.weights == "groups" and torch.cuda.get_device_capability(device) >= FP8_SINCE
    )
    choice = _fp8_choice(files, model, engine, precision, torch.device(device), load)
    decoder = load(
        weights=precision.weights,
        plain=choice.plain if choice else (),
        fp8_head=choice.head if choice else drafts and knows_fp8,
        on_progress=on_progress,
    )
    # only now: what was measured above, and is kept on disk, does not depend on it
    decoder.limit(limit_context(model, engine))
    if precision.kv == "fp8":  # random weights are centred on zero: the same kernels, for benchmarks
        decoder.k_center = (
            choice.center(model, decoder.device)
            if choice
            else torch.zeros(model.num_layers, model.num_kv_heads, model.head_dim, device=decoder.device)
        )
    return decoder, precision, choice


def _fp8_choice(
    files: ModelFiles,
    model: ModelConfig,
    engine: EngineConfig,
    precision: Precision,
    device: torch.device,
    load: Callable[..., Decoder],
) -> Fp8Choice | None:
    """What FP8 does to this model; None where nothing is FP8, for random weights, and if memory is too small to find out."""
    if "fp8" not in (precision.weights, precision.kv) or engine.load_format == "dummy" or files.format == "dummy":
        return None
    import torch

    from common.engine.load.fp8_choice import known_or_measured
    from common.engine.load.sample_text import SAMPLE_TEXT
    from common.text.tokenizer import load_tokenizer

    online = precision.weights == "fp8" and model.weight_format in ("plain", "groups")
    kv = precision.kv == "fp8"

    def measured(what: str, loaded: Callable[[], tuple[Decoder, Decoder | None]]) -> Fp8Choice:
        name = f"{model.identity}/{precision.compute}/{what}"
        return known_or_measured(
            name, device, lambda: load_tokenizer(files).encode(SAMPLE_TEXT), loaded, engine.quantization_max_loss, kv=kv
        )

    found = None
    if online:
        try:
            found = measured("weights", lambda: (load(weights="none"), load(weights="fp8", fp8_head=True)))
        except torch.OutOfMemoryError:
            log.warning("fp8_not_measured", reason="the unquantised model does not fit beside it", consequence="all is FP8")
    if found is None and kv:
        found = measured(f"{precision.weights} as they are", lambda: (load(weights=precision.weights), None))
    torch.cuda.empty_cache()
    return found


def kv_pool(segment_blocks: NDArray[np.uint8], model: ModelConfig, group: GroupSpec, dtype: torch.dtype) -> torch.Tensor:
    """`segment_blocks` of a group seen as [num_blocks, its layers, 2, block_tokens, kv_heads, head_dim], in the same memory."""
    import torch

    memory: Any = torch.from_numpy(segment_blocks)
    return memory.view(dtype).view(-1, len(group.members), 2, group.block_tokens, model.num_kv_heads, model.head_dim)
