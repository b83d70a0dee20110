"""Puts a head beside an engine that is open: what its setting names, or what is shipped for the model."""

from __future__ import annotations

import time

from common.engine.engine import Engine
from common.models.head_folder import HeadFiles, find_head
from common.models.source import ModelFiles
from common.protocol.errors import ConfigError, PenstockError
from common.runtime import logs

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
        if head is not None:
            _attach(engine, head, files, max_sequences)
    except PenstockError as error:
        log.warning("no_head", code=error.code, reason=str(error), consequence="nothing is drafted from hidden states")


def _attach(engine: Engine, found: HeadFiles, files: ModelFiles, max_sequences: int) -> None:
    """:raises ConfigError: if the head does not fit, or the engine can't run it."""
    if engine.on_gpu:
        raise ConfigError("a head runs beside engines on a CPU only: use --device cpu, or --head off", param="head")
    from common.engine.cpu.runner import CpuRunner
    from common.models.head_weights import load_head

    runner = engine.runner
    if not isinstance(runner, CpuRunner):
        raise ConfigError("a head needs an engine that computes hidden states: use --engine torch", param="head")
    begun = time.perf_counter()
    tensors = load_head(found, runner.decoder, files.name)
    try:
        from common.engine.cpu.head import Head
    except ImportError as error:
        raise ConfigError(f"a head needs the package numba: {error}", param="head") from error
    runner.head = Head(tensors, max_sequences=max_sequences, threads=runner.threads)
    runner.warm_up()
    engine.head = found.name
    log.info("head_loaded", head=found.name, layers=list(found.spec.layers), seconds=round(time.perf_counter() - begun, 2))
