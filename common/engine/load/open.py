"""From settings to a running engine: find the model, lay out its cache, map a segment for it, load the weights.

On a CPU the segment is the KV memory, and comes first: a machine without room for it should say so at once. On a GPU the KV
gets what the weights leave, so the segment comes last; it holds generations, and says how to reach the pool.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING

from common.cache.spec import group_name
from common.engine.engine import Engine, GroupMemory
from common.engine.load.layout import EngineConfig, cache_layout, check_use, limit_context
from common.engine.load.runners import announce_pool, load_runner, resolve_device
from common.engine.settings import EngineServiceConfig
from common.models.config import ModelConfig, load_config, weights_identity
from common.models.source import ModelFiles, resolve
from common.ops.kept import not_kept
from common.runtime import logs
from common.transfer.checked_copies import prepare
from common.transfer.cuda_ipc import LocalTransport, export_pool
from common.transfer.host_stage import HostStage, open_stage
from common.transfer.segment import Segment
from common.transfer.segment_file import sweep, wait_for_room

if TYPE_CHECKING:
    from common.engine.layer_group import LayerGroup

log = logs.get("engine")

Progress = Callable[[int, int], None]


def open_engine(
    config: EngineServiceConfig,
    segment_name: str,
    on_progress: Progress = lambda done, total: None,
    *,
    transport: LocalTransport | None = None,
    drafts: bool = False,
) -> Engine:
    """Blocks until the weights are loaded: call it in a thread. `on_progress(done, total)` counts bytes.

    `transport` is what will fetch other workers' KV: it is told where this engine keeps its own. drafts: whether the model only
    drafts for another one.

    :raises UnknownModel: the model is not on this machine.
    :raises ConfigError: settings that don't fit the model or the machine.
    """
    settings = EngineConfig.of(config, on_gpu=False)
    files = resolve(config.model, weights=settings.load_format != "dummy")
    whole = load_config(files)
    model = limit_context(whole, settings)
    check_use(model, files.name, drafts=drafts)
    identity = weights_identity(files, model, dummy=settings.load_format == "dummy")
    sweep(config.shm_dir)
    if settings.engine == "torch" and (reason := not_kept()):
        log.warning("kernels_not_kept", reason=reason)
    on_gpu = resolve_device(settings) != "cpu"
    settings = EngineConfig.of(config, on_gpu=on_gpu)
    if not on_gpu:
        engine = _open_on_cpu(files, whole, settings, config.shm_dir, segment_name, on_progress)
        engine.identity, engine.files = identity, files
        return engine
    runner = load_runner(files, settings, on_progress=on_progress, model=whole, drafts=drafts)
    groups: Sequence[LayerGroup] = runner.groups  # pyright: ignore[reportAttributeAccessIssue]
    memory: list[GroupMemory] = []
    stage: HostStage | None = None
    try:
        for index, group in enumerate(groups):
            segment = Segment.create(
                config.shm_dir,
                group_name(segment_name, index),
                num_blocks=len(group.pool),
                block_bytes=group.pool[0].nbytes,
                fingerprint=group_name(runner.fingerprint, index),
                device_memory=export_pool(group.pool),
            )
            memory.append(GroupMemory(segment, group.retention))
        if not drafts and not config.zero_retention:
            stage = open_stage([group.pool for group in groups], config.kv_stage_mb, pins=config.kv_pin_kvstore)
        for one, staged in zip(memory, stage.groups if stage is not None else [], strict=False):
            one.staged = staged
        if transport is not None:
            transport.attach({group_name(runner.fingerprint, index): group.pool for index, group in enumerate(groups)})
    except BaseException:
        for one in memory:
            one.segment.close()
        if stage is not None:
            stage.close()
        raise
    engine = Engine(runner, memory[0], memory[1:], on_gpu=True, identity=identity, files=files, stage=stage)
    engine.tell = getattr(runner, "tell_progress", engine.tell)
    engine.board = getattr(runner, "board", None)
    return engine


def _open_on_cpu(
    files: ModelFiles, whole: ModelConfig, settings: EngineConfig, shm_dir: str, segment_name: str, on_progress: Progress
) -> Engine:
    """whole: the model with its own context."""
    model = limit_context(whole, settings)
    layout = cache_layout(model, settings)
    announce_pool(model, settings, layout)
    memory: list[GroupMemory] = []
    wait_for_room(Path(shm_dir), layout.memory_bytes)
    try:
        for index, (group, num_blocks) in enumerate(layout.pools):
            segment = Segment.create(
                shm_dir,
                group_name(segment_name, index),
                num_blocks=num_blocks,
                block_bytes=group.block_bytes,
                fingerprint=group_name(layout.fingerprint, index),
            )
            memory.append(GroupMemory(segment, group.retention))
        runner = load_runner(files, settings, [group.segment.blocks for group in memory], on_progress, model=whole)
        if settings.engine == "torch":
            from common.ops.cpu_int8.huge_pages_cpu import use_huge_pages

            Thread(target=use_huge_pages, name="huge-pages", daemon=True).start()  # steps get faster; nobody waits for it
            prepare()  # what copies to and from a kvstore
        return Engine(runner, memory[0], memory[1:])
    except BaseException:
        for group in memory:
            group.segment.close()
        raise
