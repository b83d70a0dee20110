"""A prefix is fetched unless that was measured to be slower than computing it."""

from __future__ import annotations

from common.worker.fetch_rate import FORGET_S, MAX_FETCHES, FetchRates

MB = 1_000_000


def rates(tokens_per_s: float = 1000.0) -> FetchRates:
    return FetchRates(lambda: tokens_per_s)


def test_a_path_of_which_little_is_known_is_taken():
    fetched = rates()
    assert fetched.pays("kvstore", MB, 1, 0.0)
    for _ in range(2):
        fetched.measure("kvstore", MB, 100.0, 0.0)
        assert fetched.pays("kvstore", MB, 1, 0.0), "two slow fetches decide nothing"
    fetched.measure("kvstore", MB, 100.0, 0.0)
    assert not fetched.pays("kvstore", MB, 1, 0.0)


def test_it_is_computed_where_that_is_faster():
    fetched = rates(1000.0)
    for _ in range(3):
        fetched.measure("nixl", 10 * MB, 1.0, 0.0)  # 10 MB/s
    assert fetched.bytes_per_s("nixl", MB, 0.0) == 10 * MB
    assert fetched.pays("nixl", 10 * MB, 1000, 0.0), "one second either way"
    assert not fetched.pays("nixl", 10 * MB, 999, 0.0)
    assert fetched.pays("kvstore", 10 * MB, 1, 0.0), "another path was not measured"


def test_nothing_is_skipped_before_prefill_was_measured():
    fetched = rates(0.0)
    for _ in range(5):
        fetched.measure("disk", MB, 100.0, 0.0)
    assert fetched.pays("disk", 1000 * MB, 1, 0.0)


def test_one_slow_fetch_among_fast_ones_changes_nothing():
    fetched = rates()
    for seconds in (0.001, 0.001, 60.0):
        fetched.measure("kvstore", MB, seconds, 0.0)
    assert fetched.pays("kvstore", MB, 2, 0.0)


def test_a_slow_path_is_tried_again():
    fetched = rates()
    for _ in range(MAX_FETCHES * 2):
        fetched.measure("disk", MB, 100.0, 0.0)
    assert not fetched.pays("disk", MB, 1, FORGET_S)
    assert fetched.pays("disk", MB, 1, FORGET_S + 1)
    for _ in range(3):
        fetched.measure("disk", MB, 0.0005, FORGET_S + 1)
    assert fetched.pays("disk", MB, 1, FORGET_S + 1), "it has become fast"


def test_a_path_that_became_slow_is_noticed():
    fetched = rates()
    for _ in range(MAX_FETCHES):
        fetched.measure("kvstore", MB, 0.0001, 0.0)
    for _ in range(MAX_FETCHES // 2 + 1):
        fetched.measure("kvstore", MB, 10.0, 1.0)
    assert not fetched.pays("kvstore", MB, 1, 1.0)


def test_small_fetches_say_nothing_of_large_ones():
    fetched = rates()
    for _ in range(8):
        fetched.measure("kvstore", MB // 100, 0.1, 0.0)  # mostly latency
    assert not fetched.pays("kvstore", MB // 100, 1, 0.0)
    assert fetched.pays("kvstore", MB, 100, 0.0)
    for _ in range(3):
        fetched.measure("kvstore", MB, 0.01, 0.0)
    assert fetched.pays("kvstore", MB, 100, 0.0)


def test_what_came_of_much_that_was_asked_for_says_how_fast_much_is():
    fetched = rates()
    for _ in range(3):
        fetched.measure("disk", MB // 100, 0.1, 0.0, asked_bytes=MB)
    assert not fetched.pays("disk", MB, 100, 0.0)
    for _ in range(4):
        fetched.measure("disk", 0, 0.1, 0.0, asked_bytes=MB)
    assert not fetched.pays("disk", MB, 1000, 0.0), "nothing comes at all"


def test_empty_and_instantaneous_fetches_are_harmless():
    fetched = rates()
    for _ in range(3):
        fetched.measure("shm", 0, 0.0, 0.0)
    assert fetched.bytes_per_s("shm", 1, 0.0) == 0
    for _ in range(3):
        fetched.measure("shm", MB, 0.0, 0.0)
    assert fetched.pays("shm", MB, 1, 0.0)


def test_a_test_of_the_path_counts_until_fetches_were_measured():
    rates = FetchRates(lambda: 1000.0)
    assert rates.pays("kvstore_nixl", 1000, 1000, 0.0, tested_bytes_per_s=1000.0)
    assert not rates.pays("kvstore_nixl", 1001, 1000, 0.0, tested_bytes_per_s=1000.0)
    for _ in range(3):
        rates.measure("kvstore_nixl", 1000, 0.1, 0.0)
    assert rates.pays("kvstore_nixl", 9999, 1000, 0.0, tested_bytes_per_s=1000.0) is False, (
        "small fetches say little of large ones"
    )
    assert rates.pays("kvstore_nixl", 4000, 1000, 0.0, tested_bytes_per_s=1000.0)
