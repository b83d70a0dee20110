"""The settings of one engine, and how its KV pool is laid out under them. Torch-free: sizes and names only.

The fingerprint names weights, precision and cache layout, and how this version of Penstock hashes blocks and lays out segments:
KV may move only between workers that agree on it.
"""

from __future__ import annotations

import hashlib
from typing import Literal

import msgspec

from common.cache import prefix
from common.cache.division import divide_memory
from common.cache.retention import Retention
from common.cache.spec import CacheLayout, LayerCache, attention_layout
from common.engine.load.abilities import int8_lacks
from common.engine.load.precision import (
    DeviceKind,
    DtypeSetting,
    KvSetting,
    Precision,
    QuantizationSetting,
    resolve_precision,
)
from common.engine.settings import EngineServiceConfig
from common.models.config import ModelConfig, context_of
from common.models.formats.scheme import WeightFormat
from common.protocol.errors import ConfigError
from common.transfer import segment_file

MIN_CONTEXT_TOKENS = 256
"""A KV pool that holds no sequence of this length, or of the model's whole context, is a mistake in the settings."""
_LEAST_CONTEXT = 8
MAX_BLOCKS = 1 << 23
"""Blocks of a group. Each takes some 70 bytes beside its KV: a worker with these is ready some seconds later."""

