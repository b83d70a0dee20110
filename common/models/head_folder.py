"""Folders of heads that draft from a target's hidden states (EAGLE-3): what they say, whether they fit, which are shipped.

A folder has `config.json` and `model.safetensors`; docs/heads.md describes both. Everything that can be wrong is found here,
from the files alone: `penstock up` asks before it starts anything. Torch-free.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from common.models.json_files import read_object
from common.models.naming import local_path
from common.models.source import ModelFiles
from common.models.spec import ModelSpec
from common.models.weights.errors import WeightsError
from common.models.weights.expected import TARGET_OFFSETS, Shapes
from common.models.weights.offsets import check_offsets
from common.protocol.errors import ConfigError

ARCHITECTURE = "LlamaForCausalLMEagle3"
SHIPPED = Path(__file__).parent / "heads"
"""A folder for each head that comes with the package."""
STATES = 3
"""Hidden states of the target that a feature is made of."""
_MULTIPLE = 16
"""The hidden size must be a multiple of this: of the lanes of `ops.cpu_int8`."""
_FLOATS = {"F32": 4, "BF16": 2, "F16": 2}


class HeadSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A head as its config.json describes it. layers: before which layers of the target its hidden states are taken, rising;
    the target's number of layers stands for behind the last one. target: (name, revision) of the model it was trained for."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float
    rms_eps: float
    vocab_size: int
    draft_vocab_size: int
    layers: tuple[int, ...]
    embedding_from_target: bool
    head_from_target: bool
    target: tuple[str, str]


class HeadFiles(NamedTuple):
    """A head on this machine. `name`: the folder's."""

    name: str
    path: Path
    spec: HeadSpec


def find_head(setting: str, target: ModelFiles) -> HeadFiles | None:
    """Return the head that `--head` means: a folder's, or with `auto` the one that is shipped for the target; None for none.

    :raises ConfigError: if the folder has no config.json of a head.
    """
    if setting == "off":
        return None
    if setting != "auto":
        return open_head(local_path(setting))
    for path in sorted(SHIPPED.glob("*/config.json")):
        head = open_head(path.parent)
        if head.spec.target == (target.name, target.revision):
            return head
    return None


def open_head(folder: Path) -> HeadFiles:
    """:raises ConfigError: if the folder has no config.json of a head."""
    if not folder.is_dir():
        raise ConfigError(f"the head {folder} is no folder: give one with config.json and model.safetensors", param="head")
    return HeadFiles(folder.resolve().name, folder, _read_spec(read_object(folder / "config.json"), folder))


