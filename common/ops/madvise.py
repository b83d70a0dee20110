"""Advice to the kernel on this process's memory, by the number of the system call and not through libc's `madvise`.

UCX writes a jump over the beginning of that function when a NIXL agent opens. The kernel may need a tenth of a second for one
piece of advice, and a thread that it returns to then would go on in the middle of that jump, and end the process.
"""

from __future__ import annotations

import ctypes
import os
import platform
from functools import partial

_libc = ctypes.CDLL(None, use_errno=True)
_NUMBER = {"x86_64": 28, "aarch64": 233}.get(platform.machine())
_ARGUMENTS = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
if _NUMBER is None:
    _libc.madvise.argtypes = _ARGUMENTS
    _madvise = _libc.madvise
else:
    _libc.syscall.argtypes, _libc.syscall.restype = (ctypes.c_long, *_ARGUMENTS), ctypes.c_long
    _madvise = partial(_libc.syscall, _NUMBER)


def madvise(address: int, num_bytes: int, advice: int) -> None:
    """advice: one of Linux's MADV_ numbers. The interpreter's lock is not held meanwhile.

    :raises OSError: the kernel refuses, or has no such advice.
    """
    if _madvise(address, num_bytes, advice):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
