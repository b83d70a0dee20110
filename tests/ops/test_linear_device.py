"""Every way to compute a linear on a GPU equals the reference, interpreted: odd sizes, few and many rows, all formats."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from common.ops import backend
from common.ops.backend import interpreted
from common.ops.linear import device as linear_device
from common.ops.linear.candidates import ROW_BUCKETS, Candidate, Op, Shape, bucket, candidates, invariant_candidate
from common.ops.linear.linear import add_linear, linear, takes_quantised
from common.ops.linear.reference import linear_fp8_reference
from common.ops.linear.weight import LinearWeight, linear_from_fp8, pack_linear
from common.ops.quant.quantise import quantise_rows, quantise_weight
from common.ops.tensors import Activation, Quantised

DOT = Candidate("dot", block_n=64, block_m=16, block_k=64, splits=1)
GEMV = Candidate("gemv", block_n=4, block_m=1, block_k=256, warps=8)
TMA = Candidate("persistent", block_n=128, block_m=128, block_k=64, warps=8)
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 4e-3}


@pytest.fixture(autouse=True)
def _interpreted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Kernels run here, their outputs start as NaN, and no file of choices is read."""
    monkeypatch.setenv("PENSTOCK_KERNEL_CACHE", str(tmp_path))
    empty = torch.empty

    def poisoned(*args, **kwargs) -> torch.Tensor:
        made = empty(*args, **kwargs)
        return made.fill_(float("nan")) if made.dtype.is_floating_point and made.element_size() > 1 else made

    monkeypatch.setattr(torch, "empty", poisoned)
    linear_device.forget_choices()
    with interpreted():
        yield
    linear_device.forget_choices()


def _weight(
    out_features: int,
    in_features: int,
    kind: str,
    biased: bool,
    dtype: torch.dtype = torch.bfloat16,
    *,
    batch_invariant: bool = False,
) -> LinearWeight:
    weight = (torch.randn(out_features, in_features) * in_features**-0.5).to(dtype)
    bias = torch.randn(out_features).to(dtype) if biased else None
    if kind == "blocks":
        data, scale = quantise_weight(weight, 128)
        return linear_from_fp8(data, scale, bias, dtype=dtype, batch_invariant=batch_invariant)
    return pack_linear(weight, bias, format="fp8" if kind == "channel" else "plain", batch_invariant=batch_invariant)


def _expected(x: Activation, weight: LinearWeight) -> torch.Tensor:
    if weight.scale is not None:
        return linear_fp8_reference(x, weight.data, weight.scale, weight.bias, torch.float32)
    assert not isinstance(x, Quantised)
    return torch.nn.functional.linear(x.float(), weight.data.float(), None if weight.bias is None else weight.bias.float())


def _check(op: Op, x: Activation, weight: LinearWeight, chosen: Candidate) -> torch.Tensor:
    y = linear_device.run(op, x, weight, chosen)
    if y.ndim == 3:
        assert op == "split"
        assert y.dtype == torch.float32
        y = y.sum(0)
    else:
        assert y.dtype == (torch.float32 if op == "wide" else weight.dtype)
    dequantised = chosen.kind == "library" and weight.scale is not None  # to the model's dtype
    tolerance = TOLERANCES[torch.float32 if op == "wide" and not dequantised else weight.dtype]
    torch.testing.assert_close(y.float(), _expected(x, weight), atol=tolerance * 2, rtol=tolerance)
    return y


@pytest.mark.parametrize("kind", ["plain", "channel", "blocks"])
@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize(("rows", "out_features", "in_features"), [(1, 130, 200), (5, 96, 256), (19, 65, 327)])
def test_weights_as_the_tall_side(kind: str, splits: int, rows: int, out_features: int, in_features: int) -> None:
    weight = _weight(out_features, in_features, kind, biased=rows != 5)
    x = torch.randn(rows, in_features).bfloat16()
    chosen = Candidate("dot", block_n=64, block_m=16, block_k=64, splits=splits)
    for op in ("split", "linear", "wide") if splits > 1 else ("linear", "wide"):
        _check(op, x, weight, chosen)
        if kind != "plain":
            _check(op, quantise_rows(x), weight, chosen)


