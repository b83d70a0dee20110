"""Speculation changes speed, never tokens; and the book always knows who mirrors what."""

from __future__ import annotations

import random
from typing import Literal

import msgspec
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from common.engine.outcomes import Outcome, accept
from common.engine.plan import StepPlan, StepRow
from common.engine.simulated.runner import BYTES_PER_TOKEN, SimulatedRunner, TokenRule
from common.protocol.draft_messages import (
    DraftBranch,
    DraftClose,
    Drafting,
    DraftResync,
    DraftRow,
    DraftSampling,
    DraftUpdate,
    Proposals,
)
from common.protocol.handles import WorkerRef
from common.protocol.messages import Presence, SamplingParams
from services.decode.mirrored_sequence import MAX_PROPOSAL, RESYNC_TOKENS, align
from services.decode.speculation import FEW_SEQUENCES, QUIET_TOKENS, DraftBook
from services.decode.speculation_policy import SpeculationPolicy
from tests.unit.speculating import flat_costs

DECODE = WorkerRef("decode", "decode-1", 1)
VOCAB = 1000


def drafter(name: str, *, epoch: int = 1, credits: int = 100, state: Literal["ready", "draining"] = "ready") -> Presence:
    return Presence(worker=WorkerRef("draft", name, epoch), state=state, credits=credits)


def make_book(*workers: Presence, max_tokens: int = 4, max_step_tokens: int = 1000) -> DraftBook:
    book = DraftBook(
        SpeculationPolicy(max_tokens=max_tokens, max_step_tokens=max_step_tokens, costs=flat_costs()), vocab_size=VOCAB
    )
    book.set_workers(workers)
    return book


def updates(book: DraftBook) -> dict[WorkerRef, list[DraftRow]]:
    return {worker: message.rows for worker, message in book.messages(DECODE) if isinstance(message, DraftUpdate)}


def closes(book: DraftBook) -> dict[WorkerRef, list[str]]:
    return {worker: message.sequences for worker, message in book.messages(DECODE) if isinstance(message, DraftClose)}


def offer(book: DraftBook, worker: Presence, sequence: str, base: int, tokens: list[int]) -> None:
    book.on_proposals(Proposals(draft=worker.worker, rows=[DraftRow(sequence, base, tokens)]))


def test_draft_models_have_caught_up_when_they_proposed_something_for_most_texts() -> None:
    model, ngrams = msgspec.structs.replace(drafter("draft-1"), vocabulary="v"), drafter("draft-2", credits=0)
    book = make_book(model, ngrams)
    assert book.are_caught_up(), "nothing is asked"
    texts = {f"s{index}": list(range(1, 101)) for index in range(4)}
    for name, tokens in texts.items():
        book.open(name, tokens)
    updates(book)
    for name in ("s0", "s1"):
        offer(book, model, name, 100, [7])
    assert not book.are_caught_up()
    offer(book, model, "s2", 100, [7])
    assert book.are_caught_up()
    texts["s0"].append(7)
    updates(book)
    assert book.are_caught_up(), "one more token is computed in one more step"
    texts["s1"] += [7] * (MAX_PROPOSAL + 1)
    updates(book)
    assert not book.are_caught_up(), "it was told nothing for long"
    offer(book, model, "s3", 100, [7])
    assert book.are_caught_up()
    book.set_workers([drafter("draft-1")])
    book.set_workers([ngrams])
    for name in texts:
        book.open(name, texts[name])
    assert book.are_caught_up(), "n-grams need not be computed"


def test_a_proposal_in_time_is_used_whole() -> None:
    assert align(3, [7, 8], [1, 2, 3]) == [7, 8]


def test_a_late_proposal_is_trimmed_by_what_was_generated_meanwhile() -> None:
    assert align(2, [3, 4, 5, 6], [1, 2, 3, 4]) == [5, 6]


def test_a_late_proposal_that_guessed_wrong_or_is_used_up_is_dropped() -> None:
    assert align(2, [3, 9, 5, 6], [1, 2, 3, 4]) == []
    assert align(2, [3, 4], [1, 2, 3, 4]) == []


def test_a_proposal_for_tokens_not_yet_generated_is_dropped() -> None:
    assert align(5, [1, 2], [1, 2, 3]) == []


