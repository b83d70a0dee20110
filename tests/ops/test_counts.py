"""Counts kept in a table give the same adjusted logits, to the bit, as histories counted anew."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch

from common.ops import backend
from common.ops.sampling.adjust_device import apply_adjustments
from common.ops.sampling.adjustments import PENDING, Adjustment, Adjustments, pack_adjustments
from common.ops.sampling.counts_device import Addition, CountUpdate, add_counts, pack_additions
from common.ops.sampling.penalties import apply_penalties

VOCAB = 1030


@pytest.fixture(autouse=True)
def interpreted() -> Iterator[None]:
    with backend.interpreted():
        yield


def adjusted(logits: torch.Tensor, changes: list[Adjustment], fed: torch.Tensor, table: torch.Tensor | None) -> torch.Tensor:
    return apply_adjustments(logits, Adjustments.on("cpu", pack_adjustments(changes)), fed, None, table)


def test_slots_histories_and_neither_go_together() -> None:
    rng = random.Random(1)
    table = torch.full((3, VOCAB), 99, dtype=torch.int32)
    prompt, output = [rng.randrange(40) for _ in range(1500)], [rng.randrange(60) for _ in range(20)]
    fed = torch.tensor([5, 41, VOCAB + 7])
    additions = [Addition(2, [*prompt, *output], len(prompt), clears=True), Addition(0, [*output, PENDING], 0, 1, clears=True)]
    add_counts(table, CountUpdate.on("cpu", pack_additions(additions)), fed)
    add_counts(table, CountUpdate.on("cpu", pack_additions([Addition(2, [7, VOCAB, 7, PENDING], 1, 2)])), fed)
    assert (table[1] == 99).all()
    assert table[2, 7] == 2 * (output.count(7) + 1) + 1
    presence, frequency, repetition = 0.3, 0.7, 1.2
    logits = torch.randn(6, VOCAB)
    changes = [
        Adjustment(0, (), [3, 3, 9], presence, frequency, repetition, slot=2),  # three proposed tokens behind what is counted
        Adjustment(3, prompt, output, presence, frequency, repetition),
        Adjustment(4, (), (), presence, frequency, repetition, slot=0),
        Adjustment(5, biases={4: 2.0}),
    ]
    found = adjusted(logits, changes, fed, table)
    whole = [
        (0, [*prompt, 7], [*output, 7, 3, 3, 9]),
        (3, prompt, output),
        (4, [], [*output, 41]),
    ]
    for index, (row, before, after) in enumerate(whole):
        expected = logits[row].clone()
        apply_penalties(expected, before, after, presence=presence, frequency=frequency, repetition=repetition)
        assert torch.equal(found[index], expected)
    expected = logits[5].clone()
    expected[4] += 2.0
    assert torch.equal(found[3], expected)
    assert torch.equal(adjusted(logits, changes[1:2], fed, None)[0], found[1])
    assert torch.equal(adjusted(logits, changes[:1], fed, table)[0], found[0])


def test_another_table_is_refused() -> None:
    update = CountUpdate.on("cpu", pack_additions([Addition(0, [1], 0)]))
    for table in (torch.zeros(2, 8), torch.zeros(8, dtype=torch.int32), torch.zeros(8, 2, dtype=torch.int32).t()):
        with pytest.raises(ValueError, match="counts are int32"):
            add_counts(table, update, torch.zeros(1, dtype=torch.int64))