@pytest.mark.parametrize("kind", ["plain", "channel"])
@pytest.mark.parametrize(("rows", "block_m"), [(1, 1), (2, 2), (3, 4), (4, 4)])
def test_one_to_four_rows_without_tensor_cores(kind: str, rows: int, block_m: int) -> None:
    for out_features, in_features in ((67, 256), (40, 327)):
        weight = _weight(out_features, in_features, kind, biased=True)
        x = torch.randn(rows, in_features).bfloat16()
        _check("split", x, weight, Candidate("gemv", block_n=4, block_m=block_m, block_k=256, warps=8))
        _check("linear", x, weight, Candidate("gemv", block_n=2, block_m=block_m, block_k=512, warps=8))
        _check("wide", x, weight, Candidate("gemv", block_n=4, block_m=block_m, block_k=256, warps=8))


@pytest.mark.parametrize(
    "kind", ["plain", pytest.param("channel", marks=pytest.mark.slow), pytest.param("blocks", marks=pytest.mark.slow)]
)
def test_many_rows_by_persistent_programs(kind: str) -> None:
    weight = _weight(392, 272, kind, biased=True)
    x = torch.randn(150, 272).bfloat16()
    for chosen in (TMA, replace(TMA, flat=True)):
        _check("wide" if chosen.flat else "linear", quantise_rows(x) if kind != "plain" else x, weight, chosen)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_dtypes(dtype: torch.dtype) -> None:
    weight = _weight(80, 136, "plain", biased=True, dtype=dtype)
    x = torch.randn(3, 136).to(dtype)
    for chosen in (DOT, Candidate("gemv", block_n=2, block_m=4, block_k=256, warps=8), Candidate("library")):
        _check("linear", x, weight, chosen)


@pytest.mark.parametrize("kind", ["plain", "channel", "blocks"])
def test_the_library_takes_any_weight(kind: str) -> None:
    weight = _weight(144, 200, kind, biased=True)
    x = torch.randn(7, 200).bfloat16()
    for op in ("linear", "wide"):
        _check(op, x, weight, Candidate("library"))
        if kind == "blocks":
            _check(op, quantise_rows(x), weight, Candidate("library", quantised=True))


@pytest.mark.parametrize("kind", ["plain", "channel", "blocks"])
def test_what_is_chosen_unmeasured_is_right(kind: str) -> None:
    weight = _weight(160, 192, kind, biased=False)
    for rows in (1, 20):
        x = torch.randn(rows, 192).bfloat16()
        y = linear(x, weight, split=True)
        y = y.sum(0) if y.ndim == 3 else y
        given = quantise_rows(x) if takes_quantised(weight, rows) else x
        torch.testing.assert_close(y.float(), _expected(given, weight), atol=4e-2, rtol=2e-2)
        wide = linear(x, weight, wide=True)
        given = quantise_rows(x) if takes_quantised(weight, rows) else x
        torch.testing.assert_close(wide, _expected(given, weight), atol=2e-4, rtol=1e-4)
    assert linear(torch.randn(0, 192).bfloat16(), weight).shape == (0, 160)
    with pytest.raises(ValueError, match="partial sums"):
        linear(torch.randn(1, 192).bfloat16(), weight, split=True, wide=True)


