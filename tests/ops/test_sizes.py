"""The host's arithmetic of sizes is Triton's."""

from __future__ import annotations

import triton

from common.ops.sizes import cdiv, next_power_of_2


def test_sizes_are_what_triton_says():
    assert all(cdiv(x, y) == triton.cdiv(x, y) for x in range(70) for y in range(1, 20))
    assert all(next_power_of_2(n) == triton.next_power_of_2(n) for n in [*range(1, 70), 4095, 4096, 4097, 128256])
