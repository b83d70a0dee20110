"""Reads tensors ahead of the decoder that takes them, in threads, within a budget of bytes.

The order is the decoder's: embedding, layer by layer, the rest. One that is asked for before its turn is read at once, so
the order only matters for speed. On a CPU nothing is read ahead: the files' own pages are the weights until they are packed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from common.models.weights.source import WeightSource
from common.models.weights.upload import Upload

AHEAD_BYTES = 2 << 30

_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_EXPERT = re.compile(r"\.experts\.(\d+)\.")


class Prefetch:
    """`read` each name at most once, all from one thread. Whatever was read ahead and not asked for goes with `close`."""

    def __init__(self, source: WeightSource, upload: Upload, names: Iterable[str], *, threads: int) -> None:
        """`threads` 0: nothing is read ahead."""
        self.upload = upload
        self._source = source
        self._waiting = dict.fromkeys(sorted(names, key=_turn))  # in order, and quick to take from anywhere
        self._futures: dict[str, Future[torch.Tensor]] = {}
        self._ahead_bytes = 0
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="weights") if threads else None

    def read(self, name: str) -> torch.Tensor:
        """The tensor, on the device, as the source gives it.

        :raises WeightsError: see `WeightSource.read`.
        """
        if self._pool is None:
            return self._source.read(name, self.upload)
        future = self._futures.get(name) or self._submit(self._pool, name)
        self._fill(self._pool)
        tensor = future.result()
        self.discard(name)
        return tensor

    def discard(self, name: str) -> None:
        """`name` is not wanted any more."""
        future = self._futures.pop(name, None)
        if future is not None:
            future.cancel()
            self._ahead_bytes -= self._bytes(name)
        elif name in self._waiting:
            del self._waiting[name]

    def close(self) -> None:
        """Waits for the reads under way. Harmless twice."""
        self._waiting.clear()
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
            self._pool = None
        self._futures.clear()

    def _fill(self, pool: ThreadPoolExecutor) -> None:
        while self._waiting and self._ahead_bytes < AHEAD_BYTES:
            self._submit(pool, next(iter(self._waiting)))

    def _submit(self, pool: ThreadPoolExecutor, name: str) -> Future[torch.Tensor]:
        if name in self._waiting:
            del self._waiting[name]
        self._ahead_bytes += self._bytes(name)
        future = self._futures[name] = pool.submit(self._read, name)
        return future

    def _bytes(self, name: str) -> int:
        """What `name` takes on the device, about."""
        return math.prod(self._source.shapes[name]) * self.upload.dtype.itemsize

    def _read(self, name: str) -> torch.Tensor:
        """In a thread, as if in the one that waits for it: the same device, and kernels in the order of the same stream."""
        with torch.cuda.stream(self.upload.consumer):
            return self._source.read(name, self.upload)


def _turn(name: str) -> tuple[int, int, int, str]:
    if match := _LAYER.match(name):
        expert = _EXPERT.search(name)
        return 1, int(match[1]), int(expert[1]) if expert else -1, name
    return (0 if "embed_tokens" in name else 2), 0, 0, name
