"""Frames between workers and gateways: bounded on the way, merged while they wait, nothing lost, nothing twice."""

from __future__ import annotations

import random

import anyio
import anyio.lowlevel
import pytest

from common.engine.sequence import Sequence
from common.protocol import tokens
from common.protocol.handles import WorkerRef
from common.protocol.messages import (
    FramesTaken,
    Generation,
    SamplingParams,
    TokenFrame,
    TokenFrames,
    TokenLogprobs,
    frame_units,
)
from common.worker.outflow import FRAME_ENTRIES, SILENT_S, Outflow
from services.gateway.inflow import SLICE_FRAMES, Inflow
from services.gateway.windows import FIRST_TOTAL_UNITS, LEAST_TOTAL_UNITS, MIN_UNITS, TARGET_S, TOTAL_UNITS, Windows

GATEWAY = WorkerRef(id="gateway", role="gateway", epoch=1)
WORKER = WorkerRef(id="decode", role="decode", epoch=1)


def sequence(name: str, *, gateway: WorkerRef = GATEWAY, logprobs: int = -1) -> Sequence:
    generation = Generation(
        request=name,
        attempt=1,
        gateway=gateway,
        tokens=tokens.pack([7]),
        prompt_tokens=1,
        sampling=SamplingParams(max_tokens=100_000, logprobs=logprobs),
        deadline_ms=0,
    )
    return Sequence.of(generation, vocab_size=100_000, max_context=1_000_000)


class Wire:
    """What an outflow has sent, and a gateway that takes it when it is told to."""

    def __init__(self) -> None:
        self.messages: list[tuple[WorkerRef, list[TokenFrame], int]] = []
        self.received: dict[str, list[int]] = {}
        self.taken = 0
        self.outflow = Outflow(lambda gateway, frames, number: self.messages.append((gateway, frames, number)))

    def step(self, sequences: list[Sequence], count: int = 1) -> None:
        news = []
        for each in sequences:
            start = each.num_outputs
            each.tokens += range(start, start + count)
            news.append((each, start))
        self.outflow.put(news)

    def take(self, count: int, *, window: int, now: float = 0.0) -> None:
        """Work through so many messages, and acknowledge them."""
        for _, frames, number in self.messages[self.taken : self.taken + count]:
            self.taken += 1
            for frame in frames:
                assert frame.start == len(self.received.setdefault(frame.request, [])), "in order, none twice"
                self.received[frame.request] += frame.tokens
            self.outflow.taken(FramesTaken(gateway=GATEWAY, number=number, window=window), now)

    @property
    def under_way(self) -> int:
        return sum(frame_units(frame) for _, frames, _ in self.messages[self.taken :] for frame in frames)


def test_a_gateway_that_takes_nothing_is_sent_no_more_than_its_window_and_first_tokens() -> None:
    wire = Wire()
    wire.outflow.open(GATEWAY, 100, 0.0)
    sequences = [sequence(str(number)) for number in range(40)]
    for _ in range(500):
        wire.step(sequences)
    assert wire.under_way <= 40 + 100 + 1
    assert wire.outflow.num_waiting == 40
    sent = len(wire.messages)
    wire.take(10**6, window=100)
    assert len(wire.messages) > sent, "room again"
    while wire.outflow.num_waiting:
        wire.take(10**6, window=100)
    wire.take(10**6, window=100)
    assert wire.received == {str(number): list(range(500)) for number in range(40)}


def test_what_waits_of_a_request_is_one_frame() -> None:
    wire = Wire()
    wire.outflow.open(GATEWAY, 1, 0.0)
    one = sequence("one")
    for _ in range(100):
        wire.step([one])
    assert [len(frames[0].tokens) for _, frames, _ in wire.messages] == [1]
    wire.take(1, window=1)
    assert [len(frames[0].tokens) for _, frames, _ in wire.messages] == [1, 99]


def test_a_request_with_alternatives_is_sent_in_parts() -> None:
    wire = Wire()
    wire.outflow.open(GATEWAY, 1, 0.0)
    one = sequence("one", logprobs=20)
    one.logprobs = [TokenLogprobs(logprob=-1.0, top_tokens=(0,) * 20, top_logprobs=(0.0,) * 20) for _ in range(1000)]
    wire.step([one])
    wire.step([one], count=999)
    while wire.outflow.num_waiting or wire.taken < len(wire.messages):
        wire.take(1, window=1)
    assert max(len(frame.tokens) for _, frames, _ in wire.messages for frame in frames) <= FRAME_ENTRIES // 21
    assert wire.received["one"] == list(range(1000))
    assert all(len(frame.logprobs or ()) == len(frame.tokens) for _, frames, _ in wire.messages for frame in frames)


def test_the_last_frame_says_how_it_ended_and_only_that_one() -> None:
    wire = Wire()
    wire.outflow.open(GATEWAY, 1, 0.0)
    one = sequence("one")
    wire.step([one])
    wire.step([one])
    one.finish = "length"
    wire.step([one])
    wire.take(2, window=1)
    assert [frames[0].finish for _, frames, _ in wire.messages] == [None, "length"]


