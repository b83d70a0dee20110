"""The guard around interpreted kernels sees what they touch: see `tensor_guard`."""

# pyright: reportCallIssue=false, reportArgumentType=false
from __future__ import annotations

import threading

import pytest

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton")

import triton.language as tl  # noqa: E402
from triton.runtime.errors import InterpreterError  # noqa: E402
from triton.tools.tensor_descriptor import TensorDescriptor  # noqa: E402

from tests.ops import tensor_guard  # noqa: E402


@triton.jit
def copy(source, target, count, shift, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(target + at, tl.load(source + at + shift, mask=at < count, other=0.0), mask=at < count)


@triton.jit
def count_up(counter, at):
    tl.atomic_add(counter + at, 1)


@triton.jit
def copy_box(box, target, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(target + at[:, None] * SIZE + at[None, :], box.load([SIZE, SIZE]))


def test_what_is_masked_is_not_touched() -> None:
    source, target = torch.arange(13.0), torch.zeros(13)
    copy[(1,)](source, target, 13, 0, SIZE=16)
    assert torch.equal(source, target)


@pytest.mark.parametrize(("count", "shift"), [(14, 0), (13, 1), (13, -1), (13, 1 << 40)])
def test_an_element_too_far_is_seen(count: int, shift: int) -> None:
    with pytest.raises(InterpreterError, match="OutsideTensors"):
        copy[(1,)](torch.arange(13.0), torch.zeros(16), count, shift, SIZE=16)


def test_so_is_one_too_far_written() -> None:
    target = torch.zeros(16)
    with pytest.raises(InterpreterError, match="at 52 of an argument's 52 bytes"):
        copy[(1,)](torch.zeros(16), target[:13], 14, 0, SIZE=16)
    assert not target[13:].any()


def test_a_view_is_not_its_storage() -> None:
    whole = torch.arange(64.0)
    copy[(1,)](whole, torch.zeros(16), 16, 8, SIZE=16)
    with pytest.raises(InterpreterError, match="OutsideTensors"):
        copy[(1,)](whole[8:20], torch.zeros(16), 16, 0, SIZE=16)


def test_counters_are_guarded_too() -> None:
    counter = torch.zeros(4, dtype=torch.int32)
    count_up[(3,)](counter, 3)
    assert counter.tolist() == [0, 0, 0, 3]
    with pytest.raises(InterpreterError, match="OutsideTensors"):
        count_up[(1,)](counter, 4)


def test_a_descriptor_ends_where_its_tensor_does() -> None:
    x, target = torch.randn(20, 20), torch.full((16, 16), torch.nan)
    copy_box[(1,)](TensorDescriptor(x, [20, 20], [20, 1], [16, 16]), target, SIZE=16)
    assert torch.equal(target[:4, :4], x[16:, 16:]) and not target[4:].any() and not target[:, 4:].any()
    with pytest.raises(InterpreterError, match="OutsideTensors"):
        copy_box[(1,)](TensorDescriptor(x, [32, 20], [20, 1], [16, 16]), target, SIZE=16)


def test_two_threads_do_not_interpret_at_once() -> None:
    errors: list[BaseException] = []

    def launch() -> None:
        try:
            copy[(1,)](torch.zeros(16), torch.zeros(16), 16, 0, SIZE=16)
        except RuntimeError as error:
            errors.append(error)

    with tensor_guard._running:
        other = threading.Thread(target=launch)
        other.start()
        other.join()
    assert len(errors) == 1 and "two threads" in str(errors[0])
