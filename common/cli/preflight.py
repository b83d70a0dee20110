"""Can this model be served here? Asked by `pull`, `doctor` and `up`, before any process starts. Torch is not imported.

    files here and whole ─► configuration understood ─► precision fits device ─► weights of known types ─► tokenizer, template
    ─► KV pool holds a useful context ─► memory and shared memory suffice

What a GPU's memory holds is known to its driver alone: the worker says it once it has loaded.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import msgspec

from common.engine.load.layout import (
    EngineConfig,
    cache_layout,
    check_pool,
    check_use,
    limit_context,
    resolve_engine_precision,
)
from common.engine.load.precision import DeviceKind, Precision
from common.models.config import ModelConfig, load_config
from common.models.source import ModelFiles, resolve
from common.models.weights.inventory import Inventory, take_inventory
from common.protocol.errors import ConfigError, InvalidParameter
from common.runtime.memory import available_bytes
from common.text.bundle import load_bundle
from common.text.generation_config import not_applied

ENGINE_BYTES = 350 << 20
"""What an engine's process takes beside weights and KV: torch, and kernels compiled at run time."""

HEAD_MULTIPLE = 8
"""Attention over such heads has depended on the batch on no CPU so far. Over others it is measured as an engine loads."""

_GIB = 1 << 30
_MIB = 1 << 20
_WEIGHT_BYTES = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0}


class Servable(msgspec.Struct, frozen=True, kw_only=True):
    """A model that can be served under some settings. `model.max_context` is what these allow.

    `engine_bytes`: main memory of each engine's process without KV; `pool_bytes`: shared memory of each. 0 on a GPU.
    `longest`: tokens that a sequence may have, as far as known; less than `model.max_context` if the KV pool is small.
    """

    files: ModelFiles
    model: ModelConfig
    precision: Precision
    longest: int
    engine_bytes: int = 0
    pool_bytes: int = 0
    warnings: list[str] = []

    def __str__(self) -> str:
        model, weights = self.model, self.precision.weights if self.precision.weights != "none" else self.precision.compute
        return (
            f"{self.files.name}: {model.architecture}, {model.num_layers} layers, {weights} weights, context {self.longest:,}"
        )


def check_model(spec: str, engine: EngineConfig | None = None, device: DeviceKind = "cpu", *, drafts: bool = False) -> Servable:
    """Check everything about `spec` that can be known without loading it. Takes about half a second.

    drafts: whether it only drafts for another model.

    :raises UnknownModel: it is not on this machine. :raises ConfigError: why it can't be served.
    """
    engine = engine or EngineConfig()
    files = resolve(spec, weights=engine.load_format != "dummy")
    model = limit_context(load_config(files), engine)
    check_use(model, files.name, drafts=drafts)
    precision = resolve_engine_precision(model, engine, device)
    made_up = engine.load_format == "dummy" or files.format == "dummy"
    inventory = take_inventory(msgspec.structs.replace(files, format="dummy") if made_up else files, model)
    warnings = _check_text(files, model, engine)
    if device == "cuda":
        return Servable(files=files, model=model, precision=precision, longest=model.max_context, warnings=warnings)
    return servable_on_cpu(files, model, precision, inventory, engine, warnings)


def servable_on_cpu(
    files: ModelFiles,
    model: ModelConfig,
    precision: Precision,
    inventory: Inventory,
    engine: EngineConfig,
    warnings: Sequence[str] = (),
) -> Servable:
    """Return what an engine on a CPU takes for a model with these weights. model: with its context as `engine` limits it.

    :raises ConfigError: why it can't be served.
    """
    warnings = list(warnings)
    if engine.engine == "torch" and precision.weights != "int8" and model.head_dim % HEAD_MULTIPLE:
        warnings.append(
            f"its heads of {model.head_dim} are no multiple of {HEAD_MULTIPLE}: on some CPUs attention over them depends on "
            "the batch, and an engine in floats refuses them as it loads (--dtype auto computes in 8 bits)"
        )
    layout = cache_layout(model, engine)
    longest = check_pool(model, engine, layout)
    if longest < model.max_context:
        warnings.append(
            f"the KV pool holds sequences of {longest:,} tokens, the model takes {model.max_context:,}: "
            "raise --kv-cache-mb for longer ones"
        )
    return Servable(
        files=files,
        model=model,
        precision=precision,
        longest=longest,
        engine_bytes=ENGINE_BYTES + (0 if engine.engine == "simulated" else _weight_bytes(inventory, precision)),
        pool_bytes=layout.memory_bytes,
        warnings=warnings,
    )


