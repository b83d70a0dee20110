"""Writes a trained draft model as the folder that README.md beside this file describes, and reads such a folder back.

python -m recipes.draft.export build/draft build/draft/model
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from common.models.json_files import read_object_if_any
from common.models.source import DEFAULT_MODEL, resolve
from common.protocol.errors import ConfigError
from recipes.draft.draft_model import DraftModel
from recipes.draft.llama import LlamaShape
from recipes.draft.target import Target, load_target
from recipes.draft.trainer import CHECKPOINT, read_checkpoint
from recipes.draft.vocabulary import d2t_of

WEIGHTS = "model.safetensors"


def config_of(shape: LlamaShape, num_ids: int, target: Target, *, complete: bool) -> dict[str, Any]:
    """Return the contents of config.json. num_ids: of the draft vocabulary."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **msgspec.to_builtins(shape),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
        "torch_dtype": "bfloat16",
        "draft_vocab_size": num_ids,
        "embedding_from_target": not complete,
        "head_from_target": not complete,
        "target": {
            "name": target.name,
            "revision": target.revision,
            "vocab_size": target.shape.vocab_size,
            "hidden_size": target.shape.hidden_size,
        },
    }


def export(folder: Path, draft: DraftModel, target: Target, *, complete: bool = False) -> int:
    """Write config.json and model.safetensors. Returns the bytes of the weights.

    `complete`: with the target's embedding and the rows of its head, for loaders that take nothing from the target.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {f"model.{name}": tensor.to(torch.bfloat16) for name, tensor in draft.model.state_dict().items()}
    if complete:
        tensors["model.embed_tokens.weight"] = draft.embedding.to(torch.bfloat16)
        tensors["lm_head.weight"] = draft.head.to(torch.bfloat16)
    tensors["d2t"] = torch.from_numpy(d2t_of(draft.ids.cpu().numpy()))
    config = config_of(draft.shape, len(draft.ids), target, complete=complete)
    (folder / "config.json").write_bytes(msgspec.json.format(msgspec.json.encode(config)))
    save_file({name: tensor.contiguous().cpu() for name, tensor in tensors.items()}, folder / WEIGHTS, {"format": "pt"})
    return (folder / WEIGHTS).stat().st_size


def load_folder(folder: Path, target: Target) -> DraftModel:
    """Read an exported folder as a draft model in fp32.

    :raises ConfigError: if it is damaged, or is not for this target.
    """
    config = read_object_if_any(folder / "config.json")
    try:
        shape = msgspec.convert({name: config.get(name) for name in LlamaShape.__struct_fields__}, LlamaShape)
        tensors = load_file(folder / WEIGHTS)
        d2t = tensors.pop("d2t")
    except (OSError, SafetensorError, msgspec.ValidationError, KeyError) as error:
        raise ConfigError(f"{folder} is not a draft model: {error}") from error
    ids = checked_ids(folder, config, shape, d2t, target)
    embedding = tensors.pop("model.embed_tokens.weight", target.embedding).to(target.head)
    head = tensors.pop("lm_head.weight", target.head[ids]).to(target.head)
    draft = DraftModel(shape, embedding, head, ids).to(target.head.device)
    try:
        draft.model.load_state_dict({name.removeprefix("model."): tensor for name, tensor in tensors.items()})
    except RuntimeError as error:
        raise ConfigError(f"{folder} is damaged: {error}") from error
    return draft


def checked_ids(folder: Path, config: Mapping[str, Any], shape: LlamaShape, d2t: torch.Tensor, target: Target) -> torch.Tensor:
    """Return the draft vocabulary, int64. :raises ConfigError: if the folder is damaged, or is not for this target."""
    if (shape.vocab_size, shape.hidden_size) != (target.shape.vocab_size, target.shape.hidden_size):
        raise ConfigError(f"{folder} is not for {target.name}: its vocabulary or hidden size is another")
    ids = (d2t + torch.arange(len(d2t))).to(target.head.device)
    if len(ids) != config.get("draft_vocab_size") or not len(ids) or int(ids.min()) < 0 or int(ids.max()) >= shape.vocab_size:
        raise ConfigError(f"{folder} is damaged: d2t does not fit draft_vocab_size and vocab_size")
    if len(ids.unique()) < len(ids):
        raise ConfigError(f"{folder} is damaged: d2t names an id twice")
    return ids


def draft_of_checkpoint(path: Path, target: Target) -> tuple[DraftModel, dict[str, Any]]:
    """Return the draft model of a checkpoint, and what else is in it (`settings`, `progress`).

    :raises ConfigError: if the checkpoint is damaged, or of another target.
    """
    state = read_checkpoint(path, target.head.device)
    if state["target"] != {"name": target.name, "revision": target.revision}:
        raise ConfigError(f"{path} is of another target: {state['target']}")
    weights: dict[str, torch.Tensor] = state["model"]
    shape = msgspec.structs.replace(
        target.shape,
        num_hidden_layers=sum(name.endswith("input_layernorm.weight") for name in weights),
        intermediate_size=len(weights["layers.0.mlp.gate_proj.weight"]),
    )
    ids = state["ids"].to(target.head.device)
    draft = DraftModel(shape, target.embedding, target.head[ids], ids).to(target.head.device)
    draft.model.load_state_dict(weights)
    return draft, state


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="recipes.draft.export", description=__doc__)
    parser.add_argument("folder", type=Path, help="holds the checkpoint")
    parser.add_argument("out", type=Path, help="where the draft model is written")
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--complete", action="store_true", help="write the embedding and the head, too")
    arguments = parser.parse_args(argv)
    try:
        target = load_target(resolve(arguments.model), torch.device("cpu"), torch.float32)
        draft, _ = draft_of_checkpoint(arguments.folder / CHECKPOINT, target)
    except ConfigError as error:
        raise SystemExit(str(error)) from error
    size = export(arguments.out, draft, target, complete=arguments.complete)
    print(f"{arguments.out}: {size / 1e6:.1f} MB of weights, {len(draft.ids)} ids")


if __name__ == "__main__":
    main()
