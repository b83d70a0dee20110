"""What `bench.engine.check` found: comparisons side by side, in memory that is NaN before."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait

import torch

from bench.common.table import markdown
from common.ops import backend


class Checks:
    """Collects what was compared; `worst` are errors as a share of what is allowed."""

    def __init__(self, device: torch.device, *, one_by_one: bool = False) -> None:
        self.device = device
        self.broken = False  # the GPU answers no more
        self.count: dict[str, int] = {}
        self.worst: dict[str, tuple[float, str]] = {}
        self.wrong: list[str] = []
        self._lock = threading.Lock()
        # kernels are compiled side by side: a compiler spends most of its time outside the interpreter's lock
        backend.ready_for_threads()
        self._threads = ThreadPoolExecutor(os.cpu_count()) if device.type == "cuda" and not one_by_one else None
        self._running: list[Future[None]] = []

    def random(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(shape, device=self.device).to(dtype)

    def close(self, op: str, case: str, found: torch.Tensor, wanted: torch.Tensor, tolerance: float) -> None:
        """Allowed: `tolerance` of the largest number that is wanted."""
        found, wanted = found.double(), wanted.double().to(found.device)
        allowed = tolerance * max(wanted.abs().max().item(), 1e-6)
        error = (found - wanted).abs().max().item() / allowed
        self._note(op, case, error, finite=bool(found.isfinite().all()))

    def same(self, op: str, case: str, found: torch.Tensor, wanted: torch.Tensor) -> None:
        equal = found.shape == wanted.shape and bool((found.view(torch.uint8) == wanted.view(torch.uint8)).all())
        self._note(op, case, 0.0 if equal else 2.0, finite=True)

    def attempt(self, op: str, case: str, check: Callable[[], None]) -> None:
        """On a GPU, some time until `finish`."""

        def run() -> None:
            if self.broken:
                return
            try:
                with torch.inference_mode():
                    check()
            except Exception as error:
                self.fail(op, case, error)

        if self._threads is None:
            run()
        else:
            self._running.append(self._threads.submit(run))

    def fail(self, op: str, case: str, error: Exception) -> None:
        """What does not run is as wrong as what is off."""
        with self._lock:
            self.count[op] = self.count.get(op, 0) + 1
            self.wrong.append(f"{op}, {case}: {type(error).__name__}: {str(error)[:300]}")
        self.broken = self.broken or not backend.gpu_answers()

    def finish(self) -> None:
        wait(self._running)
        self._running.clear()

    def _note(self, op: str, case: str, error: float, *, finite: bool) -> None:
        with self._lock:
            self.count[op] = self.count.get(op, 0) + 1
            if error > self.worst.get(op, (-1.0, ""))[0]:
                self.worst[op] = (error, case)
            if not finite or not error <= 1.0:
                self.wrong.append(f"{op}, {case}: {'NaN or infinite' if not finite else f'{error:.2f} of what is allowed'}")

    def table(self) -> str:
        rows = [
            (op, str(count), f"{self.worst.get(op, (0.0, ''))[0]:.3f}", self.worst.get(op, (0.0, ""))[1])
            for op, count in self.count.items()
        ]
        return markdown(("op", "checks", "worst, of allowed", "where"), rows)
