"""Sizes of grids and tiles, for the host: Triton's functions of these names, which kernels use, take 8 µs a call from Python,
and a layer's launches need a dozen."""

from __future__ import annotations


def cdiv(x: int, y: int) -> int:
    """Return x / y, rounded up. x: not negative; y: positive."""
    return -(-x // y)


def next_power_of_2(n: int) -> int:
    """Return the least power of two that is not below n; n: positive."""
    return 1 << (n - 1).bit_length()
