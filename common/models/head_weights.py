"""Loads a head that drafts from its target's hidden states, with what its folder leaves to the target."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from common.models.decoder import Decoder
from common.models.head_config import HeadSpec
from common.models.head_folder import HeadFiles, check_head
from common.models.reduced_vocabulary import target_ids
from common.models.weights.errors import WeightsError
from common.models.weights.expected import TARGET_OFFSETS
from common.ops.cpu_int8.weights import LANES, unpack_int8
from common.ops.linear.weight import LinearWeight


@dataclass(slots=True, frozen=True)
class HeadTensors:
    """float32. fc: [hidden, 3 · hidden]. qkv: [(heads + 2 · kv_heads) · head_dim, 2 · hidden]. output: [hidden, heads ·
    head_dim]. gate_up: [2 · intermediate, hidden], the gate first. down: [hidden, intermediate]. lm_head: [draft_vocab,
    hidden]. Norms: [hidden]. ids: int64 [draft_vocab], the target's id of each row of lm_head, rising. embedding: [vocab,
    hidden] in the target's dtype."""

    spec: HeadSpec
    fc: torch.Tensor
    embedding_norm: torch.Tensor
    feature_norm: torch.Tensor
    qkv: torch.Tensor
    output: torch.Tensor
    mlp_norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    norm: torch.Tensor
    lm_head: torch.Tensor
    ids: torch.Tensor
    embedding: torch.Tensor


def load_head(head: HeadFiles, target: Decoder, target_name: str) -> HeadTensors:
    """:raises ConfigError: if the head does not fit the target, or its file is damaged."""
    spec, shapes, prefix = check_head(head, target.config, target_name)
    try:
        with safe_open(head.path / "model.safetensors", framework="pt") as file:
            opened: Any = file
            found = {name: opened.get_tensor(name) for name in shapes}
    except (OSError, SafetensorError) as error:
        raise WeightsError(f"the head {head.name} can't be read: {error}", param="head") from error
    offsets = found.pop(TARGET_OFFSETS, torch.zeros(spec.draft_vocab_size, dtype=torch.int64))
    ids = target_ids(offsets, spec.vocab_size)
    tensors = {name: tensor.float() for name, tensor in found.items()}
    layer = {name.removeprefix(prefix).removesuffix(".weight"): tensor for name, tensor in tensors.items()}
    return HeadTensors(
        spec=spec,
        fc=layer["fc"],
        embedding_norm=layer["input_layernorm"],
        feature_norm=layer["hidden_norm"],
        qkv=torch.cat([layer[f"self_attn.{name}_proj"] for name in "qkv"]),
        output=layer["self_attn.o_proj"],
        mlp_norm=layer["post_attention_layernorm"],
        gate_up=torch.cat((layer["mlp.gate_proj"], layer["mlp.up_proj"])),
        down=layer["mlp.down_proj"],
        norm=layer["norm"],
        lm_head=head_rows(target, ids) if spec.head_from_target else layer["lm_head"],
        ids=ids,
        embedding=target.embedding if spec.embedding_from_target else layer["embed_tokens"],
    )


def head_rows(target: Decoder, ids: torch.Tensor) -> torch.Tensor:
    """Return those rows of the target's output head, float32 [ids, hidden]."""
    if target.config.tie_embeddings:
        return target.embedding[ids.to(target.device)].float()
    return _rows(target.head, ids.to(target.device))


def _rows(weight: LinearWeight, ids: torch.Tensor) -> torch.Tensor:
    """Tiles hold `LANES` rows; no more of them are unpacked than are wanted."""
    if weight.format == "plain":
        return weight.data[ids].float()
    if weight.format == "fp8" and weight.scale is not None and weight.scale.ndim == 1:
        return weight.data[ids].float() * weight.scale[ids][:, None]
    tiles, lanes = torch.unique(ids // LANES, return_inverse=True)
    places = lanes * LANES + ids % LANES
    if weight.int8 is not None:
        scale = weight.int8.scale.view(-1, LANES)[tiles].flatten()
        chosen = weight.int8._replace(tiles=weight.int8.tiles[tiles], scale=scale)
        return unpack_int8(chosen, LANES * len(tiles), weight.in_features)[places]
    if weight.format != "tiles":
        raise WeightsError(f"rows of a head in the format {weight.format} can't be taken", param="head")
    rows = weight.data[tiles].transpose(1, 2).reshape(-1, weight.data.shape[1])
    return rows[places].float()
