"""What the kernel that unpacks in warps of its own and its calls agree on; needs no Triton."""

from __future__ import annotations

BLOCK_N = 128
"""Weight rows of a tile."""
STEP = 64
"""Inputs of a step."""
