"""From mapped file memory to a device: through pinned staging buffers, on a stream of its own.

A copy from pageable memory runs at a few GB/s and blocks its stream; pinned memory at 55 GB/s, but pinning the files' pages
themselves takes longer than reading them. So each reading thread fills one small pinned buffer while the other is copied.
"""

from __future__ import annotations

import threading

import numpy as np
import torch

STAGING_BYTES = 16 << 20
"""Of one buffer. Candidates, and how they compare: `python -m bench.load`. 0: no staging, pageable copies."""


class Upload:
    """`upload(tensor)`: the tensor on `device`. Safe to call from several threads; on a CPU it is the tensor itself.

    `dtype`: what the tensors will be used in; a source that has to convert anyway converts to it. `consumer`: the stream of
    the thread that made this, on which memory is allocated and tensors are used.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device = device
        self.dtype = dtype
        self._local = threading.local()
        self.consumer = torch.cuda.current_stream(device) if device.type == "cuda" else None

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        """tensor: on the CPU, any dtype. When this returns, the copy is complete for every stream."""
        if self.consumer is None:
            return tensor
        if not STAGING_BYTES:
            return tensor.to(self.device)
        staging: _Staging | None = getattr(self._local, "staging", None)
        if staging is None:
            staging = self._local.staging = _Staging(self.device, self.consumer)
        return staging.copy(tensor.contiguous())


class _Staging:
    """One thread's two pinned buffers and its stream."""

    def __init__(self, device: torch.device, consumer: torch.cuda.Stream) -> None:
        self._device = device
        self._consumer = consumer
        self._stream = torch.cuda.Stream(device)
        self._buffers = [torch.empty(STAGING_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        self._copied = [torch.cuda.Event() for _ in self._buffers]

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        result = torch.empty(tensor.shape, dtype=tensor.dtype, device=self._device)
        if not tensor.numel():
            return result
        source = tensor.reshape(-1).view(torch.uint8)
        target = result.view(-1).view(torch.uint8)
        # the allocator may give memory that kernels on the consumer's stream still read
        self._stream.wait_stream(self._consumer)
        with torch.cuda.stream(self._stream):
            for turn, start in enumerate(range(0, len(source), STAGING_BYTES)):
                buffer, copied = self._buffers[turn % 2], self._copied[turn % 2]
                piece = source[start : start + STAGING_BYTES]
                copied.synchronize()
                # numpy copies without the interpreter's lock and without torch's thread pool
                np.copyto(buffer[: len(piece)].numpy(), piece.numpy())
                target[start : start + len(piece)].copy_(buffer[: len(piece)], non_blocking=True)
                copied.record(self._stream)
        self._stream.synchronize()
        return result
