"""The tensors of a head: what each kind calls them, which shapes they have, and where they lie. Torch-free.

eagle3    model.safetensors of a folder of its own
mtp       the files of the model itself: one, or shards with an index
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from common.models.head_config import HeadKind, HeadSpec
from common.models.weights.errors import WeightsError
from common.models.weights.expected import TARGET_OFFSETS, Shapes
from common.models.weights.files import MTP_LAYERS, is_mtp, read_index, weight_files
from common.models.weights.offsets import check_offsets
from common.protocol.errors import ConfigError

EMBEDDING, LM_HEAD = "embed_tokens.weight", "lm_head.weight"
EAGLE_PREFIXES = "midlayer.", "layers.0."
"""What the names of an EAGLE-3 head's first layer begin with: its own, and those of the speculators library."""
MTP_PREFIX = f"{MTP_LAYERS}0."
"""What all names of the first MTP layer begin with."""
_FLOATS = {"F32": 4, "BF16": 2, "F16": 2}


class HeadNames(NamedTuple):
    """What a head calls its tensors, without `.weight`; the rest is named as in any decoder layer. fc: the first linear.
    embedding_norm, feature_norm: of the halves of a pair. input_norm: before attention; empty for none. norm: the last one."""

    fc: str
    embedding_norm: str
    feature_norm: str
    input_norm: str
    norm: str


def head_names(kind: HeadKind, prefix: str) -> HeadNames:
    """prefix: what the layer's names begin with."""
    if kind == "eagle3":
        return HeadNames("fc", f"{prefix}input_layernorm", f"{prefix}hidden_norm", "", "norm")
    own = ("input_proj", "token_layernorm", "hidden_layernorm", "input_layernorm", "final_layernorm")
    return HeadNames(*(f"{prefix}{name}" for name in own))


def further_prefix(layer: int) -> str:
    """Return what the names of a head's layer behind its first begin with. layer: 1 or more."""
    return f"layers.{layer}."


def head_shapes(spec: HeadSpec, prefix: str = EAGLE_PREFIXES[0]) -> Shapes:
    """Return every tensor that the files of a head with nothing left open must hold."""
    hidden, middle, names = spec.hidden_size, spec.intermediate_size, head_names(spec.kind, prefix)
    query, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    further = [further_prefix(layer) for layer in range(1, spec.num_layers)]
    norms = [names.embedding_norm, names.feature_norm, names.input_norm, names.norm]
    norms += [f"{layer}input_layernorm" for layer in further]
    norms += [f"{layer}post_attention_layernorm" for layer in (prefix, *further)]
    shapes: Shapes = {f"{names.fc}.weight": (hidden, spec.fc_inputs)}
    shapes |= {f"{norm}.weight": (hidden,) for norm in norms if norm}
    for layer in (prefix, *further):
        for name, size in zip("qkv", (query, kv, kv), strict=True):
            shapes[f"{layer}self_attn.{name}_proj.weight"] = (size, spec.qkv_inputs if layer == prefix else hidden)
            if spec.qkv_bias:
                shapes[f"{layer}self_attn.{name}_proj.bias"] = (size,)
        shapes |= {
            f"{layer}self_attn.o_proj.weight": (hidden, query),
            f"{layer}mlp.gate_proj.weight": (middle, hidden),
            f"{layer}mlp.up_proj.weight": (middle, hidden),
            f"{layer}mlp.down_proj.weight": (hidden, middle),
        }
    if spec.kind == "eagle3":
        shapes[TARGET_OFFSETS] = (spec.draft_vocab_size,)
    if not spec.head_from_target:
        shapes[LM_HEAD] = (spec.draft_vocab_size, hidden)
    if not spec.embedding_from_target:
        shapes[EMBEDDING] = (spec.vocab_size, hidden)
    return shapes


class StoredTensor(NamedTuple):
    """A tensor in a safetensors file. entry: what the file's header says of it. data: the file. begin: where its tensors do."""

    path: Path
    entry: Any
    data: NDArray[np.uint8]
    begin: int

    @property
    def dtype(self) -> str:
        return str(self.entry["dtype"])

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.entry["shape"])

    @property
    def raw(self) -> NDArray[np.uint8]:
        """Its bytes; fewer where the file is cut short."""
        first, end = (self.begin + offset for offset in self.entry["data_offsets"])
        return self.data[first:end]


def eagle_tensors(folder: Path) -> dict[str, StoredTensor]:
    """:raises OSError, ValueError: if the file can't be read."""
    return dict(_stored(folder / "model.safetensors"))


def mtp_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Return the tensors of the first MTP layer of a model's folder; none if it has none.

    :raises WeightsError, OSError, ValueError: if a file can't be read.
    """
    index = read_index(folder)
    holding = sorted({folder / file for name, file in index.items() if is_mtp(name)})
    found: dict[str, StoredTensor] = {}
    for path in holding if index else weight_files(folder):
        for name, tensor in _stored(path):
            if name.startswith(MTP_PREFIX) and index.get(name, path.name) == path.name:
                found.setdefault(name, tensor)
    return found


def _stored(path: Path) -> Iterator[tuple[str, StoredTensor]]:
    data = np.memmap(path, np.uint8, mode="r")
    length = int.from_bytes(data[:8].tobytes(), "little")
    header: dict[str, Any] = json.loads(data[8 : 8 + length].tobytes())
    if not isinstance(header, dict):
        raise ValueError("its header is no JSON object")
    for name, entry in header.items():
        if name != "__metadata__":
            yield name, StoredTensor(path, entry, data, 8 + length)


def check_plain(found: Mapping[str, StoredTensor]) -> None:
    """:raises ConfigError: if one of these tensors is quantised, or of quantised weights."""
    for name, tensor in found.items():
        if tensor.dtype not in _FLOATS:
            raise ConfigError(f"can't be read: {name} is {tensor.dtype}, and only plain floats ({', '.join(_FLOATS)}) are")


def check_tensors(found: Mapping[str, StoredTensor], shapes: Shapes, vocab_size: int) -> None:
    """Check that all of `shapes` are there, in floats that are finite, and that a reduced vocabulary is one of `vocab_size`.

    :raises ConfigError: what is wrong, as the end of a sentence.
    """
    for name, shape in shapes.items():
        tensor = found.get(name)
        if tensor is None:
            raise ConfigError(f"lacks the tensor {name}")
        if tensor.shape != shape:
            raise ConfigError(f"has {name} of {list(tensor.shape)}, and {list(shape)} is what its config.json says")
        item = 8 if name == TARGET_OFFSETS else _FLOATS.get(tensor.dtype, 0)
        if (name == TARGET_OFFSETS) != (tensor.dtype == "I64") or len(tensor.raw) != item * int(np.prod(shape)):
            raise ConfigError(f"has {name} of type {tensor.dtype}, or not all of it")
        if name == TARGET_OFFSETS:
            try:
                check_offsets(np.frombuffer(tensor.raw.tobytes(), np.int64), vocab_size)
            except WeightsError as error:
                raise ConfigError(f"can't be used: {error}") from error
        elif not _is_finite(tensor):
            raise ConfigError(f"has {name} with numbers that are NaN or infinite")


def _is_finite(tensor: StoredTensor) -> bool:
    kind, exponent = {"F32": ("<u4", 0x7F80_0000), "BF16": ("<u2", 0x7F80), "F16": ("<u2", 0x7C00)}[tensor.dtype]
    bits = tensor.raw.view(kind)
    return not bool(((bits & exponent) == exponent).any())
