"""Attention on a CPU pads its rows to what agrees on that CPU, and says when nothing does."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from common.ops.attention import rows_cpu as attention_rows_cpu
from common.ops.attention.rows_cpu import NotInvariant, row_multiple

real = attention_rows_cpu.flash


def kernel(way: Callable[[int], int], *, at: int = 0) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """Return the real kernel with other last bits for each number that `way` gives, in the rows from `at` on."""

    def flash(query: torch.Tensor, *rest: torch.Tensor, **options: object) -> tuple[torch.Tensor, torch.Tensor]:
        attended, sums = real(query, *rest, **options)
        attended[:, :, at:] += way(query.shape[2]) * 2**-18
        return attended, sums

    return flash


@pytest.mark.parametrize(
    ("way", "at", "expected"),
    [
        (lambda rows: 0, 0, 4),
        (lambda rows: rows % 16 > 0, 0, 16),
        (lambda rows: rows % 64 > 0, 0, 64),
        (lambda rows: rows % 8 > 0, -1, 8),
        (lambda rows: torch.get_num_threads() > 1 and rows % 32 > 0, 0, 32),
    ],
)
def test_rows_are_padded_to_what_agrees(
    way: Callable[[int], int], at: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_rows_cpu, "flash", kernel(way, at=at))
    assert row_multiple.__wrapped__(32, 128, 2) == expected


@pytest.mark.parametrize("way", [lambda rows: rows, lambda rows: torch.get_num_threads(), lambda rows: rows > 191])
def test_it_says_when_no_number_of_rows_agrees_with_another(way: Callable[[int], int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_rows_cpu, "flash", kernel(way))
    with pytest.raises(NotInvariant, match="heads of 32"):
        row_multiple.__wrapped__(32, 128, 2)
