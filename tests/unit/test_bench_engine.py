"""The engine's benchmark: cells and limits add up, and the driver runs requests as a worker does."""

from __future__ import annotations

import gc
import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch")

from bench.common.lengths import Lengths
from bench.common.stats import Percentiles
from bench.engine.cells import PRESETS, Cell, Measured, decode_line, encode_line, parse_cells
from bench.engine.driver import Driver, Request
from bench.engine.limits import Limits
from bench.engine.opening import open_runner
from common.engine.load.precision import Precision
from common.engine.plan import StepPlan, StepResult
from common.engine.simulated.runner import SimulatedRunner
from common.models.config import ModelConfig, config_from_json, load_config
from common.models.shapes import SHAPES
from common.models.source import resolve
from common.protocol.errors import ConfigError
from common.protocol.messages import SamplingParams
from tests.unit.cards import H200

BF16, FP8 = Precision("bfloat16", "none", "bfloat16"), Precision("bfloat16", "fp8", "fp8")


def llama_8b() -> ModelConfig:
    return load_config(resolve("dummy:llama-3.1-8b"))


def test_an_engine_of_a_benchmark_is_no_matter_for_the_garbage_collector() -> None:
    """As in a service: to go through libraries and a model takes 100 to 200 ms, in the middle of what is measured."""
    try:
        open_runner("dummy:tiny", "fp32", device="cpu", engine="simulated", num_blocks=64)
        assert gc.get_freeze_count() > 100_000
    finally:
        gc.unfreeze()


# -- cells


@given(rows=st.integers(1, 999), prompt=st.integers(1, 99_999), out=st.integers(1, 999), ragged=st.booleans())
def test_a_cell_reads_what_it_writes(rows: int, prompt: int, out: int, ragged: bool) -> None:
    cell = Cell(rows, prompt, out, ragged)
    assert Cell.parse(str(cell)) == cell
    lengths = cell.lengths()
    assert len(lengths) == rows and lengths == cell.lengths()
    assert all(max(1, prompt // 4) <= length <= max(1, 7 * prompt // 4) for length in lengths)


@pytest.mark.parametrize("text", ["", "1x", "0x5", "5x0", "1x2x3x4", "1x~2~", "axb", "~1x2"])
def test_what_is_no_cell_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="no cell"):
        Cell.parse(text)


def test_presets_are_cells_and_mix_with_others() -> None:
    assert parse_cells("prefill, 3x5x7 3x5x7") == [*parse_cells(PRESETS["prefill"]), Cell(3, 5, 7)]
    assert all(parse_cells(name) for name in PRESETS)


@pytest.mark.parametrize(("text", "low", "high"), [("512", 512, 512), ("~64", 16, 112), ("3-9", 3, 9), ("~1", 1, 1)])
def test_lengths(text: str, low: int, high: int) -> None:
    lengths = Lengths.parse(text)
    assert (lengths.low, lengths.high) == (low, high)
    assert low <= lengths.draw(random.Random(1)) <= high


@pytest.mark.parametrize("text", ["", "0", "9-3", "~3-9", "x"])
def test_what_is_no_length_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="no length"):
        Lengths.parse(text)


def test_lines_come_back_and_other_lines_are_nothing() -> None:
    line = Measured(cell="1x2", first_s=0.1, total_s=0.2, tok_s=3.0, step_ms=Percentiles(1, 2, 3))
    assert decode_line(encode_line(line)) == line
    assert decode_line(b"INFO something else") is None


# -- limits


def test_the_limit_of_one_row_is_the_cards_bandwidth() -> None:
    limit = Limits(llama_8b(), BF16, H200).decode([128], 256)
    assert limit.by == "memory"
    assert 255 / limit.seconds == pytest.approx(282, rel=0.01)  # 15.0 GB a step at 4.24 TB/s


def test_the_limits_of_batches_are_those_of_the_formula() -> None:
    limits = Limits(llama_8b(), BF16, H200)
    assert limits.weights.bytes_of(1) == pytest.approx(15.0e9, rel=0.01) and limits.kv_bytes == 131_072
    for rows in (8, 32, 128):
        keys = rows * (512 + 128)  # in the middle of 256 tokens
        expected = rows * 4.24e12 / (limits.weights.bytes_of(rows) + keys * 131_072)
        assert rows * 255 / limits.decode([512] * rows, 256).seconds == pytest.approx(expected, rel=0.01)


def test_a_long_prompt_is_bound_by_arithmetic_and_a_short_one_by_memory() -> None:
    limits = Limits(llama_8b(), BF16, H200)
    long, short = limits.prefill([8192]), limits.prefill([16])
    assert (long.by, short.by) == ("compute", "memory")
    linears = 2 * limits.weights.layer_params * 8192
    attention = 2 * 32 * 8192**2 * 32 * 128  # 2·L·n²·H·d
    assert long.seconds == pytest.approx((linears + attention) / 751e12, rel=0.01)


