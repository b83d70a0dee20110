"""FP8 weights of published checkpoints: which tensor is whose scale, and what becomes of both.

X.weight             F8_E4M3 [out, in]
X.weight_scale       one number, [1], [out] or [out, 1], any floating dtype
X.weight_scale_inv   float32 [⌈out/128⌉, ⌈in/128⌉]; the name notwithstanding, it is multiplied with
X.input_scale        static scale of activations: not read, they are scaled token by token
….self_attn.k_scale  and v_scale: one number, or one per KV head
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from common.models.formats.detect import FP8_BLOCK as BLOCK
from common.models.formats.groups import checked_scales
from common.models.formats.stored import can_join_fp8
from common.models.weights.source import WeightsError, WeightSource
from common.models.weights.upload import Upload
from common.ops.linear.weight import LinearWeight, linear_from_fp8


@dataclass(slots=True, frozen=True)
class Fp8Weight:
    """data: float8_e4m3fn [out, in]. scale: float32 [out], or [⌈out/128⌉, ⌈in/128⌉]. dtype: the model's."""

    data: torch.Tensor
    scale: torch.Tensor
    dtype: torch.dtype

    def dequantise(self) -> torch.Tensor:
        """Return [out, in] in `dtype`."""
        return dequantise_fp8(self.data, self.scale, self.dtype)


def find_scale(source: WeightSource, upload: Upload, name: str, shape: torch.Size) -> torch.Tensor:
    """The scale of the float8 weight `name` of `shape` [out, in]: float32 [out], or [⌈out/128⌉, ⌈in/128⌉].

    :raises WeightsError: if there is none, or of another shape.
    """
    rows, columns = shape
    for candidate in (f"{name}_scale_inv", f"{name}_scale"):
        if candidate not in source.shapes:
            continue
        scale = checked_scales(candidate, source.read(candidate, upload))
        blocks = (-(-rows // BLOCK), -(-columns // BLOCK))
        if scale.shape == blocks and (scale.numel() > 1 or candidate.endswith("_inv")):
            return scale.contiguous()
        if scale.numel() == 1:
            return scale.reshape(1).expand(rows).contiguous()
        if scale.numel() == rows and scale.shape[0] == rows:
            return scale.reshape(rows)
        raise WeightsError(f"{candidate} has shape {list(scale.shape)}, which fits no weight of shape {[rows, columns]}")
    raise WeightsError(f"{name} is float8 and has no scale beside it")


def dequantise_fp8(data: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """data: float8_e4m3fn [out, in]; scale: as `find_scale` gives it. Returns [out, in] in `dtype`."""
    if scale.ndim == 1:
        return (data.float() * scale[:, None]).to(dtype)
    rows, columns = data.shape
    whole = scale.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :columns]
    return (data.float() * whole).to(dtype)


def fused_fp8(
    parts: list[torch.Tensor],
    scales: list[torch.Tensor],
    bias: torch.Tensor | None,
    dtype: torch.dtype,
    *,
    batch_invariant: bool = False,
) -> LinearWeight | None:
    """Weights below each other as one. None where their scales don't join: of two kinds, or blocks across a seam.

    batch_invariant: see `LinearWeight`.
    """
    if not can_join_fp8([scale.ndim == 2 for scale in scales], [len(part) for part in parts]):
        return None
    # torch joins float8 tensors as bytes only
    data = parts[0] if len(parts) == 1 else torch.cat([part.view(torch.uint8) for part in parts]).view(torch.float8_e4m3fn)
    return linear_from_fp8(data, torch.cat(scales), bias, dtype=dtype, batch_invariant=batch_invariant)


def kv_scales(source: WeightSource, upload: Upload, num_layers: int, num_kv_heads: int) -> torch.Tensor | None:
    """See `WeightLoader.take_kv_scales`."""
    found = torch.ones(num_layers, 2, num_kv_heads)
    any_found = False
    for layer in range(num_layers):
        for index, kind in enumerate("kv"):
            for name in (f"self_attn.{kind}_scale", f"self_attn.{kind}_proj.{kind}_scale", "self_attn.kv_scale"):
                name = f"model.layers.{layer}.{name}"
                if name not in source.shapes:
                    continue
                scale = source.read(name, upload).float().cpu().reshape(-1)
                if scale.numel() not in (1, num_kv_heads) or not bool((scale > 0).all()):
                    raise WeightsError(f"{name} must be one positive number, or one for each of {num_kv_heads} KV heads")
                found[layer, index] = scale
                any_found = True
                break
    return found.to(upload.device) if any_found else None
