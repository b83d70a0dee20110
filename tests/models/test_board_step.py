"""Steps verify what is posted on the board when they begin, and no token is another one for that.

As in `test_device_lookup_step`, whose runner has a table of what follows which tokens in place of a model.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from common.engine.board import BOARD_SLOTS
from common.engine.plan import Room
from common.engine.sequence import Sequence
from common.models.source import ModelFiles
from common.ops.sampling.board_layout import LINE_TOKENS
from common.protocol.messages import SamplingParams
from tests.fixtures.slow import some_slow
from tests.models.test_device_lookup_step import World, chained, looking_up, plain, sequence_of

pytestmark = pytest.mark.usefixtures("kernels")

LONG = SamplingParams(temperature=0.0, max_tokens=40)


@dataclass
class Posts(World):
    """Posts what `texts` say follows, just before each step begins. take: what a row takes; None: not from the board.

    wrong: the share of tokens that are posted wrong. stale: of posts that are left out.
    """

    texts: dict[str, list[int]] = field(default_factory=dict)
    take: Callable[[Sequence, int], Room | None] = lambda sequence, limit: Room(min(limit, 4), is_posted=True)
    wrong: float = 0.0
    stale: float = 0.0
    draws: random.Random = field(default_factory=lambda: random.Random(5))

    def __post_init__(self) -> None:
        super().__post_init__()
        self.planned = self.post
        self.boarded: dict[str, Sequence] = {}

    def room_for(self, sequence: Sequence, limit: int) -> Room:
        if sequence.board < 0:
            sequence.board = self.runner.board.take()
            self.boarded[sequence.request] = sequence
        room = self.take(sequence, limit) if sequence.num_awaited else None
        return super().room_for(sequence, limit) if room is None else room

    def post(self) -> None:
        for request, sequence in self.boarded.items():
            if self.draws.random() < self.stale:
                continue
            known, whole = len(sequence.tokens), self.texts[request]
            right = whole[known : known + LINE_TOKENS]
            lines = [[(token + (self.draws.random() < self.wrong)) % 100 for token in right] for _ in range(3)]
            self.runner.board.post(sequence.board, known, [line[: self.draws.randrange(1, 12)] for line in lines])


def whole(files: ModelFiles, sequences: list[Sequence]) -> dict[str, list[int]]:
    prompts = [list(one.tokens) for one in sequences]
    answers = plain(files, sequences)
    return {one.request: [*prompt, *answer] for one, prompt, answer in zip(sequences, prompts, answers, strict=True)}


def test_what_is_posted_in_time_is_verified(files: ModelFiles) -> None:
    texts = whole(files, [sequence_of(1, LONG)])
    world = Posts(chained(files), texts=texts)
    (found,) = world.run([sequence_of(1, LONG)])
    assert found == texts["row 1"][5:]
    assert len(world.progress) < 20
    taken = [one.taken for one in world.progress if one.taken is not None]
    assert len(taken) >= len(world.progress) - 3, "every row that is fed takes from the board"
    assert sum(one.accepted for one in world.progress) == sum(len(one.tokens) for one in taken)


@pytest.mark.parametrize("with_lookup", some_slow([False, True], quick=[True]))
def test_whatever_is_posted_texts_are_the_same(files: ModelFiles, with_lookup: bool) -> None:
    """Wrong, stale, too short; rows that come at different times; and rows that look up what others take from the board."""
    warm = SamplingParams(temperature=0.6, seed=5, max_tokens=30)
    params = [LONG, warm, SamplingParams(temperature=1.1, seed=6, max_tokens=9, top_k=5), LONG]
    rng = random.Random(3)

    def sequences() -> list[Sequence]:
        return [sequence_of(index, one, 3 + 4 * index) for index, one in enumerate(params)]

    def take(sequence: Sequence, limit: int) -> Room | None:
        searched = with_lookup and rng.random() < 0.5
        return None if rng.random() < 0.4 else Room(min(limit, rng.randrange(6)), searched, is_posted=True)

    texts = whole(files, sequences())
    runner = looking_up(files) if with_lookup else chained(files)
    look_up = (lambda sequence, limit: min(limit, rng.choice([-1, 0, 2, 3]))) if with_lookup else (lambda *_: -1)
    world = Posts(runner, look_up, texts=texts, take=take, wrong=0.2, stale=0.2)
    found = world.run(sequences(), lambda index: 4 * index)
    assert found == [texts[one.request][len(one.tokens) :] for one in sequences()]
    assert sum(one.accepted for one in world.progress if one.taken is not None and one.taken.tokens) > 5
    if with_lookup:
        assert sum(one.accepted for one in world.progress if one.taken is None) > 2, "some of it was looked up"


def test_preempted_texts_and_steps_that_fail(files: ModelFiles) -> None:
    def sequences() -> list[Sequence]:
        return [sequence_of(index, LONG, 12) for index in range(4)]

    texts = whole(files, sequences())
    world = Posts(chained(files), texts=texts, wrong=0.1, num_blocks=10, watermark=0)
    running = sequences()
    world.run_with_failures(running)
    assert world.scheduler.num_preemptions > 0
    assert [one.output for one in running] == [texts[one.request][12:] for one in running]


def test_there_are_slots_for_so_many(files: ModelFiles) -> None:
    board = chained(files).board
    assert [board.take() for _ in range(BOARD_SLOTS)].count(-1) == 0
    assert board.take() == -1
