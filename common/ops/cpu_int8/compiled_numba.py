"""How kernels for a CPU are compiled: without the interpreter's lock, without bounds checks, and kept between starts.

They are kept beside the GPU's, in a folder for these very sources: Numba itself looks only at the file that a kernel is in, and
would go on with old code when a file changes that the kernel is made of. Where that file is does not matter: another clone, or
another virtual environment, with the same sources loads what the first one compiled.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import itertools
import os
import secrets
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
from llvmlite import binding
from numba.core.bytecode import FunctionIdentity
from numba.core.caching import CompileResultCacheImpl, FunctionCache
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import Compiler

from common.ops.kept import cache_directory

REASSOCIATING = frozenset({"reassoc", "contract", "nsz", "nnan"})
"""Sums and maxima may be taken in the order that suits vectors: the same one for every row, since the code is the same. What
comes of a NaN is undefined."""


_SOURCES = b"".join(
    path.read_bytes()
    for pattern in ("*/*_numba.py", "cpu_int8/weights.py")
    for path in sorted(Path(__file__).parents[1].glob(pattern))
)
"""Constants of the packing are compiled in, too."""

_FOLDER = cache_directory() / f"numba-{hashlib.sha256(_SOURCES + numba.__version__.encode()).hexdigest()[:12]}"
"""Clones may have different versions of Numba, which can't read each other's files."""

COMPILING_S, SAVING_S, POLL_S = 120.0, 10.0, 0.05
"""How long a process waits for another one that compiles the same code, or saves some; how often it looks."""

FunctionIdentity._unique_ids = itertools.count(secrets.randbits(62))
"""Numba counts functions from 1 in every process, and the count is all that tells the symbols of closures apart. What two
processes kept would bear the same names for other code, and a third, that loads both, would call the one for the other
(github.com/numba/numba/issues/10486)."""


class _ClosedLibrary(JITCodeLibrary):
    """Machine code in which calls to other kernels are bound to its own copies of them.

    Numba links copies of a kernel's callees into its module as weak symbols, and optimises them there once more. The process
    that compiles the kernel has loaded each callee by itself before, and would bind the symbols to those; a process that loads
    kept code has only the copies. Both are correct, but each round of optimisation may add floats up in another order, so a
    worker that had compiled gave other bits than those that had not.
    """

    def _optimize_final_module(self) -> None:
        super()._optimize_final_module()
        for function in self._final_module.functions:
            if not function.is_declaration and function.linkage == binding.Linkage.linkonce_odr:
                function.linkage = binding.Linkage.internal


class _ClosedCompiler(Compiler):
    """Numba's compiler, into a `_ClosedLibrary`."""

    def define_pipelines(self) -> Any:
        state = self.state
        if state.library is None:
            state.library = _ClosedLibrary(state.targetctx.codegen(), state.func_id.func_qualname)
            state.library.enable_object_caching()
        return super().define_pipelines()


class _KeptBySource:
    """Say where Numba keeps what it compiled of a kernel. Numba's own locators name the folder after the file's path."""

    def __init__(self, kernel: Callable[..., Any], file: str) -> None:
        self._py_file = file
        self._line = kernel.__code__.co_firstlineno

    @classmethod
    def from_function(cls, kernel: Callable[..., Any], file: str) -> _KeptBySource | None:
        """Return None where the kernel has no file, or where nothing can be written."""
        locator = cls(kernel, file)
        try:
            locator.get_source_stamp()
            locator.ensure_cache_path()
        except OSError:
            return None
        return locator

    def ensure_cache_path(self) -> None:
        path = self.get_cache_path()
        Path(path).mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path).close()

    def get_cache_path(self) -> str:
        return str(_FOLDER / Path(self._py_file).parent.name)

    def get_source_stamp(self) -> str:
        return hashlib.sha256(Path(self._py_file).read_bytes()).hexdigest()

    def get_disambiguator(self) -> str:
        return str(self._line)


class _KeptResults(CompileResultCacheImpl):
    _locator_classes = [_KeptBySource]