def test_leading_matches_are_accepted() -> None:
    assert accept([1, 2, 3], [1, 2, 9, 4]) == 2
    assert accept([1, 2, 3], [1, 2, 3, 4]) == 3
    assert accept([1], [2, 1]) == 0
    assert accept([], [5]) == 0


def test_of_many_sequences_those_with_no_proposals_are_sent_several_tokens_together() -> None:
    worker = drafter("draft-1")
    book = make_book(worker)
    texts = {f"s{index}": [1, 2, 3] for index in range(FEW_SEQUENCES + 1)}
    for name, tokens in texts.items():
        book.open(name, tokens)
    updates(book)
    sent: list[DraftRow] = []
    for step in range(400):
        for tokens in texts.values():
            tokens.append(step)
        sent += [row for row in updates(book).get(worker.worker, []) if row.sequence == "s0"]
    assert [token for row in sent for token in row.tokens] == texts["s0"][3 : 3 + sum(len(row.tokens) for row in sent)]
    assert len(texts["s0"]) - (sent[-1].base + len(sent[-1].tokens)) < QUIET_TOKENS
    assert max(len(row.tokens) for row in sent) == QUIET_TOKENS and len(sent) < 60
    offer(book, worker, "s0", sent[-1].base + len(sent[-1].tokens), [399, 400])
    texts["s0"].append(400)
    assert [row.tokens[-1] for row in updates(book)[worker.worker] if row.sequence == "s0"] == [400]


def test_few_sequences_are_sent_every_token_at_once() -> None:
    worker = drafter("draft-1")
    book = make_book(worker)
    texts = {f"s{index}": [1, 2, 3] for index in range(FEW_SEQUENCES)}
    for name, tokens in texts.items():
        book.open(name, tokens)
    updates(book)
    for step in range(200):
        for tokens in texts.values():
            tokens.append(step)
        assert [row.tokens for row in updates(book)[worker.worker]] == [[step]] * FEW_SEQUENCES


def test_each_step_sends_one_update_with_what_is_new() -> None:
    worker = drafter("draft-1")
    book = make_book(worker)
    first, second = [1, 2, 3], [4, 5]
    book.open("a", first)
    book.open("b", second)
    assert updates(book) == {worker.worker: [DraftRow("a", 0, [1, 2, 3]), DraftRow("b", 0, [4, 5])]}
    assert book.messages(DECODE) == []
    first.append(6)
    assert updates(book) == {worker.worker: [DraftRow("a", 3, [6])]}


def test_in_quiet_steps_nothing_is_sent_but_ends_and_afterwards_what_was_left_out() -> None:
    worker = drafter("a")
    book = make_book(worker)
    tokens = [1, 2, 3]
    book.open("s", tokens)
    book.open("t", [4])
    assert updates(book) == {worker.worker: [DraftRow("s", 0, [1, 2, 3]), DraftRow("t", 0, [4])]}
    book.trial.asking = False
    tokens += [5, 6]
    book.open("u", [7])
    book.close("t")
    assert book.messages(DECODE) == [(worker.worker, DraftClose(decode=DECODE, sequences=["t"]))]
    book.trial.asking = True
    assert updates(book) == {worker.worker: [DraftRow("s", 3, [5, 6]), DraftRow("u", 0, [7])]}


def test_a_long_prompt_is_sent_in_bounded_updates() -> None:
    worker = drafter("draft-1")
    book = DraftBook(
        SpeculationPolicy(max_tokens=4, max_step_tokens=99, costs=flat_costs()), vocab_size=VOCAB, max_update_tokens=10
    )
    book.set_workers([worker])
    book.open("a", list(range(25)))
    book.open("b", [1])
    sent = [updates(book)[worker.worker] for _ in range(3)]
    assert [[(row.sequence, row.base, len(row.tokens)) for row in rows] for rows in sent] == [
        [("a", 0, 10)],
        [("a", 10, 10)],
        [("a", 20, 5), ("b", 0, 1)],
    ]


def test_the_latest_proposal_wins_and_older_ones_are_dropped() -> None:
    worker = drafter("draft-1")
    book = make_book(worker)
    tokens = [1, 2, 3]
    book.open("a", tokens)
    book.messages(DECODE)
    offer(book, worker, "a", 3, [4, 5])
    book.begin_step(1)
    offer(book, worker, "a", 2, [9, 9])
    assert book.propose("a", 8) == [4, 5]
    offer(book, worker, "a", 3, [6])
    assert book.propose("a", 8) == [6]


