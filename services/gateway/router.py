"""Which workers a request goes to. Pure, and microseconds a decision whatever the number of workers.

    short uncached prompt, or no prefill worker  ─► (None, decode)      the direct path
    otherwise                                    ─► (prefill, decode)   of one host and fingerprint
    a prompt that is read, not continued         ─► (prefill, None)     decode in prefill's place, if there is no prefill worker
    nobody has room                              ─► None: the request stays in the gateway's queue

Costs are seconds, by what workers measured: the prompt's uncached part and the work before it at prefill, the load and the
uncached part at decode. A remembered prefix makes a worker cheaper by what it saves, a load makes it dearer by what it
delays, so that a popular prefix spreads as soon as that is worth it. Of a large pool a few workers are compared
(Mitzenmacher, "The power of two choices", 2001), and those that remember the prefix.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence

from common.protocol.handles import WorkerRef
from common.protocol.messages import Presence
from services.gateway.actions import Path
from services.gateway.known_prefixes import KnownPrefixes
from services.gateway.pools import Pair, Pool, Worker
from services.gateway.routes import Choice as Choice  # placement takes all three from here
from services.gateway.routes import Job as Job
from services.gateway.routes import ReadChoice as ReadChoice
from services.gateway.routes import costed

COMPARED = 6
"""Workers of a pool that are compared, when it has more."""
COMPARED_PAIRS = 4
HANDOFF_S = 0.005
"""What a handoff costs, beside computing: two hops and a copy."""
MAX_DIRECT_FACTOR = 4
"""Up to this many times `direct_max_tokens` the direct path is taken where measured speeds say that it is faster."""
DEFAULT_TOKENS_PER_S = 2000.0
DEFAULT_STEP_S = 0.01
STEP_SHARE = 0.1
"""By how much of a step one more sequence slows the others down: decoding is bound by memory, not by the batch."""
MAX_EXPECTED_TOKENS = 256


class Router:
    """`models`: names that workers may announce; others' workers are left alone. Empty: any. `affinity_blocks`,
    `index_blocks`: see `KnownPrefixes`."""

    def __init__(
        self, *, direct_max_tokens: int, affinity_blocks: int = 65536, index_blocks: int = 0, models: Iterable[str] = ()
    ) -> None:
        self.direct_max_tokens = direct_max_tokens
        self.models = frozenset(models)
        self.prefixes = KnownPrefixes(affinity_blocks, index_blocks)
        self.prefill = Pool()
        self.decode = Pool()
        self._pairs: dict[Pair, tuple[Pool, Pool]] = {}
        self._workers: dict[WorkerRef, Worker] = {}
        self._by_serial: dict[int, Worker] = {}
        self._serials = itertools.count()
        self._turn = 0
        self._step_s = DEFAULT_STEP_S

    # -- who is there

    def refresh(self, presences: Iterable[Presence]) -> None:
        """What everyone alive says now; who is not among them is gone."""
        alive = {
            presence.worker: presence
            for presence in presences
            if presence.worker.role in ("prefill", "decode") and (not self.models or presence.model in self.models)
        }
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
            elif worker.pair != (presence.fingerprint, presence.host) or worker.presence.state != presence.state:
                self._take_out(worker)
                worker.observe(presence)
                self._add(worker)
            else:
                worker.observe(presence)
                self._update(worker)
        for pool in (self.prefill, self.decode):
            pool.count_places()
        steps = [w.presence.step_ms for w in self.decode.members.values() if w.presence.step_ms > 0]
        self._step_s = sum(steps) / len(steps) / 1000 if steps else DEFAULT_STEP_S

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
    def has_room(self) -> bool:
        return self.decode.has_room

    @property
    def has_room_to_read(self) -> bool:
        return self._readers.has_room

    @property
    def _readers(self) -> Pool:
        return self.prefill if self.prefill.usable else self.decode

    @property
    def can_prefill(self) -> bool:
        """Does a usable prefill worker share a host with a usable decode worker?"""
        return self.prefill.usable > 0 and any(prefill.usable and decode.usable for prefill, decode in self._pairs.values())

    # -- what we sent

    def count(self, ref: WorkerRef, requests: int, tokens: int = 0) -> None:
        """So many requests of ours are there, and so many tokens of prompts to compute, more than before, or fewer."""
        worker = self._workers.get(ref)
        if worker is not None:
            worker.ours += requests
            worker.tokens += tokens
            self._update(worker)

    def refused(self, ref: WorkerRef) -> None:
        worker = self._workers.get(ref)
        if worker is not None:
            worker.refuse()
            self._update(worker)

    def remember(self, keys: Sequence[int], ref: WorkerRef) -> None:
        worker = self._workers.get(ref)
        if worker is not None:
            self.prefixes.remember(keys, worker.serial)

    # -- choosing

    def path(self, job: Job) -> Path:
        """The way that the request's prompt should take: which workers it waits for when they are full."""
        if job.path != "auto":
            return job.path
        cached = max(self.prefixes.match(job.keys, job.prompt).values(), default=0)
        uncached = job.num_tokens - min(cached, job.num_tokens - 1)
        return "direct" if uncached <= MAX_DIRECT_FACTOR * self.direct_max_tokens or not self.can_prefill else "prefill"

    def choose_to_clear(self, job: Job) -> WorkerRef | None:
        """The worker that is soonest idle if it gets nothing new. None: others would be left without one."""
        pool = self._readers if job.path == "read" else self.decode
        usable = [worker for worker in pool.members.values() if worker.usable and not worker.reserved]
        if len(usable) < 2:
            return None
        return min(usable, key=lambda worker: (worker.ref.id in job.avoid, worker.load)).ref

    def may_clear(self, ref: WorkerRef) -> bool:
        """Is it still there, and another one that others can use?"""
        worker = self._workers.get(ref)
        if worker is None or not worker.usable:
            return False
        pool = self.decode if ref.role == "decode" else self.prefill
        return any(other.usable and not other.reserved for other in pool.members.values())

    def is_idle(self, ref: WorkerRef) -> bool:
        worker = self._workers.get(ref)
        return worker is None or not worker.load

    def choose_alone(self, job: Job) -> Choice | None:
        """A decode worker that has nothing to do, for a request that must not run beside others."""
        idle = _idle(self.decode, job)
        return None if idle is None else Choice(None, idle, job.num_tokens, reason="runs_alone")

    def choose_alone_to_read(self, job: Job) -> ReadChoice | None:
        """A worker that has nothing to do, for a prompt that must not be read beside others."""
        idle = _idle(self._readers, job)
        return None if idle is None else ReadChoice(idle, job.num_tokens, reason="runs_alone")

    def choose_to_read(self, job: Job) -> ReadChoice | None:
        """A worker for a prompt that is read; what is cached of it is mostly computed again. None: all are full."""
        candidates = self._candidates(self._readers, {}, job.avoid)
        if not candidates:
            return None
        costs = [(self._prefill_cost(worker, job, {}), worker) for worker in candidates]
        return ReadChoice(min(costs, key=_cost)[1].ref, job.num_tokens, costs=costed("prefill", costs, {}))

    def choose(self, job: Job) -> Choice | None:
        """None: nobody who could take the request has room now."""
        if not self.decode.has_room:
            return None
        known = self.prefixes.match(job.keys, job.prompt)
        cached = {worker: min(tokens, job.num_tokens - 1) for worker, tokens in known.items()}
        direct = self._direct(job, cached)
        if job.path == "direct" or (job.path == "auto" and not self.can_prefill):
            reason = "path_given" if job.path == "direct" else "no_prefill_worker"
            return direct[1].because(reason) if direct else None
        if direct and job.path == "auto" and direct[1].uncached_tokens <= self.direct_max_tokens:
            return direct[1].because("short_uncached_prompt")
        split = self._split(job, cached)
        short = direct is not None and direct[1].uncached_tokens <= MAX_DIRECT_FACTOR * self.direct_max_tokens
        if split is None and direct and short and job.path == "auto":
            return direct[1].because("no_room_at_prefill")
        if split is None:
            return self._overflow(job, cached) if job.path == "auto" and not job.patient else None
        if direct and job.path == "auto" and short:
            if direct[0] < split[0]:
                return direct[1].because("direct_is_cheaper", split[1])
            return split[1].because("prefill_is_cheaper", direct[1])
        reason = "long_uncached_prompt" if job.path == "auto" else "path_given"
        return split[1].because(reason, direct[1] if direct else None)

    def choose_decode(self, prefill: WorkerRef, job: Job, *, tried: Iterable[str]) -> WorkerRef | None:
        """Another decode worker for KV that `prefill` holds."""
        worker = self._workers.get(prefill)
        if worker is None or worker.pair not in self._pairs:
            return None
        tried = frozenset(tried)
        candidates = [w for w in self._candidates(self._pairs[worker.pair][1], {}, frozenset()) if w.ref.id not in tried]
        return min(candidates, key=lambda w: self._decode_cost(w, job, {})).ref if candidates else None

    def may_redirect(self, prefill: WorkerRef, *, tried: Iterable[str]) -> bool:
        """Is there an untried decode worker, with or without room, that could read what `prefill` holds?"""
        worker = self._workers.get(prefill)
        if worker is None or worker.pair not in self._pairs:
            return False
        tried = frozenset(tried)
        return any(w.usable and w.ref.id not in tried for w in self._pairs[worker.pair][1].members.values())

    # -- inside

    def _overflow(self, job: Job, cached: Mapping[int, int]) -> Choice | None:
        """A decode worker for a prompt that has waited for prefill in vain: one that computes no other such prompt of ours."""
        found = self._direct(job, cached, idle=True)
        return found[1].because("no_room_at_prefill_for_long") if found else None

    def _direct(self, job: Job, cached: Mapping[int, int], *, idle: bool = False) -> tuple[float, Choice] | None:
        """`idle`: only among workers that compute no prompt of ours."""
        candidates = self._candidates(self.decode, cached, job.avoid, only=job.only)
        costs = [(self._direct_cost(worker, job, cached), worker) for worker in candidates if not (idle and worker.tokens)]
        if not costs:
            return None
        cost, worker = min(costs, key=_cost)
        uncached = job.num_tokens - cached.get(worker.serial, 0)
        return cost, Choice(None, worker.ref, uncached, costed("direct", costs, cached))

    def _direct_cost(self, worker: Worker, job: Job, cached: Mapping[int, int]) -> float:
        uncached = job.num_tokens - cached.get(worker.serial, 0)
        compute_s = (worker.tokens + uncached) / (worker.presence.prefill_tokens_per_s or DEFAULT_TOKENS_PER_S)
        # while it computes the prompt, everyone who decodes there waits
        return self._load_cost(worker, job) + compute_s * (1 + worker.load)

    def _split(self, job: Job, cached: Mapping[int, int]) -> tuple[float, Choice] | None:
        best, compared = None, []
        for prefills, decodes in self._open_pairs():
            candidates = self._candidates(prefills, cached, job.avoid, only=job.only)
            if not candidates:
                continue
            prefill_costs = [(self._prefill_cost(w, job, cached), w) for w in candidates]
            decode_costs = [(self._decode_cost(w, job, cached), w) for w in self._candidates(decodes, cached, job.avoid)]
            compared += [*costed("prefill", prefill_costs, cached), *costed("decode", decode_costs, cached)]
            (prefill_cost, prefill), (decode_cost, decode) = min(prefill_costs, key=_cost), min(decode_costs, key=_cost)
            cost = prefill_cost + HANDOFF_S + decode_cost
            if best is None or cost < best[0]:
                uncached = job.num_tokens - cached.get(prefill.serial, 0)
                best = cost, Choice(prefill.ref, decode.ref, uncached, compared)
        return best

    def _open_pairs(self) -> list[tuple[Pool, Pool]]:
        if len(self._pairs) <= COMPARED_PAIRS:
            return [pair for pair in self._pairs.values() if pair[0].has_room and pair[1].has_room]
        pairs, found = list(self._pairs.values()), []
        self._turn += 1
        for index in range(len(pairs)):
            pair = pairs[(self._turn * 7 + index) % len(pairs)]
            if pair[0].has_room and pair[1].has_room:
                found.append(pair)
                if len(found) == COMPARED_PAIRS:
                    break
        return found

    def _candidates(
        self, pool: Pool, cached: Mapping[int, int], avoid: frozenset[str], *, only: WorkerRef | None = None
    ) -> list[Worker]:
        """Workers with room to compare; one to avoid only when there is no other."""
        if only is not None:
            worker = self._workers.get(only)
            return [worker] if worker is not None and worker.spare > 0 and worker.ref.id in pool.members else []
        found = list(pool.sample(COMPARED))
        if cached and len(pool) > COMPARED:
            known = {worker.serial for worker in found}
            found += [w for w in self._remembering(pool, cached) if w.serial not in known and w.spare > 0]
        if avoid:
            found = [worker for worker in found if worker.ref.id not in avoid] or found
        return found

    def _remembering(self, pool: Pool, cached: Mapping[int, int]) -> list[Worker]:
        serials = itertools.islice(sorted(cached, key=lambda serial: -cached[serial]), COMPARED)
        workers = (self._by_serial.get(serial) for serial in serials)
        return [worker for worker in workers if worker is not None and pool.members.get(worker.ref.id) is worker]

    def _prefill_cost(self, worker: Worker, job: Job, cached: Mapping[int, int]) -> float:
        speed = worker.presence.prefill_tokens_per_s or DEFAULT_TOKENS_PER_S
        others = max(0, worker.load - worker.ours)
        backlog = worker.tokens + others * job.num_tokens
        return (backlog + job.num_tokens - cached.get(worker.serial, 0)) / speed

    def _decode_cost(self, worker: Worker, job: Job, cached: Mapping[int, int]) -> float:
        copied = job.num_tokens - cached.get(worker.serial, 0)
        return self._load_cost(worker, job) + copied / (100 * DEFAULT_TOKENS_PER_S)

    def _load_cost(self, worker: Worker, job: Job) -> float:
        step_s = worker.presence.step_ms / 1000 or self._step_s
        slowness = min(max(step_s / self._step_s, 0.5), 2.0)
        return worker.load * slowness * self._step_s * STEP_SHARE * min(job.max_tokens, MAX_EXPECTED_TOKENS)

    def _pools(self, worker: Worker) -> tuple[Pool, Pool]:
        pair = self._pairs.setdefault(worker.pair, (Pool(), Pool()))
        return (self.prefill, pair[0]) if worker.ref.role == "prefill" else (self.decode, pair[1])

    def _add(self, worker: Worker) -> None:
        self._workers[worker.ref] = worker
        self._by_serial[worker.serial] = worker
        for pool in self._pools(worker):
            pool.add(worker)

    def _take_out(self, worker: Worker) -> None:
        del self._by_serial[worker.serial]
        for pool in self._pools(worker):
            pool.remove(worker)
        prefills, decodes = self._pairs[worker.pair]
        if not prefills and not decodes:
            del self._pairs[worker.pair]

    def _update(self, worker: Worker) -> None:
        for pool in self._pools(worker):
            pool.update(worker)


def _cost(found: tuple[float, Worker]) -> float:
    return found[0]


def _idle(pool: Pool, job: Job) -> WorkerRef | None:
    idle = [worker for worker in pool.members.values() if worker.spare > 0 and not worker.load]
    untried = [worker for worker in idle if worker.ref.id not in job.avoid]
    return next((worker.ref for worker in untried or idle), None)
