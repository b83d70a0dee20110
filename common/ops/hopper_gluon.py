"""What kernels in Gluon share from Hopper on: bulk copies under either of their names, and programmatic dependent launch."""

# pyright: basic, reportAttributeAccessIssue=false

from __future__ import annotations

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

load_box = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
"""Triton 3.9 has it under another name."""
LET_NEXT = gl.constexpr("griddepcontrol.launch_dependents; mov.b32 $0, 0;")
AWAIT = gl.constexpr("griddepcontrol.wait; mov.b32 $0, 0;")
"""Programmatic dependent launch: what follows may start; what came before is over, and may be read or overwritten."""
