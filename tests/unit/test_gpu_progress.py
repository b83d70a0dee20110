"""The word that a GPU writes: what holds without one, with a runtime of ours in the driver's place."""

from __future__ import annotations

import mmap
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch

from common.engine.engine import Engine
from common.engine.gpu import progress
from common.engine.gpu.progress import DeviceProgress, open_progress

CPU = torch.device("cpu")


class Runtime:
    """Registers whole pages, or refuses with an error that the next launch raises, once, as CUDA does."""

    def __init__(self, code: int = 0) -> None:
        self.code = code
        self.left_behind = 0
        self.pinned: list[int] = []

    def cudaHostRegister(self, pointer: int, num_bytes: int, flags: int) -> int:
        assert pointer % mmap.PAGESIZE == num_bytes % mmap.PAGESIZE == 0 and num_bytes
        self.left_behind = self.code
        if not self.code:
            self.pinned.append(pointer)
        return self.code

    def cudaHostUnregister(self, pointer: int) -> int:
        self.pinned.remove(pointer)
        return 0

    def launched(self) -> None:
        code, self.left_behind = self.left_behind, 0
        if code:
            raise RuntimeError("CUDA error: invalid argument")


@pytest.fixture
def word() -> np.ndarray:
    return np.frombuffer(mmap.mmap(-1, 2 * mmap.PAGESIZE), np.uint64)[mmap.PAGESIZE // 8 + 3 :][:1]


def put(monkeypatch: pytest.MonkeyPatch, runtime: Runtime) -> Runtime:
    fill = torch.Tensor.fill_

    def launch(tensor: torch.Tensor, value: int) -> torch.Tensor:
        runtime.launched()
        return fill(tensor, value)

    monkeypatch.setattr(torch.Tensor, "fill_", launch)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: runtime.launched())
    return runtime


def test_its_page_is_pinned_as_long_as_it_is_written(word: np.ndarray, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = put(monkeypatch, Runtime())
    found = DeviceProgress(word, CPU)
    assert runtime.pinned == [word.ctypes.data // mmap.PAGESIZE * mmap.PAGESIZE]
    found.write(7)
    assert word[0] == 7
    found.close()
    found.close()
    found.write(8)
    assert word[0] == 7 and not runtime.pinned, "nobody writes where nothing may be mapped any more"


def test_a_gpu_that_is_lost_does_not_keep_the_process_from_ending(word: np.ndarray, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = put(monkeypatch, Runtime())
    found = DeviceProgress(word, CPU)
    runtime.left_behind = 700
    found.close()


def test_a_page_that_cannot_be_pinned_leaves_no_error_behind(word: np.ndarray, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = put(monkeypatch, Runtime(code=1))
    with pytest.raises(RuntimeError, match="cudaHostRegister: error 1"):
        DeviceProgress(word, CPU)
    torch.zeros(1).fill_(1)
    assert not runtime.left_behind and not runtime.pinned


def test_where_the_gpu_cannot_write_whoever_takes_results_does(word: np.ndarray, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(word: np.ndarray, device: torch.device) -> Any:
        raise RuntimeError("cudaHostRegister: error 1")

    monkeypatch.setattr(progress, "DeviceProgress", refuse)
    assert open_progress(word, torch.device("cuda:0")) is None and open_progress(word, CPU) is None


class _Memory:
    """A segment with a word."""

    progress = np.zeros(1, np.uint64)


def test_an_engine_ends_what_its_gpu_writes() -> None:
    ended: list[str] = []

    class Group:
        segment = _Memory()

    def tell(word: np.ndarray) -> Any:
        assert word is _Memory.progress
        return lambda: ended.append("told")

    memory: Any = Group()
    memory.segment.close = lambda: ended.append("closed")
    runner: Any = None
    engine = Engine(runner, memory, tell=tell)
    assert engine.tell_progress()
    engine.close()
    assert ended == ["told", "closed"], "the page is let go before it is unmapped"
    assert not Engine(runner, memory).tell_progress()
