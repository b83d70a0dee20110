"""What was measured once is used ever after; what was not, is the default; a broken file or candidate stops nobody."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from common.ops.backend import interpreted
from common.ops.linear import device as linear_device
from common.ops.linear.linear import takes_quantised
from common.ops.linear.linear_tuning import tune_linears
from common.ops.linear.weight import pack_linear
from common.ops.tuning import Case, Table, launches_for, poisoned, tune

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Speed:
    seconds: float
    works: bool = True


@pytest.fixture(autouse=True)
def _cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("PENSTOCK_KERNEL_CACHE", str(tmp_path))
    return tmp_path


def _table() -> Table[Speed]:
    table = Table("test", Speed, [Path(__file__)])
    table.open(CPU)
    return table


def _tune(table: Table[Speed], candidates: list[Speed], **options) -> tuple[list[Speed], dict[str, str]]:
    """What was measured, and what failed."""
    running: list[Speed] = []
    measured: list[Speed] = []

    def run(candidate: Speed, index: int) -> None:
        if not candidate.works:
            raise RuntimeError("too large")
        running.append(candidate)

    def measure(launch: Callable[[int], object], launches: int) -> float:
        launch(0)
        measured.append(running[-1])
        return running[-1].seconds

    tuned = tune(table, [Case("op 4x4 1", candidates, run, **options)], measure=measure, threads=2)
    return measured, tuned.failed


def test_the_fastest_is_chosen_and_survives_a_restart() -> None:
    slow, fast = Speed(2.0), Speed(1.0)
    table = _table()
    assert table.choose("op 4x4 1", [slow, fast]) == slow
    assert _tune(table, [slow, fast]) == ([slow, fast], {})
    table.save()
    again = _table()
    assert again.choose("op 4x4 1", [slow, fast]) == fast
    assert _tune(again, [slow, fast]) == ([], {})


def test_a_choice_that_is_no_candidate_any_more_is_measured_again() -> None:
    table = _table()
    table.put("op 4x4 1", Speed(9.0))
    slow, fast = Speed(2.0), Speed(1.0)
    assert table.choose("op 4x4 1", [slow, fast]) == slow
    assert _tune(table, [slow, fast])[0] == [slow, fast]


def test_candidates_that_fail_are_left_out() -> None:
    table = _table()
    measured, failed = _tune(table, [Speed(0.5, works=False), Speed(2.0)])
    assert measured == [Speed(2.0)]
    assert list(failed.values()) == ["RuntimeError: too large"]
    assert table.choose("op 4x4 1", [Speed(3.0), Speed(2.0)]) == Speed(2.0)


def test_costs_elsewhere_count() -> None:
    table = _table()
    _tune(table, [Speed(1.0), Speed(2.0)], extra_s=lambda candidate: 5.0 if candidate.seconds == 1.0 else 0.0)
    assert table.get("op 4x4 1") == Speed(2.0)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"op 4x4 1": {"seconds": 1, "other": 2}}'])
def test_a_broken_file_counts_as_none(content: str, _cache: Path) -> None:
    table = _table()
    table.put("op 4x4 1", Speed(1.0))
    table.save()
    (path,) = _cache.iterdir()
    path.write_text(content)
    again = _table()
    assert again.get("op 4x4 1") is None
    again.put("op 4x4 1", Speed(1.0))
    again.save()
    assert _table().get("op 4x4 1") == Speed(1.0)


def test_two_processes_add_to_one_file() -> None:
    one, other = _table(), _table()
    one.put("a", Speed(1.0))
    other.put("b", Speed(2.0))
    one.save()
    other.save()
    assert (_table().get("a"), _table().get("b")) == (Speed(1.0), Speed(2.0))


def test_measurements_take_about_as_long() -> None:
    assert launches_for(1e-5) == 100
    assert launches_for(1e-3) == 2
    assert launches_for(1.0) == 2


@pytest.fixture
def _on_device() -> Iterator[None]:
    linear_device.forget_choices()
    with interpreted():
        yield
    linear_device.TABLE.__init__("linear", linear_device.Candidate, [])
    linear_device.forget_choices()


@pytest.mark.usefixtures("_on_device")
def test_linears_are_tuned_by_shape_and_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("common.ops.linear.linear_tuning._ROTATED_BYTES", 1 << 14)
    monkeypatch.setattr("os.cpu_count", lambda: 1)  # the interpreter knows one thread
    ran: list[str] = []

    def noting(op, x, weight, chosen) -> torch.Tensor:
        ran.append(chosen.kind)
        return torch.ones(1)

    monkeypatch.setattr(linear_device, "run", noting)

    def measure(launch: Callable[[int], object], launches: int) -> float:
        launch(0)
        return {"library": 3.0, "dot": 2.0, "gemv": 1.0, "persistent": 4.0}[ran[-1]]

    shapes = [("plain", 128, 256, "qkv"), ("fp8", 128, 256, "down")]
    tuned = tune_linears(shapes, dtype=torch.bfloat16, device=CPU, buckets=(1, 16), measure=measure)  # type: ignore[arg-type]
    assert not tuned.failed
    plain = pack_linear(torch.randn(128, 256).bfloat16())
    fp8 = pack_linear(torch.randn(128, 256).bfloat16(), format="fp8")
    assert linear_device.choose("split", plain, 1, quantised=False).kind == "gemv"
    assert linear_device.choose("split", plain, 9, quantised=False).kind == "dot"
    assert linear_device.choose("linear", plain, 9, quantised=False).kind == "dot"
    assert not takes_quantised(fp8, 1)  # one row is fastest without tensor cores, which takes bf16
    ran.clear()
    assert not tune_linears(shapes, dtype=torch.bfloat16, device=CPU, buckets=(1, 16), measure=measure).seconds  # type: ignore[arg-type]
    assert not ran


@pytest.mark.usefixtures("_on_device")
@pytest.mark.parametrize(("sooner_us", "overlaps", "taken"), [(1, True, "dot"), (1, False, "library"), (4, True, "library")])
def test_the_library_has_to_win_what_it_costs_its_neighbours(
    sooner_us: int, overlaps: bool, taken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where kernels begin beside the one before, the library's do not."""
    monkeypatch.setattr("common.ops.linear.linear_tuning._ROTATED_BYTES", 1 << 14)
    monkeypatch.setattr("os.cpu_count", lambda: 1)  # the interpreter knows one thread
    monkeypatch.setattr("common.ops.backend.pdl", lambda x: overlaps)
    ran: list[str] = []
    monkeypatch.setattr(linear_device, "run", lambda op, x, weight, chosen: ran.append(chosen.kind) or torch.ones(1))

    def measure(launch: Callable[[int], object], launches: int) -> float:
        launch(0)
        return 1e-5 - sooner_us * 1e-6 * (ran[-1] == "library")

    tune_linears([("plain", 128, 256, "gate_up")], dtype=torch.bfloat16, device=CPU, buckets=(64,), measure=measure)
    plain = pack_linear(torch.randn(128, 256).bfloat16())
    assert linear_device.choose("gated", plain, 64, quantised=False).kind == taken


