"""What is left of a GPU for KV."""

from __future__ import annotations

import pytest
import torch

from common.engine.gpu.block_tables import BlockTables, max_table_ids
from common.engine.gpu.memory import kv_room, new_groups, room_beside_tables, workspace_bytes
from common.engine.gpu.step_buffers import step_tokens
from common.engine.load.runners import EngineConfig, cache_layout
from common.models.config import config_from_json
from common.models.shapes import SHAPES
from common.protocol.errors import ConfigError

GIB = 1 << 30


def room(free: int, used: int, utilization: float) -> float:
    workspace = 2 * GIB
    return kv_room(free=free * GIB, total=140 * GIB, used=used * GIB, utilization=utilization, workspace=workspace) / GIB


def test_kv_gets_what_weights_and_workspace_leave_of_a_workers_share() -> None:
    assert room(free=124, used=16, utilization=0.9) == pytest.approx(108)


def test_two_workers_of_half_a_gpu_each_fit() -> None:
    first = room(free=124, used=16, utilization=0.45)
    assert first == pytest.approx(45)
    assert room(free=int(140 - 16 - first - 16), used=16, utilization=0.45) == pytest.approx(first)


def test_others_on_the_gpu_leave_less() -> None:
    assert room(free=30, used=16, utilization=0.9) == pytest.approx(28)
    with pytest.raises(ConfigError, match="another process"):
        room(free=2, used=16, utilization=0.9)
    with pytest.raises(ConfigError, match="raise the share"):
        room(free=124, used=16, utilization=0.1)


def test_the_workspace_of_the_usual_settings_is_a_few_gib() -> None:
    model = config_from_json(SHAPES["llama-3.1-8b"])
    assert GIB < workspace_bytes(model, max_running=256, token_budget=8192) < 5 * GIB


def test_a_pool_is_as_large_as_its_layout_says() -> None:
    model = config_from_json(SHAPES["tiny"] | {"head_dim": 32})
    for dtype in ("auto", "fp8"):
        engine = EngineConfig(dtype="bfloat16", kv_cache_dtype=dtype, num_blocks=3)
        layout = cache_layout(model, engine, "cuda:0")
        (group,) = new_groups(model, layout, "bfloat16" if dtype == "auto" else "fp8", torch.device("cpu"))
        pool = group.pool
        assert (len(pool), pool[0].nbytes) == (layout.num_blocks, layout.block_bytes)
        assert not pool.view(torch.uint8).any()


def test_block_tables_and_inputs_of_a_step_are_counted() -> None:
    model = config_from_json(SHAPES["llama-3.1-8b"])
    engine = EngineConfig(dtype="bfloat16", max_running=256, token_budget=8192)
    layout = cache_layout(model, engine, "cuda:0", kv_bytes=100 * GIB)
    left = room_beside_tables(100 * GIB, layout, model.max_context, engine.max_running, engine.token_budget)
    max_ids = max_table_ids([layout.num_blocks], 256, model.max_context // 16)
    tables = BlockTables(
        num_blocks=[layout.num_blocks], max_ids=max_ids, max_tables=step_tokens(256, 8192), device=torch.device("meta")
    )
    assert tables.ids.nbytes < 100 * GIB - left < tables.ids.nbytes + (4 << 20)
    assert room_beside_tables(5, layout, model.max_context, engine.max_running, engine.token_budget) == 1


def test_measured_room_sizes_the_layout_unless_settings_do() -> None:
    model = config_from_json(SHAPES["tiny"])
    block_bytes = cache_layout(model, EngineConfig(), "cuda:0").block_bytes
    assert cache_layout(model, EngineConfig(), "cuda:0", kv_bytes=7 * block_bytes + 1).num_blocks == 7
    assert (
        cache_layout(model, EngineConfig(kv_cache_mb=1), "cuda:0", kv_bytes=7 * block_bytes).num_blocks
        == GIB // 1024 // block_bytes
    )
    assert cache_layout(model, EngineConfig(num_blocks=2), "cuda:0", kv_bytes=7 * block_bytes).num_blocks == 2
