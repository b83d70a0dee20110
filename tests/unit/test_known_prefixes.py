"""Requests go where their prefix is, by what workers tell; and by what was sent to them where they tell nothing, or not yet."""

from __future__ import annotations

import time
from collections import Counter

from common.protocol import tokens as token_bytes
from common.protocol.handles import WorkerRef
from common.protocol.messages import Presence
from services.gateway.known_prefixes import SENT_S
from services.gateway.prefix_memory import prefix_keys
from services.gateway.router import Choice, Job, Router
from tests.unit.kv_told import hashes, pack, ref, tokens, told

SHARED = tokens(2000)
CHAIN = hashes(SHARED)


def presence(worker: WorkerRef, **said: object) -> Presence:
    fields = {"state": "ready", "model": "m", "fingerprint": "f", "host": "h", "credits": 64, "prefill_tokens_per_s": 5000.0}
    return Presence(worker=worker, **(fields | said))  # pyright: ignore[reportArgumentType]


PREFILL = [ref(number) for number in range(1, 5)]
DECODE = [ref(1, role="decode")]
EVERYONE = [presence(worker) for worker in (*PREFILL, *DECODE)]


def router(index_blocks: int = 100_000) -> Router:
    made = Router(direct_max_tokens=64, index_blocks=index_blocks)
    made.refresh(EVERYONE)
    made.prefixes.tick(0)
    return made


def job(at: Router, prompt: list[int], salt: bytes = b"") -> Job:
    packed = token_bytes.pack(prompt)
    return Job(prefix_keys(packed, salt), len(prompt), 16, "prefill", prompt=at.prefixes.prompt(packed, salt))


def place(at: Router, work: Job) -> Choice:
    choice = at.choose(work)
    assert choice is not None and choice.prefill is not None
    return choice


def everyone_tells(at: Router) -> None:
    for worker in (*PREFILL, *DECODE):
        at.prefixes.index.apply(told(0, worker=worker), 0)


def test_a_prompt_goes_where_a_worker_says_that_its_prefix_is_whoever_sent_it_there() -> None:
    at = router()
    everyone_tells(at)
    at.prefixes.index.apply(told(1, CHAIN, worker=PREFILL[2]), 0)
    for tail in range(8):
        choice = place(at, job(at, [*SHARED, *tokens(100, 50 + tail)]))
        assert choice.prefill == PREFILL[2] and choice.uncached_tokens == 100


def test_what_was_evicted_is_not_counted_on() -> None:
    at = router()
    everyone_tells(at)
    work = job(at, SHARED)
    at.remember(work.keys, PREFILL[0])
    assert place(at, work).prefill == PREFILL[0], "it was sent there just now"
    for now in (0.0, SENT_S, 2 * SENT_S):
        at.prefixes.tick(now + 0.1)
    assert place(at, work).uncached_tokens == len(SHARED), "it has not told of it since"


def test_what_was_just_sent_counts_before_it_is_told_of() -> None:
    at = router()
    everyone_tells(at)
    at.remember(job(at, SHARED).keys, PREFILL[3])
    assert place(at, job(at, [*SHARED, *tokens(50, 9)])).uncached_tokens < 150
    at.prefixes.tick(SENT_S - 1)
    assert place(at, job(at, [*SHARED, *tokens(50, 9)])).prefill == PREFILL[3]


def test_workers_that_tell_nothing_are_remembered_beside_those_that_do() -> None:
    at = router()
    at.remember(job(at, SHARED).keys, PREFILL[0])  # an older version, or one that nothing was heard of yet
    at.prefixes.index.apply(told(0, worker=PREFILL[1]), 0)
    at.prefixes.index.apply(told(1, CHAIN[:10], worker=PREFILL[1]), 0)
    for now in (0.0, 10.0, 20.0, 30.0):
        at.prefixes.tick(now)
    found = at.prefixes.match(job(at, SHARED).keys, job(at, SHARED).prompt)
    assert sorted(found.values()) == [160, 1984]
    assert place(at, job(at, SHARED)).prefill == PREFILL[0]