_MIB = 1 << 20
_CHECKPOINTS: dict[WeightFormat, Literal["none", "fp8", "groups"]] = {
    "plain": "none",
    "fp8": "fp8",
    "fp8_blocks": "fp8",
    "groups": "groups",
}
_CPU_KV_MB = 1024


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of one engine; see `EngineServiceConfig`. `num_blocks` 0: what `kv_cache_mb` holds; that 0: 1 GiB on a CPU,
    on a GPU what `gpu_memory_utilization` leaves. `threads` 0: every core this process may use.

    `max_model_len` 0: the model's context. `profile` and `time_scale` are the simulated engine's. `max_running` and
    `token_budget` size a GPU's workspace.
    """

    dtype: DtypeSetting = "auto"
    quantization: QuantizationSetting = "auto"
    quantization_max_loss: float = 0.006
    kv_cache_dtype: KvSetting = "auto"
    batch_invariant: bool = False
    device: str = "auto"
    load_format: Literal["auto", "dummy"] = "auto"
    max_model_len: int = 0
    engine: Literal["torch", "simulated"] = "torch"
    kv_cache_mb: int = 0
    gpu_memory_utilization: float = 0.9
    num_blocks: int = 0
    block_tokens: int = 16
    threads: int = 0
    profile: str = "instant"
    time_scale: float = 1.0
    max_running: int = 64
    token_budget: int = 256

    @classmethod
    def of(cls, config: msgspec.Struct, *, on_gpu: bool) -> EngineConfig:
        """The settings of a service's configuration (`EngineServiceConfig`) that are the engine's.

        `on_gpu`: whose limits suit where it says none.
        """
        assert isinstance(config, EngineServiceConfig)
        settings = {name: getattr(config, name) for name in cls.__struct_fields__}
        return cls(**settings | config.limits(on_gpu=on_gpu)._asdict())


def limit_context(model: ModelConfig, engine: EngineConfig) -> ModelConfig:
    """`model` with its context limited to `max_model_len`.

    :raises ConfigError: see `context_of`; if that is too short for a gateway's canary, without which nothing is served.
    """
    context = context_of(model.max_context, engine.max_model_len)
    if context < _LEAST_CONTEXT:
        raise ConfigError(
            f"a context of {context} tokens is too short to serve: {_LEAST_CONTEXT} are the least", param="max_model_len"
        )
    return msgspec.structs.replace(model, max_context=context)


def check_use(model: ModelConfig, name: str, *, drafts: bool) -> None:
    """Check that a model can be served, or with `drafts` draft for another one.

    :raises ConfigError: if it writes only some of its tokens, and is to be served.
    """
    if model.draft_vocab_size and not drafts:
        raise ConfigError(
            f"{name} writes only {model.draft_vocab_size} of {model.vocab_size} tokens (draft_vocab_size): it can draft for "
            "another model (--draft-model), and not be served",
            param="model",
        )


_TOO_NARROW_FOR_FP8 = 16
"""Numbers of a head: kernels multiply FP8 keys in two halves, of at least 16 columns each."""


def resolve_engine_precision(model: ModelConfig, engine: EngineConfig, device: str) -> Precision:
    """What `model` is computed with on `device` (as `resolve_device` names it).

    :raises ConfigError: see `resolve_precision`; for FP8 KV of heads too narrow for the kernels.
    """
    kind: DeviceKind = "cuda" if device.startswith("cuda") else "cpu"
    computes = engine.engine == "torch"
    narrowest = min(layer.mixer.head_dim for layer in model.layers)
    if computes and kind == "cuda" and engine.kv_cache_dtype == "fp8" and narrowest <= _TOO_NARROW_FOR_FP8:
        raise ConfigError(
            f"kv_cache_dtype fp8 needs heads of more than {_TOO_NARROW_FOR_FP8} numbers, and this model's have {narrowest}; "
            "use auto",
            param="kv_cache_dtype",
        )
    return resolve_precision(
        engine.dtype,
        engine.quantization,
        engine.kv_cache_dtype,
        kind,
        checkpoint=_CHECKPOINTS[model.weight_format],
        int8_lacks=int8_lacks(model) if computes else (),
    )


def cache_layout(
    model: ModelConfig, engine: EngineConfig, device: str = "cpu", *, kv_bytes: int = 0, fp8_choice: str = ""
) -> CacheLayout:
    """The KV layout of `model` under `engine`, sized and with its fingerprint: a group for each window or chunk of its layers.

    `kv_bytes`: memory for KV where neither `num_blocks` nor `kv_cache_mb` says it; 0: a CPU's default. `fp8_choice`: the digest
    of what FP8 was allowed to touch; empty where nothing was chosen.

    :raises ConfigError: if the settings are impossible, the cache is too small for one block, or has more than MAX_BLOCKS.
    """
    precision = resolve_engine_precision(model, engine, device)
    kept = [Retention(window=layer.mixer.window, chunk=layer.mixer.chunk) for layer in model.layers]
    if engine.engine == "simulated":
        from common.engine.simulated.runner import BYTES_PER_TOKEN

        # the simulated engine keeps a hash per token, whatever the model, in each group
        layers = [
            LayerCache(num_kv_heads=1, head_dim=1, dtype_bytes=BYTES_PER_TOKEN // 2, retention=retention)
            for retention in dict.fromkeys(kept)
        ]
    else:
        layers = [
            LayerCache(
                num_kv_heads=layer.mixer.num_kv_heads,
                head_dim=layer.mixer.head_dim,
                dtype_bytes=precision.kv_bytes,
                retention=retention,
            )
            for layer, retention in zip(model.layers, kept, strict=True)
        ]
    layout = attention_layout(layers, engine.block_tokens)
    memory = engine.kv_cache_mb * _MIB or kv_bytes or _CPU_KV_MB * _MIB
    counts = _blocks_of(layout, engine, memory, context_of(model.max_context, engine.max_model_len))
    if min(counts) < 1:
        size = sum(group.block_bytes for group in layout.groups)
        raise ConfigError(f"{memory >> 20} MiB for KV hold no block of {size} bytes; raise kv_cache_mb")
    if max(counts) > MAX_BLOCKS:
        if param := "num_blocks" if engine.num_blocks else "kv_cache_mb" if engine.kv_cache_mb else "":
            blocks = f"{max(counts):,} KV blocks, with block_tokens {engine.block_tokens}, are more than {MAX_BLOCKS:,}"
            raise ConfigError(f"{blocks}: lower {param} or raise block_tokens", param=param)
        counts = [min(count, MAX_BLOCKS) for count in counts]
    weights = f"dummy/{model.identity}" if engine.load_format == "dummy" else model.identity
    if precision.weights == "fp8":
        weights += f"/{engine.quantization_max_loss}"
    name = f"{weights}/{engine.engine}/{precision.name}/{layout.digest()}/{prefix.HASHES}/{segment_file.VERSION}"
    if any(rope.is_long(context_of(model.max_context, engine.max_model_len)) for rope in model.ropes):
        name += "/long"
    if fp8_choice:
        name += f"/{fp8_choice}"
    return layout.sized(counts[0], hashlib.blake2b(name.encode(), digest_size=16).hexdigest(), *counts[1:])


def _blocks_of(layout: CacheLayout, engine: EngineConfig, memory_bytes: int, max_context: int) -> list[int]:
    """Return the blocks of each group; where `num_blocks` says those of the first, the others get what is needed beside it."""
    if not engine.num_blocks:
        return divide_memory(
            layout.groups,
            memory_bytes,
            max_context=max_context,
            num_sequences=engine.max_running,
            step_tokens=engine.token_budget,
        )
    size = layout.block_tokens
    needed = [
        engine.max_running * group.retention.blocks_for(max_context, size) + -(-engine.token_budget // size)
        for group in layout.groups[1:]
    ]
    return [engine.num_blocks, *(min(engine.num_blocks, count) for count in needed)]


def check_pool(model: ModelConfig, engine: EngineConfig, layout: CacheLayout) -> int:
    """Return the longest sequence, in tokens, that a pool of `layout` holds: at most the model's context.

    :raises ConfigError: if that is too little to be useful, and `num_blocks` does not ask for exactly that; if it is
        nothing.
    """
    longest = min(model.max_context, layout.longest_sequence)
    least = min(model.max_context, MIN_CONTEXT_TOKENS)
    if longest < least and not engine.num_blocks:
        needed, whole = (layout.bytes_for(tokens) for tokens in (least, model.max_context))
        raise ConfigError(
            f"the KV pool holds sequences of {max(longest, 0)} tokens, and {least} is the least that is useful: raise "
            f"kv_cache_mb to {-(-needed // _MIB)} or more ({model.max_context} tokens need {-(-whole // _MIB)})",
            param="kv_cache_mb",
        )
    if longest < 1:
        problem = f"num_blocks {engine.num_blocks} holds no sequence beside the block that is kept free"
        raise ConfigError(problem, param="num_blocks")
    return longest
