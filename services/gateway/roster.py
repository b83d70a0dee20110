"""The workers that a router chooses from, in pools: who is there, what each said, and what was sent to each. Pure.

A prefill and a decode worker are a pair if one can read the other's KV: on one host, or between hosts that share a way.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from common.protocol.handles import WorkerRef
from common.protocol.messages import Presence
from services.gateway.expected import DEFAULT_TOKENS_PER_S, all_are_slow, usual_tokens_per_s
from services.gateway.known_prefixes import KnownPrefixes
from services.gateway.pools import NOTHING_IS_TOO_LONG, Pair, Pool, Worker, pairs_of

DEFAULT_STEP_S = 0.01


class Roster:
    """`affinity_blocks`, `index_blocks`: see `KnownPrefixes`. `grace_s`: see `Pool.count`."""

    def __init__(self, *, affinity_blocks: int, index_blocks: int, grace_s: float) -> None:
        self.grace_s = grace_s
        self.prefixes = KnownPrefixes(affinity_blocks, index_blocks)
        self.prefill = Pool()
        self.decode = Pool()
        self._pairs: dict[Pair, tuple[Pool, Pool]] = {}
        self._workers: dict[WorkerRef, Worker] = {}
        self._by_serial: dict[int, Worker] = {}
        self._serials = itertools.count()
        self._step_s = DEFAULT_STEP_S
        """Of decode workers, on average."""
        self._tokens_per_s = DEFAULT_TOKENS_PER_S
        """Of prompts, on average."""
        self._decode_is_slow = False
        """Whether every decode worker says that its rows miss its objective."""

    # -- who is there

    def refresh(self, presences: Iterable[Presence], now: float = 0.0) -> None:
        """What every worker of the model that is alive says now; one that is not among them is gone."""
        alive = {presence.worker: presence for presence in presences if presence.worker.role in ("prefill", "decode")}
        for ref in self._workers.keys() - alive.keys():
            self.remove(ref)
        for ref, presence in alive.items():
            worker = self._workers.get(ref)
            if worker is not None and worker.presence is presence:
                continue
            if worker is None:
                worker = Worker(presence, next(self._serials))
                self.prefixes.joined(ref, worker.serial)
                self._add(worker)
            elif worker.pairs != pairs_of(presence) or worker.presence.state != presence.state:
                self._take_out(worker)
                worker.observe(presence)
                self._add(worker)
            else:
                worker.observe(presence)
                self._update(worker)
        for pool in (self.prefill, self.decode):
            pool.count(now, self.grace_s)
        steps = [w.presence.step_ms for w in self.decode.members.values() if w.presence.step_ms > 0]
        self._step_s = sum(steps) / len(steps) / 1000 if steps else DEFAULT_STEP_S
        self._tokens_per_s = usual_tokens_per_s(self._workers.values())
        self._decode_is_slow = all_are_slow(self.decode.members.values())

    def heard(self, presence: Presence) -> None:
        """What a worker says between two refreshes. One that has become another is left to the next of them."""
        worker = self._workers.get(presence.worker)
        if worker is None or worker.presence.state != presence.state or worker.pairs != pairs_of(presence):
            return
        worker.observe(presence)
        self._update(worker)

    def remove(self, ref: WorkerRef) -> None:
        """Harmless for one that is not there."""
        worker = self._workers.pop(ref, None)
        if worker is not None:
            self.prefixes.left(ref)
            self._take_out(worker)

    def knows(self, ref: WorkerRef) -> bool:
        return ref in self._workers

    def is_stuck(self, ref: WorkerRef) -> bool:
        """Whether its engine makes no progress, by its own word."""
        worker = self._workers.get(ref)
        return worker is not None and worker.is_stuck

    def reserve(self, ref: WorkerRef, *, reserved: bool = True) -> None:
        """Send nothing more there until it is reserved no longer."""
        worker = self._workers.get(ref)
        if worker is not None and worker.reserved != reserved:
            worker.reserved = reserved
            self._update(worker)

    def step_s(self, ref: WorkerRef) -> float:
        """How long a step of this worker takes; 0 when unknown."""
        worker = self._workers.get(ref)
        return worker.presence.step_ms / 1000 if worker is not None else 0.0

    @property
    def hopeful(self) -> bool:
        """Is there a decode worker, or one about to be?"""
        return any(worker.presence.state != "draining" for worker in self.decode.members.values())

    @property
    def hopeful_to_read(self) -> bool:
        """Is there a worker that could read, or one about to be?"""
        return self.hopeful or any(worker.presence.state != "draining" for worker in self.prefill.members.values())

    @property
    def has_room_to_read(self) -> bool:
        return self._readers.has_room

    @property
    def longest(self) -> int:
        """Tokens that a prompt and its answer may have; 0: unknown."""
        return self.decode.longest or self.prefill.longest

    @property
    def longest_read(self) -> int:
        """Tokens that a prompt which is read may have; 0: unknown."""
        return max(self._readers.longest, self.decode.longest) if self._readers.longest else 0

    @property
    def _readers(self) -> Pool:
        return self.prefill if self.prefill.usable else self.decode

    def _readers_of(self, num_tokens: int) -> Pool:
        """Return who may read a prompt: decode workers, too, if it is longer than prefill workers hold."""
        is_too_long = 0 < self.prefill.longest < num_tokens <= self.decode.longest
        return self.decode if is_too_long and self.decode.usable else self._readers

    def is_for_some(self, num_tokens: int) -> bool:
        """Whether some workers don't hold so many tokens, while others do."""
        return num_tokens >= min(self.decode.shortest, self.prefill.shortest)

    def may_prefill(self, num_tokens: int) -> bool:
        """Whether a prompt of so many tokens may be computed by a prefill worker for a decode worker."""
        return self.can_prefill and not 0 < self.prefill.longest <= num_tokens

    @property
    def can_prefill(self) -> bool:
        """Can a usable decode worker read what a usable prefill worker computes?"""
        return self.prefill.usable > 0 and any(prefill.usable and decode.usable for prefill, decode in self._pairs.values())

    # -- what we sent

    def count(
        self, ref: WorkerRef, requests: int, tokens: int = 0, *, freed: int = 0, background: bool = False, now: float = 0.0
    ) -> None:
        """So many requests of ours are there, and a prompt of so many tokens to compute, more than before, or fewer. `freed`:
        tokens of sequences whose blocks became free thereby. `background`: it is a batch's, and others overtake it there.
        `now`: when that came to be."""
        worker = self._workers.get(ref)
        if worker is not None:
            worker.ours += requests
            worker.tokens += tokens
            worker.room += freed
            if tokens and not background:
                worker.computes(tokens, now)
            if requests < 0:
                worker.too_long = NOTHING_IS_TOO_LONG
            self._update(worker)

    def refused(self, ref: WorkerRef, *, num_tokens: int = 0) -> None:
        """See `Worker.refuse`."""
        worker = self._workers.get(ref)
        if worker is not None:
            worker.refuse(num_tokens)
            self._update(worker)

    def offer(self, ref: WorkerRef, num_tokens: int, now: float) -> bool:
        """Count a hand-off of so many tokens that it is offered. Return whether it has blocks for it, as far as it has said."""
        worker = self._workers[ref]
        if num_tokens > worker.room:
            worker.asked_in_vain_at = now
            return False
        worker.room -= num_tokens
        return True

    def offer_refused(self, ref: WorkerRef, num_tokens: int) -> None:
        """It has not taken what `offer` counted."""
        worker = self._workers.get(ref)
        if worker is not None:
            worker.room += num_tokens

    def keep(self, ref: WorkerRef, request: str) -> None:
        """Send it nothing but this request, or, if that is empty, anything again."""
        worker = self._workers.get(ref)
        if worker is not None:
            worker.kept_for = request

    def is_too_long(self, num_tokens: int) -> bool:
        """Whether a worker has room, but not for so long a sequence."""
        return any(worker.spare > 0 and not worker.takes(num_tokens) for worker in self._workers.values())

    def remember(self, keys: Sequence[int], ref: WorkerRef) -> None:
        worker = self._workers.get(ref)
        if worker is not None:
            self.prefixes.remember(keys, worker.serial)

    # -- inside

    def _pairs_of(self, prefill: WorkerRef) -> list[Pair]:
        """The pairs that a worker belongs to, its own host's first; none for one that is gone."""
        worker = self._workers.get(prefill)
        return [] if worker is None else [pair for pair in worker.pairs if pair in self._pairs]

    def _pools(self, worker: Worker) -> list[Pool]:
        pairs = [self._pairs.setdefault(pair, (Pool(), Pool())) for pair in worker.pairs]
        if worker.ref.role == "prefill":
            return [self.prefill, *(prefills for prefills, _ in pairs)]
        return [self.decode, *(decodes for _, decodes in pairs)]

    def _add(self, worker: Worker) -> None:
        self._workers[worker.ref] = worker
        self._by_serial[worker.serial] = worker
        for pool in self._pools(worker):
            pool.add(worker)

    def _take_out(self, worker: Worker) -> None:
        del self._by_serial[worker.serial]
        for pool in self._pools(worker):
            pool.remove(worker)
        for pair in worker.pairs:
            prefills, decodes = self._pairs[pair]
            if not prefills and not decodes:
                del self._pairs[pair]

    def _update(self, worker: Worker) -> None:
        for pool in self._pools(worker):
            pool.update(worker)
