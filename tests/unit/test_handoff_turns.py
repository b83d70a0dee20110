"""A prompt that has been computed has its turn at a full decode worker, however many short requests come meanwhile."""

from __future__ import annotations

from common.protocol.handles import WorkerRef
from common.protocol.messages import HandedOff, HandoffFailed, PrefillTask, Redirect, SamplingParams, TokenFrame, TokenFrames
from services.gateway.actions import Limits
from services.gateway.dispatch import Dispatcher
from services.gateway.generation import GenerationRequest
from services.gateway.health import Health
from services.gateway.placement import OVERTAKEN_S, Placement
from services.gateway.requests import Request
from services.gateway.router import Router
from tests.unit.presences import presence

GATEWAY = WorkerRef("gateway", "gateway-0", 1)
PREFILL, DECODE = WorkerRef("prefill", "prefill-0", 1), WorkerRef("decode", "decode-0", 1)
HEARTBEAT_S = 0.25


class Site:
    """A prefill worker, and a decode worker that has room for short requests, which come all the time."""

    def __init__(self) -> None:
        placement = Placement(Router(direct_max_tokens=64), Health(trusting=True))
        self.made = Dispatcher(placement=placement, max_queue=100, max_requests=1000, no_workers_grace_s=9.0, now=0.0)
        self.now = 0.0
        self.num_submitted = 0
        self.long = self.submit(1000)
        self.beat()
        ((request, ask),) = self.made.take_asks()
        assert request is self.long and isinstance(ask.message, PrefillTask)
        self.made.accepted(request.id, PREFILL, ask.attempt, self.now)
        frame = TokenFrame(request.id, ask.attempt, 0, [5])
        self.made.frames(TokenFrames(worker=PREFILL, frames=[frame]), self.now)

    def submit(self, num_tokens: int) -> Request:
        self.num_submitted += 1
        name, sampling = f"r{self.num_submitted}", SamplingParams(max_tokens=8)
        asked = GenerationRequest(id=name, prompt=[self.num_submitted] * num_tokens, sampling=sampling, deadline_s=600.0)
        request = Request(asked, wire_id=name, gateway=GATEWAY, limits=Limits(), now=self.now, wall_ms=0)
        self.made.submit(request, self.now)
        return request

    def beat(self) -> None:
        self.now += HEARTBEAT_S
        ready = [presence(worker.role, credits=8, host="h", fingerprint="f") for worker in (PREFILL, DECODE)]
        self.made.refresh(ready, self.now)
        self.made.tick(self.now)

    def refuse(self) -> None:
        """The decode worker lacks blocks for the long prompt."""
        failed = HandoffFailed(worker=PREFILL, request=self.long.id, attempt=self.long.attempt, code="out_of_blocks")
        self.made.handoff_failed(failed, self.now)

    def is_short_one_sent(self) -> bool:
        """Whether a short request that comes now goes to the decode worker, which answers it at once."""
        request = self.submit(10)
        asks = self.made.take_asks()
        for one, ask in asks:
            self.made.accepted(one.id, DECODE, ask.attempt, self.now)
            frame = TokenFrame(one.id, ask.attempt, 0, [5], finish="stop")
            self.made.frames(TokenFrames(worker=DECODE, frames=[frame]), self.now)
        return request in [one for one, _ in asks]


class FullSite:
    """Prompts of some lengths that a prefill worker has computed, and a decode worker that lacks blocks for all of them."""

    def __init__(self, *lengths: int) -> None:
        placement = Placement(Router(direct_max_tokens=64), Health(trusting=True))
        self.made = Dispatcher(placement=placement, max_queue=100, max_requests=1000, no_workers_grace_s=9.0, now=0.0)
        self.now, self.room = 0.0, 0
        self.length_of = {f"r{number}": length for number, length in enumerate(lengths)}
        for name, length in self.length_of.items():
            asked = GenerationRequest(id=name, prompt=[9] * length, sampling=SamplingParams(max_tokens=8), deadline_s=600.0)
            self.made.submit(Request(asked, wire_id=name, gateway=GATEWAY, limits=Limits(), now=0.0, wall_ms=0), 0.0)
        self.beat()
        for request, ask in sorted(self.made.take_asks(), key=lambda asked: asked[0].id):
            self.now += 0.001
            self.made.accepted(request.id, PREFILL, ask.attempt, self.now)
            self.made.frames(TokenFrames(worker=PREFILL, frames=[TokenFrame(request.id, ask.attempt, 0, [5])]), self.now)
            self.refuse(request.id)
        for name in self.offers():
            self.refuse(name)

    def beat(self) -> None:
        self.now += HEARTBEAT_S
        said = [presence("prefill", credits=64, host="h", fingerprint="f")]
        said.append(presence("decode", credits=64, host="h", fingerprint="f", room=self.room))
        self.made.refresh(said, self.now)
        self.made.tick(self.now)

    def refuse(self, name: str) -> None:
        self.made.handoff_failed(HandoffFailed(worker=PREFILL, request=name, attempt=1, code="out_of_blocks"), self.now)

    def take(self, name: str) -> None:
        self.made.handed_off(HandedOff(worker=PREFILL, request=name, attempt=1, decode=DECODE), self.now)

    def end(self, name: str) -> None:
        frame = TokenFrame(name, 1, 1, [6], finish="stop")
        self.made.frames(TokenFrames(worker=DECODE, frames=[frame]), self.now)

    def offers(self) -> list[str]:
        """The requests whose hand-off is offered again."""
        return [tell.message.request for tell in self.made.take_tells() if isinstance(tell.message, Redirect)]


def test_while_there_are_no_blocks_the_oldest_hand_off_alone_is_offered_and_seldom() -> None:
    at = FullSite(1000, 900, 1000, 800)
    offered: list[str] = []
    for _ in range(16):
        at.beat()
        for name in at.offers():
            offered.append(name)
            at.refuse(name)
    assert set(offered) == {"r0"} and 6 <= len(offered) <= 8, "once in half a second"


def test_a_hand_off_is_offered_as_soon_as_there_are_blocks_for_it() -> None:
    at = FullSite(1000, 900, 1000, 800)
    at.beat()
    while at.offers() != ["r0"]:
        at.beat()
    at.refuse("r0")
    at.room = 2000
    at.beat()
    assert at.offers() == ["r0", "r1"], "two have room together"
    at.take("r0")
    at.take("r1")
    assert at.offers() == []
    at.end("r0")  # between two heartbeats
    assert at.offers() == ["r2"]
    at.refuse("r2")
    assert at.offers() == ["r3"], "a shorter one may have room where a longer one had none"


def test_short_requests_overtake_a_hand_off_for_a_while_and_then_wait_until_it_has_its_place() -> None:
    at = Site()
    sent: list[bool] = []
    for _ in range(int(2 * OVERTAKEN_S / HEARTBEAT_S)):
        at.refuse()
        sent.append(at.is_short_one_sent())
        at.beat()
        assert at.made.take_tells(), "it is offered again"
    half = len(sent) // 2
    assert all(sent[:half]) and not any(sent[half + 2 :])
    at.made.handed_off(HandedOff(worker=PREFILL, request=at.long.id, attempt=at.long.attempt, decode=DECODE), at.now)
    assert at.made.take_asks(), "those that waited have their turn"
