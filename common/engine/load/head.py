"""Puts a head beside an engine that is open: what its setting names, what is shipped for the model, or its own MTP layer."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

from common.engine.board import HeadSlots
from common.engine.engine import Engine
from common.engine.load.precision import FP8_SINCE
from common.models.head_folder import HeadFiles, find_head
from common.models.source import ModelFiles
from common.protocol.errors import ConfigError, PenstockError
from common.runtime import logs

if TYPE_CHECKING:
    from common.engine.cpu.runner import CpuRunner
    from common.models.head_weights import HeadTensors

log = logs.get("engine")


def attach_head(engine: Engine, setting: str, *, max_sequences: int) -> None:
    """Let the engine draft with the head that `setting` names, see `find_head`. Blocks until it is loaded and compiled.

    Without it the engine serves on: why there is none is a line in the log, if one was asked for.
    """
    files = engine.files
    if setting == "off" or files is None:
        return
    try:
        head = find_head(setting, files, on_gpu=engine.on_gpu)
        if head is None:
            return
        if engine.on_gpu:
            _attach_on_gpu(engine, head, files)
        elif (runner := _cpu_runner(engine)) is not None:
            _attach(runner, head, files, max_sequences)
        elif setting == "auto":
            return
        else:
            raise ConfigError("a head needs hidden states, and this engine has none: use --head off", param="head")
        engine.head = head.name
    except PenstockError as error:
        log.warning("no_head", code=error.code, reason=str(error), consequence="nothing is drafted from hidden states")


def _cpu_runner(engine: Engine) -> CpuRunner | None:
    """Return the runner, if it has room for a head."""
    if "common.engine.cpu.runner" not in sys.modules:  # simulated engines start without torch
        return None
    from common.engine.cpu.runner import CpuRunner

    return engine.runner if isinstance(engine.runner, CpuRunner) else None


def _attach(runner: CpuRunner, found: HeadFiles, files: ModelFiles, max_sequences: int) -> None:
    """:raises ConfigError: if it does not fit."""
    from common.models.head_weights import load_head

    begun = time.perf_counter()
    tensors = load_head(found, runner.decoder, files.name)
    try:
        from common.engine.cpu.head import Head
    except ImportError as error:
        raise ConfigError(f"a head needs the package numba: {error}", param="head") from error
    runner.head = Head(tensors, max_sequences=max_sequences, threads=runner.threads)
    runner.warm_up()
    _log_loaded(found, tensors, begun)


def _attach_on_gpu(engine: Engine, found: HeadFiles, files: ModelFiles) -> None:
    """:raises ConfigError: if it does not fit."""
    import torch

    from common.engine.gpu.runner import DeviceRunner
    from common.models.head_model import head_model
    from common.models.head_weights import load_head

    runner, begun = engine.runner, time.perf_counter()
    assert isinstance(runner, DeviceRunner)
    gpu, dtype = runner.decoder.device, runner.decoder.dtype
    tensors = load_head(found, runner.decoder, files.name)
    knows_fp8 = gpu.type == "cuda" and torch.cuda.get_device_capability(gpu) >= FP8_SINCE
    try:
        runner.attach_head(head_model(tensors, dtype=dtype, device=gpu, format="fp8" if knows_fp8 else "plain"))
    except (torch.OutOfMemoryError, ConfigError) as error:
        runner.attach_head(None)
        raise ConfigError("no GPU memory is left for a head: use --head off, or lower gpu_memory_utilization") from error
    engine.head_slots = HeadSlots()
    _log_loaded(found, tensors, begun)


def _log_loaded(found: HeadFiles, tensors: HeadTensors, begun: float) -> None:
    unused = {"unused_mtp_layers": found.num_unused} if found.num_unused else {}
    seconds = round(time.perf_counter() - begun, 2)
    log.info(
        "head_loaded", head=found.name, kind=tensors.spec.kind, layers=list(tensors.spec.layers), seconds=seconds, **unused
    )
