"""Rotation frequencies of every supported kind of RoPE, and the table of their sines.

Formulas and their order of operations follow transformers' `modeling_rope_utils`, in float32, so that angles agree bit for
bit: at position 1,500 another rounding of the angle would already show in the logits.
"""

from __future__ import annotations

import math

import torch

from common.models.config import RopeConfig

_CHUNK = 1024


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> tuple[torch.Tensor, float]:
    """Radians per position, float32 [head_dim / 2], and the factor that scales sines and cosines."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    match rope.type:
        case "default":
            return 1.0 / rope.theta**exponents, 1.0
        case "linear":
            return (1.0 / rope.theta**exponents) / rope.factor, 1.0
        case "llama3":
            return _llama3(1.0 / rope.theta**exponents, rope), 1.0
        case "yarn":
            return _yarn(rope.theta**exponents, rope, head_dim), _attention_factor(rope)


def _llama3(frequencies: torch.Tensor, rope: RopeConfig) -> torch.Tensor:
    """Long waves are slowed by `factor`, short ones kept, those between interpolated (Llama 3.1)."""
    low_wavelength = rope.original_max_context / rope.low_freq_factor
    high_wavelength = rope.original_max_context / rope.high_freq_factor
    wavelengths = 2 * math.pi / frequencies
    scaled = torch.where(wavelengths > low_wavelength, frequencies / rope.factor, frequencies)
    smooth = (rope.original_max_context / wavelengths - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    smoothed = (1 - smooth) * scaled / rope.factor + smooth * scaled
    between = (wavelengths >= high_wavelength) & (wavelengths <= low_wavelength)
    return torch.where(between, smoothed, scaled)


def _yarn(wave_steps: torch.Tensor, rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """arXiv 2309.00071: interpolate dimensions that turn less than `beta_slow` times, keep those above `beta_fast`."""

    def dimension(rotations: float) -> float:
        return head_dim * math.log(rope.original_max_context / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    high = high + 0.001 if low == high else high
    kept = 1 - torch.clamp((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low), 0, 1)
    return 1.0 / (rope.factor * wave_steps) * (1 - kept) + 1.0 / wave_steps * kept


def _attention_factor(rope: RopeConfig) -> float:
    if rope.attention_factor:
        return rope.attention_factor

    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0

    if rope.mscale and rope.mscale_all_dim:
        return mscale(rope.mscale) / mscale(rope.mscale_all_dim)
    return mscale(1.0)


class RopeTable:
    """Cosines and sines by position, grown when a longer sequence comes: [positions, 1, head_dim] in `dtype`.

    Both halves of a row hold the same angles; the sines of the first half are negated (see `ops.kv.rope`).
    """

    def __init__(self, frequencies: torch.Tensor, scale: float, dtype: torch.dtype, device: torch.device) -> None:
        self._frequencies = frequencies
        self._scale = scale
        self._cos = torch.empty(0, 1, 2 * len(frequencies), dtype=dtype, device=device)
        self._sin = self._cos.clone()

    def rows(self, positions: torch.Tensor, highest: int) -> tuple[torch.Tensor, torch.Tensor]:
        """positions: int64 [tokens], none above `highest`. Returns cos, sin [tokens, 1, head_dim]."""
        while highest >= len(self._cos):
            self._grow()
        return self._cos.index_select(0, positions), self._sin.index_select(0, positions)

    def _grow(self) -> None:
        """By chunks of fixed bounds: a position's row must not depend on how the table grew."""
        begin = len(self._cos)
        angles = torch.outer(torch.arange(begin, begin + _CHUNK).float(), self._frequencies)
        cos, sin = angles.cos() * self._scale, angles.sin() * self._scale
        self._cos = torch.cat((self._cos, torch.cat((cos, cos), -1)[:, None].to(self._cos)))
        self._sin = torch.cat((self._sin, torch.cat((-sin, sin), -1)[:, None].to(self._sin)))

    def table(self, positions: int) -> torch.Tensor:
        """Return float32 [positions, head_dim] on the device: cosines, then sines, of each position (see `ops.kv.qkv_rope`).

        Ask for the positions that the KV pool holds: a context of ten million tokens would be gigabytes.
        """
        angles = torch.outer(torch.arange(positions).float(), self._frequencies)
        return torch.cat((angles.cos() * self._scale, angles.sin() * self._scale), -1).to(self._cos.device)
