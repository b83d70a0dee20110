"""One linear of every expert in one tensor, as the kernels for a GPU read it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from common.ops.moe.packed_layout import GroupedFormat

FP8_BLOCK = 128
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass(frozen=True, slots=True)
class GroupedWeight:
    """A linear of every expert.

    values: [experts, n, k] for plain and fp8 (float8_e4m3fn); uint8 [experts, n, k / 2] for mxfp4 and int4, where the low four
    bits are the even column.
    scale: float32 [experts, n] for fp8, or [experts, ⌈n / 128⌉, ⌈k / 128⌉], one per block of the whole linear; uint8
    exponents (E8M0) [experts, n, k / 32] for mxfp4; floating [experts, n, k / group] for int4; None for plain.
    zeros: uint8 [experts, n, k / group] for int4, 8 everywhere if None.
    bias: [experts, n] or None.
    """

    values: torch.Tensor
    format: GroupedFormat = "plain"
    scale: torch.Tensor | None = None
    zeros: torch.Tensor | None = None
    bias: torch.Tensor | None = None

    def __post_init__(self) -> None:
        """:raises ValueError: if the tensors don't fit the format or each other."""
        given, experts_and_n = list(self.values.shape), self.values.shape[:2]
        packed = self.format in ("mxfp4", "int4")
        if len(given) != 3 or packed != (self.values.dtype == torch.uint8):
            raise ValueError(f"{self.format} experts can't be {self.values.dtype} {given}")
        tensors = (self.values, self.scale, self.zeros, self.bias)
        if not all(tensor.is_contiguous() for tensor in tensors if tensor is not None):
            raise ValueError("weights of experts are contiguous")
        if (self.scale is None) != (self.format == "plain") or (self.zeros is not None and self.format != "int4"):
            raise ValueError(f"{self.format} experts have other scales or zero points")
        if self.bias is not None and self.bias.shape != experts_and_n:
            raise ValueError(f"a bias of experts is {list(experts_and_n)}, not {list(self.bias.shape)}")
        if self.scale is None:
            return
        shape = self.scale.shape
        blocks = (self.experts, -(-self.n // FP8_BLOCK), -(-self.k // FP8_BLOCK))
        if self.format == "fp8" and shape not in (experts_and_n, blocks):
            raise ValueError(f"scales of fp8 experts are {list(experts_and_n)} or {list(blocks)}, not {list(shape)}")
        if packed and (shape[:2] != experts_and_n or len(shape) != 3 or not shape[2] or self.k % shape[2] or self.group % 32):
            raise ValueError(f"scales of {self.format} experts are one per 32 columns or a multiple of that, not {list(shape)}")
        if self.format == "mxfp4" and (self.scale.dtype != torch.uint8 or self.group != 32):
            raise ValueError(f"scales of mxfp4 experts are uint8, one per 32 columns, not {self.scale.dtype} {list(shape)}")
        if self.zeros is not None and self.zeros.shape != shape:
            raise ValueError(f"zero points are {list(shape)} as scales are, not {list(self.zeros.shape)}")

    @property
    def experts(self) -> int:
        return self.values.shape[0]

    @property
    def n(self) -> int:
        return self.values.shape[1]

    @property
    def k(self) -> int:
        return self.values.shape[2] * (2 if self.values.dtype == torch.uint8 else 1)

    @property
    def group(self) -> int:
        """Columns that share a scale; 32 for formats that have none."""
        packed = self.format in ("mxfp4", "int4") and self.scale is not None
        return self.k // self.scale.shape[2] if packed and self.scale is not None else 32

    def dequantised(self) -> torch.Tensor:
        """Return float32 [experts, n, k]."""
        if self.scale is None:
            return self.values.float()
        if self.format == "fp8":
            if self.scale.ndim == 2:
                return self.values.float() * self.scale[:, :, None]
            spread = self.scale.repeat_interleave(FP8_BLOCK, 1).repeat_interleave(FP8_BLOCK, 2)
            return self.values.float() * spread[:, : self.n, : self.k]
        nibbles = torch.stack((self.values & 15, self.values >> 4), dim=-1).flatten(2)
        if self.format == "mxfp4":
            table = torch.tensor([*_E2M1, *(-value for value in _E2M1)], device=self.values.device)
            factors = torch.exp2(self.scale.float() - 127)
            return table[nibbles.int()] * factors.repeat_interleave(32, 2)
        zeros = 8 if self.zeros is None else self.zeros.repeat_interleave(self.group, 2).float()
        return (nibbles.float() - zeros) * self.scale.float().repeat_interleave(self.group, 2)