def test_one_proposal_serves_several_steps_while_it_holds() -> None:
    worker = drafter("draft-1")
    book = make_book(worker, max_tokens=2)
    tokens = [1, 2, 3]
    book.open("a", tokens)
    book.messages(DECODE)
    offer(book, worker, "a", 3, [4, 5, 6, 7, 8])
    book.begin_step(1)
    assert book.propose("a", 8) == [4, 5]
    tokens += [4, 5, 6]
    assert book.propose("a", 8) == [7, 8]
    tokens += [9]
    assert book.propose("a", 8) == []


def test_what_follows_a_verification_is_foreseen_from_the_latest_proposal() -> None:
    worker = drafter("draft-1")
    book = make_book(worker, max_tokens=2)
    tokens = [1, 2, 3]
    book.open("a", tokens)
    updates(book)
    assert book.foresee("a", [], 8) == []
    offer(book, worker, "a", 3, [4, 5, 6, 7, 8, 9])
    book.begin_step(1)
    assert book.foresee("a", [4, 5], 8) == [Outcome(2, 6, [7, 8])], "if all is accepted, the proposal goes on"
    assert book.foresee("a", [4, 5], 1) == [Outcome(2, 6, [7])]
    assert book.foresee("a", [], 8) == [Outcome(0, 4, [5, 6])], "behind a step that verifies nothing"
    assert book.foresee("a", [4, 9], 8) == [Outcome(1, 5, [6, 7])], "an older proposal is being verified: the latest counts"
    assert book.foresee("a", [4, 5, 6, 7, 8], 8) == [], "nothing is left"
    tokens += [4, 5]
    assert book.foresee("a", [6, 7], 8) == [Outcome(2, 8, [9])]
    tokens += [9]
    assert book.foresee("a", [6], 8) == []


def test_many_rows_leave_no_room_to_verify() -> None:
    worker = drafter("draft-1")
    book = make_book(worker, max_step_tokens=3)
    book.open("a", [1, 2, 3])
    updates(book)
    offer(book, worker, "a", 3, [9, 9, 5])
    book.begin_step(3)
    assert book.foresee("a", [], 4) == [] == book.propose("a", 4)
    book.begin_step(2)
    assert book.foresee("a", [], 4) == [Outcome(0, 9, [9])]


def test_garbage_proposals_are_dropped() -> None:
    worker, stranger = drafter("draft-1"), drafter("draft-2", credits=0)
    book = make_book(worker, stranger)
    book.open("a", [1, 2, 3])
    book.messages(DECODE)
    offer(book, worker, "unknown", 3, [4])
    offer(book, stranger, "a", 3, [4])
    offer(book, drafter("draft-1", epoch=0), "a", 3, [4])
    offer(book, worker, "a", 4, [4])
    offer(book, worker, "a", -1, [4])
    offer(book, worker, "a", 3, [VOCAB, 1])
    offer(book, worker, "a", 3, [-1, 1])
    assert book.propose("a", 8) == []
    offer(book, worker, "a", 3, [4, 2**70, 5])
    book.begin_step(1)
    assert book.propose("a", 8) == [4]
    offer(book, worker, "a", 3, [5] * 100_000)
    assert len(book.propose("a", 100_000)) <= 4


def test_sequences_spread_over_draft_workers_with_room() -> None:
    one, two, full = drafter("draft-1", credits=10), drafter("draft-2", credits=10), drafter("draft-3", credits=0)
    book = make_book(one, two, full)
    for index in range(20):
        book.open(str(index), [1])
    held = [book.worker_of(str(index)) for index in range(20)]
    assert held.count(one.worker) == held.count(two.worker) == 10
    book.open("too many", [1])
    assert book.worker_of("too many") is None


def test_sequences_of_a_lost_draft_worker_go_whole_to_another() -> None:
    one, two = drafter("draft-1", credits=10), drafter("draft-2", credits=5)
    book = make_book(one, two)
    tokens = [1, 2, 3]
    book.open("a", tokens)
    book.messages(DECODE)
    offer(book, one, "a", 3, [4])
    book.worker_lost(one.worker)
    assert book.propose("a", 8) == []
    assert updates(book) == {two.worker: [DraftRow("a", 0, [1, 2, 3])]}
    offer(book, one, "a", 3, [4])
    assert book.propose("a", 8) == []


