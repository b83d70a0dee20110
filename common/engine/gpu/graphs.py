"""Which steps run as CUDA graphs, and the graphs themselves.

A graph is captured once per shape at start; a step takes the smallest shape that it fits, padded. Steps that fit none
(long prompts, large mixtures) are launched kernel by kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from common.engine.gpu.layer_cost import LayerCost
from common.engine.gpu.step_buffers import StepShape
from common.engine.plan import StepRow

_MIXED_STEP = 128
_FEW_ROWS = 64
_MANY_ROWS = 256
_FEW_ROWS_TOKENS = 1024
_MOST_TOKENS = 2048
"""Of prompts, in a mixture with a graph. Many rows bring several prompts at once; with few rows, steps of more than 1024 tokens
have a graph where launching them takes longer than computing them."""
_LAYER_LAUNCH_S = 1.2e-3
"""Launching a layer kernel by kernel, which also takes the interpreter's lock from the thread that plans: 0.9 to 1.4 ms on some
hosts of H100s, half as long on faster ones. Where the GPU takes longer, attention to a prompt is faster without a graph, whose
kernel reads keys from the pool."""
_VERIFY_QUERIES = 8
_VERIFY_SIZES = (2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Tokens of steps that verify. Up to some hundreds a step takes hardly longer for more of them: reading weights takes the
time."""
PADDING = 16


class ShapeTable:
    """The shapes that have graphs: decoding rows, verified rows, and short prompts among decoding rows.

    `max_tokens`: no shape has more, since the step's buffers hold no more. `cost`: of a layer; None: launching is taken to be
    the faster part of steps of more than 1024 tokens with few rows.
    """

    def __init__(self, max_rows: int, max_tokens: int, *, cost: LayerCost | None = None, verify: bool = True) -> None:
        sizes = decode_sizes(max_rows)
        self.decode = [StepShape(size, size, 1, size) for size in sizes]
        largest = min(max_tokens, _VERIFY_QUERIES * max_rows) if verify else 0
        self.verify = [StepShape(size, size, _VERIFY_QUERIES, size) for size in _VERIFY_SIZES if size <= largest]
        self._cost = cost
        launched = 0 if cost is None else int(_LAYER_LAUNCH_S / cost.linears)
        self._few_rows_tokens = few = min(_MOST_TOKENS + _MIXED_STEP, max(_FEW_ROWS_TOKENS, launched))
        mixtures = {
            16: (32, 64, *range(_MIXED_STEP, few + 1, _MIXED_STEP)),
            _FEW_ROWS: range(_MIXED_STEP, few + 1, _MIXED_STEP),
            _MANY_ROWS: range(3 * _MIXED_STEP, _MOST_TOKENS + _MANY_ROWS + 1, _MIXED_STEP),
        }
        mixed = [
            StepShape(size, rows, size, rows)
            for rows, tokens in mixtures.items()
            for size in tokens
            if size <= max_tokens and rows < max(17, 4 * max_rows)
        ]
        self.mixed = sorted(mixed)

    def __iter__(self) -> Iterator[StepShape]:
        yield from (*self.decode, *self.verify, *self.mixed)

    def choose(self, rows: Sequence[StepRow]) -> StepShape | None:
        """None: no graph fits."""
        lengths = [len(row.tokens) for row in rows]
        longest, num_tokens = max(lengths), sum(lengths)
        num_samples = sum([row.num_samples for row in rows])
        if num_samples == num_tokens:
            if longest == 1:
                return next((shape for shape in self.decode if shape.tokens >= num_tokens), None)
            if longest <= _VERIFY_QUERIES:
                found = next((shape for shape in self.verify if shape.tokens >= num_tokens), None)
                if found is not None:
                    return found
        num_rows = max(len(rows), num_samples)
        if num_rows <= _FEW_ROWS and num_tokens > _FEW_ROWS_TOKENS and not self._is_launched_slowly(rows, num_tokens):
            return None
        return next((shape for shape in self.mixed if shape.tokens >= num_tokens and shape.rows >= num_rows), None)

    def _is_launched_slowly(self, rows: Sequence[StepRow], num_tokens: int) -> bool:
        """Whether launching these few rows kernel by kernel takes longer than computing them."""
        if self._cost is None or num_tokens > self._few_rows_tokens:
            return False
        return self._cost.seconds(rows) <= _LAYER_LAUNCH_S


def decode_sizes(max_rows: int) -> list[int]:
    """Rows that decode steps are padded to: at most an eighth too many from 8 on."""
    sizes = [1, 2, 4, 8]
    step = 4
    while sizes[-1] < max_rows:
        if sizes[-1] >= 16 * step:
            step *= 2
        sizes.append(sizes[-1] + step)
    return [size for size in sizes if size < max_rows] + [max_rows]


def exact_shape(rows: Sequence[StepRow]) -> StepShape:
    """For a step without a graph: its own size, tokens rounded up to what matrix kernels like."""
    num_tokens = -(-sum(len(row.tokens) for row in rows) // PADDING) * PADDING
    return StepShape(
        tokens=num_tokens,
        rows=len(rows),
        max_queries=max(len(row.tokens) for row in rows),
        samples=sum(row.num_samples for row in rows),
    )


class StepGraph:
    """A captured step; `logits` and `noted` are where it leaves them, until the next one runs."""

    def __init__(
        self,
        forward: Callable[[], tuple[torch.Tensor, Sequence[torch.Tensor]]],
        memory: tuple[int, int],
        stream: torch.cuda.Stream,
    ) -> None:
        """forward: returns logits, and what a head reads; it has run before: kernels are compiled. memory:
        `torch.cuda.graph_pool_handle()`, shared by graphs that run one at a time."""
        self._graph = torch.cuda.CUDAGraph()
        pool: Any = memory
        # not `torch.cuda.graph`, which gives all cached memory back to the driver first: sixty times a start
        with torch.cuda.stream(stream):
            stream.synchronize()
            # thread_local: what other threads of this process do meanwhile is none of this capture's business
            self._graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                logits, noted = forward()
                self.logits, self.noted = borrowed(logits), [borrowed(states) for states in noted]
                del logits, noted
            finally:
                self._graph.capture_end()

    def replay(self) -> torch.Tensor:
        self._graph.replay()
        return self.logits


def borrowed(tensor: torch.Tensor) -> torch.Tensor:
    """The same numbers, at the same address, without owning it: graphs that run one at a time then keep their logits, a
    gigabyte for all shapes of a large vocabulary, in the same memory. The graph's pool keeps it from everybody else."""
    assert tensor.is_contiguous()
    make: Any = torch._C._construct_storage_from_data_pointer
    storage = make(tensor.data_ptr(), tensor.device, tensor.nbytes)
    empty: Any = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return empty.set_(storage, 0, tensor.shape)
