"""Powers of two, for the exponentials of softmax and of the gate: no call of a library, so that their loops become vectors."""

# pyright: reportCallIssue=false, reportArgumentType=false
from __future__ import annotations

import numpy as np

from common.ops.cpu_int8.compiled_numba import REASSOCIATING, compiled


@compiled(fastmath=REASSOCIATING)
def power_of_two(fraction):
    """2^fraction by its Taylor series of six terms; float32, -0.5 … 0.5."""
    f = fraction * np.float32(0.6931471805599453)
    series = np.float32(1 / 720) * f + np.float32(1 / 120)
    series = series * f + np.float32(1 / 24)
    series = series * f + np.float32(1 / 6)
    series = series * f + np.float32(0.5)
    series = series * f + np.float32(1)
    return series * f + np.float32(1)