def test_without_draft_workers_decoding_goes_on_alone_until_one_comes() -> None:
    one = drafter("draft-1")
    book = make_book(one)
    book.open("a", [1, 2])
    book.worker_lost(one.worker)
    assert book.messages(DECODE) == [] and book.propose("a", 8) == []
    restarted = drafter("draft-1", epoch=2)
    book.set_workers([restarted])
    assert updates(book) == {restarted.worker: [DraftRow("a", 0, [1, 2])]}


def test_a_draining_draft_worker_loses_its_sequences() -> None:
    book = make_book(drafter("draft-1"))
    book.open("a", [1])
    book.set_workers([drafter("draft-1", state="draining")])
    assert book.worker_of("a") is None and book.messages(DECODE) == []


def test_a_text_goes_to_draft_workers_whose_context_is_longer() -> None:
    short = msgspec.structs.replace(drafter("draft-1"), drafting=Drafting("m", longest=6))
    book = make_book(short)
    tokens, long = [1, 2, 3, 4], [1] * 6
    book.open("a", tokens)
    book.open("b", long)
    assert book.worker_of("a") == short.worker and book.worker_of("b") is None
    updates(book)
    offer(book, short, "a", 4, [5, 6, 7])
    for token in (5, 6):
        assert book.worker_of("a") == short.worker
        tokens.append(token)
        book.record("a", 0, 0)
    assert book.worker_of("a") is None and book.propose("a", 8) == []
    assert closes(book) == {short.worker: ["a"]}
    book.set_workers([short])
    assert book.worker_of("a") is None and not updates(book), "nor is it tried again"
    other = drafter("draft-2")
    book.set_workers([short, other])
    assert updates(book) == {other.worker: [DraftRow("a", 0, tokens), DraftRow("b", 0, long)]}


def test_a_finished_sequence_is_closed_once_and_its_room_comes_back() -> None:
    worker = drafter("draft-1", credits=1)
    book = make_book(worker)
    book.open("a", [1])
    book.close("a")
    book.close("a")
    assert closes(book) == {worker.worker: ["a"]}
    assert len(book) == 0
    book.open("b", [1])
    assert book.worker_of("b") == worker.worker


def test_a_resync_sends_the_sequence_whole_but_not_again_and_again() -> None:
    worker = drafter("draft-1")
    book = make_book(worker)
    tokens = [1, 2, 3]
    book.open("a", tokens)
    book.messages(DECODE)
    resync = DraftResync(draft=worker.worker, sequences=["a", "unknown"])
    whole_sends = 0
    for _ in range(RESYNC_TOKENS * 8):
        book.on_resync(resync)
        tokens.append(5)
        whole_sends += updates(book)[worker.worker][0].base == 0
    assert 2 <= whole_sends <= 4


def test_a_new_epoch_forgets_everything() -> None:
    book = make_book(drafter("draft-1"))
    book.open("a", [1])
    book.reset()
    assert len(book) == 0 and book.messages(DECODE) == []


def test_what_was_not_verified_is_compared_with_what_came() -> None:
    worker = drafter("draft-1")
    book = make_book(worker)
    tokens = [1, 2, 3]
    book.open("a", tokens)
    updates(book)
    rate = book.pace_of("a").rate
    offer(book, worker, "a", 3, [4, 5, 6])
    tokens.append(4)
    book.record("a", 0, 0)
    assert book.pace_of("a").rate > rate
    rate = book.pace_of("a").rate
    tokens += [9, 6]
    book.record("a", 0, 0)
    assert book.pace_of("a").rate < rate
    rate = book.pace_of("a").rate
    tokens.append(7)
    book.record("a", 0, 0)
    assert book.pace_of("a").rate == rate, "that proposal has failed already"


def test_what_was_accepted_is_counted_by_position() -> None:
    book = make_book()
    book.record("a", 4, 2)
    book.record("a", 2, 2)
    book.record("a", 0, 0)
    counters = book.counters
    assert (counters.num_drafts, counters.num_draft_tokens, counters.num_accepted_tokens) == (2, 6, 4)
    assert counters.accepted_per_position == [2, 2, 0, 0]


