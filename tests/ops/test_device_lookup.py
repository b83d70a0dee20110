"""Lookup on a device: the kernels write what the reference writes, and propose what the host's index would."""

from __future__ import annotations

import random

import pytest
import torch

from common.ops import backend
from common.ops.lookup.device_texts import (
    CANDIDATES,
    MAX_MATCH,
    MAX_PROPOSAL,
    REPORT_HEADER,
    REPORT_WORDS,
    DeviceTexts,
    FollowedStep,
    bucket_of,
    capacity_within,
    new_texts,
)
from common.ops.lookup.follow import NO_SEARCH, FollowedRow, follow_rows, pack_rows
from services.decode.token_index import TokenIndex


def copy_of(texts: DeviceTexts) -> DeviceTexts:
    return DeviceTexts(*(x.clone() for x in texts))


def garbage(num_slots: int, capacity: int) -> DeviceTexts:
    """Slots that held other texts: what is not cleared must not be read."""
    texts = new_texts(num_slots, capacity, "cpu")
    for x in texts:
        x.random_(0, capacity)
    return texts


def step_of(sampled: list[int], num_tokens: int, num_rows: int = 1) -> FollowedStep:
    return FollowedStep(
        sampled=torch.tensor(sampled),
        tokens=torch.full((num_tokens,), 7),
        positions=torch.zeros(num_tokens, dtype=torch.int64),
        report=torch.full((num_rows, REPORT_WORDS), 7, dtype=torch.int32),
    )


def followed(texts: DeviceTexts, rows: list[FollowedRow], step: FollowedStep, *, on_kernel: bool) -> FollowedStep:
    """Return the step with its tokens and its report."""
    words = torch.from_numpy(pack_rows(rows))
    given = step._replace(tokens=step.tokens.clone(), report=step.report.clone())
    if on_kernel:
        with backend.interpreted():
            follow_rows(texts, words, len(rows), given)
    else:
        follow_rows(texts, words, len(rows), given)
    return given


def proposed(history: list[int], room: int, *, on_kernel: bool, capacity: int = 1024) -> list[int]:
    """Return what a row verifies; what is reported beyond that agrees with it."""
    texts = garbage(2, capacity)
    row = FollowedRow(slot=1, first=1, start=0, feed=-1, room=room, tokens=history, is_first=True)
    step = followed(texts, [row], step_of([0], room + 3), on_kernel=on_kernel)
    tokens, (num_tokens, length, *_), behind = step.tokens.tolist(), step.report[0].tolist()[:4], step.report[0, REPORT_HEADER:]
    assert (tokens[:2], tokens[room + 2 :]) == ([7, 7], [7]), "a row's own tokens are not touched, nor its neighbours'"
    assert (num_tokens > 0) == (length > 0)
    assert num_tokens == texts.num_proposed[1]
    assert texts.proposals[1].tolist() == behind.tolist()
    assert tokens[2 : 2 + room] == behind[:room].tolist()
    return tokens[2 : 2 + num_tokens]


@pytest.mark.parametrize("on_kernel", [False, True])
def test_the_longest_match_counts_and_of_these_the_most_frequent(on_kernel: bool) -> None:
    assert proposed([9, 1, 2, 50, 8, 1, 2, 60, 9, 1, 2], 3, on_kernel=on_kernel) == [50, 8, 1]
    assert proposed([1, 2, 50, 1, 2, 50, 3, 1, 2, 60, 4, 1, 2], 2, on_kernel=on_kernel) == [50, 3]
    assert proposed([1, 2, 50, 1, 2, 60, 4, 1, 2], 2, on_kernel=on_kernel) == [60, 4], "of equals the latest"
    assert proposed([1, 2, 3, 4, 5], 4, on_kernel=on_kernel) == []
    assert proposed([5], 4, on_kernel=on_kernel) == []
    assert proposed([5, 5], 4, on_kernel=on_kernel) == []


@pytest.mark.parametrize("on_kernel", [False, True])
def test_a_loop_is_proposed_to_go_on(on_kernel: bool) -> None:
    assert proposed([1, 2, 3] * 3, 8, on_kernel=on_kernel) == [1, 2, 3, 1, 2, 3, 1, 2]
    assert proposed([4] * 5, 6, on_kernel=on_kernel) == [4] * 6


