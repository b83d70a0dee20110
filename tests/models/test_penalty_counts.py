"""Counts kept on the device from step to step are those of the history, whatever happens to a sequence between two steps."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch

from common.engine.gpu.counts import NO_SLOT, PenaltyCounts
from common.engine.history import History
from common.engine.plan import UNKNOWN, StepRow, resolve_feeds
from common.engine.plan import StepPlan as Plan
from common.engine.sequence import Sequence
from common.ops import backend
from common.protocol import tokens as token_bytes
from common.protocol.handles import WorkerRef
from common.protocol.messages import Generation, SamplingParams

VOCAB = 90
PENALISED = SamplingParams(presence_penalty=0.5)


@pytest.fixture(autouse=True)
def interpreted() -> Iterator[None]:
    with backend.interpreted():
        yield


def new_sequence(tokens: list[int], prompt_tokens: int) -> Sequence:
    generation = Generation(
        request="r", attempt=1, gateway=WorkerRef(id="g", role="gateway", epoch=1), tokens=token_bytes.pack(tokens),
        prompt_tokens=prompt_tokens, sampling=PENALISED, deadline_ms=1000,
    )  # fmt: skip
    return Sequence.of(generation, vocab_size=VOCAB, max_context=10_000)


def expected(history: list[int], prompt_tokens: int) -> torch.Tensor:
    counts = torch.zeros(VOCAB, dtype=torch.int32)
    for place, token in enumerate(history):
        counts[token] = counts[token] + 2 if place >= prompt_tokens else counts[token] | 1
    return counts


def step(counts: PenaltyCounts, rows: list[StepRow], previous: list[int], known: list[list[int]]) -> list[int]:
    """known: what each row's history is, up to the first of its samples."""
    planned = counts.plan(rows, VOCAB)
    counts.count(planned, torch.tensor(previous or [0]))
    for row, slot, history in zip(rows, planned.slots, known, strict=True):
        if slot != NO_SLOT:
            assert counts.table is not None
            assert torch.equal(counts.table[slot], expected(history, row.prompt_tokens))
    return planned.slots


def test_random_lives_of_sequences() -> None:
    """They begin and end, are fed, verify proposals, lose steps and are preempted; three slots serve five at a time."""
    rng = random.Random(2)
    counts = PenaltyCounts(3, torch.device("cpu"))
    alive: list[Sequence] = []
    with_slot = without = 0
    for _ in range(120):
        while len(alive) < 5:
            prompt = [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 30))]
            made = [rng.randrange(VOCAB) for _ in range(rng.randrange(3))]  # a hand-off, or an attempt before
            alive.append(new_sequence([*prompt, *made], len(prompt)))
        chosen = rng.sample(alive, rng.randrange(1, 6))
        rows: list[StepRow] = []
        known: list[list[int]] = []
        for s in chosen:
            proposal = [rng.randrange(VOCAB) for _ in range(rng.choice([0, 0, 2]))]
            rows.append(s.plan(s.num_unplanned, proposal, sum(row.num_samples for row in rows)))
            known.append(list(s.tokens))
        slots = step(counts, rows, [], known)
        with_slot += sum(slot != NO_SLOT for slot in slots)
        without += slots.count(NO_SLOT)
        sampled = [rng.randrange(VOCAB) for _ in range(sum(row.num_samples for row in rows))]
        ahead = [s for s, row in zip(chosen, rows, strict=True) if row.num_samples == 1 and rng.random() < 0.6]
        if ahead and all(row.num_samples == 1 for row in rows):  # the step after it, which is fed on the device
            fed = [s.plan(1, [], index) for index, s in enumerate(ahead)]
            assert all(row.history[-1] == UNKNOWN for row in fed)
            step(counts, fed, sampled, [[*s.tokens, sampled[row.feed]] for s, row in zip(ahead, fed, strict=True)])
        lost = rng.random() < 0.15
        at = 0
        for s, row in zip(chosen, rows, strict=True):
            mine = sampled[at : at + row.num_samples]
            at += row.num_samples
            s.rewind()
            if not lost:  # else both steps failed, and this one is run again with other neighbours
                s.tokens += mine[: rng.randrange(1, len(mine) + 1)]
                s.computed(len(s.tokens) - 1)
            if rng.random() < 0.1:
                s.computed(0)  # preempted: its prompt is computed again
        alive = [s for s in alive if rng.random() < 0.9]
    assert with_slot > 200 and without > 20
    assert counts.table is not None and len(counts.table) == 3


def test_a_failed_launch_counts_everything_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = PenaltyCounts(2, torch.device("cpu"))
    s = new_sequence([3, 3, 5], 2)
    row = s.plan(3, [], 0)
    with monkeypatch.context() as patch:
        patch.setattr("common.engine.gpu.counts.add_counts", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            step(counts, [row], [], [s.tokens])
    step(counts, [row], [], [s.tokens])


def test_a_table_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("common.engine.gpu.counts.MAX_BYTES", 2 * 4 * VOCAB + 1)
    counts = PenaltyCounts(256, torch.device("cpu"))
    assert counts.table is None
    rows = [new_sequence([1, 2], 2).plan(2, [], 0) for _ in range(3)]
    assert step(counts, rows, [], [[1, 2]] * 3) == [0, 1, NO_SLOT]
    assert counts.table is not None and counts.table.nbytes <= 2 * 4 * VOCAB + 1
    plain = StepRow([2], 1, [0], 1, PENALISED, 2, [1, 2])  # a history that names nobody
    assert step(counts, [plain], [], [[1, 2]]) == [NO_SLOT]


def test_a_history_is_a_list_that_nobody_copied() -> None:
    tokens = [5, 6, 7, 8]
    history = History(1, tokens, 3, [9, UNKNOWN])
    tokens += [0, 0]
    assert len(history) == 5 and history[:] == [5, 6, 7, 9, UNKNOWN] and history[2:4] == [7, 9]
    assert history[-1] == UNKNOWN and history[0] == 5 and history[1:2] == [6] and history[4:9] == [UNKNOWN]
    row = StepRow([UNKNOWN], 4, [0], 1, PENALISED, 2, history, feed=0)
    resolve_feeds(Plan(0, [row]), [44])
    assert history[3:] == [9, 44] and tokens[3] == 8
