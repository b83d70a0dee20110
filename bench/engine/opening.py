"""Opens an engine in this process, without a service around it."""

from __future__ import annotations

import time
from typing import Any

import msgspec

from common.engine.load.precision import Precision
from common.engine.load.runners import EngineConfig, load_runner, resolve_device, resolve_engine_precision
from common.models.config import ModelConfig, load_config
from common.models.source import resolve
from common.runtime.service import spare_what_is_loaded

PRECISIONS: dict[str, dict[str, Any]] = {
    "auto": {},
    "fp32": {"dtype": "float32", "quantization": "none"},
    "bf16": {"dtype": "bfloat16", "quantization": "none"},
    "fp8": {"dtype": "bfloat16", "quantization": "fp8", "kv_cache_dtype": "fp8"},
    "fp8-weights": {"dtype": "bfloat16", "quantization": "fp8"},
    "fp8-kv": {"dtype": "bfloat16", "quantization": "none", "kv_cache_dtype": "fp8"},
    "int8": {"quantization": "int8"},
}
"""Short names of precisions; "fp8" is weights and KV, as the peer's figures are."""


def split_precision(given: str) -> tuple[str, str]:
    """Return a model and the name of its precision, which may follow behind a colon: "auto" if it does not."""
    model, _, precision = given.rpartition(":")
    return (model, precision) if model and precision in PRECISIONS else (given, "auto")


class Opening(msgspec.Struct, kw_only=True):
    runner: Any
    model: ModelConfig
    precision: Precision
    device: str
    load_s: float


def open_runner(spec: str, precision: str, **settings: Any) -> Opening:
    """`spec`: as `--model`. `precision`: a name in `PRECISIONS`. `settings`: of `EngineConfig`.

    As in a service, the garbage collector leaves alone what is loaded by then: to go through it takes 100 to 200 ms, two or
    three times in a run of 256 rows.

    :raises UnknownModel, ConfigError: see `load_runner`.
    """
    engine = EngineConfig(**(PRECISIONS[precision] | settings))
    files = resolve(spec)
    model = load_config(files)
    device = resolve_device(engine)
    begun = time.perf_counter()
    runner = load_runner(files, engine)
    load_s = time.perf_counter() - begun
    spare_what_is_loaded()
    resolved = resolve_engine_precision(model, engine, device)
    return Opening(runner=runner, model=model, precision=resolved, device=device, load_s=load_s)
