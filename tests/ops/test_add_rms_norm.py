"""The fused residual norm: equal to its reference on both devices, in place, rows by themselves, never a zero scale."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from common.ops import backend
from common.ops.norm.add_rms_norm import add_rms_norm
from common.ops.norm.add_rms_norm_reference import add_rms_norm_reference, quantise_reference
from common.ops.tensors import Quantised

EPS = 1e-5
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs hold NaN until they are written."""
    empty_like = torch.empty_like

    def poison(x: torch.Tensor, *, dtype: torch.dtype) -> torch.Tensor:
        return torch.full(x.shape, torch.nan).to(dtype)

    monkeypatch.setattr(torch, "empty_like", lambda x, dtype=None: poison(x, dtype=dtype) if dtype else empty_like(x))


@pytest.fixture(params=["cpu", "kernel"])
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == "cpu":
        yield request.param
    else:
        with backend.interpreted():
            yield request.param


def make_delta(rows: int, size: int, splits: int | None, dtype: torch.dtype) -> torch.Tensor | None:
    """splits: None for no delta, 0 for one that is done."""
    if splits is None:
        return None
    return torch.randn(rows, size).to(dtype) if splits == 0 else torch.randn(splits, rows, size)


@pytest.mark.parametrize("dtype", list(TOLERANCES))
@pytest.mark.parametrize("splits", [None, 0, 1, 3])
@pytest.mark.parametrize(("rows", "size"), [(1, 576), (3, 48), (2, 5120), (5, 100)])
@pytest.mark.usefixtures("poisoned", "device")
def test_equals_the_reference(rows: int, size: int, splits: int | None, dtype: torch.dtype) -> None:
    residual, weight = torch.randn(rows, size).to(dtype), torch.randn(size).to(dtype)
    delta = make_delta(rows, size, splits, dtype)
    expected_residual, expected = add_rms_norm_reference(residual, delta, weight, EPS)
    normed = add_rms_norm(residual, delta, weight, EPS)
    assert isinstance(normed, torch.Tensor)
    torch.testing.assert_close(residual, expected_residual, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(normed, expected.to(dtype), atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype])


@pytest.mark.parametrize("dtype", list(TOLERANCES))
@pytest.mark.parametrize("splits", [None, 0, 3])
@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize(("rows", "size"), [(1, 576), (3, 100)])
@pytest.mark.usefixtures("poisoned", "device")
def test_norms_behind_blocks_equal_the_reference(
    rows: int, size: int, before: bool, splits: int | None, dtype: torch.dtype
) -> None:
    residual, behind = torch.randn(rows, size).to(dtype), torch.randn(size).to(dtype)
    weight = torch.randn(size).to(dtype) if before else None
    delta = make_delta(rows, size, splits, dtype)
    expected_residual, expected = add_rms_norm_reference(residual, delta, weight, EPS, behind)
    normed = add_rms_norm(residual, delta, weight, EPS, behind=behind)
    assert isinstance(normed, torch.Tensor) and (normed is residual) == (not before)
    torch.testing.assert_close(residual, expected_residual, atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype])
    torch.testing.assert_close(normed, expected.to(dtype), atol=2 * TOLERANCES[dtype], rtol=2 * TOLERANCES[dtype])


def test_a_residual_without_a_norm_can_be_quantised() -> None:
    residual, delta, behind = (torch.randn(3, 576).bfloat16() for _ in range(3))
    expected_residual, exact = add_rms_norm_reference(residual, delta, None, EPS, behind[0])
    with backend.interpreted():
        found = add_rms_norm(residual, delta, None, EPS, behind=behind[0].contiguous(), quantise=True)
    assert isinstance(found, Quantised)
    torch.testing.assert_close(residual, expected_residual, atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(found.data.float() * found.scale[:, None], exact, rtol=2**-4, atol=0.03)


@pytest.mark.parametrize("splits", [None, 0, 2])
@pytest.mark.parametrize(("rows", "size"), [(2, 576), (3, 48)])
@pytest.mark.usefixtures("poisoned")
def test_quantised_rows_stand_for_the_norm(rows: int, size: int, splits: int | None) -> None:
    residual, weight = torch.randn(rows, size).bfloat16(), torch.randn(size).bfloat16()
    delta = make_delta(rows, size, splits, torch.bfloat16)
    expected_residual, exact = add_rms_norm_reference(residual, delta, weight, EPS)
    expected = quantise_reference(exact)
    with backend.interpreted():
        normed = add_rms_norm(residual, delta, weight, EPS, quantise=True)
    assert isinstance(normed, Quantised)
    assert torch.equal(residual, expected_residual)
    assert normed.data.dtype == torch.float8_e4m3fn
    torch.testing.assert_close(normed.scale, expected.scale)
    dequantised = normed.data.float() * normed.scale[:, None]
    torch.testing.assert_close(dequantised, exact, rtol=2**-4, atol=float(expected.scale.max()) * 2**-9)
    assert (normed.data.float() == expected.data.float()).float().mean() > 0.99  # the rest are ties that round another way


def test_a_row_of_zeros_has_a_scale() -> None:
    with backend.interpreted():
        normed = add_rms_norm(torch.zeros(2, 64), None, torch.ones(64), EPS, quantise=True)
    assert isinstance(normed, Quantised)
    assert bool((normed.scale > 0).all())
    assert not normed.data.float().any()


def test_a_row_with_nan_stays_nan() -> None:
    residual = torch.randn(2, 64)
    residual[1, 3] = torch.nan
    with backend.interpreted():
        normed = add_rms_norm(residual, None, torch.ones(64), EPS, quantise=True)
    assert isinstance(normed, Quantised)
    assert bool(normed.data[1].float().isnan().all())
    assert not normed.data[0].float().isnan().any()


@pytest.mark.usefixtures("device")
def test_a_row_has_the_same_bits_in_every_batch() -> None:
    residual, weight, delta = torch.randn(6, 576), torch.randn(576), torch.randn(3, 6, 576)
    alone = residual[4:5].clone()
    normed = add_rms_norm(residual, delta, weight, EPS)
    assert isinstance(normed, torch.Tensor)
    assert torch.equal(add_rms_norm(alone, delta[:, 4:5], weight, EPS), normed[4:5])  # pyright: ignore[reportArgumentType]
    assert torch.equal(alone, residual[4:5])


def test_on_a_cpu_the_residual_has_the_bits_of_an_addition() -> None:
    residual, delta, weight = torch.randn(3, 576), torch.randn(3, 576), torch.randn(576)
    expected = delta.clone().add_(residual)
    add_rms_norm(residual, delta, weight, EPS)
    assert torch.equal(residual, expected)


@pytest.mark.usefixtures("device")
def test_no_rows_are_no_work() -> None:
    normed = add_rms_norm(torch.empty(0, 64), torch.empty(2, 0, 64), torch.ones(64), EPS)
    assert isinstance(normed, torch.Tensor)
    assert normed.shape == (0, 64)


def test_what_does_not_fit_is_refused() -> None:
    residual, weight = torch.randn(2, 64), torch.randn(64)
    with pytest.raises(ValueError, match="can't take"):
        add_rms_norm(residual, None, torch.randn(32), EPS)
    with pytest.raises(ValueError, match="one dtype"):
        add_rms_norm(residual, None, weight.bfloat16(), EPS)
    with pytest.raises(ValueError, match="partials"):
        add_rms_norm(residual, residual.bfloat16(), weight, EPS)
    with pytest.raises(ValueError, match="can't add"):
        add_rms_norm(residual, torch.randn(3, 64), weight, EPS)
