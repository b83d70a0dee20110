"""The draft worker on the memory bus: it proposes over the real protocol, and may fail in every way at no cost but speed."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import AsyncIterator
from typing import ClassVar

import anyio
import msgspec
import numpy as np
import pytest

from common.engine.outcomes import accept
from common.engine.plan import StepPlan, StepRow
from common.engine.simulated.runner import BYTES_PER_TOKEN, SimulatedRunner, TokenRule
from common.protocol.draft_messages import DraftClose, DraftResync, DraftRow, DraftUpdate, Proposals
from common.protocol.handles import Role
from common.protocol.messages import Message, Presence, SamplingParams
from common.runtime.actor import Actor
from common.runtime.settings import ServiceConfig
from common.testing.memory_bus import MemoryBroker
from services.decode.speculation import DraftBook
from services.decode.speculation_policy import SpeculationPolicy
from services.draft.actor import MAX_QUEUED, DraftActor
from services.draft.config import DraftConfig
from tests.unit.speculating import flat_costs
from tests.waiting import until

pytestmark = pytest.mark.virtual_time

DRAFT = DraftConfig(heartbeat_s=0.02, dead_after_s=2.0, max_sequences=8, proposal_tokens=6)
DECODE = ServiceConfig(heartbeat_s=0.02, dead_after_s=2.0)
VOCAB = 1000


class Decoder(Actor):
    """The decode side: keeps what draft workers say. always: whatever they propose is verified, right or wrong."""

    role: ClassVar[Role] = "decode"

    def __init__(self, broker: MemoryBroker, *, always: bool = False) -> None:
        self.connection = broker.connect("decode")
        super().__init__(bus=self.connection, config=DECODE, clock=time.monotonic)
        policy = SpeculationPolicy(max_tokens=4, max_step_tokens=1000, costs=flat_costs(), always=always)
        self.book = DraftBook(policy, vocab_size=VOCAB)
        self.proposals: list[Proposals] = []
        self.resyncs: list[DraftResync] = []

    def handle(self, message: Message, reply: str) -> None:
        match message:
            case Proposals():
                self.proposals.append(message)
                self.book.on_proposals(message)
            case DraftResync():
                self.resyncs.append(message)
                self.book.on_resync(message)
            case _:
                raise AssertionError(f"unexpected {message}")

    def tick(self, now: float) -> None:
        self.book.set_workers(self.registry.alive("draft", now))

    def peer_lost(self, peer: Presence) -> None:
        self.book.worker_lost(peer.worker)

    def update(self, draft: DraftActor, *rows: DraftRow) -> None:
        self.send(draft.ref, DraftUpdate(decode=self.ref, rows=list(rows)))


@contextlib.asynccontextmanager
async def running(*actors: Actor) -> AsyncIterator[None]:
    async with anyio.create_task_group() as group:
        for actor in actors:
            await group.start(actor.run)
        for actor in actors:
            await until(lambda actor=actor: actor.ready)
        yield
        group.cancel_scope.cancel()


def make_draft(broker: MemoryBroker, config: DraftConfig = DRAFT) -> DraftActor:
    return DraftActor(bus=broker.connect("draft"), config=config, clock=time.monotonic)


async def test_an_update_is_answered_by_one_message_with_a_guess_for_each_sequence() -> None:
    broker = MemoryBroker()
    decoder, draft = Decoder(broker), make_draft(broker)
    async with running(decoder, draft):
        decoder.update(draft, DraftRow("a", 0, [1, 2, 3, 1, 2]), DraftRow("b", 0, [5, 5, 5]), DraftRow("new", 0, [7, 8]))
        await until(lambda: bool(decoder.proposals))
        assert decoder.proposals == [
            Proposals(draft=draft.ref, rows=[DraftRow("a", 5, [3, 1, 2, 3, 1, 2]), DraftRow("b", 3, [5] * 6)])
        ]
        decoder.update(draft, DraftRow("a", 5, [4]))
        decoder.update(draft, DraftRow("a", 6, [1, 2]))
        await until(lambda: len(decoder.proposals) > 1)
        assert decoder.proposals[-1].rows == [DraftRow("a", 8, [4, 1, 2, 4, 1, 2])]


async def test_a_lost_update_shows_as_a_gap_and_is_asked_for_again() -> None:
    broker = MemoryBroker()
    decoder, draft = Decoder(broker), make_draft(broker)
    async with running(decoder, draft):
        decoder.update(draft, DraftRow("a", 0, [1, 2, 3]), DraftRow("b", 0, [1]))
        decoder.update(draft, DraftRow("a", 5, [1, 2]), DraftRow("b", 1, [2]), DraftRow("never opened", 4, [9]))
        await until(lambda: bool(decoder.resyncs))
        assert decoder.resyncs == [DraftResync(draft=draft.ref, sequences=["a", "never opened"])]
        decoder.update(draft, DraftRow("a", 0, [1, 2, 3, 9, 9, 1, 2]))
        await until(lambda: bool(decoder.proposals))
        assert decoder.proposals[0].rows == [DraftRow("a", 7, [3, 9, 9, 1, 2, 3])]


async def test_closed_sequences_are_forgotten() -> None:
    broker = MemoryBroker()
    decoder, draft = Decoder(broker), make_draft(broker)
    async with running(decoder, draft):
        decoder.update(draft, DraftRow("a", 0, [1, 1, 1]), DraftRow("b", 0, [2]))
        decoder.send(draft.ref, DraftClose(decode=decoder.ref, sequences=["a", "unknown"]))
        await until(lambda: len(draft.proposer) == 1)
        decoder.send(draft.ref, DraftClose(decode=decoder.ref, sequences=["a", "b"]))
        await until(lambda: len(draft.proposer) == 0)


async def test_mirrors_of_a_killed_decode_worker_are_freed() -> None:
    broker = MemoryBroker()
    decoder, other, draft = Decoder(broker), Decoder(broker), make_draft(broker)
    async with running(decoder, other, draft):
        decoder.update(draft, DraftRow("a", 0, [1]), DraftRow("b", 0, [2]))
        other.update(draft, DraftRow("a", 0, [1]))
        await until(lambda: len(draft.proposer) == 3 and draft.registry.get(decoder.ref.id) is not None)
        decoder.connection.kill()
        await until(lambda: len(draft.proposer) == 1)
        assert draft.proposer.length((other.ref, "a")) == 1


async def test_mirrors_of_a_decode_worker_that_was_never_heard_are_freed() -> None:
    broker = MemoryBroker()
    decoder, draft = Decoder(broker), make_draft(broker)
    async with running(draft):
        draft.handle(DraftUpdate(decode=decoder.ref, rows=[DraftRow("a", 0, [1])]), "")
        await until(lambda: len(draft.proposer) == 1)
        await until(lambda: len(draft.proposer) == 0)


async def test_a_mirror_whose_close_was_lost_is_forgotten_after_a_lease() -> None:
    broker = MemoryBroker()
    decoder, draft = Decoder(broker), make_draft(broker, msgspec.structs.replace(DRAFT, lease_s=0.3))
    async with running(decoder, draft):
        decoder.update(draft, DraftRow("a", 0, [1, 2]), DraftRow("b", 0, [1, 2]))
        await until(lambda: len(draft.proposer) == 2)
        for base in range(2, 12):
            decoder.update(draft, DraftRow("b", base, [base]))
            await anyio.sleep(0.05)
        assert len(draft.proposer) == 1, "the one that goes on stays"
        assert not decoder.resyncs


async def test_an_outage_of_the_bus_loses_closes_so_no_mirror_outlives_it() -> None:
    broker = MemoryBroker()
    decoder, draft = Decoder(broker), make_draft(broker)
    async with running(decoder, draft):
        decoder.update(draft, DraftRow("a", 0, [1, 2]), DraftRow("b", 0, [1, 2]))
        await until(lambda: len(draft.proposer) == 2)
        broker.stop()
        broker.start()
        await until(lambda: draft.bus.connected and not len(draft.proposer))
        decoder.update(draft, DraftRow("b", 2, [3]))
        await until(lambda: bool(decoder.resyncs))
        assert decoder.resyncs == [DraftResync(draft=draft.ref, sequences=["b"])]


async def test_a_fenced_draft_worker_drops_its_mirrors() -> None:
    broker = MemoryBroker()
    decoder, draft = Decoder(broker), make_draft(broker)
    async with running(decoder, draft):
        decoder.update(draft, DraftRow("a", 0, [1]))
        await until(lambda: len(draft.proposer) == 1)
        draft.fenced()
        assert len(draft.proposer) == 0


async def test_presence_says_how_many_more_sequences_there_is_room_for() -> None:
    broker = MemoryBroker()
    decoder, draft = Decoder(broker), make_draft(broker)
    async with running(decoder, draft):
        decoder.update(draft, *(DraftRow(str(index), 0, [1]) for index in range(20)))
        await until(lambda: len(draft.proposer) == DRAFT.max_sequences)
        seen = draft.presence("ready")
        assert (seen.running, seen.credits) == (8, 0)
        assert draft.presence("draining").credits == 0


async def test_too_many_updates_at_once_are_dropped_and_made_good() -> None:
    """The queue is bounded; what falls out is a gap like any other."""
    broker = MemoryBroker()
    decoder, draft = Decoder(broker), make_draft(broker)
    async with running(decoder, draft):
        for index in range(2 * MAX_QUEUED):
            draft.handle(DraftUpdate(decode=decoder.ref, rows=[DraftRow("a", index, [index % 7])]), "")
        await until(lambda: bool(decoder.resyncs))
        assert decoder.resyncs[0].sequences == ["a"]


async def test_what_is_no_token_id_is_refused_and_the_next_update_served() -> None:
    broker = MemoryBroker()
    decoder, draft = Decoder(broker), make_draft(broker)
    async with running(decoder, draft):
        decoder.update(draft, DraftRow("bad", 0, [-1, 2**40]), DraftRow("good", 0, [5, 5, 5]))
        await until(lambda: bool(decoder.proposals))
        assert [row.sequence for row in decoder.proposals[0].rows] == ["good"]


@pytest.mark.parametrize("faults", [False, True])
async def test_speculation_over_the_bus_saves_steps_and_changes_no_token(faults: bool) -> None:
    """With faults: a tenth of all draft messages is lost, and one of two draft workers is killed on the way."""
    rng = random.Random(3)
    broker = MemoryBroker()
    decoder = Decoder(broker)
    killed = broker.connect("draft")
    drafts = [DraftActor(bus=killed, config=DRAFT, clock=time.monotonic), make_draft(broker)]
    runner = SimulatedRunner(
        "instant",
        storage=np.zeros((256, 16 * BYTES_PER_TOKEN), np.uint8),
        block_tokens=16,
        max_context=512,
        vocab_size=VOCAB,
        fingerprint="simulated",
        time_scale=0,
        rule=TokenRule(VOCAB, repetition=0.97),
    )
    prompts = {name: [rng.randrange(VOCAB) for _ in range(rng.randrange(2, 30))] for name in "abcdef"}
    sampling = SamplingParams(seed=1)
    tokens = {name: list(prompt) for name, prompt in prompts.items()}
    blocks = {name: list(range(index * 32, index * 32 + 32)) for index, name in enumerate(prompts)}
    steps = 0
    async with running(decoder, *drafts):
        await until(lambda: len(decoder.registry.alive("draft", decoder.clock())) == 2)
        await until(lambda: all(peer.state == "ready" for peer in decoder.registry.alive("draft", decoder.clock())))
        decoder.tick(decoder.clock())
        if faults:
            broker.drop(lambda message: ".presence." not in message.subject and rng.random() < 0.1)
        for name, prompt in prompts.items():
            runner.execute(StepPlan(0, [StepRow(prompt[:-1], 0, blocks[name], 0, sampling, len(prompt))]))
            decoder.book.open(name, tokens[name])
        while steps < 150:
            steps += 1
            if faults and steps == 60:
                killed.kill()
            decoder.book.begin_step(len(tokens))
            proposed = {name: decoder.book.propose(name, 8) for name in tokens}
            rows = [
                StepRow([own[-1], *proposed[name]], len(own) - 1, blocks[name], 1 + len(proposed[name]), sampling, 1)
                for name, own in tokens.items()
                if len(own) < 500
            ]
            names = [name for name, own in tokens.items() if len(own) < 500]
            result = runner.execute(StepPlan(steps, rows))
            for name, sampled in zip(names, result.rows, strict=True):
                accepted = accept(proposed[name], sampled.tokens)
                tokens[name] += sampled.tokens[: accepted + 1]
                decoder.book.record(name, len(proposed[name]), accepted)
            for worker, message in decoder.book.messages(decoder.ref):
                decoder.send(worker, message)
            await anyio.sleep(0.004)
    for name, prompt in prompts.items():
        output = tokens[name][len(prompt) :]
        assert output == runner.expected_tokens(prompt, sampling, len(output))
    assert decoder.book.counters.num_accepted_tokens > 0.3 * steps * len(prompts)