@pytest.mark.parametrize("kind", ["plain", "channel", "blocks"])
def test_batch_invariant_rows_have_the_same_bits_in_every_batch(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # as tensor cores do, and unlike BLAS: what an element of a product is does not depend on where in the tile it lies
    monkeypatch.setattr(
        np, "matmul", lambda a, b, dtype: np.add.reduce(a.astype(dtype)[:, :, None] * b.astype(dtype)[None], axis=1)
    )
    monkeypatch.setattr(backend, "num_sms", lambda index: 16)  # enough of them for splits
    weight = _weight(160, 1024, kind, biased=True, batch_invariant=True)
    x = torch.randn(70, 1024).bfloat16()
    whole, final = linear(x, weight, split=True), linear(x, weight)
    chosen = linear_device.choose("split", weight, 1, quantised=kind != "plain")
    assert chosen.splits > 1
    assert whole.shape == (1, 70, 160)
    for rows in (1, 3, 64):
        partial = linear(x[-rows:], weight, split=True)
        assert partial.shape[0] > 1
        total = partial[0]
        for more in partial[1:]:
            total = total + more
        assert torch.equal(total, whole[0, -rows:]), rows
        assert torch.equal(linear(x[-rows:], weight), final[-rows:]), rows


def test_a_quantised_weight_is_made_once_for_all_published_scales() -> None:
    data, scale = quantise_weight(torch.randn(200, 300))
    assert linear_from_fp8(data, torch.tensor(0.5)).scale.tolist() == [0.5] * 200  # type: ignore[union-attr]
    assert torch.equal(linear_from_fp8(data, scale[:, None].bfloat16()).scale, scale.bfloat16().float())  # type: ignore[arg-type]
    assert linear_from_fp8(data, torch.rand(2, 3)).scale.shape == (2, 3)  # type: ignore[union-attr]
    with pytest.raises(ValueError, match="do not fit"):
        linear_from_fp8(data, torch.rand(3, 2))
    with pytest.raises(ValueError, match="float8_e4m3fn"):
        linear_from_fp8(data.float(), scale)


def test_shapes_that_do_not_fit_are_refused() -> None:
    weight = pack_linear(torch.randn(8, 16))
    with pytest.raises(ValueError, match=r"\[rows, 16\]"):
        linear(torch.randn(2, 8), weight)
    with pytest.raises(ValueError, match="takes no quantised"):
        linear(quantise_rows(torch.randn(2, 16)), weight)


LLAMA = [("split", 6144, 4096), ("split", 4096, 4096), ("gated", 28672, 4096), ("split", 4096, 14336), ("linear", 128256, 4096)]
SMALL = [("split", 960, 576), ("gated", 3072, 576), ("split", 576, 1536), ("linear", 49153, 577)]


@pytest.mark.parametrize(("op", "n", "k"), LLAMA + SMALL)
@pytest.mark.parametrize(("item_bytes", "scaling"), [(2, "none"), (1, "channel"), (1, "blocks"), (4, "none")])
def test_candidates_are_few_and_fit(op: Op, n: int, k: int, item_bytes: int, scaling) -> None:
    shape = Shape(op, n, k, item_bytes, scaling)
    for rows in ROW_BUCKETS:
        for quantised in (False, True) if item_bytes == 1 else (False,):
            found = candidates(shape, rows, quantised, 132)
            assert 1 <= len(found) <= 16
            assert len(set(found)) == len(found)
            for candidate in found:
                x_bytes = 1 if quantised else max(2, item_bytes)
                tile = candidate.block_k * (candidate.block_n * item_bytes + candidate.block_m * x_bytes)
                if candidate.kind != "gemv":
                    assert tile * candidate.stages <= 227 * 1024, candidate
                assert candidate.quantised == quantised
                assert op != "gated" or candidate.splits == 1
        assert invariant_candidate(shape, 132) == invariant_candidate(shape, 132)


def test_bits_of_e4m3_shifted_into_bf16_are_its_numbers_times_a_power_of_two() -> None:
    """What `linear_triton.widened` does in registers, which the interpreter does not run."""
    codes = torch.arange(256)
    halves = codes << 8
    bits = ((halves >> 4) & 0x07F0) | (halves & 0x8000)
    shifted = bits.to(torch.int32).where(bits < 1 << 15, bits - (1 << 16)).to(torch.int16).view(torch.bfloat16)
    expected = codes.to(torch.uint8).view(torch.float8_e4m3fn).float()
    found = shifted.double() * 2.0**120
    assert torch.equal(found[~expected.isnan()].float(), expected[~expected.isnan()])
    assert found[expected.isnan()].abs().tolist() == [480.0, 480.0]


def test_rows_share_buckets() -> None:
    assert [bucket(rows) for rows in (1, 3, 9, 64, 65, 5000)] == [1, 4, 16, 64, 128, 4096]


def test_many_rows_of_the_library_are_added_to_the_residual_in_one_rounding() -> None:
    weight, x, residual = (
        _weight(48, 64, "plain", biased=False),
        torch.randn(1024, 64).bfloat16(),
        torch.randn(1024, 48).bfloat16(),
    )
    expected = residual.float() + _expected(x, weight)
    assert add_linear(residual, x, weight)
    torch.testing.assert_close(residual.float(), expected, atol=1e-6, rtol=2**-8)
    assert (residual == expected.bfloat16()).float().mean() > 0.999, "rounded once"


@pytest.mark.parametrize("why", ["few rows", "bias", "channel", "blocks", "batch_invariant", "a kernel of ours"])
def test_what_cannot_be_added_in_one_pass_changes_nothing(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = why if why in ("channel", "blocks") else "plain"
    weight = _weight(128, 128, kind, biased=why == "bias", batch_invariant=why == "batch_invariant")
    if why == "a kernel of ours":
        monkeypatch.setattr(linear_device, "_choose", lambda *_: TMA)
    residual = torch.ones(1023 if why == "few rows" else 1024, 128, dtype=torch.bfloat16)
    assert not add_linear(residual, torch.randn(len(residual), 128).bfloat16(), weight)
    assert (residual == 1).all()
