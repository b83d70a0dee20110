"""Ceilings of a card, as they were measured there."""

from __future__ import annotations

from bench.engine.limits import Ceilings

H200 = Ceilings(device="NVIDIA H200", copy=4.24e12, read=4.05e12, matmul={"bfloat16": 751e12, "fp8": 1400e12})
