"""Where kernels are launched: on a stream of a GPU, as host memory that stands for one has none."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def launching(device: torch.device, stream: torch.cuda.Stream | None) -> Iterator[None]:
    """Launch what is computed meanwhile on `stream` of `device`, without a record of it for gradients. None: where torch
    launches it anyway."""
    with torch.inference_mode():
        if stream is None:
            yield
            return
        with torch.cuda.device(device), torch.cuda.stream(stream):
            yield