@pytest.mark.parametrize("on_kernel", [False, True])
def test_a_row_without_room_is_told_what_it_could_have_verified(on_kernel: bool) -> None:
    texts = garbage(1, 128)
    row = FollowedRow(slot=0, first=0, start=0, feed=-1, room=0, tokens=[1, 2, 50, 51, 1, 2], is_first=True)
    step = followed(texts, [row], step_of([0], 2), on_kernel=on_kernel)
    assert step.tokens.tolist() == [7, 7]
    assert step.report[0].tolist()[:7] == [0, 2, 1, 1, 50, 51, 1]
    assert texts.num_proposed.tolist() == [0]


@pytest.mark.parametrize("on_kernel", [False, True])
def test_a_text_that_is_not_searched_grows_and_proposes_nothing(on_kernel: bool) -> None:
    texts = garbage(1, 128)
    first = FollowedRow(slot=0, first=0, start=0, feed=-1, room=3, tokens=[1, 2, 50, 1, 2], is_first=True)
    followed(texts, [first], step_of([0], 4), on_kernel=on_kernel)
    later = FollowedRow(slot=0, first=0, start=0, feed=-1, room=NO_SEARCH, tokens=[51, 52], begin=5)
    step = followed(texts, [later], step_of([0], 4), on_kernel=on_kernel)
    assert texts.tokens[0, :7].tolist() == [1, 2, 50, 1, 2, 51, 52]
    assert (texts.lengths.tolist(), texts.num_proposed.tolist()) == ([7], [0])
    assert (step.tokens == 7).all()
    assert (step.report == 7).all()


@pytest.mark.parametrize("on_kernel", [False, True])
def test_what_a_text_has_of_the_hosts_tokens_is_skipped(on_kernel: bool) -> None:
    texts = garbage(1, 128)
    sent = [1, 2, 3, 4, 5, 6, 7, 8]
    followed(texts, [FollowedRow(0, 0, 0, -1, 0, tokens=sent[:5], is_first=True)], step_of([0], 1), on_kernel=on_kernel)
    once = copy_of(texts)
    followed(texts, [FollowedRow(0, 0, 0, -1, 0, tokens=sent[2:], begin=2)], step_of([0], 1), on_kernel=on_kernel)
    assert texts.tokens[0, :8].tolist() == sent
    assert texts.lengths.tolist() == [8]
    followed(texts, [FollowedRow(0, 0, 0, -1, 0, tokens=sent[2:5], begin=2)], step_of([0], 1), on_kernel=on_kernel)
    followed(once, [FollowedRow(0, 0, 0, -1, 0, tokens=sent[5:], begin=5)], step_of([0], 1), on_kernel=on_kernel)
    for name, one, other in zip(DeviceTexts._fields, texts, once, strict=True):
        assert torch.equal(one, other), name


def test_the_kernel_writes_what_the_reference_writes() -> None:
    """Texts that begin, grow by what the host sends and by what was sampled, outgrow their slots, end and begin anew, with
    proposals that are followed or not, at random."""
    rng = random.Random(5)
    num_slots, capacity = 5, 128
    reference = garbage(num_slots, capacity)
    kernel = copy_of(reference)
    written: list[list[int]] = [[] for _ in range(num_slots)]
    num_proposed = 0
    for turn in range(40):
        sampled, rows, first = list[int](), list[FollowedRow](), 0
        positions = torch.zeros(400, dtype=torch.int64)
        for slot in rng.sample(range(num_slots), num_slots if not turn else rng.randrange(1, num_slots + 1)):
            tokens, begin, is_first = list[int](), 0, False
            if turn == 0 or rng.random() < 0.2:
                is_first = turn == 0 or rng.random() < 0.5
                vocab = rng.choice([2, 3, 9, 50_000])
                count = rng.choice([0, 1, 2, 63, 64, 65, 150])
                if is_first:
                    written[slot] = []
                begin = max(0, len(written[slot]) - rng.choice([0, 0, 1, 40]))  # what is known is sent again
                tokens = [*written[slot][begin:], *[rng.randrange(vocab) for _ in range(count)]]
                written[slot] = [*written[slot][:begin], *tokens]
            feed, room, new = -1, rng.choice([NO_SEARCH, 0, 1, 7, MAX_PROPOSAL]), list[int]()
            if rng.random() < 0.8:
                guess = reference.proposals[slot, : int(reference.num_proposed[slot])].tolist() if turn else []
                right = guess[: rng.randrange(len(guess) + 1)]
                new = [*right, *[rng.randrange(3) for _ in range(rng.choice([1, 1, 65]))]]
                feed = len(sampled)
                sampled += [*new, 12345]
                written[slot] += new
            rows.append(FollowedRow(slot, first, 1000, feed, room, tokens, begin, is_first))
            positions[first] = 1000 + len(new) - 1
            first += 1 + max(0, room) + rng.randrange(2)
        step = step_of([*sampled, 0], 400, len(rows))._replace(positions=positions)
        wanted = followed(reference, rows, step, on_kernel=False)
        found = followed(kernel, rows, step, on_kernel=True)
        assert torch.equal(found.tokens, wanted.tokens)
        assert torch.equal(found.report, wanted.report)
        for name, one, other in zip(DeviceTexts._fields, kernel, reference, strict=True):
            assert torch.equal(one, other), f"{name} in turn {turn}"
        assert reference.lengths.tolist() == list(map(len, written))
        num_proposed += int(reference.num_proposed.sum())
    assert num_proposed > 300


