"""Writers of quantised weights, from the published descriptions of their formats: nothing here is shared with the readers."""

from __future__ import annotations

import json
from typing import Any

import torch

Written = tuple[dict[str, torch.Tensor], torch.Tensor]
"""Tensors of a module by the last part of their names, and the float32 weight that they mean."""

NF4_TABLE = torch.tensor(
    (
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334),
        *(-0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
        *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    )
)
FP4_TABLE = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def words(codes: torch.Tensor, bits: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """[a, b] → int32 [a, b · bits / 32]: code order[i] of each word in its bits i · `bits` and up."""
    each = 32 // bits
    packed = torch.zeros(codes.shape[0], codes.shape[1] // each, dtype=torch.int64)
    for i in range(each):
        packed |= codes[:, (order[i] if order else i) :: each].long() << (bits * i)
    return torch.where(packed >= 1 << 31, packed - (1 << 32), packed).to(torch.int32)


def in_groups(weight: torch.Tensor, group: int) -> torch.Tensor:
    """[out, groups, group], the last group filled up with zeros."""
    return torch.nn.functional.pad(weight, (0, -weight.shape[1] % group)).view(len(weight), -1, group)


def asymmetric(weight: torch.Tensor, group: int, bits: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """codes [out, in], zeros and scales [out, groups]; scales are float16 numbers."""
    parts = in_groups(weight, group)
    low, high = parts.amin(2).clamp(max=0), parts.amax(2).clamp(min=0)
    scales = ((high - low) / (2**bits - 1)).half().float().clamp(min=1e-4)
    zeros = (-low / scales).round().clamp(1, 2**bits - 1)
    codes = (parts / scales[:, :, None]).round().add(zeros[:, :, None]).clamp(0, 2**bits - 1)
    return codes.flatten(1)[:, : weight.shape[1]].long(), zeros, scales


def spread(values: torch.Tensor, group: int) -> torch.Tensor:
    return values.repeat_interleave(group, 1)


def write_awq(weight: torch.Tensor, group: int = 32) -> Written:
    codes, zeros, scales = asymmetric(weight, group, 4)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    tensors = {"qweight": words(codes.t(), 4, order), "qzeros": words(zeros.t().long(), 4, order), "scales": scales.t().half()}
    return tensors, (codes - spread(zeros, group)) * spread(scales, group)


def write_gptq(weight: torch.Tensor, group: int = 32, *, act_order: bool = False, version: int = 1, bits: int = 4) -> Written:
    inputs = weight.shape[1]
    order = torch.randperm(inputs, generator=torch.Generator().manual_seed(5)) if act_order else torch.arange(inputs)
    codes, zeros, scales = asymmetric(weight[:, order], group, bits)
    meant, stored = torch.empty_like(weight), torch.empty_like(codes)
    meant[:, order] = (codes - spread(zeros, group)) * spread(scales, group)
    stored[:, order] = codes
    indices = torch.empty(inputs, dtype=torch.int32)
    indices[order] = torch.arange(inputs, dtype=torch.int32) // group
    held = zeros.t().long() - (1 if version == 1 else 0)
    tensors = {"qweight": words(stored, bits).t(), "qzeros": words(held, bits), "scales": scales.t().half(), "g_idx": indices}
    return tensors, meant


def write_packed(weight: torch.Tensor, group: int = 32, *, zeros: bool = False, act_order: bool = False) -> Written:
    inputs = weight.shape[1]
    shape = torch.tensor(weight.shape)
    if zeros:
        codes, points, scales = asymmetric(weight, group, 4)
        scales = scales.bfloat16().float()
        tensors = {
            "weight_packed": words(codes, 4),
            "weight_zero_point": words(points.t().long(), 4).t(),
            "weight_shape": shape,
        }
        meant = (codes - spread(points, group)[:, :inputs]) * spread(scales, group)[:, :inputs]
        return tensors | {"weight_scale": scales.bfloat16()}, meant
    order = torch.randperm(inputs, generator=torch.Generator().manual_seed(6)) if act_order else torch.arange(inputs)
    sorted_weight = weight[:, order]
    scales = (in_groups(sorted_weight, group).abs().amax(2) / 7.5).bfloat16().float()
    exact = spread(scales, group)[:, :inputs]
    codes = (sorted_weight / exact).round().clamp(-8, 7).long()
    meant, stored = torch.empty_like(weight), torch.empty_like(codes)
    meant[:, order], stored[:, order] = codes * exact, codes + 8
    tensors = {"weight_packed": words(stored, 4), "weight_scale": scales.bfloat16(), "weight_shape": shape}
    if act_order:
        tensors["weight_g_idx"] = torch.empty(inputs, dtype=torch.int32)
        tensors["weight_g_idx"][order] = torch.arange(inputs, dtype=torch.int32) // group
    return tensors, meant


def write_int8(weight: torch.Tensor) -> Written:
    scales = (weight.abs().amax(1, keepdim=True) / 127).bfloat16()
    codes = (weight / scales.float()).round().clamp(-127, 127)
    return {"weight": codes.to(torch.int8), "weight_scale": scales}, codes * scales.float()


def nearest(values: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """The index of the entry of `table` that is nearest to each value."""
    entries, order = table.sort(stable=True)
    return order[torch.bucketize(values, (entries[1:] + entries[:-1]) / 2)]


def write_nvfp4(weight: torch.Tensor, *, modelopt: bool = False) -> Written:
    whole = weight.abs().max() / (448 * 6)
    scales = (weight.view(len(weight), -1, 16).abs().amax(2) / 6 / whole).to(torch.float8_e4m3fn)
    exact = spread(scales.float() * whole, 16)
    codes = nearest(weight / exact.clamp(min=1e-9), FP4_TABLE)
    packed = (codes[:, ::2] | (codes[:, 1::2] << 4)).to(torch.uint8)
    meant = FP4_TABLE[codes] * exact
    if modelopt:
        return {"weight": packed, "weight_scale": scales, "weight_scale_2": whole, "input_scale": torch.tensor(1.0)}, meant
    return {"weight_packed": packed, "weight_scale": scales, "weight_global_scale": (1 / whole).reshape(1)}, meant


def write_mxfp4(weight: torch.Tensor) -> Written:
    exponents = (weight.view(len(weight), -1, 32).abs().amax(2) / 6).log2().ceil().clamp(-126, 126)
    exact = spread(2.0**exponents, 32)
    codes = nearest(weight / exact, FP4_TABLE)
    packed = (codes[:, ::2] | (codes[:, 1::2] << 4)).to(torch.uint8)
    return {"weight_packed": packed, "weight_scale": (exponents + 127).to(torch.uint8)}, FP4_TABLE[codes] * exact


def write_nf4(weight: torch.Tensor, *, nested: bool = False) -> Written:
    blocks = weight.reshape(-1, 64)
    absmax = blocks.abs().amax(1)
    state: dict[str, Any] = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": list(weight.shape)}
    tensors = {"weight.quant_map": NF4_TABLE.clone()}
    if nested:
        table = torch.linspace(-1, 1, 256)
        offset = absmax.mean()
        centred = torch.nn.functional.pad(absmax - offset, (0, -len(absmax) % 256)).view(-1, 256)
        factors = centred.abs().amax(1)
        held = nearest(centred / factors[:, None], table)
        tensors |= {"weight.absmax": held.flatten()[: len(absmax)].to(torch.uint8), "weight.nested_absmax": factors}
        tensors["weight.nested_quant_map"] = table
        state |= {"nested_blocksize": 256, "nested_offset": offset.item(), "nested_dtype": "float32"}
        absmax = (table[held] * factors[:, None]).flatten()[: len(absmax)] + offset
    else:
        tensors["weight.absmax"] = absmax
    codes = nearest(blocks / absmax[:, None], NF4_TABLE)
    flat = codes.flatten()
    tensors["weight"] = ((flat[::2] << 4) | flat[1::2]).to(torch.uint8)[:, None]
    tensors["weight.quant_state.bitsandbytes__nf4"] = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    return tensors, (NF4_TABLE[codes] * absmax[:, None]).view_as(weight)


def write_fp8(weight: torch.Tensor) -> Written:
    scales = (weight.abs().amax(1, keepdim=True) / 448).bfloat16()
    data = (weight / scales.float()).to(torch.float8_e4m3fn)
    return {"weight": data, "weight_scale": scales}, data.float() * scales.float()


def write_fp8_tensor(weight: torch.Tensor) -> Written:
    scale = (weight.abs().max() / 448).reshape(1)
    data = (weight / scale).to(torch.float8_e4m3fn)
    return {"weight": data, "weight_scale": scale}, data.float() * scale


def write_fp8_blocks(weight: torch.Tensor) -> Written:
    """Blocks of 128 × 128, the last ones smaller."""
    rows, columns = -(-weight.shape[0] // 128), -(-weight.shape[1] // 128)
    padded = torch.nn.functional.pad(weight, (0, columns * 128 - weight.shape[1], 0, rows * 128 - weight.shape[0]))
    scales = padded.view(rows, 128, columns, 128).abs().amax((1, 3)) / 448
    whole = spread(spread(scales, 128).t(), 128).t()[: weight.shape[0], : weight.shape[1]]
    data = (weight / whole).to(torch.float8_e4m3fn)
    return {"weight": data, "weight_scale_inv": scales}, data.float() * whole
