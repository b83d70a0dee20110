"""Look through the scales of a GGUF file's quantised tensors, and its rotary factors, for NaN and infinity. Torch-free.

Blocks hold their scales between their codes, so that all pages of the file are read, but only the byte of a scale that says
whether it is finite is looked at: the upper byte of a float16 has its whole exponent, all ones in NaN and infinity.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES
from gguf.constants import GGMLQuantizationType as Type
from numpy.typing import NDArray

from common.models.weights.errors import WeightsError
from common.models.weights.expected import ROPE_FACTORS
from common.models.weights.gguf_tensors import GgufTensor, Mapped, bytes_of, map_files, read_tensors

_FLOAT16_SCALES: dict[Type, tuple[int, ...]] = {
    **dict.fromkeys((Type.Q4_0, Type.Q5_0, Type.Q8_0, Type.IQ4_NL, Type.IQ4_XS), (0,)),
    **dict.fromkeys((Type.IQ1_S, Type.IQ2_XXS, Type.IQ2_XS, Type.IQ2_S, Type.IQ3_XXS, Type.IQ3_S), (0,)),
    **dict.fromkeys((Type.Q4_1, Type.Q5_1, Type.Q4_K, Type.Q5_K), (0, 2)),
    Type.Q2_K: (80, 82),
    Type.Q3_K: (108,),
    Type.Q6_K: (208,),
    Type.TQ1_0: (52,),
    Type.TQ2_0: (64,),
}
"""Where a block has float16 scales and minima, in bytes from its start (ggml's `ggml-common.h`)."""
_FLOATS = {Type.F32: np.float32, Type.F16: np.float16}
_EXPONENT = 0x7C
_E8M0_NAN = 0xFF
_IQ1_M_SCALES = 48
_AT_ONCE = 1 << 20
_THREADS = 4

_Bytes = NDArray[Any]


def check_gguf_values(path: Path) -> None:
    """Check the scales of every quantised tensor of the model whose first file is `path`.

    :raises InvalidGguf: if a file is damaged or cut short. :raises WeightsError: if a scale is NaN or infinite.
    """
    files = map_files(path)
    found = read_tensors(path, files)
    if (factors := found.get(ROPE_FACTORS)) is not None:
        _check_factors(path, files, factors)
    tensors = {name: tensor for name, tensor in found.items() if _has_scales(tensor.kind)}
    with ThreadPoolExecutor(_THREADS) as threads:  # each waits for the disk by itself
        wrong = threads.map(lambda tensor: _is_wrong(files, tensor), tensors.values())
        for name, is_wrong in zip(tensors, wrong, strict=True):
            if is_wrong:
                threads.shutdown(wait=False, cancel_futures=True)
                raise WeightsError(f"{path}: {name} holds a scale that is NaN or infinite")


def _check_factors(path: Path, files: Sequence[Mapped], tensor: GgufTensor) -> None:
    """:raises WeightsError: unless they are floats by which frequencies can be divided."""
    if (dtype := _FLOATS.get(tensor.kind)) is None:
        raise WeightsError(f"{path}: {ROPE_FACTORS} is {tensor.kind.name}; F32 was expected")
    values = np.frombuffer(bytes_of(tensor, files).tobytes(), dtype)
    if not (np.isfinite(values) & (values > 0)).all():
        raise WeightsError(f"{path}: {ROPE_FACTORS} holds a factor that is not above 0")


def _has_scales(kind: Type) -> bool:
    return kind in _FLOAT16_SCALES or kind in (Type.IQ1_M, Type.MXFP4)


def _is_wrong(files: Sequence[Mapped], tensor: GgufTensor) -> bool:
    blocks: _Bytes = bytes_of(tensor, files).reshape(-1, GGML_QUANT_SIZES[tensor.kind][1])
    return any(_any_wrong(blocks[start : start + _AT_ONCE], tensor.kind) for start in range(0, len(blocks), _AT_ONCE))


def _any_wrong(blocks: _Bytes, kind: Type) -> bool:
    if kind is Type.MXFP4:
        return bool((blocks[:, 0] == _E8M0_NAN).any())
    if kind is Type.IQ1_M:  # four bits of the scale are the upper ones of each of four words
        third, fourth = (blocks[:, _IQ1_M_SCALES + 2 * word + 1] for word in (2, 3))
        return _any_not_finite((fourth & 0xF0) | (third >> 4))
    return any(_any_not_finite(blocks[:, at + 1]) for at in _FLOAT16_SCALES[kind])


def _any_not_finite(upper: _Bytes) -> bool:
    """upper: the upper bytes of float16 numbers."""
    return bool(((upper & _EXPONENT) == _EXPONENT).any())
