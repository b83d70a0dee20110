"""The engine's benchmarks as commands: processes end with their parents, and each writes what it found."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import msgspec
import pytest

pytest.importorskip("torch")

from bench.common.machine import ROOT
from bench.engine import __main__ as command
from bench.engine import accuracy, check, gpu_session, gpu_tests, in_turns, kernels, row_sweep, steps_in_turns, table, timing
from bench.engine.cells import Failed
from bench.engine.child import run_child
from bench.engine.observe import Observed, Scored
from bench.engine.report import Report
from bench.peer.model_config import hugging_face_config
from common.models.config import ModelConfig, config_from_json, load_config
from common.models.shapes import SHAPES
from common.models.source import resolve
from common.ops.quant.quantise import quantise_rows
from common.ops.quant.quantise_reference import dequantise_weight_reference
from tests.unit.cards import H200

# -- choices


def test_cells_are_timed_in_turns(capsys: pytest.CaptureFixture[str]) -> None:
    """On a CPU nothing is chosen, and both ways are the same."""
    usual = in_turns.linear_device._choose
    flags = ["--model", "dummy:tiny", "--precision", "fp32", "--device", "cpu", "--cells", "1x16,2x16x2", "--turns", "1"]
    assert in_turns.main(flags) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert [row.split("|")[1].strip() for row in rows[2:]] == ["1x16", "2x16x2"]
    assert in_turns.linear_device._choose is usual


def test_steps_of_two_models_are_timed_in_turns(capsys: pytest.CaptureFixture[str]) -> None:
    models = "dummy:tiny:fp32,dummy:tiny"
    flags = ["--models", models, "--device", "cpu", "--rows", "1,2", "--context", "8", "--steps", "3", "--turns", "1"]
    assert steps_in_turns.main(flags) == 0
    rows = [line.split("|")[1:-1] for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert [row[0].strip() for row in rows[2:]] == ["1", "2"]
    times = [float(row[at].split()[0]) for row in rows[2:] for at in (1, 2)]
    assert all(times), rows


def test_a_number_of_rows_that_takes_longer_than_a_larger_one_is_marked(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--models", "dummy:tiny:fp32", "--device", "cpu", "--rows", "3,1", "--queries", "2", "--steps", "3"]
    assert row_sweep.main(flags) == 0
    head, _, row = [line.split("|")[1:-1] for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert [name.strip() for name in head] == ["ms a step", "1", "3"] and all(float(cell.split()[0]) for cell in row[1:])
    assert row_sweep.cells({32: 4.7, 36: 6.5, 64: 5.3, 72: 5.2}) == ["4.70", "6.50 !", "5.30", "5.20"]


# -- processes


def test_gpu_tests_are_shared_out_and_those_that_fail_are_named(tmp_path: Path) -> None:
    many = [f"a.py::test[{n}]" for n in range(2 * gpu_tests.MOST_TESTS + 1)]
    found = gpu_tests.shares(["b.py::test", *many])
    assert [len(share.tests) for share in found] == [11, 11, 11, 1]
    assert sorted(test for share in found for test in share.tests) == sorted([*many, "b.py::test"])
    tests = "\n".join(f"@pytest.mark.gpu\ndef test_{name}(): {body}\n" for name, body in (("good", "pass"), ("bad", "1 / 0")))
    (tmp_path / "test_it.py").write_text(f"import pytest\n{tests}")
    share = gpu_tests.Share([f"{tmp_path}/test_it.py::test_good", f"{tmp_path}/test_it.py::test_bad"])
    gpu_tests.run(share, time.monotonic() + 60)
    assert "1 failed, 1 passed" in share.ended
    assert len(share.failed) == 1 and "test_bad" in share.failed[0]


def test_a_child_that_takes_too_long_ends_and_what_it_said_counts() -> None:
    said: list[bytes] = []
    program = "import time, subprocess, sys; print('one', flush=True); subprocess.run(['sleep', '60'])"
    error = run_child([sys.executable, "-c", program], said.append, limit_s=1.5)
    assert said == [b"one\n"] and error == "ended after its 2 s"


@pytest.mark.parametrize("start", ["", "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN); "], ids=["", "nohup"])
def test_what_a_child_started_ends_with_it(start: str) -> None:
    inner = (
        "from common.runtime import parent_death; parent_death.guard(); import time; print('up', flush=True); time.sleep(60)"
    )
    program = (
        f"import sys; from bench.engine.child import run_child; {start}run_child([sys.executable, '-c', {inner!r}], print)"
    )
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
    loader = tmp_path / "vllm" / "model_executor" / "model_loader"
    loader.mkdir(parents=True)
    for folder in (loader, loader.parent, loader.parent.parent):
        (folder / "__init__.py").write_text(FAKE_VLLM if folder.name == "vllm" else "")
    (loader / "dummy_loader.py").write_text("def initialize_single_dummy_weight(tensor, **named): ...\n")
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
    for shape in SHAPES:
        files = resolve(f"dummy:{shape}")
        model, again = load_config(files), config_from_json(hugging_face_config(files))
        ignored = {"identity", "eos_ids", "bos_id"}
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
    from tests.ops.interpreter import act_as_a_gpu

    act_as_a_gpu()

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
def test_float32_results_may_be_off_by_what_fp8_loses_and_no_more() -> None:
    """As `linears` compares them: activations that were brought to bf16 pass, a scale that is off by a hundredth does not."""
    import torch

    torch.manual_seed(0)
    plain = (torch.randn(64, 512) / 512**0.5).bfloat16()
    weight, given = check._weight(plain, "fp8"), quantise_rows(torch.randn(16, 512).bfloat16())
    assert weight.scale is not None
    wide, seen = dequantise_weight_reference(weight.data, weight.scale), given.data.float() * given.scale[:, None]
    wanted, rounded = seen @ wide.t(), seen.bfloat16().float() @ wide.t()
    for kind, scale, is_wrong in (("fp8", 1.0, False), ("fp8", 1.01, True), ("bf16", 1.0, True)):
        checks = check.Checks(torch.device("cpu"))
        tolerance = check.allowed("wide", weight if kind == "fp8" else check._weight(plain, kind), torch.bfloat16)
        checks.close("wide", "case", rounded * scale, wanted, tolerance)
        assert bool(checks.wrong) == is_wrong, (kind, scale)
    assert check.allowed("linear", weight, torch.bfloat16) == check.TOLERANCE[torch.bfloat16]


@pytest.mark.slow
def test_every_kernel_is_checked_beside_its_reference(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("triton")
    from tests.ops.interpreter import act_as_a_gpu

    act_as_a_gpu()
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
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.DEVNULL, cwd=ROOT) as session:
        while not (log.exists() and "begun" in log.read_text()):
            time.sleep(0.05)
        session.terminate()
    assert session.returncode == 143
    text = (tmp_path / "out" / "session.md").read_text()
    assert "found 15" in text and "ended with status 3" in text and "told to end" in text and "begun" in text
    with tarfile.open(tmp_path / "all.tar.gz") as packed:
        assert sorted(packed.getnames()) == ["bad.log", "good.log", "long.log", "session.md"]


def test_a_table_takes_jobs_in_the_order_of_words_and_keeps_each_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert [job.name for job in table.chosen("awq,oss", exactly=False)] == ["llama-8b-awq", "gpt-oss-120b", "gpt-oss-20b"]
    assert [job.name for job in table.chosen("llama-8b,none", exactly=True)] == ["llama-8b"]
    missing = table.Job("missing", "dummy:nothing", "fp32", "1x8x4")
    monkeypatch.setattr(table, "JOBS", (missing, missing._replace(name="missing-too"), missing._replace(name="other")))
    assert table.main(["--jobs", "missing", "--gpus", "2", "--out", str(tmp_path), "--limit-s", "100"]) == 0
    text = (tmp_path / "table.md").read_text()
    assert "## missing\n" in text and "## missing-too\n" in text and "## other" not in text
    assert text.count("exit code 1") == 2 and "nothing" in (tmp_path / "missing.log").read_text()


@pytest.mark.slow
def test_jobs_together_wait_until_all_are_ready_and_are_measured_one_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = table.Job("tiny", "dummy:tiny-1-layers", "fp32", "1x8x4", kv_gb=0.25)
    missing = tiny._replace(name="missing", model="dummy:nothing")
    jobs = (tiny, missing, tiny._replace(name="large", weights_gb=500.0))
    assert [[job.name for job in group] for group in table.groups_of(jobs, 20.0)] == [["tiny", "missing"], ["large"]]
    monkeypatch.setattr(table, "JOBS", jobs)
    assert table.main(["--together", "--room-gb", "20", "--gpus", "1", "--out", str(tmp_path), "--limit-s", "100"]) == 0
    lines = (tmp_path / "table.md").read_text().splitlines()
    assert [line.partition(":")[0] for line in lines if line.startswith("- ")] == [
        "- tiny, missing",
        "- tiny",
        "- missing",
        "- large",
        "- large",
    ]
    assert sum("exit code 0" in line for line in lines) == 2 and sum("exit code 1" in line for line in lines) == 1
    assert "1x8x4" in (tmp_path / "tiny" / "engine.md").read_text()


@pytest.mark.slow
def test_kernels_are_compiled_on_two_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "JOBS", (table.Job("tiny", "dummy:tiny", "fp32", "1x8x4"),))
    assert table.main(["--compile", "2", "--out", str(tmp_path)]) == 0
    assert '"cell":"1x8x4"' in (tmp_path / "tiny.compile.log").read_text().replace(" ", "")