def check_machine(needed: Sequence[tuple[Servable, int]], shm_dir: Path, *, store_bytes: int = 0) -> list[str]:
    """Check that the machine has memory for all engines on its CPU, so many of each, and for KV stores that may grow to
    `store_bytes`.

    Return warnings about what may run short, as sentences.

    :raises ConfigError: if the engines can't be loaded, or their KV pools don't fit.
    """
    needed = [(servable, count) for servable, count in needed if servable.engine_bytes]
    if not needed:
        return []
    warnings: list[str] = []
    num_engines = sum(count for _, count in needed)
    engines = sum(count * servable.engine_bytes for servable, count in needed)
    pools = sum(count * servable.pool_bytes for servable, count in needed)
    free = shutil.disk_usage(shm_dir).free if shm_dir.is_dir() else 0
    if pools > free:
        raise ConfigError(
            f"{num_engines} KV pools need {pools / _GIB:.1f} GiB of shared memory, {shm_dir} has {free / _GIB:.1f} free: "
            "lower --kv-cache-mb, enlarge it, or choose another with --shm-dir",
            param="kv_cache_mb",
        )
    if store_bytes > free:
        raise ConfigError(
            f"KV stores may take {store_bytes / _MIB:.0f} MiB of shared memory, {shm_dir} has {free / _MIB:.0f} free: "
            "lower --capacity-mb, or choose another with --shm-dir",
            param="capacity_mb",
        )
    if pools + store_bytes > free:
        warnings.append(
            f"{shm_dir} has {free / _MIB:.0f} MiB free; with full KV stores {(pools + store_bytes) / _MIB:.0f} are needed: "
            "lower --capacity-mb or --kv-cache-mb"
        )
    memory = available_bytes()
    if engines > memory:
        names = list(dict.fromkeys(servable.files.name for servable, _ in needed))
        raise ConfigError(
            f"{' and '.join(names)} {'takes' if len(names) == 1 else 'take'} {engines / _GIB:.1f} GiB "
            f"in {num_engines} engines, "
            f"{memory / _GIB:.1f} GiB of memory are free: start fewer (--prefill 0), choose --quantization int8, "
            "or a smaller model",
            param="model",
        )
    if engines + pools > memory:
        warnings.append(
            f"{memory / _GIB:.1f} GiB of memory are free; engines and full KV pools take {(engines + pools) / _GIB:.1f}: "
            "lower --kv-cache-mb"
        )
    return warnings


def _check_text(files: ModelFiles, model: ModelConfig, engine: EngineConfig) -> list[str]:
    """Return warnings about tokenizer and template.

    :raises ConfigError: if either can't be loaded.
    """
    try:
        bundle = load_bundle(
            files, max_context=model.max_context, max_model_len=engine.max_model_len, vocab_size=model.vocab_size
        )
    except ConfigError as error:  # a template's compiler draws where it stopped, over many lines
        raise ConfigError(str(error).splitlines()[0], param=error.param) from error
    warnings: list[str] = []
    if bundle.template is None:
        warnings.append("the model has no chat template: it answers completions, not chats")
    else:
        try:
            bundle.encode_chat([{"role": "user", "content": "Hi"}])
        except InvalidParameter as error:
            warnings.append(f"a chat of one message, tried, is refused: {str(error).splitlines()[0]}")
    if bundle.template is not None and (unknown := bundle.template.unknown_methods):
        warnings.append(f"its chat template calls {', '.join(unknown)}, unknown here: chats that come to that are refused")
    if ignored := not_applied(files):
        warnings.append(f"generation_config.json sets {', '.join(ignored)}, which answers here do not follow")
    if bundle.tokenizer.vocab_size > model.vocab_size:
        warnings.append(
            f"the tokenizer has {bundle.tokenizer.vocab_size} tokens and the model {model.vocab_size}: are they one model's?"
        )
    return warnings


def _weight_bytes(inventory: Inventory, precision: Precision) -> int:
    """Return the bytes of an engine's weights on a CPU. Embeddings have the compute type; int8 adds a copy of the head."""
    each = _WEIGHT_BYTES[precision.compute]
    if precision.weights != "int8":
        return int(each * (inventory.embedding + inventory.others))
    return int((each + 1) * inventory.embedding + inventory.others)
