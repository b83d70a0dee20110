"""The number of the last step that a GPU has run, written by the GPU into a word of shared memory.

The word is in a page of a segment, which is pinned for it. The copy that writes it is behind a step's kernels in their stream,
so whoever reads the number finds all KV of that step in the GPU's memory, no sooner and hardly later, and no thread of this
process has to run for it.
"""

from __future__ import annotations

import contextlib
import mmap
from typing import Any

import numpy as np
import torch

from common.runtime import logs

log = logs.get("engine")


class DeviceProgress:
    """word: uint64 [1]; its memory must stay mapped until `close`. Call `write` in the stream of the steps.

    :raises RuntimeError: the page can't be pinned.
    """

    def __init__(self, word: np.ndarray, device: torch.device) -> None:
        self._pointer, self._device = word.ctypes.data // mmap.PAGESIZE * mmap.PAGESIZE, device
        self._step = torch.zeros(1, dtype=torch.int64, device=device)
        self._word = torch.from_numpy(word.view(np.int64))
        self._runtime: Any = torch.cuda.cudart()
        with torch.cuda.device(device):
            code = int(self._runtime.cudaHostRegister(self._pointer, mmap.PAGESIZE, 0))
            if code:
                with contextlib.suppress(RuntimeError):
                    self._step.fill_(0)  # the next kernel to be launched would raise that error: this one
                raise RuntimeError(f"cudaHostRegister: error {code}")
        self._is_open = True

    def write(self, step: int) -> None:
        """Write `step` when all that was launched before in this stream has run."""
        if self._is_open:
            self._step.fill_(step)
            self._word.copy_(self._step, non_blocking=True)

    def close(self) -> None:
        """Let go of the page once nothing is written any more. Harmless twice, and if the GPU is lost."""
        if self._is_open:
            self._is_open = False
            try:
                torch.cuda.synchronize(self._device)
                self._runtime.cudaHostUnregister(self._pointer)
            except RuntimeError as error:
                log.debug("progress_not_closed", reason=str(error))


def open_progress(word: np.ndarray, device: torch.device) -> DeviceProgress | None:
    """Return None where the GPU can't write the word: a thread that takes the results of steps does so then, a little later."""
    if device.type != "cuda":
        return None
    try:
        return DeviceProgress(word, device)
    except RuntimeError as error:
        log.warning("progress_not_pinned", reason=str(error), consequence="the last part of a hand-off is noticed later")
        return None
