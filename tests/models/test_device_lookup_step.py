"""Steps verify what the device has just looked up, and no token is another one for that.

A decode scheduler drives the GPU's runner a step ahead, its kernels interpreted on this CPU. All of a step is real but the
decoder's forward pass, which takes seconds in the interpreter: `Chain` stands in for it, a table of what follows which tokens.
It reads a row's tokens from the KV slots that the step names, and sees to it that each holds the token of its own position. Its
texts soon run into loops: much of them can be looked up. One test has a model.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Sized
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest
import torch

from bench.engine import lookup as bench
from common.cache.grouped_pool import GroupedPool, PoolGroup
from common.cache.pool import BlockPool
from common.engine.gpu import lookup as gpu_lookup
from common.engine.gpu.continuing import Continuing
from common.engine.gpu.runner import DeviceRunner
from common.engine.gpu.step_buffers import StepShape, layout
from common.engine.outcomes import Outcome
from common.engine.plan import UNKNOWN, Room, StepPlan
from common.engine.sequence import Sequence
from common.engine.sequence_cache import SequenceCache
from common.models.source import ModelFiles
from common.protocol import tokens as token_bytes
from common.protocol.handles import WorkerRef
from common.protocol.messages import Generation, SamplingParams
from services.decode.scheduler import DecodeScheduler, Progress
from tests.models.test_device_runner import device_runner

pytestmark = pytest.mark.usefixtures("kernels")

GREEDY = SamplingParams(temperature=0.0, max_tokens=24)
VOCAB = 120
SYMBOLS = 12
"""Tokens that a text has as a rule."""


class Chain:
    """In place of a runner's forward pass: logits by the last two tokens, as the KV pool has them."""

    def __init__(self, runner: DeviceRunner, *, counts: bool = False) -> None:
        """counts: behind token t comes t + 1."""
        self.runner = runner
        self.counts = counts
        self.kept = torch.full((len(runner.groups[0].pool) * runner.block_tokens, 2), -1)
        """Token and position of each slot."""
        generator = torch.Generator().manual_seed(1)
        self.table = torch.randn(SYMBOLS, SYMBOLS, runner.vocab_size, generator=generator)
        self.table[..., :SYMBOLS] += 4

    def __call__(self, shape: StepShape, rows: Any = (), read: Any = None, *, notes: bool = False) -> torch.Tensor:
        runner = self.runner
        fields = layout(runner._buffer, shape, len(runner.groups))
        tokens = torch.where(fields.feeds >= 0, runner._sampler.sampled[fields.feeds.clamp_min(0)], fields.tokens)
        starts, logits = fields.query_starts.tolist(), torch.zeros(shape.tokens, runner.vocab_size)
        written = fields.slots[0] >= 0
        self.kept[fields.slots[0][written]] = torch.stack((tokens, fields.positions), 1)[written]
        for row, (first, end) in enumerate(pairwise(starts)):
            if first == end:
                continue
            length, table = int(fields.context_lens[row]), int(fields.block_starts[0, row])
            places = torch.arange(length)
            blocks = runner._tables.ids[table + places // runner.block_tokens].long()
            text, positions = self.kept[blocks * runner.block_tokens + places % runner.block_tokens].unbind(1)
            assert positions.tolist() == list(range(length)), "a slot holds the token of another position"
            assert fields.positions[first:end].tolist() == list(range(length - (end - first), length))
            if self.counts:
                logits[first:end].scatter_(1, text[length - (end - first) :, None] + 1, 1.0)
                continue
            before = torch.cat((text[:1], text))[length - (end - first) : length]
            logits[first:end] = self.table[before % SYMBOLS, text[length - (end - first) :] % SYMBOLS]
        logits = logits[: shape.samples] if shape.samples == shape.tokens else logits[fields.samples]
        if len(logits):
            runner._sampler.draw(logits)
        return logits


def chained(files: ModelFiles) -> DeviceRunner:
    runner = device_runner(files)
    runner._forward = Chain(runner)  # type: ignore[method-assign]
    return runner


def looking_up(files: ModelFiles, *, max_texts: int = 8) -> DeviceRunner:
    runner = chained(files)
    runner.look_up(max_texts)
    return runner


@pytest.mark.slow
def test_the_benchmark_copies_and_idles(files: ModelFiles) -> None:
    found: dict[tuple[str, int], bench.Found] = {}
    answers: dict[tuple[str, int], list[list[int]]] = {}
    cases = [bench.Case(rows=2, piece=piece, prompt=60, output=40) for piece in (8, 0)]
    for mode in bench.MODES:
        for case in cases:
            piece = case.piece
            runner = looking_up(files)
            runner._forward = Chain(runner, counts=True)  # type: ignore[method-assign]
            proposers = bench.proposers_of(mode, 4)
            if proposers is not None:
                proposers.policy.always = mode == "host" or piece > 0
            found[mode, piece], answers[mode, piece] = bench.generate(runner, case, proposers, 64)
    for mode in ("host", "device"):
        assert answers[mode, 8] == answers["off", 8]
        assert answers[mode, 0] == answers["off", 0]
        assert found[mode, 8].steps < 0.7 * found["off", 8].steps
        assert found[mode, 0].steps == found["off", 0].steps
        assert found[mode, 0].proposed == 0
    lines = bench.lines_of(cases[0], {"off": [found["off", 8]], "device": [found["device", 8]]}, {"off": True, "device": True})
    assert [len(line) for line in lines] == [len(bench.TITLES)] * 2


def sequence_of(
    index: int, sampling: SamplingParams = GREEDY, length: int = 5, *, symbols: int = VOCAB, prediction: Sized[int] = ()
) -> Sequence:
    draws = random.Random(index)
    prompt = [draws.randrange(3, symbols) for _ in range(length)]
    generation = Generation(
        request=f"row {index}",
        attempt=0,
        gateway=WorkerRef("gateway", "test", 1),
        tokens=token_bytes.pack(prompt),
        prompt_tokens=len(prompt),
        sampling=sampling,
        deadline_ms=1 << 60,
        prediction=token_bytes.pack([*prompt[-2:], *prediction] if prediction else []),
    )
    return Sequence.of(generation, vocab_size=VOCAB, max_context=256)


LookUp = Callable[[Sequence, int], int]
"""How many tokens a row may look up; 0: its text is only searched; -1: nor that."""


def nothing(sequence: Sequence, limit: int) -> int:
    return -1


@dataclass
class World:
    """A decode scheduler and a runner, as a worker's loop runs them: a step is planned while the one before it runs. planned:
    called before a planned step begins."""

    runner: Any
    look_up: LookUp = nothing
    planned: Callable[[], None] = lambda: None
    num_blocks: int = 60
    watermark: int = 1
    flights: deque[tuple[StepPlan, Any]] = field(default_factory=deque)
    progress: list[Progress] = field(default_factory=list)
    scheduler: DecodeScheduler = field(init=False)

    def __post_init__(self) -> None:
        block_tokens = self.runner.block_tokens
        pools = [PoolGroup(BlockPool(self.num_blocks, block_tokens), group.retention) for group in self.runner.groups]
        self.scheduler = DecodeScheduler(
            SequenceCache(GroupedPool(*pools), fingerprint="test"),
            token_budget=64,
            max_running=8,
            max_context=256,
            room_for=self.room_for,
            watermark=self.watermark,
        )

    def room_for(self, sequence: Sequence, limit: int) -> Room:
        found = self.look_up(sequence, limit)
        return Room(max(0, found), is_searched=found >= 0)

    def step(self) -> bool:
        """Plan and submit a step, or take the oldest one's result. Return whether there was anything to do."""
        if len(self.flights) < self.runner.run_ahead and (plan := self.scheduler.plan(0.0)) is not None:
            self.planned()
            self.flights.append((plan, self.runner.submit(plan)))
            return True
        if not self.flights:
            return False
        plan, step = self.flights.popleft()
        self.progress += self.scheduler.commit(plan, step.result(), 0.0)
        return True

    def run(self, sequences: list[Sequence], begins: Callable[[int], int] = lambda index: 0) -> list[list[int]]:
        """All to their ends. begins: in which turn a sequence comes."""
        waiting, turn = deque(enumerate(sequences)), 0
        while True:
            while waiting and begins(waiting[0][0]) <= turn:
                self.scheduler.admit(waiting.popleft()[1])
            turn += 1
            if not self.step() and not waiting:
                return [sequence.output for sequence in sequences]

    def run_with_failures(self, sequences: list[Sequence]) -> None:
        """All to their ends, though two steps in flight fail now and then."""
        for sequence in sequences:
            self.scheduler.admit(sequence)
        turn = 0
        while self.step():
            turn += 1
            if turn % 9 < 2 and len(self.flights) == 2:
                self.flights.clear()
                self.scheduler.rewind()

    @property
    def accepted(self) -> int:
        return sum(one.accepted for one in self.progress)


def plain(files: ModelFiles, sequences: list[Sequence]) -> list[list[int]]:
    return World(chained(files)).run(sequences)


@pytest.mark.slow
def test_a_model_writes_the_same_text(files: ModelFiles) -> None:
    sampling = SamplingParams(temperature=0.0, max_tokens=10)
    runner = device_runner(files)
    runner.look_up(2)
    world = World(runner, lambda sequence, limit: min(limit, 2))
    found = world.run([sequence_of(3, sampling, 4)])
    assert found == World(device_runner(files)).run([sequence_of(3, sampling, 4)])


def test_greedy_and_seeded_texts_are_those_without_lookup(files: ModelFiles) -> None:
    """Rows come at different times, verify other numbers of tokens in each step, or none, and are searched now and then."""
    rng = random.Random(3)
    warm = SamplingParams(temperature=0.6, seed=5, max_tokens=20)
    few = SamplingParams(temperature=1.1, seed=6, max_tokens=9, top_k=5)
    params = [GREEDY, warm, few, GREEDY]

    def sequences() -> list[Sequence]:
        return [sequence_of(index, one, 3 + 4 * index) for index, one in enumerate(params)]

    world = World(looking_up(files), lambda sequence, limit: min(limit, rng.choice([-1, 0, 0, 1, 3, 6])))
    found = world.run(sequences(), lambda index: 4 * index)
    assert found == plain(files, sequences())
    assert world.accepted > 5


def test_what_a_client_predicts_is_found_from_the_first_token_on(files: ModelFiles) -> None:
    """Rows beside each other: one's prediction is its answer but for a token, another's is nothing like it, one has none."""
    (whole, other, _) = answers = plain(files, [sequence_of(index) for index in range(3)])
    predicted = [[*whole[:10], (whole[10] + 1) % SYMBOLS, *whole[11:]], [7, 8, 9], []]
    world = World(looking_up(files), lambda sequence, limit: min(limit, 3))
    found = world.run([sequence_of(index, prediction=text) for index, text in enumerate(predicted)])
    assert found == answers
    steps = {name: [one for one in world.progress if one.sequence.request == name] for name in ("row 0", "row 1")}
    assert len(steps["row 0"]) < len(steps["row 1"]) <= len(other)
    assert sum(one.accepted for one in steps["row 0"]) > len(whole) // 2


def test_texts_are_found_again_behind_steps_that_are_not_packed(files: ModelFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    """No row is searched in four steps of six: those behind the first are advanced on the device, and the texts lack their
    tokens."""
    turns: list[int] = []
    world = World(looking_up(files), lambda sequence, limit: min(limit, 3) if len(turns) % 6 >= 4 else -1)
    world.planned = lambda: turns.append(1)
    continued: list[int] = []
    continues = DeviceRunner._continue
    monkeypatch.setattr(DeviceRunner, "_continue", lambda *a, **k: (continued.append(1), continues(*a, **k))[1])
    params = [SamplingParams(temperature=0.0, max_tokens=40), SamplingParams(temperature=0.6, seed=5, max_tokens=40)]

    def sequences() -> list[Sequence]:
        return [sequence_of(index, one, 5 + 4 * index) for index, one in enumerate(params)]

    found = world.run(sequences())
    assert len(continued) > 8
    assert world.accepted > 5
    monkeypatch.setattr(Continuing, "follow", lambda *_: None)
    assert found == plain(files, sequences())


def test_a_copy_takes_a_fraction_of_the_steps(files: ModelFiles) -> None:
    """With a step in flight all the time: what one step found is verified by the next, and what that accepts feeds the one
    behind it, without the host."""
    world = World(looking_up(files), lambda sequence, limit: min(limit, 4))
    sampling = SamplingParams(temperature=0.0, max_tokens=60)
    (found,) = world.run([sequence_of(1, sampling)])
    assert [found] == plain(files, [sequence_of(1, sampling)])
    assert len(world.progress) < 35, [one.accepted for one in world.progress]
    assert all(one.looked_up is not None for one in world.progress[1:]), "every text was searched from the first step on"


def test_texts_stop_where_they_must(files: ModelFiles) -> None:
    """At the most tokens, at a stop token among those that are verified, and at the longest context."""
    cases = [
        SamplingParams(temperature=0.0, max_tokens=1),
        SamplingParams(temperature=0.0, max_tokens=2),
        SamplingParams(temperature=0.0, max_tokens=13),
        SamplingParams(temperature=0.0, max_tokens=60, min_tokens=10, stop_token_ids=list(range(40, 60))),
        SamplingParams(temperature=0.0, max_tokens=1000),
    ]

    def sequences() -> list[Sequence]:
        return [sequence_of(index, one, 200 if one.max_tokens == 1000 else 4) for index, one in enumerate(cases)]

    world = World(looking_up(files), lambda sequence, limit: min(limit, 5))
    found = world.run(sequences())
    assert found == plain(files, sequences())
    assert len(found[4]) + 200 == world.scheduler.max_context


def test_a_text_that_comes_with_its_answer_begun_is_searched_at_once(files: ModelFiles) -> None:
    """As one from another worker does: its tokens are there, and its KV is computed or copied."""
    (whole,) = plain(files, [sequence_of(1, SamplingParams(temperature=0.0, max_tokens=40))])
    moved = sequence_of(1, SamplingParams(temperature=0.0, max_tokens=40))
    moved.tokens += whole[:20]
    world = World(looking_up(files), lambda sequence, limit: min(limit, 4))
    (found,) = world.run([moved])
    assert found == whole
    second = world.progress[1].looked_up
    assert second is not None
    assert second.length > 0, "the answer's first part is in the text"
    assert world.accepted > 5


@pytest.mark.slow
def test_preempted_texts_go_on(files: ModelFiles) -> None:
    """Blocks for about half of the rows: some are computed again, and their texts are on the device still."""
    sampling = SamplingParams(temperature=0.0, max_tokens=40)
    world = World(looking_up(files), lambda sequence, limit: min(limit, 3), num_blocks=10, watermark=0)
    found = world.run([sequence_of(index, sampling, 12) for index in range(4)])
    assert world.scheduler.num_preemptions > 0
    assert found == plain(files, [sequence_of(index, sampling, 12) for index in range(4)])


def test_steps_that_fail_are_run_again(files: ModelFiles) -> None:
    """What they sampled is in the texts already, whatever it is; these begin anew."""
    sampling = SamplingParams(temperature=0.0, max_tokens=40)
    world = World(looking_up(files), lambda sequence, limit: min(limit, 3))
    sequences = [sequence_of(index, sampling) for index in range(2)]
    for sequence in sequences:
        world.scheduler.admit(sequence)
    turn, texts = 0, world.runner._settling.lookup
    while world.step():
        turn += 1
        if turn % 7 < 2 and len(world.flights) == 2:
            world.flights.clear()
            world.scheduler.rewind()
            for sequence in sequences:
                index = texts._slots[sequence.serial].index
                with torch.inference_mode():
                    texts.texts.tokens[index, len(sequence.tokens) : int(texts.texts.lengths[index])] = 1
    assert [one.output for one in sequences] == plain(files, [sequence_of(index, sampling) for index in range(2)])
    for sequence in sequences:
        slot = texts._slots[sequence.serial]
        length = int(texts.texts.lengths[slot.index])
        assert texts.texts.tokens[slot.index, :length].tolist() == sequence.tokens[:length]
        assert length >= len(sequence.tokens) - 8


def test_more_texts_than_slots_take_turns(files: ModelFiles) -> None:
    """A sequence that pauses loses its slot to another, and is sent whole when it comes back."""
    sampling = SamplingParams(temperature=0.0, max_tokens=16)
    rng = random.Random(9)
    chosen: dict[str, bool] = {}

    def look_up(sequence: Sequence, limit: int) -> int:
        if len(chosen) == 4:
            chosen.clear()
        chosen[sequence.request] = sum(chosen.values()) < 1 and rng.random() < 0.7
        return min(limit, 3) if chosen[sequence.request] else -1

    world = World(looking_up(files, max_texts=3), look_up)
    found = world.run([sequence_of(index, sampling) for index in range(4)])
    assert found == plain(files, [sequence_of(index, sampling) for index in range(4)])


def test_long_texts_are_sent_in_parts(files: ModelFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_lookup, "PART_TOKENS", 16)
    sampling = SamplingParams(temperature=0.0, max_tokens=12)
    world = World(looking_up(files), lambda sequence, limit: min(limit, 2))
    (found,) = world.run([sequence_of(2, sampling, 60, symbols=6)])
    assert [found] == plain(files, [sequence_of(2, sampling, 60, symbols=6)])
    searched = [one.looked_up is not None for one in world.progress]
    assert not any(searched[:4])
    assert all(searched[5:])


def test_outcomes_of_a_draft_worker_take_turns_with_lookup(files: ModelFiles) -> None:
    """A row has one or the other; behind a row whose proposal only the device knows, an outcome may come true as well."""
    sampling = SamplingParams(temperature=0.0, max_tokens=40)
    (whole,) = plain(files, [sequence_of(1, sampling)])
    rng = random.Random(4)
    proposed = 0

    def foresee(sequence: Sequence, limit: int) -> list[Outcome]:
        nonlocal proposed
        accepted = rng.randrange(3)
        place = sequence.num_outputs + accepted
        behind = whole[place + 1 :][: min(limit, 3)]
        if not behind:
            return []
        proposed += 1
        return [Outcome(accepted, whole[place], behind)]

    world = World(looking_up(files), lambda sequence, limit: min(limit, rng.choice([-1, 0, 4])))
    world.scheduler.foresee = foresee
    world.scheduler.propose = lambda sequence, limit: whole[sequence.num_outputs :][: min(limit, 2)]
    (found,) = world.run([sequence_of(1, sampling)])
    assert found == whole
    assert proposed > 3


def test_the_host_learns_what_was_verified(files: ModelFiles) -> None:
    world = World(looking_up(files), lambda sequence, limit: min(limit, 3))
    world.run([sequence_of(1, SamplingParams(temperature=0.0, max_tokens=40))])
    tokens = world.progress[0].sequence.tokens
    for done in world.progress[1:]:
        found = done.looked_up
        assert found is not None
        assert done.proposed == found.num_verified
        assert UNKNOWN not in found.tokens
        begin = done.sequence.generation.prompt_tokens + done.start
        came = tokens[begin:]  # at its end a text takes no more than it may
        assert came[: done.accepted] == found.tokens[: min(done.accepted, len(came))]
        if done.accepted < found.num_verified and begin + done.accepted < len(tokens):
            assert tokens[begin + done.accepted] != found.tokens[done.accepted]
