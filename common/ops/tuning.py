"""Which of several implementations is fastest for a shape: measured once, kept on disk, looked up ever after.

A `Table` maps keys (strings that name an op, a shape and a bucket of rows) to candidates (small frozen dataclasses). `choose`
looks in memory, where the file was read to, and else takes the first candidate, the default: it never measures, so a step never
waits for one. `tune` measures what the table does not know yet, when a model is loaded, and writes the file.

The file is named after the GPU, Triton's version and a hash of the sources that define candidates and kernels: an edit or an
update measures again.
"""

from __future__ import annotations

import dataclasses
import fcntl
import hashlib
import json
import math
import os
import re
import statistics
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch

from common.ops import backend
from common.ops.kept import cache_directory, write_atomically

MAX_ERROR = 0.1
"""Of a candidate's result, relative: several times what quantised activations cost."""

C = TypeVar("C")


@dataclass(slots=True)
class Case(Generic[C]):
    """What to decide. run(candidate, i) launches it once, on the i-th set of inputs; launches: of one measurement.

    extra_s(candidate): time that it costs elsewhere, such as in the op that reads its partial sums. kernel(candidate): equal
    for candidates, of all cases that are tuned together, that need the same compiled code; None where nothing is compiled.
    expected(): the first set of inputs computed in a way that needs none of these kernels. A candidate that gives something
    else is not an option: a compiler's fault must not win by being fast. None: results are not compared.
    """

    key: str
    candidates: list[C]
    run: Callable[[C, int], object]
    launches: int = 20
    extra_s: Callable[[C], float] = lambda _: 0.0
    kernel: Callable[[C], object] = lambda candidate: candidate
    expected: Callable[[], torch.Tensor] | None = None


@dataclass(slots=True)
class Tuned:
    """seconds: by key and candidate, for reports. failed: what did not compile or run, and why."""

    seconds: dict[str, dict[Any, float]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)


class Table(Generic[C]):
    """name: of the file, with what `suffix` says. make: from a candidate's fields to the candidate."""

    def __init__(self, name: str, make: Callable[..., C], sources: Iterable[Path]) -> None:
        self._name = name
        self._make = make
        self._sources = tuple(sources)
        self._known: dict[str, C] = {}
        self._path: Path | None = None

    def open(self, device: torch.device) -> None:
        """Reads the file of this GPU, if there is one; an unreadable one counts as none."""
        self._path = cache_directory() / f"{self._name}-{device_name(device)}-{_digest(self._sources)}.json"
        self._known = {}
        try:
            found: dict[str, dict[str, Any]] = json.loads(self._path.read_text())
            self._known = {key: self._make(**fields) for key, fields in found.items()}
        except (OSError, ValueError, TypeError, AttributeError):
            return

    @property
    def is_open(self) -> bool:
        return self._path is not None

    def get(self, key: str) -> C | None:
        return self._known.get(key)

    def put(self, key: str, candidate: C) -> None:
        self._known[key] = candidate

    def choose(self, key: str, candidates: Sequence[C]) -> C:
        """The fastest known of `candidates`, or the first."""
        known = self._known.get(key)
        return known if known is not None and known in candidates else candidates[0]

    def exclusive(self) -> AbstractContextManager[None]:
        """While what this table lacks is measured: see `exclusive` below."""
        return exclusive(self._name)

    def save(self) -> None:
        """Writes the file, atomically, if it can be written: what another process wrote meanwhile is kept, ours goes first."""
        if self._path is None:
            return
        try:
            found = json.loads(self._path.read_text())
        except (OSError, ValueError):
            found = {}
        merged: dict[str, Any] = found if isinstance(found, dict) else {}
        merged |= {key: dataclasses.asdict(candidate) for key, candidate in self._known.items()}  # pyright: ignore[reportArgumentType]
        write_atomically(self._path, json.dumps(merged, indent=1, sort_keys=True).encode())


def tune(
    table: Table[C],
    cases: Sequence[Case[C]],
    *,
    measure: Callable[[Callable[[int], object], int], float] | None = None,
    threads: int | None = None,
) -> Tuned:
    """Measures the cases that `table` does not know, and puts the fastest candidates there; the caller saves.

    Kernels are compiled first, by `threads` threads (the number of cores): a compiler spends most of its time outside the
    interpreter's lock. measure(run, launches): seconds of a launch; default a `DeviceTimer`.

    :raises RuntimeError: if a candidate broke the GPU's context; it is named.
    """
    unknown = [case for case in cases if table.get(case.key) not in case.candidates]
    tuned = Tuned()
    if not unknown:
        return tuned
    _compile(unknown, threads or os.cpu_count() or 1, tuned)
    measure = measure or DeviceTimer()
    for case in unknown:
        times: dict[Any, float] = {}
        expected = case.expected() if case.expected else None
        for candidate in case.candidates:
            name = f"{case.key} {candidate}"
            if name in tuned.failed:
                continue
            try:
                if expected is not None:
                    with poisoned():
                        found = case.run(candidate, 0)
                    _compare(found, expected)
                times[candidate] = measure(partial(case.run, candidate), case.launches) + case.extra_s(candidate)
            except Exception as error:  # a candidate too large for this GPU is not an option there
                if not backend.gpu_answers():
                    raise RuntimeError(f"{name} broke the GPU's context: {error}") from error
                tuned.failed[name] = f"{type(error).__name__}: {error}"
        if times:
            table.put(case.key, min(times, key=lambda candidate: times[candidate]))
            tuned.seconds[case.key] = times
    return tuned


