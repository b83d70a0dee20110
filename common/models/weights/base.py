"""Named tensors from a file, and the loader that hands each of them out once.

Names are Hugging Face's (`model.layers.0.self_attn.q_proj.weight`), whatever the format. A tensor that is missing, has another
shape, or that the model has no use for is an error: half-right weights would still generate text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import torch

from common.protocol.errors import ConfigError

Progress = Callable[[int, int], None]
"""Called with (done_bytes, total_bytes) of the files after each tensor."""


class WeightsError(ConfigError):
    """The weights don't fit the model's configuration, or can't be read."""


class WeightSource(Protocol):
    """Tensors of a model on disk."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]: ...

    def size_bytes(self, name: str) -> int:
        """Bytes that `name` takes in the file."""
        ...

    def read(self, name: str) -> torch.Tensor:
        """The tensor in a floating dtype, dequantised if need be; it may share the file's memory.

        :raises WeightsError: if it can't be read.
        """
        ...


class WeightLoader:
    """Takes tensors out of `source` one by one, in `dtype`, and at the end complains about what nobody took."""

    def __init__(self, source: WeightSource, dtype: torch.dtype, on_progress: Progress | None = None) -> None:
        self.source = source
        self.dtype = dtype
        self._on_progress = on_progress or (lambda done, total: None)
        self._left = set(source.shapes)
        self._total = sum(source.size_bytes(name) for name in source.shapes)
        self._done = 0

    def has(self, name: str) -> bool:
        return name in self.source.shapes

    def take(self, name: str, *shape: int) -> torch.Tensor:
        """`name` as a tensor of `shape`.

        :raises WeightsError: if it is missing or has another shape.
        """
        found = self.source.shapes.get(name)
        if found is None:
            raise WeightsError(f"the weights lack {name}")
        if found != shape:
            raise WeightsError(f"{name} has shape {list(found)}, the configuration asks for {list(shape)}")
        tensor = self.source.read(name).to(self.dtype)
        self.skip(name)
        return tensor

    def skip(self, name: str) -> None:
        """`name` is known and not needed."""
        if name in self._left:
            self._left.discard(name)
            self._done += self.source.size_bytes(name)
            self._on_progress(self._done, self._total)

    def finish(self) -> None:
        """:raises WeightsError: if tensors are left over: this is another model than its configuration says."""
        if self._left:
            names = sorted(self._left)
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise WeightsError(f"the weights hold tensors that this model does not have: {', '.join(names[:3])}{more}")