def test_without_an_index_everything_is_remembered() -> None:
    at = router(index_blocks=0)
    everyone_tells(at)
    work = job(at, SHARED)
    assert work.prompt is None
    at.remember(work.keys, PREFILL[0])
    at.prefixes.tick(1000)
    assert place(at, work).prefill == PREFILL[0]


def test_a_worker_that_is_gone_or_began_anew_holds_nothing() -> None:
    at = router()
    everyone_tells(at)
    at.prefixes.index.apply(told(1, CHAIN, worker=PREFILL[0]), 0)
    at.refresh([presence(ref(1, epoch=2)), *EVERYONE[1:]])
    assert place(at, job(at, SHARED)).uncached_tokens == len(SHARED)
    assert at.prefixes.index.num_blocks == 0


def test_a_worker_that_drains_and_returns_keeps_what_it_told() -> None:
    at = router()
    everyone_tells(at)
    at.prefixes.index.apply(told(1, CHAIN, worker=PREFILL[0]), 0)
    at.refresh([presence(PREFILL[0], state="draining"), *EVERYONE[1:]])
    assert place(at, job(at, SHARED)).prefill != PREFILL[0]
    at.refresh(EVERYONE)
    assert place(at, job(at, SHARED)).prefill == PREFILL[0]


def test_a_hot_prefix_spreads_as_soon_as_that_is_worth_it() -> None:
    at = router()
    everyone_tells(at)
    at.prefixes.index.apply(told(1, CHAIN, worker=PREFILL[0]), 0)
    took: Counter[WorkerRef | None] = Counter()
    for number in range(400):
        work = job(at, [*SHARED, *tokens(100, 100 + number)])
        choice = place(at, work)
        at.remember(work.keys, choice.prefill or DECODE[0])
        at.count(choice.prefill or DECODE[0], 1, choice.uncached_tokens)
        if number % 2:  # half as fast as they come
            [worker] = [known for known in at.prefill.members.values() if known.ref == choice.prefill]
            at.count(worker.ref, -1, -min(worker.tokens, 100))
        took[choice.prefill] += 1
        at.refresh([presence(worker, credits=64) for worker in (*PREFILL, *DECODE)])
    assert len(took) == 4 and max(took.values()) < 200, took


def test_gateways_that_hear_the_same_decide_alike_without_talking() -> None:
    one, two = router(), router()
    prompts = [tokens(1000, number) for number in range(4)]
    for at in (one, two):
        everyone_tells(at)
        for worker, prompt in zip(PREFILL, prompts, strict=True):
            at.prefixes.index.apply(told(1, hashes(prompt), worker=worker), 0)
    for worker, prompt in zip(PREFILL, prompts, strict=True):
        assert place(one, job(one, prompt)).prefill == place(two, job(two, prompt)).prefill == worker


def test_a_decision_among_a_quarter_of_a_million_blocks_takes_microseconds() -> None:
    at = router(index_blocks=1 << 20)
    everyone_tells(at)
    for position, worker in enumerate(PREFILL):
        for number in range(1, 7):
            filler = [(position * 7 + number) * 1_000_003 + index for index in range(10_000)]
            at.prefixes.index.apply(told(number, filler, worker=worker), 0)
        at.prefixes.index.apply(told(7, CHAIN, worker=worker), 0)
    assert at.prefixes.index.num_blocks > 240_000
    times: list[float] = []
    for number in range(300):
        began = time.thread_time()
        place(at, job(at, [*SHARED, *tokens(50, 100 + number)]))
        times.append(time.thread_time() - began)
    assert sorted(times)[150] < 500e-6  # 100 µs alone; this machine is shared


def test_packing_is_that_of_the_wire() -> None:
    assert pack([1, 2]) == b"\1\0\0\0\0\0\0\0\2\0\0\0\0\0\0\0"