class _KeptFunctions(FunctionCache):
    """What is kept of a kernel. Of several processes that lack the same code, one compiles it; the others wait, and load it."""

    _impl_class = _KeptResults

    def __init__(self, kernel: Callable[..., Any]) -> None:
        super().__init__(kernel)
        self._turns: dict[Any, int | None] = {}
        """Locks that are held, by signature. One that is not compiled after all is held until the process ends."""

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """Return None where the caller is to compile it, and then to call `save_overload`."""
        found = self._kept(sig, target_context)
        if found is not None:
            return found
        file = Path(self.cache_path) / f"{self._name_of(sig, target_context.codegen())}.lock"
        self._turns[sig] = _turn(file, COMPILING_S)
        found = self._kept(sig, target_context)
        if found is not None:
            _end(self._turns.pop(sig))
        return found

    def save_overload(self, sig: Any, data: Any) -> None:
        saving = _turn(Path(self.cache_path) / "saving.lock", SAVING_S)  # all that is kept of a kernel's file has one index
        try:
            super().save_overload(sig, data)
        except OSError:  # a full disk: the next start compiles again
            return
        finally:
            _end(saving)
            _end(self._turns.pop(sig, None))

    def _kept(self, sig: Any, target_context: Any) -> Any:
        """Return what is kept. None: nothing, or it is another user's and can't be read, or damaged, as a loss of power leaves
        files; then it is forgotten, since Numba reads the index to add to it."""
        try:
            return super().load_overload(sig, target_context)
        except OSError:
            return None
        except Exception:  # whatever half a pickle raises
            with contextlib.suppress(OSError):
                self.flush()
            return None

    def _name_of(self, sig: Any, codegen: Any) -> str:
        return hashlib.sha256(repr((self._impl.filename_base, self._index_key(sig, codegen))).encode()).hexdigest()[:24]


def _turn(file: Path, at_most_s: float) -> int | None:
    """Wait until no other process has the lock of a file; return what `_end` takes. None: it can't be had, or not in time."""
    descriptor = None
    until = time.monotonic() + at_most_s
    try:
        descriptor = os.open(file, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return descriptor
            except BlockingIOError:
                if time.monotonic() > until:
                    raise
                time.sleep(POLL_S)
    except OSError:
        _end(descriptor)
        return None


def _end(descriptor: int | None) -> None:
    if descriptor is not None:
        os.close(descriptor)


def has_feature(name: str) -> bool:
    """Return whether kernels may use an instruction set, by LLVM's name: this CPU's, or those of NUMBA_CPU_FEATURES when it or
    NUMBA_CPU_NAME names another CPU."""
    cpu, features = (os.environ.get(f"NUMBA_CPU_{what}", "") for what in ("NAME", "FEATURES"))
    if cpu or features:
        return f"+{name}" in features.split(",")
    return bool(dict(binding.get_host_cpu_features()).get(name, False))


def compiled(
    *, fastmath: frozenset[str] = frozenset(), kept: bool = False, inlined: bool = False
) -> Callable[[Callable[..., Any]], Any]:
    """Compiled at the first call. kept: on disk, with all that it calls; where no folder can be written to, every start
    compiles, and gets the same code. inlined: only as a part of what calls it.

    Divisions follow IEEE 754. Numba's other error model raises ZeroDivisionError where a divisor is 0 or NaN, and a thread that
    leaves its part of a step unfinished makes all others wait for ever (`team_numba`).
    """

    def decorate(kernel: Callable[..., Any]) -> Any:
        flags = set(fastmath) or False
        options: dict[str, Any] = {"nogil": True, "boundscheck": False, "error_model": "numpy", "fastmath": flags}
        if inlined:
            options["inline"] = "always"
        if kept:
            options["pipeline_class"] = _ClosedCompiler
        dispatcher = numba.njit(**options)(kernel)
        if kept:
            with contextlib.suppress(RuntimeError):
                dispatcher._cache = _KeptFunctions(kernel)  # pyright: ignore[reportAttributeAccessIssue]
        return dispatcher

    return decorate
