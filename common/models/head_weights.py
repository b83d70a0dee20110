"""Loads a head that drafts from its target's hidden states, with what its folder leaves to the target."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from common.models.decoder import Decoder
from common.models.head_config import HeadSpec
from common.models.head_folder import HeadFiles, HeldHead, check_head
from common.models.head_tensors import EMBEDDING, LM_HEAD, further_prefix, head_names
from common.models.reduced_vocabulary import are_all, target_ids
from common.models.weights.errors import WeightsError
from common.models.weights.expected import TARGET_OFFSETS
from common.ops.cpu_int8.weights import LANES, unpack_int8
from common.ops.drafting.head_layer_tensors import HeadLayerTensors
from common.ops.linear.weight import LinearWeight


@dataclass(slots=True, frozen=True)
class HeadTensors:
    """float32, where nothing else is said.

    fc: [hidden, spec.fc_inputs]; of an MTP layer, the columns of the feature come first.
    layers: the first one's attention has `spec.qkv_inputs` inputs, the others' `spec.hidden_size`.
    lm_head: [draft_vocab, hidden]; or the target's, as it is packed, where the head proposes from all of its rows.
    ids: int64 [draft_vocab], the target's id of each row of lm_head, each once.
    embedding: [vocab, hidden], in the target's dtype.
    Norms: [hidden].
    """

    spec: HeadSpec
    fc: torch.Tensor
    embedding_norm: torch.Tensor
    feature_norm: torch.Tensor
    layers: tuple[HeadLayerTensors, ...]
    norm: torch.Tensor
    lm_head: torch.Tensor | LinearWeight
    ids: torch.Tensor
    embedding: torch.Tensor


def load_head(head: HeadFiles, target: Decoder, target_name: str) -> HeadTensors:
    """:raises ConfigError: if the head does not fit the target, or its file is damaged."""
    held = check_head(head, target.config, target_name)
    spec, prefix, found = held.spec, held.prefix, _read(head, held)
    offsets = found.pop(TARGET_OFFSETS, torch.zeros(spec.draft_vocab_size, dtype=torch.int64))
    ids = target_ids(offsets, spec.vocab_size)
    names, tensors = head_names(spec.kind, prefix), {name: tensor.float() for name, tensor in found.items()}

    def weight(name: str) -> torch.Tensor:
        return tensors[f"{name}.weight"]

    def layer(prefix: str, input_norm: str) -> HeadLayerTensors:
        biases = [tensors[f"{prefix}self_attn.{name}_proj.bias"] for name in "qkv"] if spec.qkv_bias else []
        return HeadLayerTensors(
            input_norm=weight(input_norm) if input_norm else None,
            qkv=torch.cat([weight(f"{prefix}self_attn.{name}_proj") for name in "qkv"]),
            qkv_bias=torch.cat(biases) if biases else None,
            output=weight(f"{prefix}self_attn.o_proj"),
            mlp_norm=weight(f"{prefix}post_attention_layernorm"),
            gate_up=torch.cat((weight(f"{prefix}mlp.gate_proj"), weight(f"{prefix}mlp.up_proj"))),
            down=weight(f"{prefix}mlp.down_proj"),
        )

    further = (further_prefix(number) for number in range(1, spec.num_layers))
    return HeadTensors(
        spec=spec,
        fc=weight(names.fc),
        embedding_norm=weight(names.embedding_norm),
        feature_norm=weight(names.feature_norm),
        layers=(layer(prefix, names.input_norm), *(layer(name, f"{name}input_layernorm") for name in further)),
        norm=weight(names.norm),
        lm_head=_lm_head(target, ids) if spec.head_from_target else tensors[LM_HEAD],
        ids=ids,
        embedding=target.embedding if spec.embedding_from_target else tensors[EMBEDDING],
    )


def _read(head: HeadFiles, held: HeldHead) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    try:
        for path in dict.fromkeys(held.paths.values()):
            with safe_open(path, framework="pt") as file:
                opened: Any = file
                found |= {name: opened.get_tensor(name) for name, holder in held.paths.items() if holder == path}
    except (OSError, SafetensorError) as error:
        raise WeightsError(f"{head.title} can't be read: {error}", param="head") from error
    return found


def _lm_head(target: Decoder, ids: torch.Tensor) -> torch.Tensor | LinearWeight:
    """The target's rows `ids`. Where these are all, nothing is copied."""
    config = target.config
    is_whole = config.vocab_size == config.head_size and are_all(ids, config.vocab_size)
    return target.head if is_whole else head_rows(target, ids)


def lm_head_rows(tensors: HeadTensors) -> torch.Tensor:
    """Return a head's lm_head, float32 [draft_vocab, hidden]."""
    lm_head = tensors.lm_head
    if isinstance(lm_head, torch.Tensor):
        return lm_head
    return _rows(lm_head, torch.arange(lm_head.out_features, device=lm_head.data.device))


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
