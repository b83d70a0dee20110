"""A model's layers share a cache group where they keep the same tokens: layout, fingerprint, room, and what is said of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest

from common.cache.retention import KEEP_ALL, Retention
from common.cli.doctor import check_footprint
from common.cli.doctor import check_model as check_here
from common.cli.preflight import check_model
from common.engine.engine import Engine
from common.engine.load.layout import MAX_BLOCKS, EngineConfig, cache_layout, check_pool
from common.engine.load.open import open_engine
from common.engine.load.runners import load_runner
from common.engine.plan import StepPlan, StepRow
from common.engine.simulated.runner import TokenRule, expected_tokens
from common.models.config import load_config
from common.models.spec import ModelSpec
from common.protocol.errors import ConfigError
from common.protocol.messages import SamplingParams
from services.decode.config import DecodeConfig
from tests.e2e.tiny import save_tokenizer
from tests.models.oracles import ORACLES, save
from tests.models.test_families import tiny

WINDOW, CHUNK = Retention(window=24), Retention(chunk=24)
KEPT = {
    "llama": [KEEP_ALL],
    "mistral": [WINDOW],
    "mixtral": [WINDOW],
    "gemma2": [KEEP_ALL, WINDOW],
    "gemma3": [KEEP_ALL, WINDOW],
    "gpt-oss": [KEEP_ALL, WINDOW],
    "llama4": [KEEP_ALL, CHUNK],
    "olmo3": [KEEP_ALL, WINDOW],
    "ministral": [KEEP_ALL, WINDOW],
    "ministral3": [KEEP_ALL],
    "exaone4": [KEEP_ALL, WINDOW],
    "cwm": [KEEP_ALL, WINDOW],
    "smollm3": [KEEP_ALL],
    "glm4": [KEEP_ALL],
    "phi3": [KEEP_ALL],
    "phi3-longrope": [Retention(window=30)],
    "qwen2-windows-in-last-layers": [KEEP_ALL, Retention(window=20)],
}
GREEDY = SamplingParams(temperature=0.0)


def kept(model: ModelSpec, engine: EngineConfig | None = None, device: str = "cpu") -> Sequence[Retention]:
    layout = cache_layout(model, engine or EngineConfig(num_blocks=4), device)
    return [group.retention for group in layout.groups]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders = {name: tmp_path_factory.mktemp("models") / name for name in ("mistral", "gemma2")}
    for name, folder in folders.items():
        save(ORACLES[name](), folder)
        save_tokenizer(folder)
    return folders


def open_here(folder: Path, shm_dir: Path, **settings: object) -> Engine:
    config = DecodeConfig(model=str(folder), shm_dir=str(shm_dir), **settings)  # type: ignore[arg-type]
    return open_engine(config, "segment")


@pytest.mark.parametrize("name", KEPT)
def test_a_family_has_a_group_for_each_retention_of_its_layers(name: str, tmp_path: Path) -> None:
    model = load_config(save(ORACLES[name](), tmp_path))
    for engine in ("torch", "simulated"):
        settings = EngineConfig(engine=engine, num_blocks=4)
        layout = cache_layout(model, settings)
        assert [group.retention for group in layout.groups] == KEPT[name]
        if engine == "torch":
            layers = [member.layer for group in layout.groups for member in group.members]
            assert sorted(layers) == list(range(model.num_layers))


def test_a_gpu_has_the_groups_of_a_cpu() -> None:
    gemma = tiny("gemma2", sliding_window=24)
    for device in ("cpu", "cuda:0"):
        layout = cache_layout(gemma, EngineConfig(num_blocks=4), device)
        assert [group.retention for group in layout.groups] == [KEEP_ALL, WINDOW]


def test_a_window_is_part_of_the_fingerprint_and_the_context_served_is_not() -> None:
    def fingerprint(window: int | None, max_model_len: int = 0, engine: str = "torch") -> str:
        settings = EngineConfig(num_blocks=64, max_model_len=max_model_len, engine=engine)  # type: ignore[arg-type]
        return cache_layout(tiny("mistral", sliding_window=window), settings).fingerprint

    assert len({fingerprint(window, engine=engine) for window in (None, 24, 32) for engine in ("torch", "simulated")}) == 6
    assert fingerprint(24, max_model_len=16) == fingerprint(24)


def test_windows_alone_hold_a_sequence_of_any_length() -> None:
    """Of 4 blocks of 16 tokens a window of 24 needs all; where other layers keep everything, those say how long it may be."""
    settings = EngineConfig(num_blocks=5)
    model = tiny("mistral", sliding_window=24)
    assert check_pool(model, settings, cache_layout(model, settings)) == 512
    too_few = EngineConfig(num_blocks=4)
    assert check_pool(model, too_few, cache_layout(model, too_few)) == 48
    model = tiny("gemma2", sliding_window=24)
    assert check_pool(model, settings, cache_layout(model, settings)) == 64


def test_blocks_that_hold_no_sequence_are_refused() -> None:
    """Such a worker was ready, and what it was given waited until its deadline."""
    settings = EngineConfig(num_blocks=1)
    model = tiny("mistral", sliding_window=None)
    with pytest.raises(ConfigError, match="num_blocks 1 holds no sequence"):
        check_pool(model, settings, cache_layout(model, settings))


def test_more_blocks_than_a_worker_can_keep_track_of_are_refused_and_never_the_default() -> None:
    """A simulated engine keeps 8 bytes a token: its GiB by default, in blocks of a token, took each worker minutes and 9 GB."""
    model = tiny("mistral", sliding_window=None)
    simulated = EngineConfig(engine="simulated", block_tokens=1)
    assert cache_layout(model, simulated).num_blocks == MAX_BLOCKS
    assert cache_layout(model, EngineConfig(engine="simulated")).num_blocks == MAX_BLOCKS == (1 << 30) // (16 * 8)
    for settings, says in (
        (msgspec.structs.replace(simulated, kv_cache_mb=65), "8,519,680 KV blocks, .* lower kv_cache_mb or raise"),
        (msgspec.structs.replace(simulated, num_blocks=MAX_BLOCKS + 1), "lower num_blocks or raise block_tokens"),
        (EngineConfig(num_blocks=MAX_BLOCKS + 1), "lower num_blocks or raise block_tokens"),
    ):
        with pytest.raises(ConfigError, match=says):
            cache_layout(model, settings)


def test_memory_that_holds_no_useful_context_is_an_error_that_says_how_much_would() -> None:
    shape = {"num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 65_536, "num_hidden_layers": 32}
    settings = EngineConfig(kv_cache_mb=12, dtype="float32")
    model = tiny("mistral", sliding_window=4096, **shape)
    with pytest.raises(ConfigError, match=r"raise kv_cache_mb to \d+ or more \(65536 tokens need \d+\)"):
        check_pool(model, settings, cache_layout(model, settings))
    needed = cache_layout(model, settings).bytes_for(65_536)
    assert needed == (4096 // 16 + 3) * 16 * 32 * 2 * 4 * 256 * 4, "a window, its edges, and a block that is kept free"
    enough = msgspec.structs.replace(settings, kv_cache_mb=-(-needed >> 20) + 1)
    assert check_pool(model, enough, cache_layout(model, enough)) == 65_536


@pytest.mark.parametrize("engine", ["torch", "simulated"])
def test_an_engine_has_a_segment_for_each_group(models: dict[str, Path], tmp_path: Path, engine: str) -> None:
    opened = open_here(models["gemma2"], tmp_path, engine=engine, kv_cache_mb=8, threads=1)
    try:
        assert [group.retention for group in opened.groups] == KEPT["gemma2"]
        assert sorted(path.name for path in tmp_path.iterdir()) == [f"penstock-segment{end}" for end in ("", "-1")]
        row = StepRow([5], 0, [1], 1, GREEDY, 1, more_blocks=[[2]])
        assert len(opened.runner.execute(StepPlan(0, [row])).rows[0].tokens) == 1
    finally:
        opened.close()


def test_a_simulated_engine_of_windows_alone_reads_no_more_than_they_keep(models: dict[str, Path]) -> None:
    """Every token is right although blocks behind the window are gone."""
    files = check_model(str(models["mistral"]), EngineConfig(engine="simulated")).files
    engine = EngineConfig(engine="simulated", num_blocks=16, profile="instant")
    layout = cache_layout(load_config(files), engine)
    runner = load_runner(files, engine, [np.full((16, layout.block_bytes), 0xA5, np.uint8)])
    tokens = list(range(3, 90))
    table = [*range(6)]
    runner.execute(StepPlan(0, [StepRow(tokens, 0, table, 0, GREEDY, len(tokens))]))
    found: list[int] = []
    for step in range(30):
        length = len(tokens) + step
        gone = WINDOW.first_token(length) // 16
        table = [-1] * gone + [block % 16 for block in range(gone, length // 16 + 1)]
        fed = found[-1] if found else 90
        found += runner.execute(StepPlan(step, [StepRow([fed], length, table, 1, GREEDY, len(tokens) + 1)])).rows[0].tokens
    rule = TokenRule(256, reads=WINDOW)
    assert found == expected_tokens([*tokens, 90], GREEDY, 30, rule=rule)
    assert found != expected_tokens([*tokens, 90], GREEDY, 30, rule=TokenRule(256))


@pytest.mark.parametrize("name", ["mistral", "gemma2"])
def test_preflight_knows_what_suits_a_cpu_where_nothing_is_said(models: dict[str, Path], tmp_path: Path, name: str) -> None:
    """`max_running` 0 is what suits, not no sequences: a window's group would get no block."""
    settings = EngineConfig.of(DecodeConfig(kv_cache_mb=4), on_gpu=False)
    assert (settings.max_running, settings.token_budget) == (64, 256)
    servable = check_model(str(models[name]), settings)
    assert servable.longest == servable.model.max_context == 512
    assert 0 < servable.pool_bytes <= 4 << 20
    assert check_here(str(models[name]), tmp_path, {}).level != "problem"


def test_doctor_says_what_each_group_keeps(models: dict[str, Path]) -> None:
    found = check_footprint(str(models["gemma2"]), {})[0]
    assert found.what == "kv on a gpu"
    assert "kv: 2 layers" in found.found and "window24: 2 layers" in found.found and "for the last 24" in found.found
