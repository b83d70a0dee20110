"""Sampling: published Philox words, equality with the reference, the right distribution, ties, penalties, logprobs."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch

from common.ops.sampling import host_loops
from common.ops.sampling.gumbel import gumbel_noise
from common.ops.sampling.gumbel_reference import gumbel_noise_reference, philox_reference
from common.ops.sampling.logprobs import top_logprobs
from common.ops.sampling.logprobs_reference import top_logprobs_reference
from common.ops.sampling.nucleus import ALL_BANDS, masses
from common.ops.sampling.penalties import apply_penalties
from common.ops.sampling.penalties_reference import penalties_reference
from common.ops.sampling.sample import Draw, sample_tokens
from common.ops.sampling.sample_reference import filter_reference, sample_reference

PLAIN = Draw(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=1, position=0)


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [  # Random123's kat_vectors for philox4x32-10
        ([0] * 4, (0, 0), [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([0xFFFFFFFF] * 4, (0xFFFFFFFF, 0xFFFFFFFF), [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            (0xA4093822, 0x299F31D0),
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_philox_gives_the_published_words(counter: list[int], key: tuple[int, int], expected: list[int]) -> None:
    assert [int(word) for word in philox_reference([torch.tensor(word) for word in counter], key)] == expected


def test_noise_equals_its_reference_bit_for_bit() -> None:
    rng = random.Random(1)
    for _ in range(20):
        seed, position = rng.randrange(-(1 << 63), 1 << 64), rng.randrange(1 << 32)
        tokens = torch.randint(0, 200_000, (3001,))
        noise = gumbel_noise(seed, position, tokens.numpy())
        assert np.array_equal(noise, gumbel_noise_reference(seed, position, tokens).numpy())
        assert noise.max() <= host_loops.GUMBEL_MAX


def test_noise_of_a_token_depends_on_seed_and_position_only() -> None:
    tokens = np.array([5, 6, 7, 100_000])
    whole = gumbel_noise(3, 9, np.arange(100_001))
    assert np.array_equal(gumbel_noise(3, 9, tokens), whole[tokens])
    assert not np.array_equal(gumbel_noise(3, 10, tokens), whole[tokens])
    assert not np.array_equal(gumbel_noise(4, 9, tokens), whole[tokens])
    with pytest.raises(ValueError, match="position"):
        gumbel_noise(3, -1, tokens)


@pytest.fixture(params=["compiled", "numpy"])
def loops(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "numpy":
        monkeypatch.setattr(host_loops, "compiled_loops", lambda: None)
    elif host_loops.compiled_loops() is None:
        pytest.skip("Numba is not installed")


@pytest.mark.usefixtures("loops")
def test_noise_of_many_tokens_in_any_order_equals_its_reference() -> None:
    tokens = torch.randperm(5000, generator=torch.Generator().manual_seed(1))
    for seed, position in ((0, 0), (-1, (1 << 32) - 1), (0x0123456789ABCDEF, 0x89ABCDEF)):
        noise = gumbel_noise(seed, position, tokens.numpy())
        assert np.array_equal(noise, gumbel_noise_reference(seed, position, tokens).numpy())
    assert not len(gumbel_noise(1, 1, np.empty(0, np.int64)))


@pytest.mark.usefixtures("loops")
@pytest.mark.parametrize("vocab", [1, 3, 1000, 1024, 49_157])
def test_contenders_are_all_tokens_that_could_win_and_few_others(vocab: int) -> None:
    torch.manual_seed(vocab)
    for position, spread in enumerate((0.01, 1.0, 5.0)):
        scaled = (torch.randn(vocab) * spread).numpy()
        scaled[vocab // 2 + 1 :: 7] = -np.inf
        scores = scaled + gumbel_noise(9, position, np.arange(vocab))
        some = np.sort(scores[np.isfinite(scores)])[-20:]
        for seen, lowest in ((some[-1], -np.inf), (some[0], -np.inf), (some[-1], scaled.max() - 1)):
            found = host_loops.contenders(scaled, np.float32(lowest), float(seen) - 1e-3, 9, position)
            must = np.flatnonzero((scores >= seen) & (scaled >= lowest))
            assert np.isin(must, found).all() and (np.diff(found) > 0).all() and (scaled[found] >= lowest).all()
            assert len(found) <= 20 + 4 * max(len(must), 20)


@pytest.mark.usefixtures("loops")
def test_the_sums_of_masses_are_theirs() -> None:
    torch.manual_seed(5)
    for vocab, spread in ((1, 1.0), (1023, 0.0), (4097, 3.0), (151_936, 8.0), (151_936, 0.001)):
        scaled = (torch.randn(vocab) * spread).numpy()
        scaled[vocab // 2 + 1 :: 5] = -np.inf
        top = scaled.max()
        for lowest in (np.float32(-np.inf), np.float32(top - 2), np.float32(top)):
            kept = scaled[scaled >= lowest]
            expected, gap = masses(kept, top), top - kept
            for count in (1, 32, ALL_BANDS):
                total, sums = host_loops.masses_in_bands(scaled, lowest, top, count)
                assert total == int(expected.sum())
                assert sums.tolist() == [int(expected[(gap >= i / 4) & (gap < (i + 1) / 4)].sum()) for i in range(count)]
            assert total == int(sums.sum()), "nothing is behind all bands"
            assert (host_loops.masses_of(kept, top) == expected).all()


@pytest.mark.usefixtures("loops")
@pytest.mark.parametrize("below", [0.0, 0.25, 7.9, 8.0, 14.0])
def test_a_nucleus_may_end_anywhere(below: float) -> None:
    """Among equals, between bands, and below all of them."""
    logits = torch.full((1, 30_000), 3.0)
    logits[0, 17_000:] -= 20
    logits[0, 5_000] = 3.0 + below
    logits[0, 9_000::50] = math.nextafter(3.0, 4.0)
    for top_p in (1e-6, 0.3, 0.97, 0.99, 0.999999):
        for seed in range(6):
            draw = PLAIN._replace(top_p=top_p, seed=seed)
            assert sample_tokens(logits, [draw]) == [sample_reference(logits[0], **draw._asdict())]


@pytest.mark.usefixtures("loops")
@pytest.mark.parametrize("scale", [0.1, 1.0, 8.0])
def test_sampling_equals_its_reference(scale: float) -> None:
    rng = random.Random(2)
    for vocab in (1, 7, 1000, 30_000):
        logits = torch.randn(12, vocab) * scale
        logits[:, : vocab // 3] = (logits[:, : vocab // 3] * 4).round() / 4  # ties
        logits[3, vocab // 2 :] = -math.inf
        draws = [
            Draw(
                temperature=rng.choice([0.0, 0.3, 1.0, 2.0]),
                top_k=rng.choice([0, 1, 5, 40, 2000]),
                top_p=rng.choice([1.0, 0.9, 0.5, 0.01]),
                min_p=rng.choice([0.0, 0.05, 0.5, 1.0]),
                seed=rng.randrange(1 << 64),
                position=rng.randrange(10_000),
            )
            for _ in range(12)
        ]
        draws[0] = PLAIN
        found = sample_tokens(logits, draws)
        expected = [sample_reference(row, **draw._asdict()) for row, draw in zip(logits, draws, strict=True)]
        assert found == expected


@pytest.mark.parametrize(
    "draw",
    [
        PLAIN,
        PLAIN._replace(temperature=0.5),
        PLAIN._replace(top_k=4),
        PLAIN._replace(top_p=0.8),
        PLAIN._replace(min_p=0.1),
        PLAIN._replace(temperature=1.7, top_k=9, top_p=0.95, min_p=0.02),
    ],
)
@pytest.mark.parametrize("varied", ["seed", "position"])
def test_draws_follow_the_filtered_softmax(draw: Draw, varied: str) -> None:
    """Chi-square over seeds at one position, and over the positions of one seed."""
    torch.manual_seed(3)
    logits = torch.randn(12) * 1.5
    count = 4000
    draws = [draw._replace(**{varied: i}) for i in range(count)]
    drawn = np.bincount(sample_tokens(logits.expand(count, -1), draws), minlength=12)
    kept = filter_reference(logits / draw.temperature, draw.top_k, draw.top_p, draw.min_p)
    expected = kept.double().softmax(-1).numpy() * count
    assert not drawn[expected == 0].any()
    drawn, expected = drawn[expected > 0], expected[expected > 0]
    statistic = ((drawn - expected) ** 2 / expected).sum()
    freedom = len(expected) - 1
    assert statistic < freedom + 4 * math.sqrt(2 * freedom) + 6  # beyond the 99.9th percentile for 1 to 11 degrees


def test_a_row_is_drawn_alike_alone_and_in_a_batch() -> None:
    logits = torch.randn(9, 5000)
    draws = [PLAIN._replace(seed=i, position=3 * i, top_p=(1.0, 0.9)[i % 2]) for i in range(9)]
    together = sample_tokens(logits, draws)
    assert together == [sample_tokens(row[None], [draw])[0] for row, draw in zip(logits, draws, strict=True)]


def test_ties_go_to_the_lowest_id() -> None:
    logits = torch.tensor([[0.0, 2.0, 2.0, 1.0, 2.0]])
    assert sample_tokens(logits, [PLAIN._replace(temperature=0.0)]) == [1]
    for seed in range(20):
        assert sample_tokens(logits, [PLAIN._replace(top_k=1, seed=seed)]) == [1]
        assert sample_tokens(logits, [PLAIN._replace(top_p=0.01, seed=seed)]) == [1]
        assert sample_tokens(logits, [PLAIN._replace(top_k=2, seed=seed)])[0] in (1, 2)


def test_penalties_equal_their_reference() -> None:
    rng = random.Random(4)
    for _ in range(30):
        logits = torch.randn(60)
        prompt = [rng.randrange(60) for _ in range(rng.randrange(0, 40))]
        output = [rng.randrange(60) for _ in range(rng.randrange(0, 40))]
        strengths = {
            "presence": rng.choice([0.0, 0.7, -1.0]),
            "frequency": rng.choice([0.0, 0.3, -2.0]),
            "repetition": rng.choice([1.0, 1.3, 0.5]),
        }
        expected = penalties_reference(logits, prompt, output, **strengths)
        apply_penalties(logits, prompt, output, **strengths)
        torch.testing.assert_close(logits, expected)


def test_logprobs_equal_their_reference() -> None:
    logits = torch.randn(500) * 4
    logits[10:20] = logits.max()
    for token, num_top in ((3, 0), (12, 1), (499, 5), (7, 20), (0, 600)):
        logprob, tokens, values = top_logprobs(logits, token, num_top)
        expected = top_logprobs_reference(logits, token, num_top)
        assert logprob == pytest.approx(expected[0], abs=1e-5)
        assert tokens[:100] == expected[1][:100]
        assert values == pytest.approx(expected[2], abs=1e-5)


def test_shapes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="draws need"):
        sample_tokens(torch.randn(2, 5), [PLAIN])
    with pytest.raises(ValueError, match="penalties"):
        apply_penalties(torch.randn(2, 5), [], [], presence=0, frequency=0, repetition=1)
    with pytest.raises(ValueError, match="no logit"):
        top_logprobs(torch.randn(5), 5, 1)
