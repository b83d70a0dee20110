"""Writes a trained EAGLE-3-style head as the folder that README.md beside this file describes, and reads such a folder back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from common.models.json_files import read_object_if_any
from common.protocol.errors import ConfigError
from recipes.draft.eagle import EagleHead
from recipes.draft.export import WEIGHTS, checked_ids, config_of
from recipes.draft.llama import LlamaShape
from recipes.draft.target import Target

LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
ARCHITECTURE = "LlamaForCausalLMEagle3"


def export_eagle(folder: Path, head: EagleHead, target: Target) -> int:
    """Write config.json and model.safetensors, with `feature_scale` folded into `fc`. Returns the bytes of the weights."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.detach().clone() for name, tensor in head.state_dict().items()}
    tensors["fc.weight"] /= tensors.pop("feature_scale")
    tensors = {name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()}
    tensors["d2t"] = head.ids - torch.arange(len(head.ids), device=head.ids.device)
    config = config_of(head.shape, len(head.ids), target, complete=False)
    config |= {"architectures": [ARCHITECTURE], LAYER_IDS: list(head.layer_ids)}
    (folder / "config.json").write_bytes(msgspec.json.format(msgspec.json.encode(config)))
    partial = folder / "model.partial"
    save_file({name: tensor.contiguous().cpu() for name, tensor in tensors.items()}, partial, {"format": "pt"})
    partial.replace(folder / WEIGHTS)
    return (folder / WEIGHTS).stat().st_size


def load_eagle(folder: Path, target: Target) -> EagleHead:
    """Read an exported folder as a head in fp32.

    :raises ConfigError: if it is damaged, or is not for this target.
    """
    config: dict[str, Any] = read_object_if_any(folder / "config.json")
    try:
        shape = msgspec.convert({name: config.get(name) for name in LlamaShape.__struct_fields__}, LlamaShape)
        layer_ids = msgspec.convert(config.get(LAYER_IDS), list[int])
        tensors = load_file(folder / WEIGHTS)
        d2t = tensors.pop("d2t")
    except (OSError, SafetensorError, msgspec.ValidationError, KeyError) as error:
        raise ConfigError(f"{folder} is not an EAGLE-3 head: {error}") from error
    ids = checked_ids(folder, config, shape, d2t, target)
    head = EagleHead(shape, layer_ids, target.embedding, target.head[ids], ids).to(ids.device)
    tensors["feature_scale"] = torch.ones_like(head.feature_scale)
    try:
        head.load_state_dict(tensors)
    except RuntimeError as error:
        raise ConfigError(f"{folder} is damaged: {error}") from error
    return head
