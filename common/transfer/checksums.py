"""The checksum of KV blocks: CRC-32 as zlib defines it, computed by ISA-L where that is installed, many times faster.

Both give the same values, so blocks may pass between processes, hosts and disks whatever each of them uses.
"""

from __future__ import annotations

import ctypes
import zlib
from typing import Any

try:
    from isal import isal_zlib
except ImportError:  # there is no wheel for every platform
    isal_zlib = None

LIBRARY = "zlib" if isal_zlib is None else "isal"
_crc32 = zlib.crc32 if isal_zlib is None else isal_zlib.crc32


def crc32(data: Any, before: int = 0) -> int:
    """Return the CRC-32 of contiguous bytes: bytes, a bytearray, a memoryview or an array. `before`: of the bytes before them.

    Other threads run meanwhile, unless it is a few kilobytes.
    """
    return _crc32(data, before)


def crc32_address() -> int:
    """Return the address of ISA-L's `crc32_gzip_refl(uint32 before, const void *data, uint64 size)`, for compiled code; 0 where
    there is none."""
    if isal_zlib is None:
        return 0
    try:
        return ctypes.cast(ctypes.CDLL(isal_zlib.__file__).crc32_gzip_refl, ctypes.c_void_p).value or 0
    except (OSError, AttributeError):  # the wheel may be linked otherwise one day
        return 0
