"""How much of a GPU is left for KV once the weights are in, and the pools themselves."""

from __future__ import annotations

import torch

from common.cache.spec import CacheLayout
from common.engine.gpu.step_buffers import device_bytes
from common.engine.layer_group import LayerGroup
from common.models.config import ModelConfig
from common.models.spec import ExpertsSpec
from common.ops.attention.settings import DEFAULT_SETTINGS
from common.protocol.errors import ConfigError

_FIXED_BYTES = 3 << 29
"""The CUDA context, graphs, cuBLAS, compiled kernels, what the allocator can't hand out again."""

_STORAGE = {"fp8": torch.float8_e4m3fn}


def workspace_bytes(model: ModelConfig, max_running: int, token_budget: int, *, copies_prefixes: bool = False) -> int:
    """Return what a step of `token_budget` tokens of prompts beside `max_running` decoding rows holds at most, rather too much
    than too little. copies_prefixes: whether a prompt's whole prefix is copied, as `ops.attention.prompt` wants it."""
    qkv = (model.num_heads + 2 * model.num_kv_heads) * model.head_dim
    per_token = 4 * (4 * model.hidden_size + 2 * qkv + 3 * model.intermediate_size)
    answers = max((layer.mlp.router.top_k for layer in model.layers if isinstance(layer.mlp, ExpertsSpec)), default=0)
    per_token += 4 * answers * model.hidden_size  # of a token's experts
    per_sample = 4 * 4 * model.vocab_size  # logits of a graph and of a step without one, adjusted logits, counts of penalties
    copied = min(model.max_context, DEFAULT_SETTINGS.max_prefix) if copies_prefixes else DEFAULT_SETTINGS.max_piece
    piece = 6 * copied * model.num_kv_heads * model.head_dim  # K and V, as stored and as multiplied
    return _FIXED_BYTES + (token_budget + max_running) * per_token + max_running * per_sample + piece


def kv_room(*, free: int, total: int, used: int, utilization: float, workspace: int) -> int:
    """Bytes for KV. This worker may have `utilization` of `total`, of which its weights have `used`; `free` is what all
    workers on the GPU have left.

    :raises ConfigError: if nothing is left.
    """
    room = min(int(utilization * total) - used, free) - workspace
    if room <= 0:
        raise ConfigError(
            f"no GPU memory is left for KV: this worker may use {int(utilization * total) >> 20} MiB (gpu_memory_utilization "
            f"{utilization}), {free >> 20} of {total >> 20} MiB are free, the weights have {used >> 20} MiB and a step needs "
            f"{workspace >> 20} MiB: is another process on this GPU? Otherwise raise the share, or lower token_budget",
            param="gpu_memory_utilization",
        )
    return room


def measured_kv_room(device: torch.device, utilization: float, workspace: int) -> int:
    """`kv_room` of `device` as it is now, with the weights loaded. :raises ConfigError: see there."""
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    used = torch.cuda.memory_reserved(device)
    return kv_room(free=free, total=total, used=used, utilization=utilization, workspace=workspace)


def room_beside_tables(room: int, layout: CacheLayout, max_context: int, max_running: int, token_budget: int) -> int:
    """Return what is left of `room` for KV once a step's inputs and the block tables of a cache of `layout` are in; at least 1.

    layout: as it would be with all of `room`: the less KV there is, the smaller are the tables.
    """
    counts = [num_blocks for _, num_blocks in layout.pools]
    longest_blocks = -(-min(max_context, layout.longest_sequence + layout.block_tokens) // layout.block_tokens)
    return max(1, room - device_bytes(counts, longest_blocks, max_running, token_budget))


def new_groups(model: ModelConfig, layout: CacheLayout, kv: str, device: torch.device) -> list[LayerGroup]:
    """Return the cache groups with a pool each, an allocation of its own: [num_blocks, layers, 2, block_tokens, kv_heads,
    head_dim] of `Precision.kv`.

    :raises ConfigError: if they don't fit.
    """
    dtype = _STORAGE.get(kv) or getattr(torch, kv)
    made: list[LayerGroup] = []
    for group, num_blocks in layout.pools:
        layers = [member.layer for member in group.members]
        shape = (num_blocks, len(layers), 2, group.block_tokens, model.num_kv_heads, model.head_dim)
        try:
            # zeros, not anything: what a masked load brings in must be a number
            made.append(LayerGroup(torch.zeros(shape, dtype=dtype, device=device), layers, group.retention))
        except torch.OutOfMemoryError as error:
            size = layout.memory_bytes
            raise ConfigError(f"{size >> 20} MiB of KV don't fit onto {device}: lower kv_cache_mb or num_blocks") from error
    return made
