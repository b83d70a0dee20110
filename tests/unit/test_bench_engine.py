"""The engine's benchmark: cells and limits add up, the driver runs requests as a worker does, tables say what is known."""

from __future__ import annotations

import json
import math
import random
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch")

from bench.common import plot
from bench.common.lengths import Lengths
from bench.common.machine import Machine
from bench.common.stats import Percentiles
from bench.common.table import markdown
from bench.engine import __main__ as command
from bench.engine import accuracy, check, gpu_session, kernels, timing
from bench.engine.cells import PRESETS, Cell, Failed, Measured, Opened, decode_line, encode_line, parse_cells
from bench.engine.child import run_child
from bench.engine.driver import Driver, Request
from bench.engine.goals import NOTHING, find, load_goals
from bench.engine.limits import Ceilings, Limits
from bench.engine.observe import Observed, Scored
from bench.engine.report import Part, Report, Side, draw, render
from bench.peer.model_config import hugging_face_config
from common.engine.plan import StepPlan, StepResult
from common.engine.precision import Precision
from common.engine.simulated import SimulatedRunner
from common.models.config import ModelConfig, config_from_json, load_config
from common.models.source import resolve
from common.protocol.errors import ConfigError
from common.protocol.messages import SamplingParams

H200 = Ceilings(device="NVIDIA H200", copy=4.24e12, read=4.05e12, matmul={"bfloat16": 751e12, "fp8": 1400e12})
BF16, FP8 = Precision("bfloat16", "none", "bfloat16"), Precision("bfloat16", "fp8", "fp8")
MACHINE = Machine(taken_at="now", commit="abc", cpu="x", cores=2, load=0.0, gpus=["NVIDIA H200"], versions={})


def llama_8b() -> ModelConfig:
    return load_config(resolve("dummy:llama-3.1-8b"))


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
    assert limits.weight_bytes == pytest.approx(15.0e9, rel=0.01) and limits.kv_bytes == 131_072
    for rows in (8, 32, 128):
        keys = rows * (512 + 128)  # in the middle of 256 tokens
        expected = rows * 4.24e12 / (limits.weight_bytes + keys * 131_072)
        assert rows * 255 / limits.decode([512] * rows, 256).seconds == pytest.approx(expected, rel=0.01)


def test_a_long_prompt_is_bound_by_arithmetic_and_a_short_one_by_memory() -> None:
    limits = Limits(llama_8b(), BF16, H200)
    long, short = limits.prefill([8192]), limits.prefill([16])
    assert (long.by, short.by) == ("compute", "memory")
    linears = 2 * limits.layer_params * 8192
    attention = 2 * 32 * 8192**2 * 32 * 128  # 2·L·n²·H·d
    assert long.seconds == pytest.approx((linears + attention) / 751e12, rel=0.01)


def test_fp8_halves_the_layers_but_not_the_head() -> None:
    limits = Limits(llama_8b(), FP8, H200)
    assert limits.weight_bytes == limits.layer_params + 2 * limits.head_params
    assert limits.kv_bytes == 65_536 and limits.linear_peak == 1400e12 and limits.attention_peak == 751e12


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
        assert sorted(driver._free) == list(range(runner.num_blocks))


def test_a_request_that_never_fits_is_refused() -> None:
    runner = runner_of(SimulatedRunner, 4)
    with pytest.raises(ConfigError, match="don't fit"):
        Driver(runner, token_budget=64, max_rows=4).generate([Request([5] * 16, 2)])


def test_a_closed_loop_counts_only_full_rows() -> None:
    runner = runner_of(SimulatedRunner, 400)
    run = Driver(runner, token_budget=64, max_rows=4).generate([Request([5] * 8, 3 + index % 5) for index in range(40)])
    tok_s, seconds = run.steady()
    assert 0 < seconds < run.seconds and tok_s > 0


# -- tables, goals, plots


def report_of(tok_s: float, peer: Side | None = None) -> Report:
    ours = Side(
        lines=[
            Opened(name="m", device="NVIDIA H200", first_token_s=9.0, kv_tokens=100, ahead=True),
            Measured(cell="1x128x256", first_s=0.01, total_s=1.0, tok_s=tok_s, limit_tok_s=282, limit_by="memory"),
            Measured(cell="1x2048", first_s=0.05, total_s=0.05, tok_s=40_960, limit_tok_s=50_000, limit_by="compute"),
        ]
    )
    goals = find(load_goals(), device="NVIDIA H200", model="dummy:llama-3.1-8b", precision="bf16")
    part = Part(model="dummy:llama-3.1-8b", precision="bf16", ours=ours, peer=peer, goals=goals)
    return Report(machine=MACHINE, command="python -m bench.engine", parts=[part])


def test_a_recorded_peer_is_marked_and_a_goal_is_compared() -> None:
    text = render(report_of(255.0))
    line = next(line for line in text.splitlines() if "1x128x256" in line)
    assert "207*" in line and "1.23" in line and "yes" in line and "90%" in line
    assert "no" in next(line for line in text.splitlines() if "| 1x2048" in line.replace("|    ", "| "))


