"""Whatever a kernel makes of a number of rows, a batch is computed so that a row has the same bits in any batch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from common.ops import attention_rows_cpu, row_counts_cpu
from common.ops.attention_rows_cpu import NotInvariant, row_multiple
from common.ops.row_counts_cpu import Multiply, RowCounts, measure, multiply_rows, split

INPUTS, OUTPUTS = 64, 48
WEIGHT = torch.randn(OUTPUTS, INPUTS, generator=torch.Generator().manual_seed(1))
ROW = torch.randn(INPUTS, generator=torch.Generator().manual_seed(2))
X = torch.randn(300, INPUTS, generator=torch.Generator().manual_seed(3))


def ordered(x: torch.Tensor, way: int) -> torch.Tensor:
    """x Wᵀ row by row, added up in one of several orders."""
    inputs = torch.roll(torch.arange(INPUTS), int(way))
    out = torch.zeros(len(x), OUTPUTS)
    for index in inputs.tolist():
        out += x[:, index, None] * WEIGHT[:, index]
    return out


def by_number(way: Callable[[int], int]) -> Multiply:
    return lambda x: ordered(x, way(len(x)))


def another_for_last_rows(x: torch.Tensor) -> torch.Tensor:
    """Rows that don't fill a tile of 6 go another way, but for two of them."""
    whole = len(x) if len(x) == 2 else len(x) // 6 * 6
    return torch.cat((ordered(x[:whole], 0), ordered(x[whole:], 1)))


KERNELS: dict[str, tuple[Multiply, RowCounts]] = {
    "one way": (by_number(lambda rows: 0), RowCounts((1, 2, 3, 4, 8, 9, 16, 17, 32, 33, 64, 65, 128, 256), True, 2)),
    "one row alone": (by_number(lambda rows: rows == 1), RowCounts((2, 3, 4, 8, 9, 16, 17, 32, 33, 64, 65, 128, 256), True, 2)),
    "another from 33 rows on": (by_number(lambda rows: rows > 32), RowCounts((1, 2, 3, 4, 8, 9, 16, 17, 32), True, 2)),
    "another for odd numbers": (by_number(lambda rows: rows % 2), RowCounts((2, 4, 8, 16, 32, 64, 128, 256), False, 2)),
    "another for each number": (by_number(lambda rows: rows % INPUTS), RowCounts((1, 65), False, 2)),
    "another for last rows": (another_for_last_rows, RowCounts((1, 3, 4), False, 2)),
    "another on several threads": (
        lambda x: ordered(x, torch.get_num_threads() > 1),
        RowCounts((1, 2, 3, 4, 8, 9, 16, 17, 32, 33, 64, 65, 128, 256), True, 1),
    ),
    "another for many rows on several threads": (
        lambda x: ordered(x, torch.get_num_threads() > 1 and len(x) > 64),
        RowCounts((1, 2, 3, 4, 8, 9, 16, 17, 32, 33, 64), True, 2),
    ),
}


@pytest.fixture(autouse=True)
def _two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", KERNELS)
def test_a_row_has_the_same_bits_in_any_batch_and_on_any_measured_number_of_threads(name: str) -> None:
    multiply, expected = KERNELS[name]
    counts = measure([(multiply, ROW)], largest=256, threads=2)
    assert counts == expected
    assert torch.get_num_threads() == 2
    with row_counts_cpu._threads(1):
        whole = multiply_rows(X, multiply, measure([(multiply, ROW)], largest=256, threads=1))
    torch.testing.assert_close(whole, X @ WEIGHT.T, atol=1e-4, rtol=1e-4)
    for rows in (1, 2, 3, 5, 31, 32, 33, 65, 100, 257, 300):
        assert torch.equal(multiply_rows(X[-rows:], multiply, counts), whole[-rows:]), rows


def test_calls_hold_all_rows_in_sizes_that_agree() -> None:
    for counts in (RowCounts((2, 8, 32), True, 1), RowCounts((2, 8, 32), False, 1), RowCounts((1,), True, 1)):
        for rows in range(1, 100):
            sizes = list(split(rows, counts))
            assert rows <= sum(sizes) < rows + max(counts.sizes)
            assert all(size in counts.sizes or (counts.dense and 2 <= size <= 32) for size in sizes)


def test_a_difference_that_rounding_to_bfloat16_hides_is_found() -> None:
    def multiply(taken: torch.Tensor | int) -> Multiply:
        return lambda x: (ordered(x.float(), len(x) > 16) - taken).bfloat16()

    row = ROW.bfloat16()
    hidden = measure([(multiply(0), row)], largest=64, threads=1)
    found = measure([(multiply(0), row), (multiply(multiply(0)(row[None])[0].float()), row)], largest=64, threads=1)
    assert hidden.sizes[-1] == 64 and found.sizes[-1] == 16


def test_attention_pads_its_rows_to_what_agrees_and_says_when_nothing_does(monkeypatch: pytest.MonkeyPatch) -> None:
    real = attention_rows_cpu.flash

    def kernel(agrees: Callable[[int], bool]) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
        def flash(query: torch.Tensor, *rest: torch.Tensor, **options: object) -> tuple[torch.Tensor, torch.Tensor]:
            attended, sums = real(query, *rest, **options)
            return (attended if agrees(query.shape[2]) else attended + query.shape[2] * 2**-20), sums

        return flash

    monkeypatch.setattr(attention_rows_cpu, "flash", kernel(lambda rows: rows % 16 == 0))
    assert row_multiple.__wrapped__(32, 128, 2) == 16
    monkeypatch.setattr(attention_rows_cpu, "flash", kernel(lambda rows: False))
    with pytest.raises(NotInvariant, match="depends on the batch"):
        row_multiple.__wrapped__(32, 128, 2)
