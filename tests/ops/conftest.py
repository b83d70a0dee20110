"""Kernels in the interpreter round as they do on a GPU, and keep to their tensors."""

from importlib.util import find_spec

if find_spec("triton"):
    from tests.ops.interpreter import act_as_a_gpu

    act_as_a_gpu()
