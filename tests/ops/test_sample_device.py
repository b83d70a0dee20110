"""Sampling on a device draws the tokens of the CPU, bit for bit: plain, filtered, adjusted; log-probabilities agree."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

from common.ops import backend
from common.ops.sampling.adjust_device import apply_adjustments
from common.ops.sampling.adjustments import PENDING, Adjustment, Adjustments, pack_adjustments
from common.ops.sampling.host_loops import GUMBEL_MAX
from common.ops.sampling.logprobs import token_logprobs, token_logprobs_torch, top_logprobs
from common.ops.sampling.logprobs_reference import top_logprobs_reference
from common.ops.sampling.nucleus import MASS_BITS, masses
from common.ops.sampling.penalties import apply_penalties
from common.ops.sampling.sample import Draw, sample_tokens
from common.ops.sampling.sample_device import DrawBatch, HostDraws, pack_draws, sample_filtered, sample_plain
from common.ops.sampling.sample_reference import sample_reference

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")
filters_triton = pytest.importorskip("common.ops.sampling.filters_triton")
gumbel_triton = pytest.importorskip("common.ops.sampling.gumbel_triton")
logprobs_triton = pytest.importorskip("common.ops.sampling.logprobs_triton")
sample_triton = pytest.importorskip("common.ops.sampling.sample_triton")

POISON = -7
PLAIN = Draw(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=1, position=0)


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Chunks and tiles are small, so that small vocabularies have several."""
    monkeypatch.setattr(sample_triton, "CHUNKS", ((1 << 30, 512, 4),))
    monkeypatch.setattr(filters_triton, "TILE", 1024)
    monkeypatch.setattr(filters_triton, "CHUNK", 1024)
    monkeypatch.setattr(logprobs_triton, "PIECE", 128)
    with backend.interpreted():
        yield


def batch_of(draws: list[Draw], spare: int = 3) -> DrawBatch:
    host = HostDraws(len(draws) + spare)
    pack_draws(draws, host)
    batch = DrawBatch.create(host.rows, "cpu")
    batch.load(host)
    return batch


def drawn(logits: torch.Tensor, draws: list[Draw]) -> list[int]:
    """What the device draws: all rows plain, then those with filters again."""
    batch = batch_of(draws)
    host = HostDraws(batch.rows)
    pack_draws(draws, host)
    out = torch.full((batch.rows,), POISON, dtype=torch.int32)
    sample_plain(logits, batch, out)
    assert out[: len(draws)].tolist() == sample_tokens(logits.float(), [draw._replace(top_k=0, top_p=1.0) for draw in draws])
    sample_filtered(logits, torch.from_numpy(host.filtered_rows(len(draws))), batch, out)
    assert (out[len(draws) :] == POISON).all()
    return out[: len(draws)].tolist()


def random_draw(rng: random.Random) -> Draw:
    return Draw(
        temperature=rng.choice([0.0, 1e-5, 0.01, 0.3, 1.0, 2.0]),
        top_k=rng.choice([0, 0, 1, 5, 40, 900, 2000]),
        top_p=rng.choice([1.0, 1.0, 0.999, 0.9, 0.5, 0.01, 0.0]),
        min_p=rng.choice([0.0, 0.0, 0.05, 0.5, 1.0]),
        seed=rng.randrange(-(1 << 63), 1 << 64),
        position=rng.randrange(1 << 32),
    )


