"""Folders of heads that draft from a target's hidden states (EAGLE-3): what they say, whether they fit, which are shipped.

A folder has `config.json` and `model.safetensors`; docs/heads.md describes both. Everything that can be wrong is found here,
from the files alone: `penstock up` asks before it starts anything. Torch-free.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from common.models.head_config import STATES, HeadSpec, read_spec, usual_layers
from common.models.json_files import read_object
from common.models.naming import hub_id, local_path, model_name
from common.models.source import ModelFiles, resolve
from common.models.spec import ModelSpec
from common.models.weights.errors import WeightsError
from common.models.weights.expected import TARGET_OFFSETS, Shapes
from common.models.weights.offsets import check_offsets
from common.protocol.errors import ConfigError, UnknownModel

SHIPPED = Path(__file__).parent / "heads"
"""A folder for each head that comes with the package."""
_PREFIXES = "midlayer.", "layers.0."
"""What the names of the layer's tensors begin with: EAGLE-3's, and those of the speculators library."""
_EMBEDDING, _HEAD = "embed_tokens.weight", "lm_head.weight"
_MULTIPLE = 16
"""The hidden size must be a multiple of this: of the lanes of `ops.cpu_int8`."""
_FLOATS = {"F32": 4, "BF16": 2, "F16": 2}


class HeadFiles(NamedTuple):
    """A head on this machine. `name`: the folder's, or its Hugging Face id."""

    name: str
    path: Path
    spec: HeadSpec


def find_head(setting: str, target: ModelFiles) -> HeadFiles | None:
    """Return the head that `--head` means: a folder's or a Hugging Face id's, or with `auto` the one that is shipped for the
    target; None for none.

    :raises ConfigError: if it is not here, or has no config.json of a head that is supported.
    """
    if setting == "off":
        return None
    if setting != "auto":
        return open_head(_folder_of(setting), model_name(setting))
    for path in sorted(SHIPPED.glob("*/config.json")):
        head = open_head(path.parent)
        if head.spec.target == (target.name, target.revision):
            return head
    return None


def _folder_of(setting: str) -> Path:
    path = local_path(setting)
    if path.exists() or hub_id(setting) is None:
        return path
    try:
        return resolve(setting).path
    except UnknownModel as error:
        raise ConfigError(str(error), param="head") from error


def open_head(folder: Path, name: str = "") -> HeadFiles:
    """name: what it is called; the folder's name if that is empty.

    :raises ConfigError: if the folder has no config.json of a head that is supported.
    """
    if not folder.is_dir():
        raise ConfigError(f"the head {folder} is no folder: give one with config.json and model.safetensors", param="head")
    return HeadFiles(
        name or folder.resolve().name, folder, read_spec(read_object(folder / "config.json"), str(folder / "config.json"))
    )


class HeldHead(NamedTuple):
    """A head that fits its target. spec: with nothing left open. shapes: of the tensors that are read, by their names in the
    file. prefix: what the layer's names begin with there."""

    spec: HeadSpec
    shapes: Shapes
    prefix: str


def head_shapes(spec: HeadSpec, prefix: str = _PREFIXES[0]) -> Shapes:
    """Return every tensor that the file of a head with nothing left open must hold."""
    hidden, middle = spec.hidden_size, spec.intermediate_size
    query, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    shapes: Shapes = {
        "fc.weight": (hidden, STATES * hidden),
        f"{prefix}input_layernorm.weight": (hidden,),
        f"{prefix}hidden_norm.weight": (hidden,),
        f"{prefix}self_attn.q_proj.weight": (query, 2 * hidden),
        f"{prefix}self_attn.k_proj.weight": (kv, 2 * hidden),
        f"{prefix}self_attn.v_proj.weight": (kv, 2 * hidden),
        f"{prefix}self_attn.o_proj.weight": (hidden, query),
        f"{prefix}post_attention_layernorm.weight": (hidden,),
        f"{prefix}mlp.gate_proj.weight": (middle, hidden),
        f"{prefix}mlp.up_proj.weight": (middle, hidden),
        f"{prefix}mlp.down_proj.weight": (hidden, middle),
        "norm.weight": (hidden,),
        TARGET_OFFSETS: (spec.draft_vocab_size,),
    }
    if not spec.head_from_target:
        shapes[_HEAD] = (spec.draft_vocab_size, hidden)
    if not spec.embedding_from_target:
        shapes[_EMBEDDING] = (spec.vocab_size, hidden)
    return shapes


