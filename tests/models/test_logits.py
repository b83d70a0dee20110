"""Logits are what the head's products add up to in float32, on every device: not rounded to a model's 16 bits before a draw."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from common.models.config import load_config
from common.models.decoder import Decoder
from common.models.registry import load_decoder
from common.ops.backend import interpreted
from common.ops.sampling.sample import Draw, sample_tokens
from common.ops.sampling.sample_device import DrawBatch, HostDraws, pack_draws, sample_plain
from tests.models.oracles import build, save
from tests.ops.interpreter import act_as_a_gpu


@pytest.fixture(params=["cpu", "kernels"])
def decoder(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Decoder]:
    """In bfloat16, with a soft cap of 2. kernels: the GPU's, interpreted."""
    files = save(build("gemma2"), tmp_path)
    config = load_config(files)
    if request.param == "cpu":
        yield load_decoder(files, config, dtype=torch.bfloat16, device=torch.device("cpu"))
        return
    act_as_a_gpu()
    with interpreted():
        yield load_decoder(files, config, dtype=torch.bfloat16, device=torch.device("cpu"))


@torch.inference_mode()
def test_logits_are_float32_from_the_accumulator(decoder: Decoder) -> None:
    states = torch.randn(5, decoder.config.hidden_size).bfloat16()
    head = decoder.embedding.double()  # tied
    cap = decoder.config.logit_soft_cap
    assert cap
    expected = (states.double() @ head.T / cap).tanh() * cap
    found = decoder.logits(states)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-5)
    assert not torch.equal(found, found.bfloat16().float())
    assert decoder.logits(states[:0]).dtype == torch.float32


def test_equal_logits_give_the_lowest_id_and_near_ones_the_higher() -> None:
    """In bfloat16 the second of these would be a tie as well."""
    logits = torch.zeros(2, 5000)
    logits[0, [17, 4097, 4999]] = 3.0
    logits[1, [17, 4097]] = torch.tensor([3.0, 3.0 + 1e-6])
    greedy = [Draw(0.0, 0, 1.0, 0.0, 1, 0)] * 2
    assert sample_tokens(logits, greedy) == [17, 4097]
    act_as_a_gpu()
    with interpreted():
        host, out = HostDraws(2), torch.zeros(2, dtype=torch.int64)
        pack_draws(greedy, host)
        batch = DrawBatch.create(host.rows, torch.device("cpu"))
        batch.load(host)
        sample_plain(logits, batch, out)
    assert out.tolist() == [17, 4097]
