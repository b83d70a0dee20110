"""The attention of a step on a GPU: what its layers call, planned over the step's buffer."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from common.engine.gpu.block_tables import BlockTables
from common.engine.gpu.prompt_plans import forms_of, run_prompts, with_prompt_kernel
from common.engine.gpu.step_buffers import Fields, StepShape
from common.engine.layer_group import GroupedAttention, LayerGroup
from common.models.attention import DeviceAttention
from common.models.blocks.attention import Attention
from common.models.decoder import Decoder
from common.ops.attention.form import FormKind
from common.ops.attention.settings import AttentionSettings
from common.ops.attention.work import AttentionWorkspace, plan_device_attention
from common.ops.attention.work_list import DeviceBatch, DeviceRow
from common.ops.kv.forms import KvTarget


class StepAttention:
    """longest: positions of a sequence at most."""

    def __init__(
        self,
        decoder: Decoder,
        groups: Sequence[LayerGroup],
        tables: BlockTables,
        *,
        longest: int,
        settings: AttentionSettings,
    ) -> None:
        self.settings = with_prompt_kernel(settings, decoder)
        self._decoder = decoder
        self._groups = groups
        self._tables = tables
        self._workspace = AttentionWorkspace(groups[0].pool.device)
        self._ropes = {rope: table.table(longest) for rope, table in decoder.ropes.items()}
        self._kinds = [forms_of(decoder, group.layers) for group in groups]
        self._kv_forms = [decoder.kv_form(group.pool.dtype, group.layers) for group in groups]

    def plan(self, fields: Fields[torch.Tensor], shape: StepShape, rows: Sequence[Sequence[DeviceRow]] = ()) -> Attention:
        """Plan a step whose inputs are in `fields`. rows: of each cache group, for steps that are not captured."""
        planned = [self._plan(fields, shape, group, rows[group] if rows else None) for group in range(len(self._groups))]
        return planned[0] if len(planned) == 1 else GroupedAttention(self._groups, planned)

    def plan_prompts(self, token_budget: int, max_context: int) -> None:
        """Have libraries that compute prompts plan their lengths."""
        plain = [kinds[FormKind()] for kinds in self._kinds if FormKind() in kinds]
        if plain:  # which is all that libraries can do
            longest = min(token_budget, max_context)
            self.settings = run_prompts(self.settings, self._decoder, plain[0].scale, longest, max_context)

    def _plan(
        self, fields: Fields[torch.Tensor], shape: StepShape, group: int, rows: Sequence[DeviceRow] | None
    ) -> DeviceAttention:
        pool, dtype = self._groups[group].pool, self._decoder.dtype
        batch = DeviceBatch(
            query_starts=fields.query_starts,
            context_lens=fields.context_lens,
            block_ids=self._tables.ids,
            block_starts=fields.block_starts[group],
            max_queries=shape.max_queries,
            num_tokens=shape.tokens,
            rows=rows,
            max_blocks=self._tables.slots.max_ids,
        )
        plans = {
            kind: plan_device_attention(
                batch,
                pool,
                self._decoder.config.num_heads,
                self._workspace,
                settings=self.settings,
                dtype=dtype,
                form=form,
            )
            for kind, form in self._kinds[group].items()
        }
        target = KvTarget(pool, fields.slots[group], batch_invariant=self.settings.batch_invariant, **self._kv_forms[group])
        return DeviceAttention(target, plans, fields.positions, self._ropes, dtype)
