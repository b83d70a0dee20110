"""Causal attention of a ragged batch over paged, block-first KV, wherever the pool is.

A plan is made once per step and used by every layer: `plan_attention` on a CPU, `plan_device_attention` on a GPU.
"""

from __future__ import annotations

import torch

from common.ops.attention.form import AttentionForm, Reach
from common.ops.attention.paged_cpu import attend_cpu
from common.ops.attention.paged_device import attend_device
from common.ops.attention.plan_cpu import AttentionPlan, AttentionRow, check_attention, plan_attention
from common.ops.attention.prefix_kv import StepKv
from common.ops.attention.rows_cpu import NotInvariant
from common.ops.attention.scratch_cpu import Scratch
from common.ops.attention.work import AttentionWorkspace, DevicePlan, plan_device_attention
from common.ops.attention.work_list import DeviceBatch, DeviceRow

__all__ = [
    "AttentionForm",
    "AttentionPlan",
    "AttentionRow",
    "AttentionWorkspace",
    "DeviceBatch",
    "DevicePlan",
    "DeviceRow",
    "NotInvariant",
    "Reach",
    "Scratch",
    "check_attention",
    "paged_attention",
    "plan_attention",
    "plan_device_attention",
]


def paged_attention(
    query: torch.Tensor,
    pool: torch.Tensor,
    layer: int,
    plan: AttentionPlan | DevicePlan,
    form: AttentionForm,
    *,
    key: torch.Tensor | None = None,
    value: torch.Tensor | None = None,
    kv_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """query: [tokens, heads, head_dim]. Returns the same shape and dtype; padding tokens get zeros.

    The step's own K and V must be in the pool: in the query's dtype, or (on a GPU) float8_e4m3fn; then kv_scale is float32
    [layers, 2, kv_heads], by which what is stored was divided. The kernel computes with 8-bit KV in float16.
    key, value: the step's K and V [tokens, kv_heads, head_dim] in the query's dtype, which prompts without a prefix, and long
    pieces of others, use instead of the pool (GPU only).

    :raises ValueError: if the tensors are not what the plan was made for, or the form's sinks don't fit.
    """
    if isinstance(plan, AttentionPlan):
        if kv_scale is not None:
            raise ValueError("8-bit KV is for GPUs")
        return attend_cpu(query, pool, layer, plan, form)
    _check(query, pool, plan, form, key, value, kv_scale)
    if key is None or value is None:
        return attend_device(query, None, pool, layer, plan, form, kv_scale)
    kv = StepKv(key, value, pool, layer, plan.batch.block_ids, kv_scale)
    return attend_device(query, kv, pool, layer, plan, form, kv_scale)


def _check(
    query: torch.Tensor,
    pool: torch.Tensor,
    plan: DevicePlan,
    form: AttentionForm,
    key: torch.Tensor | None,
    value: torch.Tensor | None,
    kv_scale: torch.Tensor | None,
) -> None:
    expected = (plan.batch.num_tokens, plan.num_heads, plan.head_dim)
    if query.shape != expected or query.stride()[1:] != (plan.head_dim, 1):
        raise ValueError(f"the plan is for {list(expected)}, heads contiguous, not {list(query.shape)}, {query.stride()}")
    if pool.shape[4:] != (plan.kv_heads, plan.head_dim) or not pool.is_contiguous():
        raise ValueError(f"the plan is for {plan.kv_heads} KV heads of {plan.head_dim}, not {list(pool.shape[4:])}")
    if pool.dtype not in (query.dtype, torch.float8_e4m3fn):
        raise ValueError(f"a {pool.dtype} pool does not go with {query.dtype} queries")
    if pool.dtype == torch.float8_e4m3fn and plan.head_dim % 2:
        raise ValueError("8-bit KV is read in pairs: head_dim must be even")
    if kv_scale is not None and (kv_scale.shape != (pool.shape[1], 2, plan.kv_heads) or not kv_scale.is_contiguous()):
        raise ValueError(f"kv_scale is [layers, 2, kv_heads], contiguous, not {list(kv_scale.shape)}")
    form.check(plan.num_heads, query.device)
    if form.reach != plan.reach or (plan.takes_kv and form.kind != plan.kind):
        raise ValueError(f"the plan is for {plan.kind if plan.takes_kv else plan.reach}, not {form}")
    if plan.takes_kv and (key is None or value is None):
        raise ValueError("the plan computes prompts from tensors: it needs key and value")
