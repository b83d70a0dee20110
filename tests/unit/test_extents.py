"""Free stretches of a kvstore's staging buffer: nothing is given twice, everything comes back."""

from __future__ import annotations

import itertools
import random

import pytest

from common.transfer.extents import ALIGNMENT, Extent, Extents


def test_blocks_lie_one_behind_the_other_while_there_is_a_long_stretch():
    extents = Extents(1 << 20)
    assert extents.take(3, 1000) == [Extent(0, 3, 3008)]
    assert extents.take(1, 64) == [Extent(3008, 1, 64)]
    assert extents.free_bytes == (1 << 20) - 3072


def test_a_request_that_does_not_fit_takes_nothing():
    extents = Extents(10_000)
    assert extents.take(11, 1000) is None
    assert extents.take(1, 10_001) is None
    assert extents.take(0, 1000) is None
    assert extents.free_bytes == 10_000
    assert extents.take(10, 1000) is not None, "to the last byte"
    assert extents.take(1, 1) is None
    assert Extents(0).take(1, 1) is None


def test_a_request_may_lie_in_several_stretches_but_no_block_does():
    extents = Extents(64 * 100)
    held = [extents.take(1, 64 * 10) for _ in range(10)]
    for index in (1, 4, 5, 8):
        extents.give_back(held[index] or [])
    found = extents.take(3, 64 * 10)
    assert found == [Extent(640, 1, 640), Extent(2560, 2, 1280)]
    assert extents.take(1, 64 * 11) is None, "640 bytes are free, in one piece"
    extents.check()


def test_what_was_given_back_can_be_taken_as_one_piece_again():
    extents = Extents(64 * 30)
    held = [extents.take(1, 64 * 10) or [] for _ in range(3)]
    for index in (0, 2, 1):
        extents.give_back(held[index])
        extents.check()
    assert extents.take(1, 64 * 30) == [Extent(0, 1, 64 * 30)]


def test_giving_back_twice_is_noticed():
    extents = Extents(1 << 12)
    taken = extents.take(1, 100) or []
    extents.give_back(taken)
    with pytest.raises(AssertionError):
        extents.give_back(taken)


def test_whatever_is_taken_and_given_back_no_two_extents_overlap_and_nothing_leaks():
    dice = random.Random(5)
    extents, held = Extents(100_000), list[list[Extent]]()
    for _ in range(3000):
        if held and dice.random() < 0.5:
            extents.give_back(held.pop(dice.randrange(len(held))))
        elif (taken := extents.take(num_blocks := dice.randrange(1, 12), size := dice.randrange(1, 4000))) is not None:
            assert sum(extent.num_blocks for extent in taken) == num_blocks
            assert all(extent.num_blocks * size <= extent.num_bytes and not extent.offset % ALIGNMENT for extent in taken)
            held.append(taken)
        extents.check()
        spans = sorted((extent.offset, extent.offset + extent.num_bytes) for taken in held for extent in taken)
        assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(spans))
        assert extents.free_bytes == 100_000 - sum(end - begin for begin, end in spans)
    for taken in held:
        extents.give_back(taken)
    assert extents.free_bytes == 100_000
