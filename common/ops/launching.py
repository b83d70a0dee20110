"""Where kernels are launched: on a stream of a GPU, as host memory that stands for one has none."""

from __future__ import annotations

import contextlib
import threading
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


class OwnThread:
    """A thread that launches on one stream alone, and has entered what `launching` enters once and for all: entering and
    leaving it takes longer than launching a graph."""

    def __init__(self, device: torch.device, stream: torch.cuda.Stream | None) -> None:
        self._device = device
        self._stream = stream
        self._ident = 0

    def take(self) -> None:
        """From here on it is the calling thread, until that ends."""
        _of_thread.mode = torch.inference_mode()  # left by nobody, and forgotten with the thread
        _of_thread.mode.__enter__()
        if self._stream is not None:
            torch.cuda.set_device(self._device)
            torch.cuda.set_stream(self._stream)
        self._ident = threading.get_ident()

    def launching(self) -> contextlib.AbstractContextManager[None]:
        """As the function of this name, in any thread."""
        if threading.get_ident() == self._ident:
            return contextlib.nullcontext()
        return launching(self._device, self._stream)


_of_thread = threading.local()
