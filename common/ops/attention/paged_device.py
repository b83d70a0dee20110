"""One layer's attention on a GPU: rows in work lists through the kernel that reads pages, prompts through `prompt` or cuDNN."""

from __future__ import annotations

import torch

from common.ops.attention.form import AttentionForm
from common.ops.attention.parts import attend_chunk
from common.ops.attention.prefill import attend_ragged, attend_run
from common.ops.attention.prefix_kv import StepKv
from common.ops.attention.prompt_plan import attend_planned
from common.ops.attention.work import DevicePlan


def attend_device(
    query: torch.Tensor,
    kv: StepKv | None,
    pool: torch.Tensor,
    layer: int,
    plan: DevicePlan,
    form: AttentionForm,
    kv_scale: torch.Tensor | None,
) -> torch.Tensor:
    """As `paged_attention`, after its checks. kv: None if the plan takes none."""
    if kv is not None and not plan.lists and len(plan.fresh) + len(plan.ragged) + len(plan.chunks) == 1:
        if plan.fresh and plan.fresh[0].count * plan.fresh[0].length == len(query):
            return attend_run(query, kv.key, kv.value, plan.fresh[0], plan.settings, form.scale)
        if plan.ragged and plan.ragged[0].tokens == len(query):
            return attend_ragged(query, kv.key, kv.value, plan.ragged[0], form.scale)
        if plan.chunks and plan.chunks[0].length == len(query):
            return attend_chunk(query, kv, plan.chunks[0], form.scale, plan.settings)
    output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    if plan.lists:
        from common.ops.attention.paged_triton import attend_paged

        attend_paged(query, pool, layer, plan, form, kv_scale, output)
    elif plan.listed_nowhere < len(output):
        output.zero_()
    if kv is not None:
        _attend_prompts(query, kv, plan, form, output)
    return output


def _attend_prompts(query: torch.Tensor, kv: StepKv, plan: DevicePlan, form: AttentionForm, output: torch.Tensor) -> None:
    if plan.prompts is not None:
        attend_planned(query, kv, plan.prompts, form, output)
    for run in plan.fresh:
        attended = attend_run(query, kv.key, kv.value, run, plan.settings, form.scale)
        output[run.first : run.first + run.count * run.length] = attended
    for run in plan.ragged:
        own = slice(run.first, run.first + run.tokens)
        output[own] = attend_ragged(query, kv.key, kv.value, run, form.scale)[own]
    for run in plan.chunks:
        output[run.first : run.first + run.length] = attend_chunk(query, kv, run, form.scale, plan.settings)
