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
    DeviceTexts,
    FollowedStep,
    TextPart,
    bucket_of,
    capacity_within,
    new_texts,
    pack_parts,
)
from common.ops.lookup.follow import DEPTHS, FollowedRow, extend_texts, follow_rows, pack_rows
from services.decode.token_index import TokenIndex

ALL = [MAX_PROPOSAL] * DEPTHS
"""Propose as much as there is room for, whatever the match."""


def copy_of(texts: DeviceTexts) -> DeviceTexts:
    return DeviceTexts(*(x.clone() for x in texts))


def garbage(num_slots: int, capacity: int) -> DeviceTexts:
    """Slots that held other texts: what is not cleared must not be read."""
    texts = new_texts(num_slots, capacity, "cpu")
    for x in texts:
        x.random_(0, capacity)
    return texts


def extended(texts: DeviceTexts, parts: list[TextPart], *, on_kernel: bool) -> None:
    words = torch.from_numpy(pack_parts(parts))
    if on_kernel:
        with backend.interpreted():
            extend_texts(texts, words, len(parts))
    else:
        extend_texts(texts, words, len(parts))


def followed(
    texts: DeviceTexts, rows: list[FollowedRow], depths: list[list[int]], step: FollowedStep, *, on_kernel: bool
) -> list[int]:
    """Return the step's tokens."""
    words = torch.from_numpy(pack_rows(rows, depths))
    given = step._replace(tokens=step.tokens.clone())
    if on_kernel:
        with backend.interpreted():
            follow_rows(texts, words, len(rows), given)
    else:
        follow_rows(texts, words, len(rows), given)
    return given.tokens.tolist()


def proposed(history: list[int], room: int, *, on_kernel: bool, capacity: int = 1024, depths: list[int] = ALL) -> list[int]:
    texts = garbage(2, capacity)
    extended(texts, [TextPart(1, history, is_first=True)], on_kernel=on_kernel)
    step = FollowedStep(torch.zeros(1, dtype=torch.int64), torch.full((room + 3,), 7), torch.zeros(room + 3, dtype=torch.int64))
    row = FollowedRow(slot=1, first=1, start=0, feed=-1, room=room)
    tokens = followed(texts, [row], [depths], step, on_kernel=on_kernel)
    assert (tokens[:2], tokens[room + 2 :]) == ([7, 7], [7]), "a row's own tokens are not touched, nor its neighbours'"
    num_tokens = int(texts.found[1, 0])
    assert texts.proposals[1].tolist() == [*tokens[2 : 2 + num_tokens], *[0] * (MAX_PROPOSAL - num_tokens)]
    assert not any(tokens[2 + num_tokens : 2 + room])
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
def test_depths_say_how_much_is_proposed(on_kernel: bool) -> None:
    depths = [0] * DEPTHS
    depths[3], depths[MAX_MATCH + 1 + 2], depths[2 * (MAX_MATCH + 1) + 2] = 4, 3, 1
    ask = {"on_kernel": on_kernel, "depths": depths}
    assert len(proposed([1, 2, 3, 7, 8, 9, 1, 2, 3], 6, **ask)) == 4
    assert len(proposed([1, 2, 3, 7, 8, 9, 1, 2, 3], 2, **ask)) == 2, "no more than there is room for"
    assert len(proposed([0, 2, 3, 7, 8, 9, 1, 2, 3], 6, **ask)) == 0, "one occurrence of two tokens does not pay"
    assert len(proposed([4, 2, 3, 7, 5, 2, 3, 7, 1, 2, 3], 6, **ask)) == 3
    assert len(proposed([4, 2, 3, 7, 5, 2, 3, 8, 1, 2, 3], 6, **ask)) == 1


