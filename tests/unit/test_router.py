"""Where requests go: balanced, near their prefix, never to who can't take them, and in microseconds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path as FilePath
from typing import Any

import msgspec
import pytest

from common.protocol import tokens as token_bytes
from common.protocol.capacity import Capacity
from common.protocol.handles import Role, WorkerRef
from common.protocol.messages import Presence
from common.protocol.transfer_messages import KvEndpoint
from services.gateway.actions import Path
from services.gateway.prefix_memory import BOUNDARIES, PrefixMemory, prefix_keys
from services.gateway.router import Choice, Job, Router
from services.gateway.routes import WORDS
from tests.unit.cpu_cost import costs_at_most


def test_the_operations_page_lists_every_reason_of_a_path() -> None:
    page = (FilePath(__file__).parents[2] / "docs" / "operations.md").read_text()
    listed = [f"| `{reason}` | {words[0].upper()}{words[1:]}. |" for reason, words in WORDS.items() if reason]
    assert "\n".join(listed) in page


def worker(role: Role, number: int, *, epoch: int = 1, **said: Any) -> Presence:
    said = {"state": "ready", "model": "m", "fingerprint": "f", "host": "h", "credits": 64, **said}
    return Presence(worker=WorkerRef(role, f"{role}-{number}", epoch), **said)


def router(*presences: Presence, direct_max_tokens: int = 64) -> Router:
    made = Router(direct_max_tokens=direct_max_tokens)
    made.refresh(presences)
    return made


def job(
    prompt: list[int], *, path: Path = "auto", max_tokens: int = 64, avoid: Iterable[str] = (), patient: bool = True
) -> Job:
    keys = prefix_keys(token_bytes.pack(prompt))
    return Job(keys, len(prompt), max_tokens, path, frozenset(avoid), patient)


def prompt(num_tokens: int, *, first: int = 0) -> list[int]:
    return [first + index % 1000 for index in range(num_tokens)]


SHORT, LONG = job(prompt(8)), job(prompt(2000))


def place(chooser: Router, work: Job) -> Choice:
    """Choose, and count the request there, as the dispatcher does."""
    choice = chooser.choose(work)
    assert choice is not None
    chooser.count(choice.decode, 1)
    if choice.prefill is not None:
        chooser.count(choice.prefill, 1, choice.uncached_tokens)
    return choice


# -- direct or not


def test_short_prompts_go_straight_to_decode_and_long_ones_through_prefill() -> None:
    both = router(worker("prefill", 1), worker("decode", 1))
    assert place(both, SHORT).prefill is None
    assert place(both, LONG).prefill is not None


def test_without_a_prefill_worker_everything_goes_direct() -> None:
    assert place(router(worker("decode", 1)), LONG).prefill is None
    draining = router(worker("prefill", 1, state="draining"), worker("decode", 1))
    assert place(draining, LONG).prefill is None


def test_minus_one_never_goes_direct_and_a_large_limit_always() -> None:
    pools = worker("prefill", 1), worker("decode", 1)
    assert place(router(*pools, direct_max_tokens=-1), SHORT).prefill is not None
    assert place(router(*pools, direct_max_tokens=10**9), LONG).prefill is None


def test_a_long_prompt_whose_prefix_decode_remembers_goes_direct() -> None:
    both = router(worker("prefill", 1), worker("decode", 1))
    ref = WorkerRef("decode", "decode-1", 1)
    both.remember(LONG.keys, ref)
    choice = place(both, LONG)
    assert choice.prefill is None
    assert choice.uncached_tokens <= 64


def test_somewhat_longer_prompts_go_where_measured_speeds_say() -> None:
    slow: dict[str, Any] = {"prefill_tokens_per_s": 100.0}
    fast: dict[str, Any] = {"prefill_tokens_per_s": 10_000.0}
    medium = job(prompt(200))
    assert place(router(worker("prefill", 1, **slow), worker("decode", 1, **fast)), medium).prefill is None
    assert place(router(worker("prefill", 1, **fast), worker("decode", 1, **slow)), medium).prefill is not None


def test_a_path_can_be_forced() -> None:
    both = router(worker("prefill", 1), worker("decode", 1))
    assert place(both, job(prompt(4), path="prefill")).prefill is not None
    assert place(both, job(prompt(4000), path="direct")).prefill is None
    assert router(worker("decode", 1)).choose(job(prompt(4), path="prefill")) is None


# -- first tokens in time


def pools_with(
    *, prefill_backlog: int, decode_backlog: int = 0, ttft_s: float = 0.5, prefill_tokens: int = 1000, decode_tokens: int = 1000
) -> Router:
    """Workers that compute `prefill_tokens` and `decode_tokens` of prompts in 100 ms."""
    made = Router(direct_max_tokens=64, ttft_s=ttft_s)
    made.refresh(
        [
            worker("prefill", 1, capacity=Capacity(prefill_tokens, prefill_backlog)),
            worker("decode", 1, capacity=Capacity(decode_tokens, decode_backlog, 8.0)),
        ]
    )
    return made


@pytest.mark.parametrize(
    ("expected", "said"),
    [
        ("long_uncached_prompt", {"prefill_backlog": 900}),  # 0.3 s: safely in time
        ("prefill_would_be_late", {"prefill_backlog": 3100}),
        ("prefill_would_be_late", {"prefill_backlog": 3100, "decode_backlog": 1900}),
        ("long_uncached_prompt", {"prefill_backlog": 3100, "decode_backlog": 2900}),  # in time, and hardly sooner
        ("long_uncached_prompt", {"prefill_backlog": 3100, "decode_backlog": 3100}),  # both late, no sooner
        ("sooner_at_decode", {"prefill_backlog": 6000, "decode_backlog": 3100}),
        ("long_uncached_prompt", {"prefill_backlog": 0, "prefill_tokens": 100}),  # it may have been slow once
        ("long_uncached_prompt", {"prefill_backlog": 90_000, "ttft_s": 0.0}),  # no objective
        ("long_uncached_prompt", {"prefill_backlog": 3100, "decode_tokens": 100}),
        ("prefill_would_be_late", {"prefill_backlog": 3100, "decode_tokens": 0}),  # never computed a prompt: as fast as others
    ],
)
def test_a_decode_worker_takes_long_prompts_for_which_prefill_would_be_late(expected: str, said: dict[str, Any]) -> None:
    choice = place(pools_with(**said), LONG)
    assert choice.reason == expected
    assert (choice.prefill is None) == (expected != "long_uncached_prompt")


def test_prompts_are_shared_as_their_backlogs_grow() -> None:
    pools, ways = pools_with(prefill_backlog=0), Counter[str]()
    for _ in range(20):
        choice = pools.choose(LONG)
        assert choice is not None
        ways["direct" if choice.prefill is None else "prefill"] += 1
        pools.count(choice.prefill or choice.decode, 1, choice.uncached_tokens)
    assert ways["prefill"] >= ways["direct"] >= 7


def test_a_path_that_was_asked_for_is_taken_however_late() -> None:
    assert place(pools_with(prefill_backlog=90_000), job(prompt(2000), path="prefill")).prefill is not None


def test_the_expected_first_token_is_kept_for_explaining() -> None:
    choice = place(pools_with(prefill_backlog=3100), LONG)
    soon = {cost.part: cost.ttft_s for cost in choice.costs}
    assert soon == {"prefill": pytest.approx(0.515), "decode": 0.0, "direct": pytest.approx(0.2)}
    assert choice.ttft_s == pytest.approx(0.2)


def test_while_prefill_has_no_room_a_decode_worker_keeps_the_objective() -> None:
    made = Router(direct_max_tokens=64, ttft_s=0.5)
    full = worker("prefill", 1, credits=0, capacity=Capacity(1000, 9000))
    made.refresh([full, worker("decode", 1, capacity=Capacity(1000, 1000))])
    assert place(made, LONG).reason == "no_room_at_prefill"
    made.refresh([full, worker("decode", 1, capacity=Capacity(1000, 9000))])
    assert made.choose(LONG) is None, "it waits for prefill, and for five seconds at most"


SLOW, BUSY = Capacity(1000, 0, 25.0, 0), Capacity(1000, 500, 0.0, 9)


@pytest.mark.parametrize(
    ("decode", "prefill", "spills"),
    [
        ({"credits": 0, "capacity": Capacity(1000, 0, 9.0, 0)}, {"capacity": Capacity(4000, 0, 0.0, 9)}, True),
        ({"capacity": SLOW}, {"capacity": Capacity(4000, 0, 0.0, 9)}, True),
        ({"capacity": SLOW}, {"capacity": BUSY}, False),  # it has prompts
        ({"capacity": SLOW}, {"capacity": Capacity(4000, 0, 0.0, 0)}, False),  # full, or of a version that can't
        ({"capacity": Capacity(1000, 0, 9.0, 9)}, {"capacity": Capacity(4000, 0, 0.0, 9)}, False),
        ({}, {"capacity": Capacity(4000, 0, 0.0, 9)}, False),
    ],
)
def test_a_prefill_worker_without_prompts_decodes_while_no_decode_worker_has_room(
    decode: dict[str, Any], prefill: dict[str, Any], spills: bool
) -> None:
    for ttft_s in (0.5, 0.0):
        made = Router(direct_max_tokens=64, ttft_s=ttft_s)
        made.refresh([worker("decode", 1, **decode), worker("prefill", 1, **prefill)])
        for work in (SHORT, LONG):
            choice = made.choose(work)
            if spills and ttft_s:
                assert made.has_room and choice is not None
                assert (choice.decode.role, choice.prefill, choice.reason) == ("prefill", None, "decode_pool_is_full")
            else:
                assert choice is None or choice.decode.role == "decode"
        assert made.choose(job(prompt(8), path="prefill")) is None or decode.get("credits") != 0


def test_a_worker_without_blocks_for_a_long_sequence_takes_shorter_ones() -> None:
    made = router(worker("decode", 1), worker("prefill", 1))
    ref = WorkerRef("prefill", "prefill-1", 1)
    made.refused(ref, num_tokens=2000)
    assert made.choose(LONG) is None and made.is_too_long(2000)
    assert place(made, job(prompt(1900))).prefill == ref
    assert not made.is_too_long(1900)
    made.refused(ref, num_tokens=1900)
    assert made.choose(job(prompt(1900))) is None
    made.count(ref, -1)  # something of ours has ended there
    assert place(made, LONG).prefill == ref
    made.refused(ref, num_tokens=2000)
    made.refresh([worker("decode", 1), worker("prefill", 1)])  # it says how it is
    assert place(made, LONG).prefill == ref
    impatient = job(prompt(2000), patient=False)
    made.refused(ref, num_tokens=2000)
    assert place(made, impatient).reason == "no_room_at_prefill_for_long"


def test_a_worker_that_is_kept_for_a_request_gets_nothing_else() -> None:
    made = router(worker("decode", 1), worker("decode", 2))
    ref = WorkerRef("decode", "decode-1", 1)
    made.keep(ref, "long")
    assert {place(made, SHORT).decode.id for _ in range(6)} == {"decode-2"}
    made.refused(WorkerRef("decode", "decode-2", 1))
    assert made.choose(SHORT) is None
    assert place(made, msgspec.structs.replace(SHORT, request="long")).decode == ref
    made.keep(ref, "")
    assert place(made, SHORT).decode == ref


def test_what_a_worker_has_to_compute_is_what_it_said_and_what_came_since() -> None:
    made = pools_with(prefill_backlog=1000)
    ref = WorkerRef("prefill", "prefill-1", 1)
    one = made.prefill.members["prefill-1"]
    made.count(ref, 2, 4000)
    assert one.backlog == 5000
    one.observe(worker("prefill", 1, capacity=Capacity(1000, 3000)))
    assert one.backlog == 3000
    one.observe(worker("prefill", 1, capacity=Capacity(1000, 0)))  # said before it had heard of ours
    assert one.backlog == 2000
    made.count(ref, -2, -4000)
    assert one.backlog == 0


# -- who may take it


@pytest.mark.parametrize("state", ["starting", "draining"])
def test_only_ready_workers_get_requests(state: str) -> None:
    assert router(worker("decode", 1, state=state)).choose(SHORT) is None
    assert place(router(worker("decode", 1, state=state), worker("decode", 2)), SHORT).decode.id == "decode-2"


@pytest.mark.parametrize("other", [{"fingerprint": "f2"}, {"host": "h2"}])
def test_kv_is_only_handed_over_between_workers_that_can_share_it(other: dict[str, Any]) -> None:
    assert place(router(worker("prefill", 1), worker("decode", 1, **other)), LONG).prefill is None
    mixed = router(worker("prefill", 1), worker("decode", 1, **other), worker("decode", 2))
    for _ in range(8):
        assert place(mixed, LONG).decode.id == "decode-2"


def test_nobody_with_credits_means_nobody() -> None:
    assert router(worker("decode", 1, credits=0)).choose(SHORT) is None
    both = router(worker("prefill", 1, credits=0), worker("decode", 1))
    assert both.choose(LONG) is None
    assert both.choose(job(prompt(2000), patient=False)) is not None  # it has waited long enough for prefill


def test_own_requests_use_up_credits_and_give_them_back() -> None:
    one = router(worker("decode", 1, credits=2))
    first = place(one, SHORT)
    place(one, SHORT)
    assert one.choose(SHORT) is None
    one.count(first.decode, -1)
    assert one.choose(SHORT) is not None


def test_a_refusal_counts_until_something_ends_there_or_the_worker_says_otherwise() -> None:
    one = router(worker("decode", 1, credits=9))
    choice = place(one, SHORT)
    one.refused(choice.decode)
    assert one.choose(SHORT) is None
    one.count(choice.decode, -1)
    assert one.choose(SHORT) is not None
    one.refused(choice.decode)
    one.refresh([worker("decode", 1, credits=1)])
    assert one.choose(SHORT) is not None


def test_a_worker_to_avoid_is_taken_only_when_there_is_no_other() -> None:
    two = router(worker("decode", 1), worker("decode", 2))
    shy = job(prompt(8), avoid=("decode-1",))
    assert {place(two, shy).decode.id for _ in range(8)} == {"decode-2"}
    assert place(router(worker("decode", 1)), shy).decode.id == "decode-1"


def test_a_worker_that_is_gone_or_began_anew_is_forgotten() -> None:
    one = router(worker("decode", 1, epoch=1), worker("prefill", 1))
    one.refresh([worker("decode", 1, epoch=2)])
    assert place(one, LONG).decode.epoch == 2
    assert not one.knows(WorkerRef("decode", "decode-1", 1))
    one.remove(WorkerRef("decode", "decode-1", 2))
    assert one.choose(SHORT) is None
    assert not one.hopeful


# -- balance


def test_a_burst_between_two_heartbeats_spreads() -> None:
    four = router(*(worker("decode", number) for number in range(4)))
    took = Counter(place(four, SHORT).decode.id for _ in range(64))
    assert set(took.values()) == {16}


def test_a_burst_of_prompts_spreads_over_prefill_too() -> None:
    pools = router(*(worker("prefill", n) for n in range(4)), *(worker("decode", n) for n in range(2)))
    took = Counter(str(place(pools, job(prompt(500, first=index))).prefill) for index in range(32))
    assert set(took.values()) == {8}


def test_a_worker_that_joins_takes_load_at_once() -> None:
    loaded = worker("decode", 1, running=32, step_ms=20.0)
    pool = router(loaded)
    for _ in range(32):
        place(pool, SHORT)
    pool.refresh([loaded, worker("decode", 2)])
    assert {place(pool, SHORT).decode.id for _ in range(8)} == {"decode-2"}


def test_other_gateways_load_counts() -> None:
    pool = router(worker("decode", 1, running=20), worker("decode", 2, running=2))
    assert {place(pool, SHORT).decode.id for _ in range(10)} == {"decode-2"}


def test_a_large_pool_is_used_evenly() -> None:
    pool = router(*(worker("decode", number, credits=64) for number in range(200)))
    took = Counter(place(pool, SHORT).decode.id for _ in range(2000))
    assert len(took) == 200
    assert max(took.values()) <= 20


# -- prefixes


def test_a_prompt_goes_where_its_prefix_is() -> None:
    pool = router(*(worker("decode", number) for number in range(20)), direct_max_tokens=10**9)
    shared = prompt(1000)
    home = place(pool, job(shared)).decode
    pool.remember(prefix_keys(token_bytes.pack(shared)), home)
    pool.count(home, -1)
    choice = place(pool, job([*shared, *prompt(100, first=5000)]))
    assert choice.decode == home
    assert choice.uncached_tokens <= 116


def test_a_popular_prefix_spreads_instead_of_making_a_hot_spot() -> None:
    pool = router(*(worker("decode", number, step_ms=10.0) for number in range(4)), direct_max_tokens=10**9)
    popular = job(prompt(200), max_tokens=256)
    took: Counter[str] = Counter()
    for _ in range(64):
        choice = place(pool, popular)
        pool.remember(popular.keys, choice.decode)
        took[choice.decode.id] += 1
    assert len(took) == 4
    assert max(took.values()) <= 24


def test_prefixes_of_different_tenants_are_told_apart() -> None:
    packed = token_bytes.pack(prompt(64))
    assert not set(prefix_keys(packed, b"a")) & set(prefix_keys(packed, b"b"))


def test_keys_stand_for_growing_prefixes_and_stay_few() -> None:
    packed = token_bytes.pack(prompt(100_000))
    keys = prefix_keys(packed)
    assert keys[:4] == prefix_keys(packed[: 4 * 64])
    assert BOUNDARIES[len(keys) - 1] <= 100_000 < BOUNDARIES[len(keys)]
    assert len(keys) < 400


def test_the_memory_is_bounded_and_keeps_what_is_used() -> None:
    memory = PrefixMemory(100)
    memory.remember([1, 2, 3], 7)
    for key in range(1000, 2000):
        memory.remember([key], 8)
        memory.remember([1, 2, 3], 7)
    assert len(memory) <= 100
    assert memory.match([1, 2, 3]) == {7: BOUNDARIES[2]}


# -- a second home for computed KV


def test_a_redirect_goes_to_an_untried_decode_worker_of_the_same_host() -> None:
    pool = router(worker("prefill", 1), worker("decode", 1), worker("decode", 2), worker("decode", 3, host="h2"))
    prefill = WorkerRef("prefill", "prefill-1", 1)
    choice = pool.choose_decode(prefill, LONG, tried={"decode-1"})
    assert choice is not None
    assert choice.id == "decode-2"
    assert pool.choose_decode(prefill, LONG, tried={"decode-1", "decode-2"}) is None
    assert not pool.may_redirect(prefill, 8, tried={"decode-1", "decode-2"})


def test_a_redirect_may_be_worth_waiting_for() -> None:
    pool = router(worker("prefill", 1), worker("decode", 1, credits=0))
    prefill = WorkerRef("prefill", "prefill-1", 1)
    assert pool.choose_decode(prefill, LONG, tried=()) is None
    assert pool.may_redirect(prefill, 8, tried=())


def test_an_idle_worker_that_lacked_blocks_is_not_asked_again_until_it_says_otherwise() -> None:
    pool = router(worker("decode", 1))
    found = pool.choose_alone(LONG)
    assert found is not None
    pool.refused(found.decode, num_tokens=LONG.num_tokens)
    assert pool.choose_alone(LONG) is None
    pool.refresh([worker("decode", 1)])
    assert pool.choose_alone(LONG) is not None


# -- speed


def test_a_decision_takes_microseconds_with_hundreds_of_workers() -> None:
    pool = router(*(worker("prefill", n) for n in range(250)), *(worker("decode", n, credits=1000) for n in range(250)))
    work = [job(prompt(1500, first=index)) for index in range(50)]
    for each in work:
        pool.remember(each.keys, place(pool, each).decode)
    with costs_at_most(500 * 500e-6):  # 40 µs each, alone; this machine is shared
        for _ in range(10):
            for each in work:
                pool.choose(each)


# -- why


def test_a_choice_tells_its_reason_and_what_others_would_have_cost() -> None:
    both = router(worker("prefill", 1), worker("decode", 1), worker("decode", 2, running=9))
    short, long = both.choose(SHORT), both.choose(LONG)
    assert short is not None and short.reason == "short_uncached_prompt"
    assert {(cost.part, cost.worker) for cost in short.costs} == {("direct", "decode-1"), ("direct", "decode-2")}
    assert long is not None and long.reason == "long_uncached_prompt"
    parts = [
        ("prefill", "prefill-1"),
        ("decode", "decode-1"),
        ("decode", "decode-2"),
        ("direct", "decode-1"),
        ("direct", "decode-2"),
    ]
    assert sorted((cost.part, cost.worker) for cost in long.costs) == sorted(parts)
    decode = {cost.worker: cost.cost_s for cost in long.costs if cost.part == "decode"}
    assert long.decode.id == min(decode, key=lambda worker: decode[worker]) and decode["decode-1"] < decode["decode-2"]


def test_without_prefill_workers_the_reason_says_so() -> None:
    choice = router(worker("decode", 1)).choose(LONG)
    assert choice is not None and choice.reason == "no_prefill_worker"


def test_a_prompt_that_waited_for_prefill_in_vain_says_so() -> None:
    full = router(worker("prefill", 1, credits=0), worker("decode", 1))
    choice = full.choose(job(prompt(2000), patient=False))
    assert choice is not None and choice.reason == "no_room_at_prefill_for_long"


# -- workers of other hosts

REMOTE: dict[str, Any] = {"endpoints": [KvEndpoint("nixl", "a", 100.0)]}


def test_workers_of_two_hosts_are_a_pair_when_both_announce_a_way() -> None:
    split = place(router(worker("prefill", 1, **REMOTE), worker("decode", 1, host="h2", **REMOTE)), LONG)
    assert split.prefill is not None and split.decode.id == "decode-1"
    nothing: dict[str, Any] = {}
    for one, other in ((REMOTE, nothing), (nothing, REMOTE)):
        assert place(router(worker("prefill", 1, **one), worker("decode", 1, host="h2", **other)), LONG).prefill is None
    assert place(router(worker("prefill", 1, **REMOTE), worker("decode", 1, fingerprint="f2", **REMOTE)), LONG).prefill is None


def test_a_decode_worker_of_the_same_host_is_taken_while_it_is_not_the_slower_one() -> None:
    near, far = worker("decode", 1, **REMOTE), worker("decode", 2, host="h2", **REMOTE)
    pool = router(worker("prefill", 1, **REMOTE), near, far)
    for _ in range(8):
        choice = pool.choose(LONG)
        assert choice is not None and choice.decode.id == "decode-1"
    busy = worker("decode", 1, running=60, step_ms=20.0, **REMOTE)
    assert place(router(worker("prefill", 1, **REMOTE), busy, far), LONG).decode.id == "decode-2"


def test_a_slow_path_between_hosts_is_dearer() -> None:
    slow: dict[str, Any] = {"endpoints": [KvEndpoint("nixl", "a", 1e6)]}
    pool = router(
        worker("prefill", 1, **REMOTE), worker("decode", 1, running=60, **REMOTE), worker("decode", 2, host="h2", **slow)
    )
    assert place(pool, LONG).decode.id == "decode-1"


def test_a_redirect_goes_to_the_same_host_first_and_then_to_others() -> None:
    pool = router(worker("prefill", 1, **REMOTE), worker("decode", 1), worker("decode", 2, host="h2", **REMOTE))
    prefill = WorkerRef("prefill", "prefill-1", 1)
    assert pool.choose_decode(prefill, LONG, tried=()) == WorkerRef("decode", "decode-1", 1)
    assert pool.choose_decode(prefill, LONG, tried={"decode-1"}) == WorkerRef("decode", "decode-2", 1)
    assert pool.may_redirect(prefill, 8, tried={"decode-1"})
    assert not pool.may_redirect(prefill, 8, tried={"decode-1", "decode-2"})


def test_a_worker_of_two_pairs_leaves_both() -> None:
    pool = router(worker("prefill", 1, **REMOTE), worker("decode", 1, host="h2", **REMOTE))
    pool.refresh([worker("prefill", 1), worker("decode", 1, host="h2", **REMOTE)])  # it announces no way any more
    assert place(pool, LONG).prefill is None
    pool.refresh([])
    assert pool.choose(LONG) is None
    assert not pool._pairs


# -- paths between hosts that fail


def far(role: Role, number: int, *, host: str, agent: str, cannot_reach: Iterable[str] = (), **said: Any) -> Presence:
    return worker(role, number, host=host, endpoints=[KvEndpoint("nixl", agent, 100.0, list(cannot_reach))], **said)


def test_a_decode_worker_is_not_paired_with_a_prefill_worker_that_it_can_not_read() -> None:
    fast = far("prefill", 1, host="h1", agent="p1", prefill_tokens_per_s=9999.0)
    prefills = fast, far("prefill", 2, host="h2", agent="p2", prefill_tokens_per_s=100.0)
    pool = router(*prefills, far("decode", 1, host="h3", agent="d1", cannot_reach=["p1"]))
    for _ in range(4):
        choice = pool.choose(LONG)
        assert choice is not None and choice.prefill is not None and choice.prefill.id == "prefill-2", "the slow one works"
        assert choice.reason == "long_uncached_prompt"
    both = router(*prefills, far("decode", 1, host="h3", agent="d1"))
    assert place(both, LONG).prefill == WorkerRef("prefill", "prefill-1", 1)


def test_a_dearer_decode_worker_that_can_read_is_taken() -> None:
    pool = router(
        far("prefill", 1, host="h1", agent="p1"),
        far("decode", 1, host="h2", agent="d1", cannot_reach=["p1", "another"]),
        far("decode", 2, host="h3", agent="d2", running=20),
    )
    choice = place(pool, LONG)
    assert choice.prefill is not None and choice.decode.id == "decode-2"


def test_where_no_path_works_a_prompt_is_computed_once_and_that_is_said() -> None:
    workers = far("prefill", 1, host="h1", agent="p1"), far("decode", 1, host="h2", agent="d1", cannot_reach=["p1"])
    choice = place(router(*workers), LONG)
    assert choice.prefill is None and choice.reason == "no_working_path"
    assert {cost.part for cost in choice.costs} == {"direct", "prefill", "decode"}
    asked_for = place(router(*workers), job(prompt(2000), path="prefill"))
    assert asked_for.prefill is not None and asked_for.reason == "no_working_path", "it runs, and decode computes it again"
    assert asked_for.uncached_tokens == 2000


def test_workers_of_one_host_are_a_pair_whatever_is_said_of_paths() -> None:
    pool = router(far("prefill", 1, host="h1", agent="p1"), far("decode", 1, host="h1", agent="d1", cannot_reach=["p1"]))
    choice = place(pool, LONG)
    assert choice.prefill is not None and choice.reason == "long_uncached_prompt"


def test_a_pair_is_taken_again_once_its_path_works() -> None:
    prefill = far("prefill", 1, host="h1", agent="p1")
    pool = router(prefill, far("decode", 1, host="h2", agent="d1", cannot_reach=["p1"]))
    assert pool.choose(LONG).prefill is None  # pyright: ignore[reportOptionalMemberAccess]
    pool.refresh([prefill, far("decode", 1, host="h2", agent="d1")])
    assert place(pool, LONG).prefill is not None
    again = far("prefill", 1, epoch=2, host="h1", agent="p1-again")
    pool.refresh([again, far("decode", 1, host="h2", agent="d1", cannot_reach=["p1"])])
    assert place(pool, LONG).prefill is not None, "another life has another agent"


def test_a_redirect_goes_to_who_can_read_while_there_is_one() -> None:
    workers = (
        far("prefill", 1, host="h1", agent="p1"),
        far("decode", 1, host="h2", agent="d1", cannot_reach=["p1"]),
        far("decode", 2, host="h3", agent="d2", running=60),
    )
    pool, prefill = router(*workers), WorkerRef("prefill", "prefill-1", 1)
    assert pool.choose_decode(prefill, LONG, tried=()) == WorkerRef("decode", "decode-2", 1)
    assert pool.choose_decode(prefill, LONG, tried={"decode-2"}) == WorkerRef("decode", "decode-1", 1)


def test_paths_that_fail_cost_a_decision_little() -> None:
    """64 workers on either side, each of which can't read a quarter of the others."""
    prefills = [far("prefill", number, host=f"p{number}", agent=f"p{number}") for number in range(64)]
    decodes = [
        far("decode", number, host=f"d{number}", agent=f"d{number}", cannot_reach=[f"p{n}" for n in range(number % 4, 64, 4)])
        for number in range(64)
    ]
    pool, reached = router(*prefills, *decodes), Counter[bool]()
    for _ in range(200):
        choice = pool.choose(LONG)
        assert choice is not None
        if choice.prefill is not None:
            prefill, decode = (int(ref.id.split("-")[1]) for ref in (choice.prefill, choice.decode))
            reached[prefill % 4 != decode % 4] += 1
    assert reached[False] == 0 and reached[True] > 150
