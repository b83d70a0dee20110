"""Asynchronous copies between host and device: through pinned memory, in the order of the current stream."""

from __future__ import annotations

from typing import Any

import torch
from numpy.typing import NDArray


def to_device(array: NDArray[Any], device: torch.device) -> torch.Tensor:
    """Start copying a small array to the device, and return the copy."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Start copying to host memory, and return the copy, which is complete once the current stream has got there."""
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    return host.copy_(tensor, non_blocking=True)
