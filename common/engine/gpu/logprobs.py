"""Log-probabilities behind a step's graph, on their way to the host.

A sequence that asks for them asks in every step. So the kernels for the same samples of the same logits are captured in a CUDA
graph when they are launched again, and replayed from then on: two launches from Python take the host longer than the graph of a
whole step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from common.engine.gpu.pinned import to_device, to_host
from common.ops.backend import on_device
from common.ops.sampling.logprobs import token_logprobs

if TYPE_CHECKING:
    from common.ops.sampling.logprobs_triton import LogprobBuffers

_CAPTURED_AT = 3
"""Times that samples ask before a graph is worth its capture."""
_MOST_KNOWN = 24
"""Steps whose buffers and graphs are kept."""
_MOST_ASKED = 2048
"""Likeliest tokens of all samples that memory is kept for, half a megabyte. More take the GPU longer than a launch."""

_Key = tuple[int, tuple[int, ...], int, torch.dtype, bytes, int]


class Logprobs(NamedTuple):
    """Of the samples `asking`: see `ops.sampling.logprobs.token_logprobs`; in pinned memory once the step has run."""

    asking: NDArray[np.int32]
    chosen: torch.Tensor
    ids: torch.Tensor
    values: torch.Tensor


@dataclass(slots=True)
class _Known:
    """What is kept of one key. asking: the samples, on the device. answers: one for each step that may be under way, used in
    turn, with the pinned bytes that it is a view of. times: launches so far."""

    asking: torch.Tensor
    buffers: LogprobBuffers
    answers: list[tuple[torch.Tensor, Logprobs]]
    graph: torch.cuda.CUDAGraph | None = None
    times: int = 0


class LogprobLaunches:
    """sampled: int64 [max_samples], on the device, the tokens whose log-probabilities are taken. depth: steps under way at
    once, with the one that is read."""

    def __init__(self, sampled: torch.Tensor, depth: int) -> None:
        self._sampled = sampled
        self._depth = depth
        self._last: tuple[int, torch.Size, NDArray[np.int32], int, _Known] | None = None
        self._known: dict[_Key, _Known] = {}
        """By the logits' address, shape, stride and dtype, the samples that ask, and for how many tokens."""

    def launch(self, logits: torch.Tensor, asking: NDArray[np.int32], num_top: int) -> Logprobs:
        """logits: floats [samples, vocab_size]. asking: not empty."""
        from common.ops.sampling.logprobs_triton import MAX_TOP, token_logprobs_triton

        if num_top > MAX_TOP or not on_device(logits) or logits.stride(1) != 1:
            taken = token_logprobs(logits, self._sampled, to_device(asking, logits.device), num_top)
            return Logprobs(asking, *map(to_host, taken))
        num_top = min(num_top, logits.shape[1])
        known = self._again(logits, asking, num_top)
        if known is None:
            known = self._find(logits, asking, num_top)
            is_kept = len(known.answers) > 1
            self._last = (logits.data_ptr(), logits.shape, asking, num_top, known) if is_kept else None
        arguments = (logits, self._sampled, known.asking, num_top, known.buffers)
        known.times += 1
        if known.times == _CAPTURED_AT and logits.is_cuda:
            graph = torch.cuda.CUDAGraph()
            graph.capture_begin(capture_error_mode="thread_local")  # nothing is allocated meanwhile
            try:
                token_logprobs_triton(*arguments)
            finally:
                graph.capture_end()
            known.graph = graph  # a capture that failed is not replayed
        if known.graph is None:
            token_logprobs_triton(*arguments)
        else:
            known.graph.replay()
        host, answer = known.answers[known.times % len(known.answers)]
        host.copy_(known.buffers.results, non_blocking=True)
        return answer

    def _again(self, logits: torch.Tensor, asking: NDArray[np.int32], num_top: int) -> _Known | None:
        """Return what was known of the step before if this one asks for the same: its key takes longer than a launch."""
        if self._last is None:
            return None
        place, shape, asked, num_asked, known = self._last
        same = asked is asking and num_asked == num_top and logits.data_ptr() == place and logits.shape == shape
        return known if same else None

    def _find(self, logits: torch.Tensor, asking: NDArray[np.int32], num_top: int) -> _Known:
        """Return what is known of such a step, or remember it from now on, unless it is large."""
        from common.ops.sampling.logprobs_triton import LogprobBuffers, results_in

        key = (logits.data_ptr(), tuple(logits.shape), logits.stride(0), logits.dtype, asking.tobytes(), num_top)
        found = self._known.get(key)
        if found is None:
            is_kept = len(asking) * num_top <= _MOST_ASKED
            buffers = LogprobBuffers.create(len(asking), logits.shape[1], num_top, logits.device)
            hosts = [
                torch.empty_like(buffers.results, device="cpu", pin_memory=logits.is_cuda)
                for _ in range(self._depth if is_kept else 1)
            ]
            answers = [(host, Logprobs(asking, *results_in(host, len(asking), num_top))) for host in hosts]
            found = _Known(to_device(asking, logits.device), buffers, answers)
            if is_kept:
                if len(self._known) == _MOST_KNOWN:
                    self._forget(logits.device)
                self._known[key] = found
        return found

    def _forget(self, device: torch.device) -> None:
        """Everything, once what was launched has run."""
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
        self._known.clear()
        self._last = None