def test_a_wrong_result_does_not_win_by_being_fast() -> None:
    results = {
        1.0: torch.zeros(3, 4),
        2.0: torch.full((2, 3, 4), 0.49),
        3.0: torch.ones(3, 4),
        0.5: torch.full((3, 4), torch.nan),
    }

    def run(candidate: Speed, index: int) -> torch.Tensor:
        return results[candidate.seconds].clone()

    def measure(launch: Callable[[int], object], launches: int) -> float:
        found = launch(0)
        assert isinstance(found, torch.Tensor)
        return next(seconds for seconds, result in results.items() if torch.equal(found, result))

    table = _table()
    case = Case("op", [Speed(seconds) for seconds in results], run, expected=lambda: torch.ones(3, 4))
    failed = tune(table, [case], measure=measure).failed
    assert table.get("op") == Speed(2.0), "partial sums are added up before they are compared"
    assert len(failed) == 2
    assert all("off by" in message for message in failed.values())


def test_what_a_kernel_leaves_out_is_nan_while_it_is_compared() -> None:
    with poisoned():
        assert torch.empty(5).isnan().all()
    assert not torch.are_deterministic_algorithms_enabled()


def test_what_breaks_the_gpu_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(candidate: Speed, index: int) -> None:
        if not candidate.works and index:
            monkeypatch.setattr("common.ops.backend.gpu_answers", lambda: False)
            raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    def measure(launch: Callable[[int], object], launches: int) -> float:
        launch(1)
        return 1.0

    table = _table()
    case = Case("op 4x4 1", [Speed(1.0), Speed(2.0, works=False), Speed(3.0)], run)
    with pytest.raises(RuntimeError, match=r"op 4x4 1 Speed\(seconds=2\.0.*illegal memory access"):
        tune(table, [case], measure=measure, threads=2)


def test_two_processes_measure_one_after_the_other(_cache: Path) -> None:
    program = """
import fcntl, sys
from pathlib import Path
lock = (Path(sys.argv[1]) / "test.lock").open("w")
fcntl.flock(lock, fcntl.LOCK_EX)
print("held", flush=True)
sys.stdin.read()
"""
    command = [sys.executable, "-c", program, str(_cache)]
    entered: list[float] = []

    def measure() -> None:
        with _table().exclusive():
            entered.append(time.monotonic())

    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdin is not None and other.stdout is not None
        assert other.stdout.readline() == "held\n"
        waiting = threading.Thread(target=measure)
        waiting.start()
        waiting.join(0.2)
        assert not entered
        other.stdin.close()
        waiting.join()
    assert entered


_THREADS = """
import importlib, sys, threading
from common.ops import backend

backend.ready_for_threads()
names = [f"triton.experimental.gluon.{name}" for name in ("nvidia.hopper", "language", "language.nvidia.hopper", "nvidia")]
barrier = threading.Barrier(len(names))

def load(name):
    barrier.wait()
    importlib.import_module(name)
    loaded.append(name)

loaded = []
threads = [threading.Thread(target=load, args=(name,)) for name in names]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
sys.exit(len(names) - len(loaded))
"""


def test_threads_may_begin_with_any_module_of_gluon() -> None:
    """Candidates compile in threads; one that Gluon's circular imports fail would be left out of a table that is kept."""
    for _ in range(3):
        subprocess.run([sys.executable, "-c", _THREADS], check=True)
