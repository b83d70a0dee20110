"""Probability masses for top-p, the same bits on every device: e^(value - top) as integers.

Sums of integers depend on no order, and the exponential uses nothing but single float32 roundings (products, sums and floor,
never fused), so a CPU and a GPU keep the same tokens of equal logits. A mass is within a few 2^-23 of the exponential, cut to
a whole number of 2^-40ths of the likeliest token's.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

MASS_BITS = 40
"""The likeliest token's mass is 2^40: 2^22 tokens' sum fits an int64."""

_PIECE = 8192  # stays in a core's cache
LOWEST = -28.0  # e^-28 < 2^-40
LOG2E = 1.4426950408889634
LN2_HIGH = 0.693359375  # nine bits: its product with an exponent is exact
LN2_LOW = -2.12194440e-4
# e^r = 1 + r + r² · polynomial(r) for |r| <= ln(2) / 2: Cephes' expf
COEFFICIENTS = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
BANDS_PER_UNIT = 4
"""Bands in a unit of value, counted from the highest value down. A quarter is exact in float32, so a higher value is never in a
later band."""
ALL_BANDS = int(-LOWEST * BANDS_PER_UNIT)
"""Values below these bands have a mass of 0."""


def masses(values: NDArray[np.float32], top: np.float32) -> NDArray[np.int64]:
    """values: float32 [n], none above `top`, which is finite. Returns int64 [n], 2^40 for `top`."""
    result = np.empty(len(values), np.int64)
    for start in range(0, len(values), _PIECE):
        result[start : start + _PIECE] = _masses(values[start : start + _PIECE] - top)
    return result


def _masses(distance: NDArray[np.float32]) -> NDArray[np.float32]:
    np.maximum(distance, np.float32(LOWEST), out=distance)
    exponent = distance * np.float32(LOG2E)
    exponent += np.float32(0.5)
    np.floor(exponent, out=exponent)
    distance -= exponent * np.float32(LN2_HIGH)
    distance -= exponent * np.float32(LN2_LOW)
    power = distance * np.float32(COEFFICIENTS[0])
    for coefficient in COEFFICIENTS[1:-1]:
        power += np.float32(coefficient)
        power *= distance
    power += np.float32(COEFFICIENTS[-1])
    power *= distance * distance
    power += distance
    power += np.float32(1)
    bits = power.view(np.int32)
    bits += exponent.astype(np.int32) << 23
    power *= np.float32(2.0**MASS_BITS)
    return power


def bands_of(values: NDArray[np.float32], top: np.float32, num_bands: int) -> NDArray[np.int64]:
    """Return the number of the band of each of values, none of which is above `top`; `num_bands` for those below so many."""
    return np.minimum((top - values) * np.float32(BANDS_PER_UNIT), np.float32(num_bands)).astype(np.int64)


def wanted_mass(total: int, top_p: float) -> int:
    """The nucleus ends where the sum of masses, highest first, reaches this; at least one token is kept."""
    return max(1, math.ceil(top_p * float(total)))
