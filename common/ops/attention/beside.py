"""Decoding rows beside a long prompt: they read memory while the prompt computes, on a stream of their own and on few SMs.

stream of the step   ─ qkv ─┬─ cuDNN over the prompt ──────────┬─ output projection ─
second stream               └─ decode: a persistent kernel ────┘
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

_BYTES_PER_SM_S = 60e9
"""What one SM reads of KV, alone: an H200's 132 together reach 4e12."""
_FLOPS_S = 550e12
"""What cuDNN reaches over a long prompt on an H200."""


class Beside:
    """Where the rows of a work list run beside a prompt. num_programs: of the persistent kernel, one per SM."""

    def __init__(self, num_programs: int, stream: torch.cuda.Stream | None) -> None:
        self.num_programs = num_programs
        self._stream = stream

    @contextmanager
    def forked(self, device: torch.device) -> Iterator[None]:
        """Launch what is inside on the second stream, after what the current one has launched."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self._stream):
            yield

    def join(self) -> None:
        """Let the current stream wait for what was launched inside `forked`."""
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)


def sms_beside(kv_bytes: int, prompt_flops: float, sms: int) -> int:
    """Return on how many SMs rows that read `kv_bytes` are done when the prompt is; 0 if that is more than a quarter.

    kv_bytes, prompt_flops: of one layer.
    """
    needed = -(-kv_bytes * _FLOPS_S // (_BYTES_PER_SM_S * max(prompt_flops, 1.0)))
    return int(needed) if needed <= sms // 4 else 0
