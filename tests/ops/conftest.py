"""Kernels in the interpreter round as they do on a GPU, and keep to their tensors."""

from collections.abc import Iterator
from importlib.util import find_spec

import pytest


@pytest.fixture(params=["cpu", "kernel"])
def cpu_and_kernel(request: pytest.FixtureRequest) -> Iterator[None]:
    """What is called computes as on a CPU, and then by the kernel."""
    from common.ops import backend

    if request.param == "cpu":
        yield
    else:
        with backend.interpreted():
            yield


if find_spec("triton"):
    from tests.ops.interpreter import act_as_a_gpu

    act_as_a_gpu()
