"""Kernels in the interpreter round as they do on a GPU."""

from importlib.util import find_spec

if find_spec("triton"):
    from tests.ops.interpreter import round_as_a_gpu

    round_as_a_gpu()
