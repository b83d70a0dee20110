"""On Hopper, products whose first operand is in registers have to be over before the loop that they are in turns.

Triton lets them go on meanwhile. Before 3.7 it then writes the next operand to registers that they still read (triton#9433),
and so does NVIDIA's assembler before CUDA 13.3, whatever Triton asks it for (triton#11781). Sums are wrong whenever the tensor
cores are late. Triton waits for products whose sum the loop uses.
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
from __future__ import annotations

import triton
import triton.language as tl

_HOPPER = 90
_SAFE_TRITON, _SAFE_ASSEMBLER = (3, 7), (13, 3)


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".")[:2])


def _overwrites_operands() -> bool:
    if _version(triton.__version__) < _SAFE_TRITON:
        return True
    try:
        from triton.backends.nvidia.compiler import get_ptxas

        return _version(get_ptxas(_HOPPER).version) < _SAFE_ASSEMBLER
    except (ImportError, RuntimeError, ValueError):  # there is none
        return True


_OVERWRITES = tl.constexpr(_overwrites_operands())


@triton.jit
def settled(total, FAST: tl.constexpr):
    """Return `total`, float32, a loop's sum of products; to be called in the loop. FAST: Hopper or later, not interpreted."""
    if FAST and _OVERWRITES and not tl.target_info.cuda_capability_geq(10, 0):
        total = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=f,f", [total], dtype=tl.float32, is_pure=True, pack=1)
    return total
