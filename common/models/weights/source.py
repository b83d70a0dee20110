"""Where tensors come from: what each format of weights provides to the loader. Names are Hugging Face's."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Protocol

import torch

from common.models.formats.groups import Groups
from common.models.weights.errors import WeightsError as WeightsError
from common.models.weights.upload import Upload

Progress = Callable[[int, int], None]
"""Called with (done_bytes, total_bytes) of the files after each tensor."""


class WeightSource(Protocol):
    """Tensors of a model. `read` is called from several threads where the loader reads ahead."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]: ...

    @property
    def holds_fp8(self) -> bool:
        """Are weights float8 in the files? What then isn't, is so on purpose."""
        ...

    @property
    def groups(self) -> Collection[str]:
        """Tensors that `read_groups` gives as codes and scales; `read` gives them dequantised."""
        ...

    def read_groups(self, name: str, upload: Upload) -> Groups:
        """On `upload.device`. :raises WeightsError: if it can't be read."""
        ...

    def size_bytes(self, name: str) -> int:
        """Bytes that `name` takes in the file."""
        ...

    def read(self, name: str, upload: Upload) -> torch.Tensor:
        """The tensor on `upload.device` in a floating dtype, dequantised if need be (float8 is left to the loader). On a
        CPU it may share the file's memory.

        :raises WeightsError: if it can't be read.
        """
        ...