def test_the_kernels_write_what_the_reference_writes() -> None:
    """Texts that begin, grow by what was sampled, outgrow their slots, end and begin anew, with proposals that are followed or
    not, at random."""
    rng = random.Random(5)
    num_slots, capacity = 5, 128
    reference = garbage(num_slots, capacity)
    kernel = copy_of(reference)
    tables = [[rng.randrange(MAX_PROPOSAL + 1) for _ in range(DEPTHS)] for _ in range(2)]
    lengths = [0] * num_slots
    num_proposed = 0
    for turn in range(40):
        parts = []
        for slot in range(num_slots):
            if turn == 0 or rng.random() < 0.15:
                is_first = turn == 0 or rng.random() < 0.5
                vocab = rng.choice([2, 3, 9, 50_000])
                count = rng.choice([0, 1, 2, 63, 64, 65, 150])
                parts.append(TextPart(slot, [rng.randrange(vocab) for _ in range(count)], is_first))
                lengths[slot] = count + (0 if is_first else lengths[slot])
        if parts:
            extended(reference, parts, on_kernel=False)
            extended(kernel, parts, on_kernel=True)
        sampled, rows, first = list[int](), list[FollowedRow](), 0
        positions = torch.zeros(400, dtype=torch.int64)
        for slot in rng.sample(range(num_slots), rng.randrange(1, num_slots + 1)):
            feed, room, given = -1, rng.choice([0, 1, 7, MAX_PROPOSAL]), 0
            if rng.random() < 0.8:
                guess = reference.proposals[slot, : int(reference.found[slot, 0])].tolist()
                right = guess[: rng.randrange(len(guess) + 1)]
                new = [*right, *[rng.randrange(3) for _ in range(rng.choice([1, 1, 65]))]]
                feed, given = len(sampled), len(new)
                sampled += [*new, 12345]
                lengths[slot] += given
            rows.append(FollowedRow(slot, first, 1000, feed, room, rng.randrange(2)))
            positions[first] = 1000 + given - 1
            first += 1 + room + rng.randrange(2)
        step = FollowedStep(torch.tensor([*sampled, 0]), torch.full((400,), 7), positions)
        wanted = followed(reference, rows, tables, step, on_kernel=False)
        assert followed(kernel, rows, tables, step, on_kernel=True) == wanted
        for name, one, other in zip(DeviceTexts._fields, kernel, reference, strict=True):
            assert torch.equal(one, other), f"{name} in turn {turn}"
        assert reference.lengths.tolist() == lengths
        num_proposed += int(reference.found[:, 0].sum())
    assert num_proposed > 500


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
    extended(texts, [TextPart(0, begin, is_first=True)], on_kernel=on_kernel)
    guesses = []
    for feed, token in ((-1, 0), (0, 1), (0, 2)):
        step = FollowedStep(torch.tensor([token]), torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.int64))
        followed(texts, [FollowedRow(0, 0, 0, feed, 1)], [ALL], step, on_kernel=on_kernel)
        guesses.append(int(texts.proposals[0, 0]))
        if not remembers:
            texts.lags.zero_()
    assert guesses == [1, 2, 30 if remembers else 60]


def test_bounds_are_checked() -> None:
    with pytest.raises(ValueError, match="power of two"):
        new_texts(1, 100, "cpu")
    with pytest.raises(ValueError, match="hold no"):
        capacity_within(1000, 8)
    with pytest.raises(ValueError, match="two parts"):
        pack_parts([TextPart(1, [2]), TextPart(1, [3])])
    with pytest.raises(ValueError, match="two rows"):
        pack_rows([FollowedRow(1, 0, 0, 0, 1), FollowedRow(1, 2, 0, 0, 1)], [ALL])
    with pytest.raises(ValueError, match="at most"):
        pack_rows([FollowedRow(1, 0, 0, 0, MAX_PROPOSAL + 1)], [ALL])
    with pytest.raises(ValueError, match="depths"):
        pack_rows([FollowedRow(1, 0, 0, 0, 1)], [[1]])


def test_texts_take_what_they_may() -> None:
    for max_bytes, num_slots in ((64 << 20, 256), (1 << 20, 3), (40_000, 8)):
        capacity = capacity_within(max_bytes, num_slots)
        taken = sum(4 * x.numel() for x in new_texts(num_slots, capacity, "meta"))
        assert max_bytes / 2.2 < taken <= max_bytes