def check_head(head: HeadFiles, target: ModelSpec, target_name: str) -> HeldHead:
    """Check that a head fits its target, and that its file holds what it must: shapes, and numbers that are finite. A head that
    can propose every token need not say which.

    :raises ConfigError: why it can't draft.
    """
    path = head.path / "model.safetensors"

    def wrong(what: str) -> ConfigError:
        return ConfigError(f"the head {head.name} {what}", param="head")

    try:
        data, header, begin = _opened(path)
        held = _held(head.spec, target, header)
        _check_fits(held.spec, target, target_name)
        _check_file(data, header, begin, held)
    except ConfigError as error:
        raise wrong(str(error)) from error
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        pickled = not path.exists() and (head.path / "pytorch_model.bin").exists()
        hint = "; pytorch_model.bin is not read: convert it to safetensors" if pickled else ""
        raise wrong(f"can't be read: {path}: {error}{hint}") from error
    return held


def _held(spec: HeadSpec, target: ModelSpec, header: Mapping[str, Any]) -> HeldHead:
    """Settle what the head's config.json leaves open: by its target, and by what its file holds."""
    spec = msgspec.structs.replace(
        spec,
        layers=spec.layers or usual_layers(target.num_layers),
        embedding_from_target=_EMBEDDING not in header if spec.embedding_from_target is None else spec.embedding_from_target,
        head_from_target=_HEAD not in header if spec.head_from_target is None else spec.head_from_target,
    )
    prefix = next((prefix for prefix in _PREFIXES if any(name.startswith(prefix) for name in header)), _PREFIXES[0])
    shapes = head_shapes(spec, prefix)
    if TARGET_OFFSETS not in header and spec.draft_vocab_size == spec.vocab_size:
        del shapes[TARGET_OFFSETS]
    return HeldHead(spec, shapes, prefix)


def _check_fits(spec: HeadSpec, target: ModelSpec, target_name: str) -> None:
    """:raises ConfigError: if it is for another target."""
    for what, ours, theirs in (
        ("vocabulary", spec.vocab_size, target.vocab_size),
        ("hidden size", spec.hidden_size, target.hidden_size),
    ):
        if ours != theirs:
            raise ConfigError(f"is for a {what} of {ours}, and {target_name} has {theirs}")
    if spec.layers[-1] > target.num_layers:
        raise ConfigError(f"reads hidden states of layer {spec.layers[-1]}, and {target_name} has {target.num_layers} layers")
    if sorted(set(spec.layers)) != list(spec.layers) or spec.layers[0] < 0:
        raise ConfigError(f"does not say which layers it reads, and {target_name} has only {target.num_layers}")
    if spec.hidden_size % _MULTIPLE or spec.num_heads % spec.num_kv_heads or spec.head_dim % 2:
        raise ConfigError(f"has sizes that are not supported: a hidden size that is no multiple of {_MULTIPLE}, or odd heads")
    if spec.draft_vocab_size > spec.vocab_size:
        raise ConfigError(f"has a draft_vocab_size of {spec.draft_vocab_size}, more than its vocabulary of {spec.vocab_size}")


def _opened(path: Path) -> tuple[np.ndarray[Any, np.dtype[np.uint8]], dict[str, Any], int]:
    """Return a safetensors file, its header, and where its data begins."""
    data = np.memmap(path, np.uint8, mode="r")
    length = int.from_bytes(data[:8].tobytes(), "little")
    header: dict[str, Any] = json.loads(data[8 : 8 + length].tobytes())
    if not isinstance(header, dict):
        raise ValueError("its header is no JSON object")
    return data, header, 8 + length


def _check_file(data: np.ndarray[Any, np.dtype[np.uint8]], header: Mapping[str, Any], begin: int, held: HeldHead) -> None:
    for name, shape in held.shapes.items():
        entry = header.get(name)
        if entry is None:
            raise ConfigError(f"lacks the tensor {name}")
        if tuple(entry["shape"]) != shape:
            raise ConfigError(f"has {name} of {entry['shape']}, and {list(shape)} is what its config.json says")
        first, end = (begin + offset for offset in entry["data_offsets"])
        raw = data[first:end]
        item = 8 if name == TARGET_OFFSETS else _FLOATS.get(entry["dtype"], 0)
        if (name == TARGET_OFFSETS) != (entry["dtype"] == "I64") or len(raw) != item * int(np.prod(shape)):
            raise ConfigError(f"has {name} of type {entry['dtype']}, or not all of it")
        if name == TARGET_OFFSETS:
            try:
                check_offsets(np.frombuffer(raw.tobytes(), np.int64), held.spec.vocab_size)
            except WeightsError as error:
                raise ConfigError(f"can't be used: {error}") from error
        elif not _is_finite(raw, entry["dtype"]):
            raise ConfigError(f"has {name} with numbers that are NaN or infinite")


def _is_finite(raw: np.ndarray[Any, np.dtype[np.uint8]], dtype: str) -> bool:
    kind, exponent = {"F32": ("<u4", 0x7F80_0000), "BF16": ("<u2", 0x7F80), "F16": ("<u2", 0x7C00)}[dtype]
    bits = np.frombuffer(raw.tobytes(), kind)
    return not bool(((bits & exponent) == exponent).any())
