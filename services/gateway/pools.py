"""The workers a router chooses from: what each said last, plus what this gateway has sent there since. Pure.

A presence is up to a heartbeat old. Counting our own requests keeps a burst from landing on whoever looked idle then:

    load    = max(ours now, running + waiting as it said + what we added since)
    spare   = credits as it said - what we added since
    room    = tokens for whose KV it has blocks as it said + what ours have freed - hand-offs that we offered since
    backlog = tokens of prompts to compute as it said + what we added since
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterator

from common.protocol.handles import WorkerRef
from common.protocol.messages import Presence

STUCK_MS, STUCK_STEPS = 2000.0, 20.0
NOTHING_IS_TOO_LONG = 1 << 60

MAX_PART_TOKENS = 8192
"""Of a longer prompt, what is computed at most before a shorter one has its turn."""

BETWEEN_HOSTS = "between hosts"
"""In a host's place in a `Pair`."""
DEFAULT_PULL_US_PER_TOKEN = 50.0
"""What a token takes from host to host before it was measured."""

Pair = tuple[str, str]
"""(fingerprint, host): KV can be handed over between workers with equal ones."""


def pairs_of(presence: Presence) -> tuple[Pair, ...]:
    """Return where a worker belongs: to its host, and if other hosts can read its KV, or it theirs, to all of them."""
    here = (presence.fingerprint, presence.host)
    return (here, (presence.fingerprint, BETWEEN_HOSTS)) if presence.endpoints else (here,)


def pull_s(pair: Pair, decode: Worker, num_tokens: int) -> float:
    """Return the seconds that copying the KV of a prompt takes beyond what it takes within a host."""
    if pair[1] != BETWEEN_HOSTS:
        return 0.0
    measured = max((endpoint.pull_us_per_token for endpoint in decode.presence.endpoints), default=0.0)
    return num_tokens * (measured or DEFAULT_PULL_US_PER_TOKEN) / 1e6


