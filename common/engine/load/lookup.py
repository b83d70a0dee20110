"""Has the steps of an engine that is open look up what they verify."""

from __future__ import annotations

import time

from common.engine.engine import Engine
from common.protocol.errors import ConfigError
from common.runtime import logs

log = logs.get("engine")


def attach_lookup(engine: Engine, *, max_sequences: int) -> None:
    """Let an engine on a GPU look up what may follow each row's text. Blocks until that is compiled; nothing happens on a CPU.

    Without it the engine serves on: why is a line in the log.
    """
    if not engine.on_gpu:
        return
    from common.engine.gpu.runner import DeviceRunner

    runner, begun = engine.runner, time.perf_counter()
    assert isinstance(runner, DeviceRunner)
    try:
        runner.look_up(max_sequences)
    except ConfigError as error:
        log.warning("no_lookup", code=error.code, reason=str(error), consequence="nothing is looked up on the GPU")
        return
    engine.looks_up = True
    log.info("lookup_ready", texts=max_sequences, seconds=round(time.perf_counter() - begun, 2))
