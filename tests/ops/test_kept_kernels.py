"""Compiled code that is kept on disk computes the same bits in the process that compiles it and in those that load it."""

from __future__ import annotations

import fcntl
import os
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from numba.core.caching import FunctionCache

from common.ops.cpu_int8 import compiled_numba
from common.ops.kept import CACHE_VARIABLE

PROGRAM = """
import hashlib
import numpy as np
from common.ops.cpu_int8.attention_numba import Step, attention
from common.ops.cpu_int8.compiled_numba import compiled

TOKENS, KV_HEADS, SIZE, GROUP = 100, 3, 64, 3

attend = attention(SIZE, GROUP)

@compiled(kept=True)
def attend_all(step, wanted, qkv, out):
    for part in range(len(wanted)):
        attend(part, 1, step, wanted, 0, 0.125, qkv, out)

dice = np.random.default_rng(0)
tokens = np.arange(TOKENS)
pool = dice.standard_normal((8, 1, 2, 16, KV_HEADS, SIZE), np.float32).view(np.int16)[..., 1::2].copy()
rope, rotated = np.empty((0, SIZE), np.float32), np.ones(1, bool)
step = Step(tokens, np.zeros_like(tokens), np.arange(8), np.zeros(1, np.int64), pool, rope, rotated)
qkv = dice.standard_normal((TOKENS, (GROUP + 2) * KV_HEADS * SIZE), np.float32)
out = np.empty((TOKENS, GROUP * KV_HEADS * SIZE), np.float32)
attend_all(step, tokens, qkv, out)
assert np.isfinite(out).all()
print(sum(attend_all.stats.cache_hits.values()), hashlib.sha256(out.tobytes()).hexdigest())
if not attend_all.stats.cache_hits:
    library = next(iter(attend_all.overloads.values())).library
    print(*sorted({function.linkage.name for function in library.get_defined_functions()}))
"""


Lines = list[list[str]]


def start(folder: Path, cache: str) -> subprocess.Popen[str]:
    """Numba keeps nothing of a kernel that has no file, so the program is one."""
    program = folder / "program.py"
    program.write_text(PROGRAM)
    root = Path(__file__).parents[2]
    environment = os.environ | {CACHE_VARIABLE: str(folder / cache), "PYTHONPATH": str(root)}
    pipes = subprocess.PIPE
    return subprocess.Popen([sys.executable, str(program)], env=environment, stdout=pipes, stderr=pipes, text=True)


def said(running: subprocess.Popen[str]) -> Lines:
    """What the program says."""
    out, error = running.communicate(timeout=120)
    assert running.returncode == 0, error
    return [line.split() for line in out.splitlines()]


def run(folder: Path, cache: str) -> Lines:
    return said(start(folder, cache))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kept")


@pytest.fixture(scope="module")
def compiled(folder: Path) -> Lines:
    """Of the process that compiles the kernel and keeps it in "kernels"."""
    return run(folder, "kernels")


def test_a_kept_kernel_gives_the_same_bits_where_it_is_compiled_and_where_it_is_loaded(folder: Path, compiled: Lines) -> None:
    """The sum of softmax is what differed: each round of optimisation vectorises it in another order."""
    (hits, digest), _ = compiled
    assert hits == "0"
    assert run(folder, "kernels") == [["1", digest]]


def test_a_clone_loads_what_another_compiled_from_the_same_sources_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled_numba, "_FOLDER", tmp_path / "kernels")
    raised = noted_errors(monkeypatch)

    def hits(clone: str, factor: int) -> int:
        """Load the kernel from a file of this clone and call it; how often what was kept served."""
        file = tmp_path / clone / "sources" / "kernel.py"
        file.parent.mkdir(parents=True)
        file.write_text(f"def kernel(number):\n    return {factor} * number\n")
        kernel = compiled_numba.compiled(kept=True)(runpy.run_path(str(file))["kernel"])
        assert kernel(7) == 7 * factor
        return sum(kernel.stats.cache_hits.values())

    assert [hits("first", 2), hits("second", 2), hits("changed", 3), hits("third", 3)] == [0, 1, 0, 1], raised