@given(seed=st.integers(0, 2**32), hostility=st.floats(0, 1), max_tokens=st.integers(1, 6))
@settings(max_examples=80, deadline=None)
def test_no_proposal_ever_changes_a_token(seed: int, hostility: float, max_tokens: int) -> None:
    """Right, wrong, late, garbled and foreign proposals, lost workers and resyncs: the output is the oracle's."""
    rng = random.Random(seed)
    runner = SimulatedRunner(
        "instant",
        storage=np.zeros((32, 4 * BYTES_PER_TOKEN), np.uint8),
        block_tokens=4,
        max_context=128,
        vocab_size=VOCAB,
        fingerprint="simulated",
        time_scale=0,
        rule=TokenRule(VOCAB, repetition=0.5),
    )
    workers = [drafter("draft-1"), drafter("draft-2")]
    book = make_book(*workers, max_tokens=max_tokens)
    prompt = [rng.randrange(VOCAB) for _ in range(rng.randrange(2, 12))]
    sampling = SamplingParams(seed=seed)
    expected = runner.expected_tokens(prompt, sampling, 60)
    tokens = list(prompt)
    blocks = rng.sample(range(32), 32)
    runner.execute(StepPlan(0, [StepRow(prompt[:-1], 0, blocks, 0, sampling, len(prompt))]))
    book.open("a", tokens)
    steps = 0
    while len(tokens) < len(prompt) + 40:
        steps += 1
        base = max(0, len(tokens) - rng.randrange(4))
        future = (prompt + expected)[base : base + 8]
        if rng.random() < hostility:
            future = [rng.choice([token, rng.randrange(-5, VOCAB + 5)]) for token in future]
            base += rng.randrange(-2, 3)
        table = [
            (rng.randrange(-1, 10), [rng.choice([*future, VOCAB, 5]) for _ in range(rng.randrange(4))]) if future else (0, [1])
            for _ in range(rng.randrange(4) if hostility else 0)
        ]
        right = (prompt + expected)[base : base + 8] if base >= 0 else []
        table += [(index, right[index:]) for index in range(rng.randrange(4))]
        offer_table(book, rng.choice(workers), rng.choice(["a", "a", "b"]), base, future, *table)
        if rng.random() < 0.1:
            book.worker_lost(rng.choice(workers).worker)
            book.set_workers(workers)
        if rng.random() < 0.1:
            book.on_resync(DraftResync(draft=workers[0].worker, sequences=["a"]))
        book.begin_step(1)
        proposal = book.propose("a", rng.randrange(8))
        row = StepRow([*tokens[-1:], *proposal], len(tokens) - 1, blocks, 1 + len(proposal), sampling, len(prompt))
        sampled = runner.execute(StepPlan(steps, [row])).rows[0].tokens
        accepted = accept(proposal, sampled)
        tokens += sampled[: accepted + 1]
        book.record("a", len(proposal), accepted)
        book.messages(DECODE)
    output = tokens[len(prompt) :]
    assert output == expected[: len(output)]
    if hostility == 0.0 and book.counters.num_draft_tokens:
        assert steps < 40 and book.counters.num_accepted_tokens == book.counters.num_draft_tokens


def test_a_proposal_that_is_used_up_when_it_arrives_counts_as_late() -> None:
    worker = drafter("draft-1")
    book, tokens = make_book(worker), [1, 2, 3]
    book.open("a", tokens)
    updates(book)
    tokens += [4, 5]
    for base, proposal in ((1, [2]), (3, [4, 5]), (3, [4, 5, 6]), (3, [])):
        offer(book, worker, "a", base, proposal)
    assert book.counters.num_late == 2


def test_an_update_that_opens_a_mirror_says_how_its_tokens_are_drawn() -> None:
    worker = drafter("draft-1")
    book, tokens, said = make_book(worker), [1, 2, 3], DraftSampling(seed=7, temperature=0.8, prompt_tokens=2)
    book.open("a", tokens, said)
    sampling = [message.sampling for _, message in book.messages(DECODE) if isinstance(message, DraftUpdate)]
    tokens += [4]
    sampling += [message.sampling for _, message in book.messages(DECODE) if isinstance(message, DraftUpdate)]
    assert sampling == [{"a": said}, {}]