def _read_spec(config: Mapping[str, Any], folder: Path) -> HeadSpec:
    def wrong(what: str) -> ConfigError:
        return ConfigError(f"{folder / 'config.json'}: {what}", param="head")

    def number(name: str, kind: type = int, default: object = None) -> Any:
        value: Any = default if config.get(name) is None else config[name]
        if not _is_positive(value) or (kind is int and value != int(value)):
            raise wrong(f"{name} must be a positive number, not {str(value)[:40]!r}")
        return kind(value)

    def fields(name: str) -> dict[str, Any]:
        value = config.get(name) or {}
        if not isinstance(value, dict):
            raise wrong(f"{name} must be an object, not {str(value)[:40]!r}")
        return value

    if config.get("architectures") != [ARCHITECTURE]:
        raise wrong(f"architectures must be [{ARCHITECTURE!r}]; other models draft as --draft-model")
    rope = fields("rope_parameters")
    if any(each.get("rope_type", "default") != "default" for each in (fields("rope_scaling"), rope)):
        raise wrong("rope_scaling is not supported in a head")
    layers = config.get("eagle_aux_hidden_state_layer_ids")
    if not isinstance(layers, list) or len(layers) != STATES or sorted(set(map(str, layers))) != sorted(map(str, layers)):
        raise wrong(f"eagle_aux_hidden_state_layer_ids must be {STATES} different layers")
    if any(not isinstance(layer, int) or layer < 0 for layer in layers) or sorted(layers) != layers:
        raise wrong("eagle_aux_hidden_state_layer_ids must be rising numbers of layers")
    heads, hidden = number("num_attention_heads"), number("hidden_size")
    target = fields("target")
    return HeadSpec(
        hidden_size=hidden,
        intermediate_size=number("intermediate_size"),
        num_heads=heads,
        num_kv_heads=number("num_key_value_heads", default=heads),
        head_dim=number("head_dim", default=hidden // heads),
        rope_theta=number("rope_theta", float, rope.get("rope_theta", 10000.0)),
        rms_eps=number("rms_norm_eps", float, 1e-6),
        vocab_size=number("vocab_size"),
        draft_vocab_size=number("draft_vocab_size"),
        layers=tuple(layers),
        embedding_from_target=config.get("embedding_from_target") is True,
        head_from_target=config.get("head_from_target") is True,
        target=(str(target.get("name", "")), str(target.get("revision", ""))),
    )


def _is_positive(value: object) -> bool:
    """Return whether a value of a JSON file is a positive number that a float can hold."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value <= sys.float_info.max


def head_shapes(spec: HeadSpec) -> Shapes:
    """Return every tensor that the file must hold, by the names of published EAGLE-3 checkpoints."""
    hidden, middle = spec.hidden_size, spec.intermediate_size
    query, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    shapes: Shapes = {
        "fc.weight": (hidden, STATES * hidden),
        "midlayer.input_layernorm.weight": (hidden,),
        "midlayer.hidden_norm.weight": (hidden,),
        "midlayer.self_attn.q_proj.weight": (query, 2 * hidden),
        "midlayer.self_attn.k_proj.weight": (kv, 2 * hidden),
        "midlayer.self_attn.v_proj.weight": (kv, 2 * hidden),
        "midlayer.self_attn.o_proj.weight": (hidden, query),
        "midlayer.post_attention_layernorm.weight": (hidden,),
        "midlayer.mlp.gate_proj.weight": (middle, hidden),
        "midlayer.mlp.up_proj.weight": (middle, hidden),
        "midlayer.mlp.down_proj.weight": (hidden, middle),
        "norm.weight": (hidden,),
        TARGET_OFFSETS: (spec.draft_vocab_size,),
    }
    if not spec.head_from_target:
        shapes["lm_head.weight"] = (spec.draft_vocab_size, hidden)
    if not spec.embedding_from_target:
        shapes["embed_tokens.weight"] = (spec.vocab_size, hidden)
    return shapes


def check_head(head: HeadFiles, target: ModelSpec, target_name: str) -> None:
    """Check that a head fits its target, and that its file holds what it must: shapes, and numbers that are finite.

    :raises ConfigError: why it can't draft.
    """
    spec = head.spec

    def wrong(what: str) -> ConfigError:
        return ConfigError(f"the head {head.name} {what}", param="head")

    for what, ours, theirs in (
        ("vocabulary", spec.vocab_size, target.vocab_size),
        ("hidden size", spec.hidden_size, target.hidden_size),
    ):
        if ours != theirs:
            raise wrong(f"is for a {what} of {ours}, and {target_name} has {theirs}")
    if spec.layers[-1] > target.num_layers:
        raise wrong(f"reads hidden states of layer {spec.layers[-1]}, and {target_name} has {target.num_layers} layers")
    if spec.hidden_size % _MULTIPLE or spec.num_heads % spec.num_kv_heads or spec.head_dim % 2:
        raise wrong(f"has sizes that are not supported: a hidden size that is no multiple of {_MULTIPLE}, or odd heads")
    if spec.draft_vocab_size > spec.vocab_size:
        raise wrong(f"has a draft_vocab_size of {spec.draft_vocab_size}, more than its vocabulary of {spec.vocab_size}")
    try:
        _check_file(head.path / "model.safetensors", head_shapes(spec), spec)
    except ConfigError as error:
        raise wrong(str(error)) from error
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise wrong(f"can't be read: {head.path / 'model.safetensors'}: {error}") from error


def _check_file(path: Path, shapes: Shapes, spec: HeadSpec) -> None:
    data = np.memmap(path, np.uint8, mode="r")
    length = int.from_bytes(data[:8].tobytes(), "little")
    header: dict[str, Any] = json.loads(data[8 : 8 + length].tobytes())
    if not isinstance(header, dict):
        raise ValueError("its header is no JSON object")
    for name, shape in shapes.items():
        entry = header.get(name)
        if entry is None:
            raise ConfigError(f"lacks the tensor {name}")
        if tuple(entry["shape"]) != shape:
            raise ConfigError(f"has {name} of {entry['shape']}, and {list(shape)} is what its config.json says")
        begin, end = (8 + length + offset for offset in entry["data_offsets"])
        raw = data[begin:end]
        item = 8 if name == TARGET_OFFSETS else _FLOATS.get(entry["dtype"], 0)
        if (name == TARGET_OFFSETS) != (entry["dtype"] == "I64") or len(raw) != item * int(np.prod(shape)):
            raise ConfigError(f"has {name} of type {entry['dtype']}, or not all of it")
        if name == TARGET_OFFSETS:
            try:
                check_offsets(np.frombuffer(raw.tobytes(), np.int64), spec.vocab_size)
            except WeightsError as error:
                raise ConfigError(f"can't be used: {error}") from error
        elif not _is_finite(raw, entry["dtype"]):
            raise ConfigError(f"has {name} with numbers that are NaN or infinite")


def _is_finite(raw: np.ndarray[Any, np.dtype[np.uint8]], dtype: str) -> bool:
    kind, exponent = {"F32": ("<u4", 0x7F80_0000), "BF16": ("<u2", 0x7F80), "F16": ("<u2", 0x7C00)}[dtype]
    bits = np.frombuffer(raw.tobytes(), kind)
    return not bool(((bits & exponent) == exponent).any())
