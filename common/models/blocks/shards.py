"""How tensor parallelism cuts a weight: the rule that each block writes down for each of its weights."""

from __future__ import annotations

from typing import Literal

ShardRule = Literal["replicated", "heads", "outputs", "inputs", "experts"]
"""replicated: every rank has all of it.
heads: output rows by KV head, with the query heads that share it.
outputs: output rows, of each fused part alike.
inputs: input columns; ranks' results are summed, and a bias is one rank's.
experts: whole experts."""