@pytest.mark.parametrize("on_kernel", [False, True])
def test_it_proposes_what_the_index_on_the_host_does(on_kernel: bool) -> None:
    rng = random.Random(8)
    vocab, capacity = 6, 1024
    buckets = {bucket_of(first, second, capacity) for first in range(vocab) for second in range(vocab)}
    assert len(buckets) == vocab * vocab, "pairs that share a bucket would shorten the walk"
    found = 0
    for _ in range(25):
        history = [rng.randrange(vocab) for _ in range(rng.randrange(2, 300))]
        index = TokenIndex(max_tokens=4096, max_candidates=CANDIDATES - 1)
        index.extend(history)
        match = index.find(history[-MAX_MATCH:])
        wanted = index.follow(match.position, 9, []) if match else []
        assert proposed(history, 9, on_kernel=on_kernel, capacity=capacity) == wanted
        found += bool(wanted)
    assert found > 15


@pytest.mark.parametrize("on_kernel", [False, True])
def test_what_a_slot_no_longer_holds_is_not_found(on_kernel: bool) -> None:
    rare = [70, 71, 72, 73]
    filler = list(range(100, 224))
    assert proposed([*rare, *filler[:120], 70, 71], 2, on_kernel=on_kernel, capacity=128) == [72, 73]
    assert proposed([*rare, *filler, *filler, 70, 71], 2, on_kernel=on_kernel, capacity=128) == []


@pytest.mark.parametrize("on_kernel", [False, True])
@pytest.mark.parametrize("remembers", [True, False])
def test_a_long_copy_goes_on_past_more_frequent_pairs(on_kernel: bool, remembers: bool) -> None:
    """The occurrence that the last proposal was copied from is compared, however many came since."""
    texts = new_texts(1, 1024, "cpu")
    begin = [41, 40, 1, 2, 30, *[1, 2, 60] * (CANDIDATES + 2), 41, 40]
    guesses = []
    for feed, token, sent in ((-1, 0, begin), (0, 1, []), (0, 2, [])):
        row = FollowedRow(0, 0, 0, feed, 1, sent, is_first=bool(sent))
        followed(texts, [row], step_of([token], 2), on_kernel=on_kernel)
        guesses.append(int(texts.proposals[0, 0]))
        if not remembers:
            texts.lags.zero_()
    assert guesses == [1, 2, 30 if remembers else 60]


def test_bounds_are_checked() -> None:
    with pytest.raises(ValueError, match="power of two"):
        new_texts(1, 100, "cpu")
    with pytest.raises(ValueError, match="hold no"):
        capacity_within(1000, 8)
    with pytest.raises(ValueError, match="two rows"):
        pack_rows([FollowedRow(1, 0, 0, 0, 1), FollowedRow(1, 2, 0, 0, 1)])
    with pytest.raises(ValueError, match="at most"):
        pack_rows([FollowedRow(1, 0, 0, 0, MAX_PROPOSAL + 1)])
    with pytest.raises(ValueError, match="begins at 0"):
        pack_rows([FollowedRow(1, 0, 0, 0, 1, [1], begin=3, is_first=True)])


def test_texts_take_what_they_may() -> None:
    for max_bytes, num_slots in ((64 << 20, 256), (1 << 20, 3), (40_000, 8)):
        capacity = capacity_within(max_bytes, num_slots)
        taken = sum(4 * x.numel() for x in new_texts(num_slots, capacity, "meta"))
        assert max_bytes / 2.2 < taken <= max_bytes