def test_a_gateway_behind_holds_up_nobody_elses_frames() -> None:
    wire, other = Wire(), WorkerRef(id="other", role="gateway", epoch=1)
    for gateway in (GATEWAY, other):
        wire.outflow.open(gateway, 10, 0.0)
    mine, others = sequence("mine"), sequence("others", gateway=other)
    for number in range(1, 101):
        wire.step([mine, others])
        wire.outflow.taken(FramesTaken(gateway=other, number=number, window=10), 0.0)
    assert sum(len(frame.tokens) for gateway, frames, _ in wire.messages for frame in frames if gateway == other) == 100
    assert sum(len(frame.tokens) for gateway, frames, _ in wire.messages for frame in frames if gateway == GATEWAY) <= 11


def test_without_a_window_every_frame_goes_at_once() -> None:
    wire = Wire()
    one = sequence("one")
    for _ in range(50):
        wire.step([one])
    assert [len(frames[0].tokens) for _, frames, _ in wire.messages] == [1] * 50


def test_messages_that_were_lost_do_not_stop_it_for_good() -> None:
    wire = Wire()
    wire.outflow.open(GATEWAY, 4, 0.0)
    one = sequence("one")
    for _ in range(20):
        wire.step([one])
    sent = len(wire.messages)
    wire.outflow.tick(SILENT_S / 2)
    assert len(wire.messages) == sent
    wire.outflow.tick(SILENT_S * 1.5)
    assert len(wire.messages) > sent


def test_a_request_that_left_is_sent_nothing_more() -> None:
    wire = Wire()
    wire.outflow.open(GATEWAY, 1, 0.0)
    one, two = sequence("one"), sequence("two")
    for _ in range(5):
        wire.step([one, two])
    assert wire.outflow.drop(one) == 1, "what it was not sent begins here"
    wire.take(100, window=10)
    assert {frame.request for _, frames, _ in wire.messages[2:] for frame in frames} <= {"two"}


@pytest.mark.parametrize("seed", range(20))
def test_whatever_is_taken_when_every_token_arrives_once_and_in_order(seed: int) -> None:
    dice, wire = random.Random(seed), Wire()
    window = dice.choice([1, 8, 64])
    wire.outflow.open(GATEWAY, window, 0.0)
    sequences = [sequence(str(number)) for number in range(dice.randrange(1, 12))]
    for _ in range(200):
        if dice.random() < 0.6:
            wire.step(dice.sample(sequences, dice.randrange(1, len(sequences) + 1)), count=dice.choice([1, 1, 5]))
        else:
            wire.take(dice.randrange(1, 4), window=window)
    while wire.taken < len(wire.messages):
        wire.take(1, window=window)
    assert wire.received == {each.request: list(range(each.num_outputs)) for each in sequences if each.num_outputs}


# -- the gateway's side


def test_workers_share_what_a_gateway_takes() -> None:
    windows = Windows()
    assert windows.size == FIRST_TOTAL_UNITS
    for number in range(4):
        windows.took(WorkerRef(id=str(number), role="decode", epoch=1), 1, 1, now=0.0)
    windows.tick(0.5)
    assert windows.size == FIRST_TOTAL_UNITS // 4
    for number in range(1000):
        windows.took(WorkerRef(id=str(number), role="decode", epoch=1), 1, 1, now=1.0)
    windows.tick(1.0)
    assert windows.size == MIN_UNITS
    windows.tick(10.0)
    assert windows.size == FIRST_TOTAL_UNITS, "those that sent nothing for seconds need no share"


def test_a_slow_gateway_is_sent_less_and_more_again_when_it_keeps_up() -> None:
    windows = Windows()
    for now in range(10):
        windows.waited(5 * TARGET_S, 100, float(now))
    assert windows.size == LEAST_TOTAL_UNITS
    for now in range(10, 1000):
        windows.waited(TARGET_S / 10, 100, float(now))
    assert windows.size == TOTAL_UNITS


def test_large_messages_are_acknowledged_at_once_and_small_ones_by_the_next_tick() -> None:
    windows = Windows()
    assert windows.took(WORKER, 1, FIRST_TOTAL_UNITS // 2, now=0.0)
    assert windows.acknowledge(WORKER) == 1
    assert not windows.took(WORKER, 2, 1, now=0.0)
    assert windows.tick(0.25) == [WORKER]
    assert windows.acknowledge(WORKER) == 2
    assert windows.tick(0.5) == []


async def test_a_long_message_is_taken_in_slices_first_tokens_first_and_told_once() -> None:
    slices: list[list[TokenFrame]] = []
    told: list[tuple[float, ...]] = []
    now = 0.0
    inflow = Inflow(
        lambda message: slices.append(list(message.frames)),
        lambda _, *what: told.append(what),
        lambda: now,
    )
    frames = [TokenFrame(request=str(number), attempt=1, start=number % 2, tokens=[1]) for number in range(10 * SLICE_FRAMES)]
    inflow.put(TokenFrames(worker=WORKER, frames=frames, number=7))
    assert {frame.start for frame in slices[0]} == {0}, "somebody waits for these"
    now = 0.7
    assert inflow.lag_s == 0.7
    async with anyio.create_task_group() as group:
        group.start_soon(inflow.run)
        while inflow.lag_s:
            await anyio.lowlevel.checkpoint()
        group.cancel_scope.cancel()
    assert all(len(each) <= SLICE_FRAMES for each in slices[1:])
    assert sorted(frame.request for each in slices for frame in each) == sorted(frame.request for frame in frames)
    assert told == [(7, len(frames), 0.7)]
