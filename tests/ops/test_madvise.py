"""Advice to the kernel does not go through libc's function, which UCX overwrites while others may be in it."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from common.ops.madvise import madvise

ROOT = Path(__file__).parents[2]
MADV_NORMAL = 0
OVERWRITTEN = """
import ctypes, mmap, os
import numpy as np
from common.ops.cpu_int8.huge_pages_cpu import use_huge_pages
from common.transfer.mapping import map_pages

held, libc = np.ones(8 << 20, np.uint8), ctypes.CDLL(None)
code = ctypes.cast(libc.madvise, ctypes.c_void_p).value
pages = ctypes.c_void_p(code // mmap.PAGESIZE * mmap.PAGESIZE)
assert libc.mprotect(pages, ctypes.c_size_t(2 * mmap.PAGESIZE), mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC) == 0
ctypes.memmove(code, bytes.fromhex("0f0b"), 2)  # an instruction that ends the process
use_huge_pages()
map_pages(held.ctypes.data // mmap.PAGESIZE * mmap.PAGESIZE, mmap.PAGESIZE)
print("alive", flush=True)
os._exit(0)
"""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="an instruction of this processor is written")
def test_libcs_function_may_be_overwritten() -> None:
    """As UCX does it when a NIXL agent opens: a worker with weights to collapse ended with a segmentation fault then."""
    ran = subprocess.run([sys.executable, "-c", OVERWRITTEN], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert (ran.returncode, ran.stdout) == (0, "alive\n"), ran.stderr


def test_what_the_kernel_refuses_is_an_error() -> None:
    memory = np.ones(1 << 20, np.uint8)
    page = -(-memory.ctypes.data // 4096) * 4096
    madvise(page, 4096, MADV_NORMAL)
    with pytest.raises(OSError, match="Invalid argument"):
        madvise(page + 1, 4096, MADV_NORMAL)
    with pytest.raises(OSError, match="Invalid argument"):
        madvise(page, 4096, 9999)