class Worker:
    """One life of one worker. `serial` is its name in the prefix memory."""

    __slots__ = (
        "asked_in_vain_at",
        "base",
        "base_tokens",
        "began_at",
        "credits",
        "kept_for",
        "longest",
        "ours",
        "presence",
        "prompts",
        "ref",
        "reserved",
        "room",
        "serial",
        "tokens",
        "too_long",
    )

    def __init__(self, presence: Presence, serial: int) -> None:
        self.ref: WorkerRef = presence.worker
        self.serial = serial
        self.ours = 0
        self.tokens = 0
        self.prompts: list[int] = []
        """Tokens of each prompt of ours that it computes, ascending; without those of batches, which others overtake."""
        self.began_at = 0.0
        """When it got the first of them, or gave the first token of another one."""
        self.reserved = False
        self.kept_for = ""
        """The only request that it gets, one that has waited for its blocks for long; empty: all."""
        self.asked_in_vain_at = -math.inf
        """When it was last offered a hand-off for which it said that it has no blocks."""
        self.longest = NOTHING_IS_TOO_LONG
        """A sequence of so many tokens is left to workers of its pool that hold more. Those that hold the most take any."""
        self.observe(presence)

    def observe(self, presence: Presence) -> None:
        self.presence = presence
        self.credits = presence.credits if presence.state == "ready" else 0
        self.base = self.ours
        self.base_tokens = self.tokens
        self.too_long = NOTHING_IS_TOO_LONG
        self.room = NOTHING_IS_TOO_LONG if presence.room < 0 else presence.room
        """Tokens of the longest sequence that it has blocks for: as it said, with what ours have freed there, and without what
        we have offered it since."""

    def refuse(self, num_tokens: int = 0) -> None:
        """It had no room after all: none until something of ours ends there, or it says otherwise. num_tokens > 0: none for so
        many tokens or more; a shorter sequence may still find blocks."""
        if num_tokens:
            self.too_long = min(self.too_long, num_tokens)
            return
        self.credits = 0
        self.base = self.ours

    def takes(self, num_tokens: int, request: str = "") -> bool:
        """Whether it may have room for a request of so many tokens."""
        return self.spare > 0 and num_tokens < min(self.too_long, self.longest) and self.kept_for in ("", request)

    @property
    def pairs(self) -> tuple[Pair, ...]:
        """Its own host's first."""
        return pairs_of(self.presence)

    @property
    def usable(self) -> bool:
        return self.presence.state == "ready"

    @property
    def places(self) -> int:
        """Taken and free ones, as it said last."""
        presence = self.presence
        return presence.credits + presence.running + presence.waiting

    @property
    def spare(self) -> int:
        if self.reserved or self.presence.state != "ready":
            return 0
        return self.credits - (self.ours - self.base)

    @property
    def is_stuck(self) -> bool:
        """Its engine has been at one step for many times as long as steps take there."""
        presence = self.presence
        return presence.step_age_ms > max(STUCK_MS, STUCK_STEPS * presence.step_ms)

    @property
    def load(self) -> int:
        presence = self.presence
        return max(self.ours, presence.running + presence.waiting + self.ours - self.base)

    @property
    def backlog(self) -> int:
        """Tokens of prompts that it is to compute. What was on its way to it when it spoke is in neither of the two numbers: so
        never less than half of what we sent, of which it may have computed some."""
        return max(self.presence.capacity.backlog_tokens + self.tokens - self.base_tokens, self.tokens // 2)

    def ahead_of(self, num_tokens: int) -> int:
        """Tokens of prompts that it is to compute before a new one with so many: those of ours that are as short, half a part
        of a longer one, and what others have sent. What it has computed since `began_at` is among them."""
        theirs = max(0, self.presence.capacity.backlog_tokens - self.base_tokens)
        place = bisect.bisect_right(self.prompts, num_tokens)
        longest = self.prompts[-1] if place < len(self.prompts) else 0
        return theirs + sum(self.prompts[:place]) + min(longest, MAX_PART_TOKENS) // 2

    def computes(self, num_tokens: int, now: float) -> None:
        """A prompt of ours with so many tokens is there from now on; or, below 0, is computed."""
        if not self.prompts or num_tokens < 0:
            self.began_at = now
        if num_tokens > 0:
            bisect.insort(self.prompts, num_tokens)
        elif -num_tokens in self.prompts:
            self.prompts.remove(-num_tokens)


class Pool:
    """Workers of one role. Those with room are kept apart, so that choosing never walks past the full ones."""

    def __init__(self) -> None:
        self.members: dict[str, Worker] = {}
        self.usable = 0
        self.places = 0
        """Of all members that are ready, when they were counted last."""
        self.longest = 0
        """Tokens of the longest sequence that a member holds, or held until lately; 0: unknown."""
        self._longest_at = 0.0
        self.shortest = NOTHING_IS_TOO_LONG
        """A sequence of so many tokens is for some members only."""
        self._open: list[Worker] = []
        self._slots: dict[str, int] = {}
        self._turn = 0

    def __len__(self) -> int:
        return len(self.members)

    @property
    def has_room(self) -> bool:
        return bool(self._open)

    def add(self, worker: Worker) -> None:
        self.members[worker.ref.id] = worker
        self.usable += worker.usable
        self.update(worker)

    def remove(self, worker: Worker) -> None:
        if self.members.pop(worker.ref.id, None) is not None:
            self.usable -= worker.usable
            self._close(worker.ref.id)

    def update(self, worker: Worker) -> None:
        """Call after `worker.spare` may have changed."""
        worker_id = worker.ref.id
        if worker.spare <= 0:
            self._close(worker_id)
        elif worker_id not in self._slots:
            self._slots[worker_id] = len(self._open)
            self._open.append(worker)

    def count(self, now: float, grace_s: float) -> None:
        """Count places, and who holds the longest sequences. Call when workers have said how they are. `grace_s`: what only a
        member held that has left waits so long for it to return."""
        usable = [worker for worker in self.members.values() if worker.usable]
        self.places = sum(worker.places for worker in usable)
        if usable:
            held = [worker.presence.max_context for worker in usable]
            longest = max(held) if all(held) else 0
            if not longest or longest >= self.longest or now - self._longest_at > grace_s:
                self.longest, self._longest_at = longest, now
        for worker in usable:
            mine = worker.presence.max_context
            worker.longest = mine if mine < self.longest else NOTHING_IS_TOO_LONG
        self.shortest = min((worker.longest for worker in usable), default=NOTHING_IS_TOO_LONG)

    def spare(self, limit: int) -> int:
        """How many requests all of them would take, or some number above `limit`: no more workers are asked than that takes."""
        total = 0
        for worker in self._open:
            total += worker.spare
            if total > limit:
                break
        return total

    def sample(self, count: int) -> Iterator[Worker]:
        """At most `count` workers with room, others each time: all of a small pool, an even spread of a large one."""
        num_open = len(self._open)
        self._turn += 1
        if num_open <= count:
            for index in range(num_open):
                yield self._open[(self._turn + index) % num_open]
            return
        # Weyl's sequence: even steps through the pool, and two pools do not fall into step with one another
        start, stride = (self._turn * 0x9E3779B1) % num_open, num_open // count
        for index in range(count):
            yield self._open[(start + index * stride) % num_open]

    def _close(self, worker_id: str) -> None:
        slot = self._slots.pop(worker_id, None)
        if slot is None:
            return
        last = self._open.pop()
        if last.ref.id != worker_id:
            self._open[slot] = last
            self._slots[last.ref.id] = slot
