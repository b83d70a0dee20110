"""Weights in GGUF files: dequantised while loading, or, those of linears on a GPU, as they are stored.

Two things of llama.cpp's are undone here, so that the decoder sees Hugging Face's tensors: names, and where
`paired_rows` says so (the `llama` architecture) the order of rows in the Q and K projections (llama.cpp rotates neighbouring
pairs, we rotate halves; see `LlamaModel.permute` in its convert_hf_to_gguf.py). A file without `output.weight` ties it to the
embedding.

On a GPU the file's bytes are copied and dequantised there; the types that matter most are done in torch (`gguf_blocks`), the
rest by the `gguf` package on the CPU.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Collection
from pathlib import Path

import torch
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize as gguf_dequantize

from common.models.config import ModelConfig
from common.models.formats.gguf import can_group_blocks, groups_of_blocks
from common.models.formats.groups import Groups
from common.models.weights.gguf_blocks import can_dequantise, dequantise_blocks
from common.models.weights.gguf_tensors import bytes_of, map_files, read_tensors, without_layers
from common.models.weights.source import WeightsError
from common.models.weights.upload import Upload

_FLOATS = {
    GGMLQuantizationType.F32: torch.float32,
    GGMLQuantizationType.F16: torch.float16,
    GGMLQuantizationType.BF16: torch.bfloat16,
}


_OF_METADATA = ("rope_factors_short.weight", "rope_factors_long.weight")
"""What `load_config` reads."""


class GgufWeights:
    """A `WeightSource` over the mapped files of the model whose first file is `path`.

    :raises InvalidGguf: if a file is damaged. :raises WeightsError: if it holds a tensor type that can't be dequantised.
    """

    def __init__(self, path: Path, config: ModelConfig) -> None:
        self._config = config
        self.holds_fp8 = False
        files = map_files(path)
        self._tensors = without_layers(read_tensors(path, files), config.drafting)
        with warnings.catch_warnings():  # here, not in `read`: it is for the whole process and all its threads
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")  # nobody writes to it
            self._files = [torch.from_numpy(file) for file in files]
        for name in _OF_METADATA:
            self._tensors.pop(name, None)
        if embedding := self._tensors.get("model.embed_tokens.weight"):
            self._tensors.setdefault("lm_head.weight", embedding)
        self.groups: Collection[str] = frozenset(
            name for name, tensor in self._tensors.items() if name.endswith("_proj.weight") and can_group_blocks(tensor.kind)
        )
        """The linears of the layers that stay quantised on a GPU."""
        self.shapes = {name: tensor.shape for name, tensor in self._tensors.items()}

    def read_groups(self, name: str, upload: Upload) -> Groups:
        """:raises WeightsError: if scales are not finite."""
        tensor = self._tensors[name]
        found = groups_of_blocks(upload(bytes_of(tensor, self._files)), tensor.kind, tensor.shape)
        if not bool(found.scales.isfinite().all()):
            raise WeightsError(f"{name} holds a scale that is NaN or infinite")
        heads = self._permuted_heads(name)
        return found.map_rows(lambda rows: _unpermute(rows, heads)) if heads else found

    def size_bytes(self, name: str) -> int:
        return self._tensors[name].num_bytes

    def read(self, name: str, upload: Upload) -> torch.Tensor:
        """:raises WeightsError: if quantised weights are not finite."""
        tensor = self._tensors[name]
        values = dequantize(bytes_of(tensor, self._files), tensor.kind, tensor.shape, upload)
        # NaN and infinity stay what they are in a sum
        if tensor.kind not in _FLOATS and not bool(values.sum(dtype=torch.float32).isfinite()):
            raise WeightsError(f"{name} holds a scale that is NaN or infinite")
        heads = self._permuted_heads(name)
        return _unpermute(values, heads) if heads else values

    def _permuted_heads(self, name: str) -> int:
        """The heads whose rows llama.cpp has reordered in this tensor; 0: none."""
        if not self._config.names.paired_rows:
            return 0
        return self._config.num_heads if ".q_proj." in name else self._config.num_kv_heads if ".k_proj." in name else 0


def dequantize(data: torch.Tensor, kind: GGMLQuantizationType, shape: tuple[int, ...], upload: Upload) -> torch.Tensor:
    """data: uint8, the tensor's bytes. Returns [*shape] on `upload.device`: in `upload.dtype`, or as stored if that is
    F32, F16 or BF16.

    :raises WeightsError: for a type that the gguf package can't dequantise.
    """
    if dtype := _FLOATS.get(kind):
        return upload(data.view(dtype)).view(shape)
    if can_dequantise(kind):
        return dequantise_blocks(upload(data), kind, upload.dtype).view(shape)
    try:
        rows = data.view(math.prod(shape[:-1]), -1).numpy()
        return upload(torch.from_numpy(gguf_dequantize(rows, kind)).to(upload.dtype)).view(shape)
    except NotImplementedError as error:
        raise WeightsError(f"GGUF tensors of type {kind.name} can't be dequantised") from error


def _unpermute(rows: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Rows of neighbouring pairs → rows of halves, per head."""
    pairs = rows.view(num_heads, rows.shape[0] // num_heads // 2, 2, *rows.shape[1:])
    return pairs.transpose(1, 2).reshape(rows.shape)
