"""Tensors that belong to another one, which asks for them or knows better: scales, zero points and what describes them.
Torch-free."""

from __future__ import annotations

_OF_GROUPS = (
    *("qzeros", "scales", "g_idx", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx"),
    *("weight_global_scale", "input_global_scale", "weight_scale_2", "input_scale", "input_zero_point"),
    *("absmax", "quant_map", "nested_absmax", "nested_quant_map", "bitsandbytes__nf4"),
)
_OF_FP8 = ("weight_scale_inv", "input_scale_ub", "activation_scale")
_OF_ATTENTION = ("q_scale", "k_scale", "v_scale", "kv_scale", "prob_scale")
_COMPANIONS = frozenset((*_OF_GROUPS, *_OF_FP8, *_OF_ATTENTION))
"""Last parts of their names."""


def is_companion(name: str) -> bool:
    """Return whether the tensor `name` belongs to another one."""
    return name.rpartition(".")[2] in _COMPANIONS
