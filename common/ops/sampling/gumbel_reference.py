"""What `gumbel_noise` computes: Philox, step by step, in torch integers."""

from __future__ import annotations

import torch

from common.ops.sampling.philox import MASK32, MULTIPLIERS, ROUNDS, WEYL


def philox_reference(counter: list[torch.Tensor], key: tuple[int, int]) -> list[torch.Tensor]:
    """Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011).

    counter: four int64 tensors of 32-bit words; key: two 32-bit words. Returns four tensors of 32-bit words.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        high0, low0 = _multiply(c0, MULTIPLIERS[0])
        high1, low1 = _multiply(c2, MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + WEYL[0]) & MASK32, (k1 + WEYL[1]) & MASK32
    return [c0, c1, c2, c3]


def _multiply(words: torch.Tensor, factor: int) -> tuple[torch.Tensor, torch.Tensor]:
    """High and low halves of a 32 x 32 bit product; its sign bit as int64 is cut off with the shift."""
    product = words * factor
    return (product >> 32) & MASK32, product & MASK32


def gumbel_noise_reference(seed: int, position: int, tokens: torch.Tensor) -> torch.Tensor:
    """tokens: int64 [n]. Returns float32 [n]; see `gumbel_noise`."""
    zero = torch.zeros_like(tokens)
    lanes = philox_reference([tokens >> 2, zero + position, zero, zero], (seed & MASK32, seed >> 32 & MASK32))
    words = torch.stack(lanes).gather(0, (tokens & 3)[None])[0]
    uniform = (words.double() + 0.5) * 2.0**-32
    return (-torch.log(-torch.log(uniform))).float()
