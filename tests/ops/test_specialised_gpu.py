"""The warp-specialised kernel for gate and up beside its reference, on Hopper."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

from common.ops.linear import device as linear_device
from common.ops.linear.candidates import Candidate
from common.ops.linear.specialised import gate_up_specialised, specialised_candidates
from common.ops.linear.weight import GateActivation, LinearWeight, pack_linear

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not (torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)), reason="needs a Hopper GPU"
    ),
]
MAX_ERROR = 0.03
"""In standard deviations of the results, of which bf16's rounding is the most."""


def meant(x: torch.Tensor, weight: LinearWeight, activation: GateActivation) -> torch.Tensor:
    """In float32."""
    added = None if weight.bias is None else weight.bias.float()
    gate, up = F.linear(x.float(), weight.data.float(), added).chunk(2, 1)
    return (F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")) * up


def made(size: int, depth: int, *, bias: bool = False) -> LinearWeight:
    numbers = torch.randn(2 * size, depth, device="cuda").mul_(depth**-0.5).bfloat16()
    return pack_linear(numbers, torch.randn(2 * size, device="cuda").bfloat16() if bias else None)


def candidates(weight: LinearWeight, rows: int) -> list[Candidate]:
    return specialised_candidates(linear_device.shape_of("gated", weight), max(1024, linear_device.bucket(rows)))


@pytest.fixture(autouse=True)
def exact() -> Iterator[None]:
    """The reference multiplies in float32."""
    settings = torch.backends.cuda.matmul  # not monkeypatch: torch 2.11 can't delete what a setting was given
    before, settings.allow_tf32 = settings.allow_tf32, False
    torch.manual_seed(0)
    yield
    settings.allow_tf32 = before


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("size", "depth"), [(1000, 528), (14336, 4096), (72, 80)])
def test_every_candidate(size: int, depth: int, bias: bool) -> None:
    """Tiles that are cut at every edge, more tiles than multiprocessors, and one."""
    weight = made(size, depth, bias=bias)
    for rows in (100, 129, 512, 1700):
        x = torch.randn(rows, depth, device="cuda").bfloat16()
        expected = meant(x, weight, "silu")
        found = candidates(weight, rows)
        assert found
        for chosen in found:
            result = linear_device.run("gated", x, weight, chosen).float()
            error = (result - expected).abs() / (expected.abs() + expected.std())
            assert error.max() < MAX_ERROR, (rows, chosen)


def test_gelu() -> None:
    weight = made(1000, 512)
    x = torch.randn(300, 512, device="cuda").bfloat16()
    expected = meant(x, weight, "gelu_tanh")
    result = gate_up_specialised(x, weight, candidates(weight, 300)[0], "gelu_tanh").float()
    assert ((result - expected).abs() / (expected.abs() + expected.std())).max() < MAX_ERROR


def test_rows_beyond_the_last_are_not_written_and_do_not_count() -> None:
    """A row's results are the same, bit for bit, alone in a tile and beside rows that are not numbers."""
    weight = made(1000, 512)
    x = torch.full((256, 512), float("nan"), device="cuda", dtype=torch.bfloat16)
    x[130] = torch.randn(512, device="cuda")
    chosen = candidates(weight, 256)[0]
    alone = gate_up_specialised(x[130:131].contiguous(), weight, chosen)
    assert torch.equal(gate_up_specialised(x, weight, chosen)[130], alone[0])


def test_it_runs_in_a_graph() -> None:
    weight = made(1000, 512)
    x = torch.randn(300, 512, device="cuda").bfloat16()
    chosen = candidates(weight, 300)[0]
    expected = gate_up_specialised(x, weight, chosen)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = gate_up_specialised(x, weight, chosen)
    found.zero_()
    graph.replay()
    assert torch.equal(found, expected)
