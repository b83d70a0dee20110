"""Puts a head beside an engine that is open: what its setting names, or what is shipped for the model."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

from common.engine.engine import Engine
from common.models.head_folder import HeadFiles, find_head
from common.models.source import ModelFiles
from common.protocol.errors import ConfigError, PenstockError
from common.runtime import logs

if TYPE_CHECKING:
    from common.engine.cpu.runner import CpuRunner

log = logs.get("engine")


def attach_head(engine: Engine, setting: str, *, max_sequences: int) -> None:
    """Let the engine draft with the head that `setting` names, see `find_head`. Blocks until it is loaded and compiled.

    Without it the engine serves on: why there is none is a line in the log, if one was asked for.
    """
    files = engine.files
    if setting == "off" or files is None:
        return
    try:
        head = find_head(setting, files)
        runner = None if head is None else _runner_of(engine, is_asked_for=setting != "auto")
        if head is not None and runner is not None:
            engine.head = _attach(runner, head, files, max_sequences)
    except PenstockError as error:
        log.warning("no_head", code=error.code, reason=str(error), consequence="nothing is drafted from hidden states")


def _runner_of(engine: Engine, *, is_asked_for: bool) -> CpuRunner | None:
    """Return the runner, if a head can run beside it.

    :raises ConfigError: if it can't, and a head was asked for.
    """
    if not engine.on_gpu and "common.engine.cpu.runner" in sys.modules:  # simulated engines start without torch
        from common.engine.cpu.runner import CpuRunner

        if isinstance(engine.runner, CpuRunner):
            return engine.runner
    if is_asked_for:
        raise ConfigError("a head runs beside engines on a CPU only: use --device cpu, or --head off", param="head")
    return None


def _attach(runner: CpuRunner, found: HeadFiles, files: ModelFiles, max_sequences: int) -> str:
    """Return the head's name. :raises ConfigError: if it does not fit."""
    from common.models.head_weights import load_head

    begun = time.perf_counter()
    tensors = load_head(found, runner.decoder, files.name)
    try:
        from common.engine.cpu.head import Head
    except ImportError as error:
        raise ConfigError(f"a head needs the package numba: {error}", param="head") from error
    runner.head = Head(tensors, max_sequences=max_sequences, threads=runner.threads)
    runner.warm_up()
    log.info("head_loaded", head=found.name, layers=list(found.spec.layers), seconds=round(time.perf_counter() - begun, 2))
    return found.name