def test_fp8_halves_the_layers_but_not_the_head() -> None:
    limits = Limits(llama_8b(), FP8, H200)
    size = limits.weights.layer_params + 2 * limits.weights.head_params
    assert limits.weights.bytes_of(1) == pytest.approx(size, rel=0.001)  # and a scale for each output
    assert limits.kv_bytes == 65_536 and limits.linear_peak == 1400e12 and limits.attention_peak == 751e12


def test_a_mixture_reads_the_experts_that_its_tokens_touch() -> None:
    """gpt-oss-120b: 36 layers of 128 experts in 4.25 bits, 4 of them for a token; half its layers see 128 keys."""
    model = config_from_json(SHAPES["gpt-oss-120b"])
    limits = Limits(model, Precision(compute="bfloat16", weights="groups", kv="bfloat16"), H200)
    (experts,) = limits.weights.experts
    one = 3 * 2880 * 2880
    assert (experts.count, experts.top_k) == (128, 4)
    assert experts.bytes == pytest.approx(36 * 128 * one * 4.25 / 8, rel=0.02)
    assert limits.weights.bytes_of(1) - limits.weights.always == pytest.approx(experts.bytes / 32)
    assert experts.touched(32) == pytest.approx(1 - (31 / 32) ** 32) and experts.touched(4096) == pytest.approx(1)
    assert limits.weights.layer_params == pytest.approx(36 * (4 * one + 2 * 2880 * 64 * (64 + 8) + 128 * 2880))
    token = 2 * 8 * 64 * 2
    read = limits.decode([1000], 2).bytes - limits.weights.bytes_of(1)
    assert read == token * (18 * 1001 + 18 * 128)
    full, windows = 1000 * 1001 // 2, 128 * 129 // 2 + 872 * 128
    flops = limits.prefill([1000]).flops - 2 * (limits.weights.layer_params * 1000 + limits.weights.head_params)
    assert flops == pytest.approx(4 * 64 * 64 * 18 * (full + windows))


# -- the driver


class Ahead(SimulatedRunner):
    """A runner that answers a step only when asked for its result, and checks what is fed."""

    run_ahead = 2

    def __init__(self, **settings: object) -> None:
        super().__init__("instant", **settings)  # type: ignore[arg-type]
        self.taken = self.submitted = 0
        self.before: list[int] = []

    def submit(self, plan: StepPlan) -> Any:
        self.submitted += 1
        assert self.submitted - self.taken <= 2, "more than two steps under way"

        def result() -> StepResult:
            self.taken += 1
            for row in plan.rows:
                if row.feed >= 0:
                    assert row.tokens == [-1]
                    row.tokens = [self.before[row.feed]]
                    row.feed = -1
            executed = super(Ahead, self).execute(plan)
            self.before = [token for row in executed.rows for token in row.tokens]
            return executed

        return SimpleNamespace(result=result)


def runner_of(kind: type[SimulatedRunner], num_blocks: int) -> SimulatedRunner:
    settings = {
        "storage": np.random.default_rng(0).integers(0, 255, (num_blocks, 4 * 8), np.uint8),
        "block_tokens": 4,
        "max_context": 4096,
        "vocab_size": 999,
        "fingerprint": "",
    }
    return kind(**settings) if kind is Ahead else kind("instant", **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [SimulatedRunner, Ahead])
@pytest.mark.parametrize("seed", range(6))
def test_every_request_gets_its_own_tokens(kind: type[SimulatedRunner], seed: int) -> None:
    draw = random.Random(seed)
    runner = runner_of(kind, draw.choice([40, 400]))
    requests = [
        Request([draw.randrange(3, 999) for _ in range(draw.randint(1, 60))], draw.randint(1, 30))
        for _ in range(draw.randint(1, 30))
    ]
    driver = Driver(runner, token_budget=draw.choice([1, 7, 64, 1000]), max_rows=draw.choice([1, 3, 50]), seed=seed)
    for _ in range(2):  # the second time on blocks that the first used
        for request in requests:
            request.output, request.planned = [], 0
        run = driver.generate(requests)
        for request in requests:
            assert request.output == runner.expected_tokens(request.prompt, SamplingParams(temperature=0.0), request.num_tokens)
        assert sum(step.sampled for step in run.steps) == sum(request.num_tokens for request in requests)
        assert sum(step.prefilled for step in run.steps) == sum(len(request.prompt) for request in requests)
        assert [sorted(group.free) for group in driver.groups] == [list(range(runner.num_blocks))]


def test_a_request_that_never_fits_is_refused() -> None:
    runner = runner_of(SimulatedRunner, 4)
    with pytest.raises(ConfigError, match="don't fit"):
        Driver(runner, token_budget=64, max_rows=4).generate([Request([5] * 16, 2)])


def test_a_closed_loop_counts_only_full_rows() -> None:
    runner = runner_of(SimulatedRunner, 400)
    run = Driver(runner, token_budget=64, max_rows=4).generate([Request([5] * 8, 3 + index % 5) for index in range(40)])
    tok_s, seconds = run.steady()
    assert 0 < seconds < run.seconds and tok_s > 0
    assert 0 < run.steady(run.seconds / 2)[1] < seconds
    assert run.steady(run.seconds) == (0.0, 0.0)
