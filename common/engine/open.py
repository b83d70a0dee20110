"""From settings to a running engine: find the model, lay out its cache, map a segment for it, load the weights."""

from __future__ import annotations

from collections.abc import Callable

from common.engine.load import EngineConfig, cache_layout, load_runner
from common.engine.settings import EngineServiceConfig
from common.engine.worker import Engine
from common.models.config import load_config
from common.models.source import resolve
from common.transfer.shm import Segment, sweep


def open_engine(
    config: EngineServiceConfig, segment_name: str, *, on_progress: Callable[[int, int], None] = lambda done, total: None
) -> Engine:
    """Blocks until the weights are loaded: call it in a thread. `on_progress(done, total)` counts bytes.

    :raises UnknownModel: the model is not on this machine.
    :raises ConfigError: settings that don't fit the model or the machine.
    """
    files = resolve(config.model)
    model = load_config(files)
    settings = EngineConfig.of(config)
    layout = cache_layout(model, settings)
    sweep(config.shm_dir)
    segment = Segment.create(
        config.shm_dir,
        segment_name,
        num_blocks=layout.num_blocks,
        block_bytes=layout.block_bytes,
        fingerprint=layout.fingerprint,
    )
    try:
        return Engine(load_runner(files, settings, segment.blocks, on_progress), segment)
    except BaseException:
        segment.close()
        raise