def _compare(found: object, expected: torch.Tensor) -> None:
    """found: as `expected`, or partial sums of it. :raises ValueError: if they are not about the same."""
    assert isinstance(found, torch.Tensor)
    total = found.float().sum(0) if found.ndim > expected.ndim else found.float()
    size = float(expected.norm())
    if not 0 < size < math.inf:  # random codes may be anything
        return
    error = float((total - expected).norm()) / size
    if not error < MAX_ERROR:
        raise ValueError(f"its result is off by {error:.3g} of what is right")


@contextmanager
def poisoned() -> Iterator[None]:
    """`torch.empty` gives NaN meanwhile: what a kernel leaves out is no right answer of another one."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of what has no deterministic form
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = True  # pyright: ignore[reportAttributeAccessIssue]
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(False)


class DeviceTimer:
    """Times launches on the current CUDA device, in CUDA graphs that share one pool of memory.

    Captures without `torch.cuda.graph`, which collects garbage each time: 0.1 s, for a measurement of milliseconds.
    """

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()
        self._anchor = torch.cuda.CUDAGraph()  # keeps the pool while other graphs come and go
        self._capture(self._anchor, None, lambda _: torch.zeros(1, device="cuda"), 1)
        self._raise_clocks()

    def __call__(self, run: Callable[[int], object], launches: int, replays: int = 3) -> float:
        """Median seconds of a launch in a graph of `launches`; run(i) takes the i-th of several sets of inputs, so that L2
        does not hold them."""
        graph = torch.cuda.CUDAGraph()
        self._capture(graph, self._anchor.pool(), run, launches)
        times: list[float] = []
        with torch.cuda.stream(self._stream):
            graph.replay()
            for _ in range(replays):
                start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                start.record()
                graph.replay()
                end.record()
                end.synchronize()
                times.append(start.elapsed_time(end) / 1e3 / launches)
        return statistics.median(times)

    def _raise_clocks(self) -> None:
        """An idle GPU takes a while to clock up, at the cost of whichever candidate comes first."""
        with torch.cuda.stream(self._stream):
            square = torch.ones(4096, 4096, dtype=torch.bfloat16, device="cuda")
            for _ in range(500):  # a tenth of a second at full speed
                torch.mm(square, square)
            self._stream.synchronize()

    def _capture(self, graph: torch.cuda.CUDAGraph, pool: Any, run: Callable[[int], object], launches: int) -> None:
        torch.cuda.synchronize()
        with torch.cuda.stream(self._stream):
            run(0)
            self._stream.synchronize()
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                for i in range(launches):
                    run(i)
            finally:
                graph.capture_end()


@contextmanager
def exclusive(name: str) -> Iterator[None]:
    """One process measures at a time: side by side they would disturb each other, and all would measure the same. Where nothing
    can be kept, each measures by itself."""
    directory = cache_directory()
    with ExitStack() as held:
        with suppress(OSError):
            directory.mkdir(parents=True, exist_ok=True)
            lock = held.enter_context((directory / f"{name}.lock").open("w"))
            fcntl.flock(lock, fcntl.LOCK_EX)  # until it is closed, or its process ends
        yield


def _compile(cases: Sequence[Case[C]], threads: int, tuned: Tuned) -> None:
    """Runs each kernel once. One that fails, fails for every case."""
    device = torch.cuda.current_device() if torch.cuda.is_available() else None
    users: dict[object, list[tuple[Case[C], C]]] = {}
    for case in cases:
        for candidate in case.candidates:
            if (kernel := case.kernel(candidate)) is not None:
                users.setdefault(kernel, []).append((case, candidate))

    def once(sharing: list[tuple[Case[C], C]]) -> None:
        if device is not None:
            torch.cuda.set_device(device)
        case, candidate = sharing[0]
        try:
            case.run(candidate, 0)
        except Exception as error:
            for case, candidate in sharing:
                tuned.failed[f"{case.key} {candidate}"] = f"{type(error).__name__}: {error}"

    if users:
        backend.ready_for_threads()
        with ThreadPoolExecutor(min(threads, len(users))) as pool:
            list(pool.map(once, users.values()))
        if device is not None:
            torch.cuda.synchronize()


def device_name(device: torch.device) -> str:
    """As part of a file's name."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return re.sub(r"[^A-Za-z0-9.]+", "-", name)


def _digest(sources: Iterable[Path]) -> str:
    digest = hashlib.sha256(f"torch {torch.__version__}, triton {_triton_version()}".encode())
    for path in sources:
        digest.update(path.read_bytes())
    return f"triton{_triton_version()}-{digest.hexdigest()[:12]}"


def _triton_version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("triton")
    except PackageNotFoundError:
        return "none"


def launches_for(seconds: float, *, total_s: float = 1.5e-3, most: int = 100) -> int:
    """How many launches of about `seconds` make a measurement of about `total_s`."""
    return max(2, min(most, math.ceil(total_s / max(seconds, 1e-7))))