def noted_errors(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that gets what Numba's cache raises from now on, of which `compiled` says nothing: it compiles again."""
    raised: list[str] = []
    for name in ("load_overload", "save_overload"):
        original: Callable[..., Any] = getattr(FunctionCache, name)

        def noted(*arguments: Any, name: str = name, original: Callable[..., Any] = original) -> Any:
            try:
                return original(*arguments)
            except BaseException as error:
                raised.append(f"{name}: {error!r}")
                raise

        monkeypatch.setattr(FunctionCache, name, noted)
    return raised


@pytest.mark.parametrize("suffix", [".nbi", ".nbc"])
@pytest.mark.parametrize("content", [b"", b"half a pickle"])
def test_files_that_are_damaged_are_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str, content: bytes
) -> None:
    """As a loss of power leaves them."""
    monkeypatch.setattr(compiled_numba, "_FOLDER", tmp_path / "kernels")
    assert hits_of_a_kernel(tmp_path) == 0
    (kept,) = tmp_path.glob(f"kernels/**/*{suffix}")
    kept.write_bytes(content)
    assert [hits_of_a_kernel(tmp_path) for _ in range(2)] == [0, 1]


def test_files_that_can_neither_be_read_nor_written_are_done_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of another user, and a disk that is full."""
    monkeypatch.setattr(compiled_numba, "_FOLDER", tmp_path / "kernels")
    assert hits_of_a_kernel(tmp_path) == 0
    (index,) = tmp_path.glob("kernels/**/*.nbi")
    index.unlink()
    index.mkdir()
    assert [hits_of_a_kernel(tmp_path) for _ in range(2)] == [0, 0]


def hits_of_a_kernel(folder: Path) -> int:
    """Make a kernel and call it, as a new process does; how often what was kept served."""
    file = folder / "kernel.py"
    file.write_text("def kernel(number):\n    return 3 * number\n")
    kernel = compiled_numba.compiled(kept=True)(runpy.run_path(str(file))["kernel"])
    assert kernel(7) == 21
    return sum(kernel.stats.cache_hits.values())


def test_a_kept_kernel_leaves_no_call_to_be_bound_by_name(compiled: Lines) -> None:
    """A weak symbol is bound to whatever the process has loaded under that name before."""
    _, linkages = compiled
    assert "internal" in linkages
    assert not [linkage for linkage in linkages if "weak" in linkage or "linkonce" in linkage]


def test_of_two_processes_that_lack_a_kernel_one_compiles_it(folder: Path, compiled: Lines) -> None:
    """Workers that start side by side on a new machine share its processors."""
    both = [start(folder, "others") for _ in range(2)]
    (hits, _), (others, _) = sorted(said(one)[0] for one in both)
    assert [hits, others] == ["0", "1"]


def test_two_processes_that_compile_a_kernel_give_the_same_bits(folder: Path, compiled: Lines) -> None:
    """Where no folder is shared, each compiles it for itself."""
    assert run(folder, "alone")[0] == compiled[0]


def test_who_compiles_for_too_long_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_numba, "_FOLDER", tmp_path / "kernels")
    monkeypatch.setattr(compiled_numba, "COMPILING_S", 0.1)
    monkeypatch.setattr(compiled_numba, "SAVING_S", 0.1)
    file = tmp_path / "kernel.py"
    file.write_text("def kernel(number):\n    return 3 * number\n")
    held: list[int] = []
    turn = compiled_numba._turn

    def taken(lock: Path, at_most_s: float) -> int | None:
        held.append(os.open(lock, os.O_CREAT | os.O_RDWR))  # as another process would hold it
        fcntl.flock(held[-1], fcntl.LOCK_EX)
        return turn(lock, at_most_s)

    monkeypatch.setattr(compiled_numba, "_turn", taken)
    kernel = compiled_numba.compiled(kept=True)(runpy.run_path(str(file))["kernel"])
    assert kernel(7) == 21 and len(held) == 2
    for descriptor in held:
        os.close(descriptor)
