"""Log-probabilities behind steps that ask for the same again: what was launched before is launched for what there is now."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from common.engine.gpu import logprobs as logprobs_module
from common.engine.gpu import sampling as sampling_module
from common.engine.gpu.logprobs import LogprobLaunches, Logprobs
from common.engine.gpu.sampling import DeviceSampler
from common.engine.masks import StepMasks
from common.engine.plan import StepRow
from common.ops import backend
from common.ops.sampling.logprobs import token_logprobs_torch
from common.protocol.messages import SamplingParams

ON_GPU = pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")])


@pytest.fixture(autouse=True)
def interpreted() -> Iterator[None]:
    """On a GPU on a stream of its own, as steps are."""
    if not torch.cuda.is_available():
        with backend.interpreted():
            yield
        return
    with torch.cuda.stream(torch.cuda.Stream()):
        yield


DEVICES = pytest.mark.parametrize(
    "device",
    [pytest.param("cpu", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is for CPUs")), ON_GPU],
)


def check(found: Logprobs, logits: torch.Tensor, tokens: torch.Tensor, num_top: int) -> None:
    if logits.is_cuda:
        torch.cuda.synchronize()
    rows = torch.from_numpy(found.asking).to(logits.device)
    chosen, ids, values = (part.cpu() for part in token_logprobs_torch(logits, tokens, rows, num_top))
    assert torch.equal(found.ids, ids)
    torch.testing.assert_close((found.chosen, found.values), (chosen, values), atol=1e-5, rtol=0)


@DEVICES
def test_steps_that_ask_for_the_same_again(device: str) -> None:
    """Other logits and tokens in the same memory; more samples and fewer in between, and more ways than are kept."""
    torch.manual_seed(1)
    tokens = torch.zeros(8, dtype=torch.int64, device=device)
    launches = LogprobLaunches(tokens, 2)
    memory = torch.empty(8, 300, device=device)
    for step in range(6):
        memory.normal_()
        tokens.random_(0, 300)
        for count in (2, 8):
            logits = memory[:count]
            for num_top in (0, 3):
                asking = np.arange(0, count, 1 + step % 2, dtype=np.int32)
                check(launches.launch(logits, asking, num_top), logits, tokens, num_top)
    for number in range(logprobs_module._MOST_KNOWN):
        asking = np.array([index for index in range(8) if number + 3 >> index & 1], np.int32)
        check(launches.launch(memory, asking, 3), memory, tokens, 3)
    assert 0 < len(launches._known) <= logprobs_module._MOST_KNOWN


@DEVICES
def test_more_than_is_kept(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logprobs_module, "_MOST_ASKED", 4)
    tokens, logits = torch.zeros(2, dtype=torch.int64, device=device), torch.randn(2, 300, device=device)
    launches = LogprobLaunches(tokens, 2)
    for _ in range(4):
        check(launches.launch(logits, np.arange(2, dtype=np.int32), 3), logits, tokens, 3)
    assert not launches._known


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
def test_a_capture_that_fails_is_not_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, logits = torch.zeros(2, dtype=torch.int64, device="cuda"), torch.randn(2, 300, device="cuda")
    launches, asking = LogprobLaunches(tokens, 2), np.arange(2, dtype=np.int32)

    def fail(*_: object) -> None:
        raise RuntimeError("no")

    for launch in range(1, logprobs_module._CAPTURED_AT + 3):
        with monkeypatch.context() as patch:
            if launch == logprobs_module._CAPTURED_AT:
                patch.setattr("common.ops.sampling.logprobs_triton.token_logprobs_triton", fail)
                with pytest.raises(RuntimeError, match="no"):
                    launches.launch(logits, asking, 3)
                continue
            logits.normal_()
            check(launches.launch(logits, asking, 3), logits, tokens, 3)


ASKING = SamplingParams(temperature=0.0, logprobs=2)
FILTERED = SamplingParams(temperature=0.9, seed=7, top_k=5)
AWAITED = SamplingParams(temperature=0.0, min_tokens=2, stop_token_ids=[1])


def sampled(sampler: DeviceSampler, rows: list[StepRow], logits: torch.Tensor) -> tuple[list[int], list[list[int]]]:
    """Tokens, and the likeliest ones of rows that ask."""

    def masks() -> StepMasks | None:
        constrained = [row for row in rows if row.constraint is not None]
        if not constrained:
            return None
        words = np.full((len(constrained), -(-logits.shape[1] // 32)), -1, np.int32)
        words[:, 0] = 0  # none of the first 32 tokens
        return StepMasks(np.array([rows.index(row) for row in constrained], np.int32), words)

    special = sampler.load(rows)
    sampler.draw(logits)
    found = sampler.finish(logits, rows, masks) if special else None
    if logits.is_cuda:
        torch.cuda.synchronize()
    return sampler.results[: len(logits)].tolist(), [] if found is None else found.ids.tolist()


class Upper:
    """A constraint, of which the test fills the mask itself."""

    def fill(self, *_: object, **__: object) -> None:
        raise AssertionError


@DEVICES
def test_a_sampler_that_repeats_itself_draws_as_a_new_one_would(device: str) -> None:
    """The same sequences step after step, one of which is constrained for a while, and one that may not end before its third
    token."""
    torch.manual_seed(2)
    kept = DeviceSampler(4, torch.device(device), 3)
    all_params = [[ASKING, FILTERED], [ASKING, FILTERED, AWAITED]]
    for params in all_params:
        for step in range(6):
            logits = torch.randn(len(params), 96, device=device)
            logits[:, 1] = 9.0  # the token that ends a text, and one that masks forbid
            constraint = Upper() if step in (2, 3) else None
            rows = [
                StepRow([5], 4 + step, [], 1, each, 4, constraint=constraint if each is ASKING else None) for each in params
            ]
            expected = sampled(DeviceSampler(4, torch.device(device), 3), rows, logits)
            assert sampled(kept, rows, logits) == expected
            assert (expected[0][0] >= 32) == (constraint is not None)
            if AWAITED in params:
                assert (expected[0][2] == 1) == (step >= 1)


@DEVICES
def test_a_sampler_whose_rows_change_places_draws_as_a_new_one_would(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a step needs is kept by what its samples ask for, and more kinds of steps come than are kept."""
    monkeypatch.setattr(sampling_module, "_MOST_KNOWN", 3)
    torch.manual_seed(3)
    kept = DeviceSampler(4, torch.device(device), 3)
    plain = SamplingParams(temperature=0.0)
    some = [[ASKING, plain], [plain, ASKING], [FILTERED, ASKING], [ASKING, FILTERED], [ASKING, AWAITED], [ASKING, plain, plain]]
    for step, params in enumerate(some * 3):
        logits = torch.randn(len(params), 96, device=device)
        rows = [StepRow([5], 4 + step, [], 1, each, 4) for each in params]
        assert sampled(kept, rows, logits) == sampled(DeviceSampler(4, torch.device(device), 3), rows, logits)