def tied(rows: int, vocab: int) -> torch.Tensor:
    logits = torch.randn(rows, vocab) * 3
    logits[:, : vocab // 2] = (logits[:, : vocab // 2] * 2).round() / 2
    return logits


def peaked(rows: int, vocab: int) -> torch.Tensor:
    logits = torch.randn(rows, vocab)
    logits[:, vocab // 3] = 30
    logits[:, vocab // 2] = 30  # half the mass each, but for the rest
    return logits


def partly_forbidden(rows: int, vocab: int) -> torch.Tensor:
    logits = torch.randn(rows, vocab)
    logits[:, vocab // 7 :] = -math.inf
    logits[0] = -math.inf
    logits[-1, vocab // 2] = math.inf
    return logits


def signed_zeros(rows: int, vocab: int) -> torch.Tensor:
    return torch.zeros(rows, vocab) * torch.randn(rows, vocab).sign()


@pytest.mark.parametrize("vocab", [1, 7, 1003, 4099])
@pytest.mark.parametrize(
    "make",
    [
        torch.randn,
        tied,
        peaked,
        partly_forbidden,
        signed_zeros,
        lambda rows, vocab: torch.full((rows, vocab), 25.3),
        lambda rows, vocab: torch.randn(rows, vocab) * 1e4,
    ],
    ids=["normal", "tied", "peaked", "forbidden", "zeros", "flat", "huge"],
)
@pytest.mark.filterwarnings("ignore:invalid value encountered in add")  # infinite logits and no min-p: inf - inf, unused
def test_the_device_draws_the_tokens_of_the_cpu(make: Callable[[int, int], torch.Tensor], vocab: int) -> None:
    rng = random.Random(vocab)
    rows = 2 if vocab > 2000 else 4
    logits = make(rows, vocab)
    draws = [random_draw(rng) for _ in range(rows)]
    assert drawn(logits, draws) == sample_tokens(logits, draws)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("nans", [1, 600, 1003])
def test_broken_logits_give_some_token_and_no_endless_loop(nans: int) -> None:
    rng = random.Random(nans)
    logits = torch.randn(4, 1003)
    logits[:, torch.randperm(1003)[:nans]] = math.nan
    for _ in range(2):
        draws = [random_draw(rng) for _ in range(4)]
        batch, out = batch_of(draws), torch.full((7,), POISON)
        sample_plain(logits, batch, out)
        assert all(0 <= token < 1003 for token in out[:4].tolist())
        sample_filtered(logits, torch.arange(4, dtype=torch.int32), batch, out.fill_(POISON))
        assert all(0 <= token < 1003 for token in out[:4].tolist())


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_results_say_which_rows_have_logits_that_are_not_finite(bad: float) -> None:
    """Whatever else is drawn of them later: under masks, filters, from adjusted copies."""
    logits = torch.randn(5, 1003)
    logits[1, 700] = logits[3, 1002] = bad
    draws = [PLAIN, PLAIN, PLAIN._replace(top_p=0.9), PLAIN._replace(top_k=5), PLAIN._replace(temperature=0.0)]
    batch = batch_of(draws)
    out, results = (torch.full((8,), POISON) for _ in range(2))
    sample_plain(logits, batch, out, results=results)
    assert results.tolist() == [out[0], -1, out[2], -1, out[4], *[POISON] * 3]
    sample_filtered(logits, torch.tensor([2, 3], dtype=torch.int32), batch, out, results=results)
    assert results.tolist() == [out[0], -1, out[2], -1, out[4], *[POISON] * 3]
    masks = torch.zeros(2, 32, dtype=torch.int32)
    masks[:, 0] = 1 << 9
    sample_plain(logits, batch, out, rows=torch.tensor([0, 1], dtype=torch.int32), masks=masks, results=results)
    assert results.tolist() == [9, -1, out[2], -1, out[4], *[POISON] * 3]
    sample_plain(logits[:1], batch, out, rows=torch.tensor([4], dtype=torch.int32), compact=True, results=results)
    assert results[4] == out[4] == logits[0].argmax()
    assert all(0 <= token < 1003 for token in out[:5].tolist())


def test_bfloat16_logits_count_as_what_they_are() -> None:
    rng = random.Random(5)
    logits = (torch.randn(4, 1003) * 4).bfloat16()
    draws = [random_draw(rng) for _ in range(4)]
    assert drawn(logits, draws) == sample_tokens(logits.float(), draws)


@pytest.mark.parametrize("top_k", [0, 40])
@pytest.mark.parametrize("top_p", [1.0, 0.9])
@pytest.mark.parametrize("min_p", [0.0, 0.1])
def test_each_filter_is_that_of_the_reference(top_k: int, top_p: float, min_p: float) -> None:
    logits = torch.randn(2, 1300) * 2
    draws = [Draw(0.8, top_k, top_p, min_p, seed, 17) for seed in range(2)]
    assert drawn(logits, draws) == [sample_reference(row, **draw._asdict()) for row, draw in zip(logits, draws, strict=True)]


@triton.jit
def everything(score):
    return score * 0.0 + 1e30


def test_near_ties_are_settled_by_exact_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a slack of everything, every token of every chunk is scored in double precision."""
    for module in (sample_triton, filters_triton):
        monkeypatch.setattr(module, "slack", everything)
    rng = random.Random(6)
    logits = tied(4, 1003)
    draws = [random_draw(rng) for _ in range(4)]
    assert drawn(logits, draws) == sample_tokens(logits, draws)


@triton.jit
def both_noises(words, rough, exact, SIZE: tl.constexpr):  # pyright: ignore[reportInvalidTypeForm]
    places = tl.arange(0, SIZE)
    found = tl.load(words + places).to(tl.uint32, bitcast=True)
    tl.store(rough + places, gumbel_triton.rough_noise(found))
    tl.store(exact + places, gumbel_triton.exact_noise(found))


def test_rough_noise_is_near_the_noise() -> None:
    """The words at the ends, around the series' bound, and random ones."""
    words = np.concatenate(
        [
            np.arange(2048),
            2**32 - 1 - np.arange(2048),
            2**32 - 2**26 + np.arange(-2048, 2048),
            np.random.randint(0, 2**32, 8192),
        ]
    ).astype(np.uint32)
    rough, exact = torch.full((len(words),), torch.nan), torch.full((len(words),), torch.nan)
    both_noises[(1,)](torch.from_numpy(words.view(np.int32)), rough, exact, SIZE=len(words))
    uniform = (words.astype(np.float64) + 0.5) * 2.0**-32
    expected = (-np.log(-np.log(uniform))).astype(np.float32)
    assert np.array_equal(exact.numpy(), expected)
    assert expected.max() <= GUMBEL_MAX
    assert np.abs(rough.numpy() - expected).max() < 2e-5


def test_masses_are_exponentials() -> None:
    values = np.concatenate([[0], -np.random.rand(5000) * 40]).astype(np.float32)
    found = masses(values, np.float32(0))
    assert found[0] == 1 << MASS_BITS
    expected = np.exp(values.astype(np.float64))
    assert np.all(np.abs(found / 2.0**MASS_BITS - expected) <= expected * 2.0**-21 + 2.0**-MASS_BITS)


def test_a_compact_copy_draws_what_its_rows_would() -> None:
    logits = torch.randn(7, 600) * 2
    draws = [PLAIN._replace(seed=seed, top_p=(1.0, 0.7)[seed % 2], temperature=(0.0, 0.9)[seed % 3 > 0]) for seed in range(7)]
    rows = torch.tensor([6, 0, 3, 1], dtype=torch.int32)
    out = torch.full((10,), POISON)
    sample_filtered(logits[rows], rows, batch_of(draws), out, compact=True)
    expected = sample_tokens(logits, draws)
    assert [out[row].item() for row in rows] == [expected[row] for row in rows]
    assert [out[row].item() for row in (2, 4, 5, 7, 8, 9)] == [POISON] * 6


@pytest.mark.parametrize("vocab", [7, 1003])
@pytest.mark.parametrize("make", [torch.randn, tied, peaked, partly_forbidden])
@pytest.mark.filterwarnings("ignore:invalid value encountered in add")
def test_masked_rows_draw_as_if_other_tokens_were_impossible(make: Callable[[int, int], torch.Tensor], vocab: int) -> None:
    rng = random.Random(vocab)
    logits = make(6, vocab)
    draws = [random_draw(rng)._replace(top_k=0, top_p=1.0) for _ in range(6)]
    rows = torch.tensor([5, 0, 3, 2], dtype=torch.int32)
    masks = torch.randint(-(2**31), 2**31, (4, -(-vocab // 32) + 3), dtype=torch.int32)  # wider than the vocabulary
    masks[1] = 0
    masks[1, 0] = 2  # one token only
    allowed = np.unpackbits(masks.numpy().view(np.uint8), axis=1, bitorder="little").astype(bool)[:, :vocab]
    changed = logits[rows].clone()
    changed.numpy()[~allowed] = -math.inf
    expected = sample_tokens(changed, [draws[row] for row in rows])
    assert expected[1] == 1 or not logits[0].isfinite().any()
    for given, compact in ((logits, False), (logits[rows], True)):
        out = torch.full((9,), POISON, dtype=torch.int64)
        sample_plain(given, batch_of(draws), out, rows=rows, masks=masks, compact=compact)
        assert out[rows].tolist() == expected
        assert [out[row].item() for row in (1, 4, 6, 7, 8)] == [POISON] * 5
    unmasked = torch.full((9,), POISON)
    sample_plain(logits[rows], batch_of(draws), unmasked, rows=rows, compact=True)
    assert unmasked[rows].tolist() == sample_tokens(logits[rows], [draws[row] for row in rows])


def test_adjusted_logits_are_the_bits_of_the_cpu() -> None:
    rng = random.Random(7)
    vocab = 1003
    logits = torch.randn(9, vocab).bfloat16()
    previous = torch.tensor([11, 500, 902], dtype=torch.int32)
    masks = torch.randint(-(2**31), 2**31, (3, -(-vocab // 32)), dtype=torch.int32)
    allowed = np.unpackbits(masks.numpy().view(np.uint8), axis=1, bitorder="little").astype(bool)[:, :vocab]
    adjustments: list[Adjustment] = []
    expected = []
    for row, mask in ((8, -1), (2, 2), (5, 0), (0, -1)):
        prompt = [rng.randrange(40) for _ in range(rng.randrange(0, 1500))]
        output = [rng.randrange(vocab) for _ in range(rng.randrange(0, 60))] * 2
        feed = rng.randrange(3)
        biases = {token: rng.uniform(-9, 9) for token in rng.sample(range(vocab + 50), 30)}
        forbidden = [3, 5, *list(biases)[:2], vocab + 1]
        one = Adjustment(
            row=row,
            prompt=prompt,
            output=[*output, PENDING],
            presence=rng.uniform(-2, 2),
            frequency=rng.uniform(-2, 2),
            repetition=rng.choice([1.0, 1.3, 0.7]),
            biases=biases,
            forbidden=forbidden,
            feed=feed,
            mask=mask,
        )
        adjustments.append(one)
        values = logits[row].float()
        apply_penalties(
            values,
            prompt,
            [*output, int(previous[feed])],
            presence=one.presence,
            frequency=one.frequency,
            repetition=one.repetition,
        )
        for token, bias in biases.items():
            if token < vocab:
                values.numpy()[token] += np.float32(bias)
        values[[token for token in forbidden if token < vocab]] = -math.inf
        if mask >= 0:
            values.numpy()[~allowed[mask]] = -math.inf
        expected.append(values)
    before = logits.clone()
    found = apply_adjustments(logits, Adjustments.on("cpu", pack_adjustments(adjustments)), previous, masks)
    assert torch.equal(found, torch.stack(expected))
    assert torch.equal(logits, before)


def test_biases_alone_need_no_history() -> None:
    logits = torch.randn(3, 50)
    adjustments = [Adjustment(row=1, biases={4: 2.5}), Adjustment(row=0, forbidden=[9])]
    found = apply_adjustments(logits, Adjustments.on("cpu", pack_adjustments(adjustments)), torch.zeros(1, dtype=torch.int64))
    expected = logits[[1, 0]].clone()
    expected[0, 4] += 2.5
    expected[1, 9] = -math.inf
    assert torch.equal(found, expected)
    nothing = apply_adjustments(logits, Adjustments.on("cpu", pack_adjustments([])), torch.zeros(1, dtype=torch.int64))
    assert nothing.shape == (0, 50)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_top", [0, 1, 20, 64, 600])
def test_log_probabilities_of_tokens_that_ask(num_top: int, dtype: torch.dtype) -> None:
    given = (torch.randn(14, 500) * 4).to(dtype)
    given[3, :300] = -math.inf
    logits = given.float()
    given[:, 10:20] = logits[:, 10:20] = logits.max()
    given[5, 3:9] = logits[5, 3:9] = torch.tensor([0.0, -0.0, 0.0, -0.0, 0.0, -0.0])
    tokens = torch.randint(310, 500, (14,))
    rows = torch.randperm(14)[:11]
    chosen, ids, values = token_logprobs(given, tokens, rows, num_top)
    plainly = token_logprobs_torch(given, tokens, rows, min(num_top, 500))
    assert torch.equal(ids, plainly[1])
    torch.testing.assert_close((chosen, values), (plainly[0], plainly[2]), atol=1e-5, rtol=0)
    assert (chosen.dtype, ids.shape, values.shape) == (torch.float32, (11, min(num_top, 500)), (11, min(num_top, 500)))
    for index, row in enumerate(rows.tolist()):
        expected = top_logprobs_reference(logits[row], int(tokens[row]), num_top)
        assert chosen[index].item() == pytest.approx(expected[0], abs=1e-5)
        assert ids[index].tolist() == expected[1] == top_logprobs(logits[row], int(tokens[row]), num_top)[1]
        assert values[index].tolist() == pytest.approx(expected[2], abs=1e-5)


def test_packed_draws_keep_their_meaning() -> None:
    host = HostDraws(5)
    pack_draws(
        [PLAIN._replace(temperature=0.5, seed=(1 << 64) - 1, top_k=1 << 40, min_p=0.25, position=(1 << 32) - 1)] * 5, host
    )
    pack_draws([PLAIN._replace(temperature=9e-6, top_k=3), PLAIN._replace(top_p=0.5), PLAIN], host)
    assert host.temperature.tolist() == [0, 1, 1, 0, 0]
    assert host.filtered_rows(5).tolist() == [1]
    assert (int(host.seed[4]), int(host.position[4]), int(host.top_k[4])) == (-1, (1 << 32) - 1, (1 << 31) - 1)
    assert host.log_min_p[4] == np.float32(math.log(0.25))
    assert host.log_min_p[2] == -math.inf
    other = HostDraws(5)
    other.copy_from(host)
    other.position[:3] += 1
    assert other.position[:3].tolist() == [1, 1, 1]
    assert host.position[:3].tolist() == [0, 0, 0]


def test_what_does_not_fit_is_refused() -> None:
    batch, out = DrawBatch.create(2, "cpu"), torch.zeros(2, dtype=torch.int32)
    with pytest.raises(ValueError, match="don't fit"):
        sample_plain(torch.randn(3, 5), batch, out)
    with pytest.raises(ValueError, match="int32 or int64"):
        sample_plain(torch.randn(2, 5), batch, out.float())
    with pytest.raises(ValueError, match="drawn from logits"):
        sample_plain(torch.randn(5), batch, out)
    with pytest.raises(ValueError, match="rows are int32"):
        sample_filtered(torch.randn(2, 5), torch.tensor([0]), batch, out)
    one = torch.zeros(1, dtype=torch.int32)
    with pytest.raises(ValueError, match="rows are int32"):
        sample_plain(torch.randn(2, 5), batch, out, rows=one, compact=True)
    with pytest.raises(ValueError, match="rows that are named"):
        sample_plain(torch.randn(2, 5), batch, out, compact=True)
    with pytest.raises(ValueError, match="masks are not those"):
        sample_plain(torch.randn(2, 5), batch, out, masks=torch.zeros(1, 1, dtype=torch.int32))
    with pytest.raises(ValueError, match="masks are int32"):
        sample_plain(torch.randn(2, 50), batch, out, masks=torch.zeros(2, 1, dtype=torch.int32))
    with pytest.raises(ValueError, match="positions"):
        pack_draws([PLAIN._replace(position=-1)], HostDraws(1))
    with pytest.raises(ValueError, match="don't fit"):
        pack_draws([PLAIN] * 2, HostDraws(1))
    with pytest.raises(ValueError, match="don't fit"):
        batch.load(HostDraws(40))
    with pytest.raises(ValueError, match="adjusted are logits"):
        apply_adjustments(torch.randn(5), Adjustments.on("cpu", pack_adjustments([])), out)
    for masks in (torch.zeros(1, 1, dtype=torch.int32), torch.zeros(1, 2), torch.zeros(2, dtype=torch.int32)):
        with pytest.raises(ValueError, match="masks are int32"):
            apply_adjustments(torch.randn(1, 40), Adjustments.on("cpu", pack_adjustments([])), out, masks)