def test_a_peer_of_the_same_run_replaces_the_recorded_one() -> None:
    measured = Measured(cell="1x128x256", first_s=0.01, total_s=1.2, tok_s=212.0)
    peer = Side(lines=[Opened(name="vLLM", device="", version="vLLM 9.9"), measured], error="ended after its 60 s")
    text = render(report_of(255.0, peer))
    assert "vLLM 9.9" in text and "212 " in text and "207*" not in text and "ended after its 60 s" in text


def test_unknown_cards_have_no_goals() -> None:
    assert find(load_goals(), device="NVIDIA B200", model="dummy:llama-3.1-8b", precision="bf16") is NOTHING


def test_every_goal_names_a_cell_and_is_above_the_peer() -> None:
    for figures in load_goals():
        assert all(Cell.parse(name) for name in [*figures.goal, *figures.recorded])
        assert all(goal > figures.recorded[name] for name, goal in figures.goal.items())


def test_a_table_stands_in_line() -> None:
    lines = markdown(("a", "number"), [("x", "1,000"), ("yyy", "5")]).splitlines()
    assert len({len(line) for line in lines}) == 1
    assert lines[1].endswith(":|") or lines[1].endswith(": |")


def test_the_plot_is_a_png(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert draw(report_of(255.0), tmp_path / "a" / "engine.png")
    assert (tmp_path / "a" / "engine.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_the_plot_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert not draw(report_of(255.0), tmp_path / "engine.png")
    assert "penstock[bench]" in capsys.readouterr().err == plot.MISSING + "\n"


# -- processes


def test_a_child_that_takes_too_long_ends_and_what_it_said_counts() -> None:
    said: list[bytes] = []
    program = "import time, subprocess, sys; print('one', flush=True); subprocess.run(['sleep', '60'])"
    error = run_child([sys.executable, "-c", program], said.append, limit_s=1.5)
    assert said == [b"one\n"] and error == "ended after its 2 s"


def test_what_a_child_started_ends_with_it() -> None:
    inner = (
        "from common.runtime import parent_death; parent_death.guard(); import time; print('up', flush=True); time.sleep(60)"
    )
    program = f"import sys; from bench.engine.child import run_child; run_child([sys.executable, '-c', {inner!r}], print)"
    said: list[bytes] = []
    begun = time.monotonic()
    assert run_child([sys.executable, "-u", "-c", program], said.append, limit_s=3, stderr=subprocess.STDOUT)
    assert time.monotonic() - begun < 20  # the innermost has our pipe: its end is what we waited for
    assert b"up" in b"".join(said)


def test_a_child_that_fails_says_so() -> None:
    assert run_child([sys.executable, "-c", "raise SystemExit(3)"], lambda line: None) == "ended with status 3"


@pytest.mark.slow
def test_one_command_measures_and_writes_everything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--device=cpu", "--model=dummy:tiny", "--cells=2x16x6,1x24,3x~8x4", "--repeat=1", f"--out={tmp_path}"]
    assert command.main(flags) == 0
    text = (tmp_path / "engine.md").read_text()
    assert "dummy:tiny" in text and "2x16x6" in text and "3x~8x4" in text and "Ceilings" in text
    assert len(json.loads((tmp_path / "engine.json").read_text())["parts"][0]["ours"]["lines"]) == 6
    assert "written to" in capsys.readouterr().out


FAKE_VLLM = """
import time, types
__version__ = "0.0"
class SamplingParams:
    def __init__(self, **given): self.__dict__.update(given)
class LLM:
    def __init__(self, **given): print("libraries print, too", given)
    def generate(self, prompts, sampling, use_tqdm):
        time.sleep(1e-3 * sampling.max_tokens)
        answer = types.SimpleNamespace(token_ids=[0] * sampling.max_tokens)
        return [types.SimpleNamespace(outputs=[answer]) for _ in prompts]
"""


@pytest.mark.slow
def test_a_peer_is_measured_in_the_same_cells(tmp_path: Path) -> None:
    (tmp_path / "vllm.py").write_text(FAKE_VLLM)
    flags = [
        "--device=cpu",
        "--model=dummy:tiny",
        "--precision=bf16",
        "--cells=2x16x9,1x24,1x9999",
        "--peer-only",
        "--repeat=1",
    ]
    assert command.main([*flags, f"--peer={tmp_path}", f"--out={tmp_path / 'out'}"]) == 0
    side = msgspec.json.decode((tmp_path / "out" / "engine.json").read_bytes(), type=Report).parts[0].peer
    assert side is not None and side.error == "" and set(side.measured()) == {"2x16x9", "1x24"}
    assert 500 < side.measured()["2x16x9"].tok_s < 2100  # 2 tokens a millisecond at best
    assert [line.cell for line in side.lines if isinstance(line, Failed)] == ["1x9999"]  # longer than the model's context


def test_the_peer_gets_the_shape_that_we_run() -> None:
    for shape in ("llama-3.1-8b", "llama-3.2-1b", "qwen3-8b", "qwen3-32b"):
        model = load_config(resolve(f"dummy:{shape}"))
        again = config_from_json(hugging_face_config(model))
        ignored = {"identity", "eos_ids", "bos_id", "weight_format"}
        for name in set(ModelConfig.__struct_fields__) - ignored:
            assert getattr(again, name) == getattr(model, name), (shape, name)


# -- accuracy and kernels


def test_agreement_is_arithmetic() -> None:
    wanted = Observed(precision="a", device="cpu", greedy=[[1, 2, 3]], forced=[[Scored(-1.0, 5), Scored(-2.0, 6)]])
    seen = Observed(precision="b", device="cpu", greedy=[[1, 2, 4]], forced=[[Scored(-1.5, 5), Scored(-2.0, 7)]])
    found = accuracy.agreement("b", seen, wanted)
    assert found.perplexity == pytest.approx(math.exp(1.75))
    assert (found.top1, found.mean_error, found.max_error) == (0.5, 0.25, 0.5)
    assert (found.greedy_equal, found.greedy_tokens) == (0, 2.0)


@pytest.mark.parametrize(("text", "load"), [("256x512", (256, 512, 1)), ("1x8192+0", (1, 0, 8192)), ("2x16+100", (2, 100, 16))])
def test_loads(text: str, load: tuple[int, int, int]) -> None:
    parsed = kernels.parse_load(text)
    assert (parsed.rows, parsed.context, parsed.queries) == load


@pytest.mark.slow
def test_kernels_are_timed_in_the_interpreter_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from tests.ops.interpreter import round_as_a_gpu

    round_as_a_gpu()

    def once(calls: list[timing.Call], *_: object, **__: object) -> float:
        calls[0]()
        return 1e-6

    monkeypatch.setattr(kernels, "seconds_per_call", once)
    monkeypatch.setattr(kernels, "measure_ceilings", lambda *_, **__: H200)
    assert kernels.main(["--device=cpu", "--loads=2x20", f"--out={tmp_path}"]) == 0
    text = (tmp_path / "kernels.md").read_text()
    for op in ("embed", "qkv_rope", "attention", "gate_up", "down", "head", "sample", "in sequence"):
        assert op in text


@pytest.mark.slow
def test_every_kernel_is_checked_beside_its_reference(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("triton")
    from tests.ops.interpreter import round_as_a_gpu

    round_as_a_gpu()
    assert check.main(["--device=cpu"]) == 0
    text = capsys.readouterr().out
    for op in ("add_rms_norm to fp8", "embed", "qkv_rope", "linear, gated", "attention", "invariance"):
        assert f"| {op}" in text


def test_what_is_off_does_not_run_or_is_no_number_is_found() -> None:
    import torch

    checks = check.Checks(torch.device("cpu"))
    one = torch.ones(3)
    checks.close("a", "well", one, one + 1e-5, 1e-3)
    checks.close("a", "off", one, one + 0.1, 1e-3)
    checks.close("a", "nan", torch.tensor([1.0, math.nan, 1.0]), one, 1e-3)
    checks.same("b", "one bit", torch.tensor([1.0]), torch.tensor([1.0000001]))
    checks.attempt("c", "raises", lambda: [][0])
    assert [wrong.partition(":")[0] for wrong in checks.wrong] == ["a, off", "a, nan", "b, one bit", "c, raises"]
    assert checks.count == {"a": 3, "b": 1, "c": 1}


def test_a_session_fits_its_time() -> None:
    parts = gpu_session.parts("out", peer="site")
    assert all(0 < part.limit_s <= 600 for part in parts.values())


def test_a_session_keeps_what_its_parts_found(tmp_path: Path) -> None:
    """Also when one fails, and when it is told to end: then in the middle of a part."""
    program = f"""
import sys
from bench.engine import gpu_session
from bench.engine.gpu_session import HALF, Part
gpu_session.parts = lambda out, peer: {{
    "good": Part("says something", ["-c", "import sys; print('found', sys.argv[1])", HALF], 40),
    "bad": Part("fails", ["-c", "raise SystemExit(3)"], 40),
    "long": Part("goes on", ["-c", "import time; print('begun', flush=True); time.sleep(60)"], 40),
}}
sys.exit(gpu_session.main([{str(tmp_path / "out")!r}, "good", "bad", "long", "--pack", {str(tmp_path / "all.tar.gz")!r}]))
"""
    log = tmp_path / "out" / "long.log"
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.DEVNULL, cwd=gpu_session.ROOT) as session:
        while not (log.exists() and "begun" in log.read_text()):
            time.sleep(0.05)
        session.terminate()
    assert session.returncode == 143
    text = (tmp_path / "out" / "session.md").read_text()
    assert "found 15" in text and "ended with status 3" in text and "told to end" in text and "begun" in text
    with tarfile.open(tmp_path / "all.tar.gz") as packed:
        assert sorted(packed.getnames()) == ["bad.log", "good.log", "long.log", "session.md"]
