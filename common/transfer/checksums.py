"""The checksum of KV blocks: CRC-32 as zlib defines it, computed by ISA-L where that is installed, many times faster.

Both give the same values, so blocks may pass between processes, hosts and disks whatever each of them uses.
"""

from __future__ import annotations

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