def offer_table(
    book: DraftBook, worker: Presence, sequence: str, base: int, tokens: list[int], *branches: tuple[int, list[int]]
) -> None:
    table = [DraftBranch(accepted, line) for accepted, line in branches]
    book.on_proposals(Proposals(draft=worker.worker, rows=[DraftRow(sequence, base, tokens)], tables={sequence: table}))


def test_where_a_proposal_fails_its_table_is_used_without_asking_again() -> None:
    worker = drafter("draft-1")
    book, tokens = make_book(worker), [1, 2, 3]
    book.open("a", tokens)
    updates(book)
    offer_table(book, worker, "a", 3, [4, 5, 6], (0, [9, 8]), (1, [7, 8, 9]), (1, [6, 5, 4]))
    book.begin_step(1)
    assert book.propose("a", 8) == [4, 5, 6]
    tokens += [4, 7]
    book.record("a", 3, 1)
    assert book.propose("a", 8) == [8, 9]
    offer(book, worker, "a", 3, [4, 5, 6])
    assert book.propose("a", 8) == [8, 9], "drafted before the worker has heard of it"
    tokens.append(8)
    updates(book)
    offer(book, worker, "a", 6, [9, 9, 9])
    assert book.propose("a", 8) == [9, 9, 9]
    assert (book.counters.num_table_hits, book.counters.num_table_misses) == (1, 0)


def test_an_outcome_that_is_in_no_table_is_a_miss_and_counted_once() -> None:
    worker = drafter("draft-1")
    book, tokens = make_book(worker), [1, 2, 3]
    book.open("a", tokens)
    updates(book)
    offer_table(book, worker, "a", 3, [4, 5, 6], (1, [7, 8, 9]))
    tokens += [4, 3]
    book.record("a", 2, 1)
    assert book.propose("a", 8) == []
    tokens += [3]
    book.record("a", 0, 0)
    assert (book.counters.num_table_hits, book.counters.num_table_misses) == (0, 1)
    offer_table(book, worker, "a", 3, [4, 5, 6], (1, [3, 3, 3, 1]))
    book.begin_step(1)
    assert book.propose("a", 8) == [3, 1], "late, but right"


def test_what_a_table_says_of_a_verification_is_foreseen() -> None:
    worker = drafter("draft-1")
    book, tokens = make_book(worker, max_tokens=2, max_step_tokens=4), [1, 2, 3]
    book.open("a", tokens)
    updates(book)
    offer_table(book, worker, "a", 3, [4, 5, 6, 7], (0, [9, 8, 7, 6]), (1, [7, 8]), (1, [6]), (3, [1, 2]), (2, [8, 3]))
    book.begin_step(1)
    assert book.foresee("a", [4, 5], 8) == [Outcome(2, 6, [7]), Outcome(0, 9, [8, 7]), Outcome(1, 7, [8]), Outcome(2, 8, [3])]
    tokens += [4]
    book.begin_step(1)
    assert book.foresee("a", [], 8) == [Outcome(0, 5, [6, 7]), Outcome(0, 7, [8])]
    assert book.foresee("a", [], 8) == [Outcome(0, 5, [6]), Outcome(0, 7, [8])], "outcomes share the row's room"


def test_garbage_tables_are_dropped() -> None:
    worker = drafter("draft-1")
    book, tokens = make_book(worker), [1, 2, 3]
    book.open("a", tokens)
    updates(book)
    offer_table(book, worker, "unknown", 3, [4], (0, [5]))
    offer_table(book, worker, "a", 3, [4, 5], (-1, [5]), (3, [5]), (2**70, [5]), (0, [VOCAB, 1]), (0, []), (1, [7, -1, 5]))
    offer_table(book, worker, "a", 3, [4, 5], *[(0, [6] * 100_000)] * 100_000)
    assert len(book._mirrors["a"].table) <= 16
    assert all(len(line) <= 128 for line in book._mirrors["a"].table)
    tokens += [5]
    book.record("a", 0, 0)
    book.begin_step(1)
    assert book.propose("a", 8) == [] and len(book.foresee("a", [], 8)) == 0
