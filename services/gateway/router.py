"""Which workers a request goes to. Pure, and microseconds a decision whatever the number of workers.

    short uncached prompt, or no prefill worker  ─► (None, decode)      the direct path
    otherwise                                    ─► (prefill, decode)   of one fingerprint and host; of two that share NIXL
    … but no path between their hosts works      ─► (None, decode)      or, where that is not allowed, any two of them
    … but first tokens would miss the objective  ─► (None, decode)      where a decode worker keeps it, or is sooner
    a prompt that is read, not continued         ─► (prefill, None)     decode in prefill's place, if there is no prefill worker
    nobody has room                              ─► None: the request stays in the gateway's queue

Costs are seconds, by what workers measured: the prompt's uncached part and the work before it at prefill, the load and the
uncached part at decode. A remembered prefix makes a worker cheaper by what it saves, a load makes it dearer by what it
delays, so that a popular prefix spreads as soon as that is worth it. Of a large pool a few workers are compared
(Mitzenmacher, "The power of two choices", 2001), and those that remember the prefix.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping

from common.protocol.handles import WorkerRef
from services.gateway.expected import GAP, SAFE, backlog_s, first_token_s, prompt_s, why_direct
from services.gateway.pools import Pair, Pool, Worker, pull_s
from services.gateway.roster import Roster
from services.gateway.routes import Choice as Choice  # placement takes all three from here
from services.gateway.routes import Job as Job
from services.gateway.routes import ReadChoice as ReadChoice
from services.gateway.routes import costed
from services.gateway.working_paths import cheapest, works

COMPARED = 6
"""Workers of a pool that are compared, when it has more."""
COMPARED_PAIRS = 4
IN_VAIN_APART_S = 0.5
"""Seconds between two hand-offs that are offered to a worker that says that it lacks blocks for them."""
HANDOFF_S = 0.005
"""What a handoff costs, beside computing: two hops and a copy."""
MAX_DIRECT_FACTOR = 4
"""Up to this many times `direct_max_tokens` the direct path is taken where measured speeds say that it is faster."""
COPY_TOKENS_PER_S = 200_000.0
STEP_SHARE = 0.1
"""By how much of a step one more sequence slows the others down: decoding is bound by memory, not by the batch."""
MAX_EXPECTED_TOKENS = 256


class Router(Roster):
    """See `Roster` for the other arguments. `ttft_s`: the objective for first tokens; 0: none."""

    def __init__(
        self,
        *,
        direct_max_tokens: int,
        affinity_blocks: int = 65536,
        index_blocks: int = 0,
        ttft_s: float = 0.0,
        grace_s: float = 10.0,
    ) -> None:
        super().__init__(affinity_blocks=affinity_blocks, index_blocks=index_blocks, grace_s=grace_s)
        self.direct_max_tokens = direct_max_tokens
        self.ttft_s = ttft_s
        self._turn = 0

    @property
    def has_room(self) -> bool:
        return self.decode.has_room or self._decode_is_full

    # -- choosing

    def is_direct(self, job: Job, cached: Mapping[int, int]) -> bool:
        """Whether the request waits for room at decode alone, where workers are full."""
        uncached = job.num_tokens - max(cached.values(), default=0)
        return uncached <= MAX_DIRECT_FACTOR * self.direct_max_tokens or not self.may_prefill(job.num_tokens)

    def choose_to_clear(self, job: Job) -> WorkerRef | None:
        """The worker that is soonest idle if it gets nothing new. None: others would be left without one."""
        pool = self._readers_of(job.num_tokens) if job.path == "read" else self.decode
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
        idle = _idle(self._readers_of(job.num_tokens), job)
        return None if idle is None else ReadChoice(idle, job.num_tokens, reason="runs_alone")

    def choose_to_read(self, job: Job) -> ReadChoice | None:
        """A worker for a prompt that is read; what is cached of it is mostly computed again. None: all are full."""
        candidates = self._candidates(self._readers_of(job.num_tokens), {}, job)
        if not candidates:
            return None
        costs = [(self._prompt_s(worker, job, {}), worker) for worker in candidates]
        return ReadChoice(min(costs, key=_cost)[1].ref, job.num_tokens, costs=costed("prefill", costs, {}))

    def choose(self, job: Job) -> Choice | None:
        """None: nobody who could take the request has room now."""
        if not self.has_room:
            return None
        cached = self.cached(job)
        if self._decode_is_full and job.path == "auto" and job.only is None and (spilled := self._spill(job, cached)):
            return spilled
        if not self.decode.has_room:
            return None
        direct = self._direct(job, cached)
        if job.path == "direct" or (job.path == "auto" and not self.may_prefill(job.num_tokens)):
            reason = "too_long_for_prefill" if self.can_prefill else "no_prefill_worker"
            reason = "path_given" if job.path == "direct" else reason
            if direct and direct[1].ttft_s > SAFE * self.ttft_s > 0:
                direct = self._direct(job, cached, soonest=True) or direct
            return direct[1].because(reason) if direct else None
        if direct and job.path == "auto" and direct[1].uncached_tokens <= self.direct_max_tokens:
            return direct[1].because("short_uncached_prompt")
        split = self._split(job, cached)
        short = direct is not None and direct[1].uncached_tokens <= MAX_DIRECT_FACTOR * self.direct_max_tokens
        if split is None and direct and short and job.path == "auto":
            return direct[1].because("no_room_at_prefill")
        if split is None:
            return self._overflow(job, cached) if job.path == "auto" else None
        if split[1].reason == "no_working_path":  # a decode worker would compute the prompt a second time
            return direct[1].because("no_working_path", split[1]) if direct and job.path == "auto" else split[1]
        if job.path == "auto" and not short and self.ttft_s > 0 and self._is_busy(split[1]):
            soonest = self._direct(job, cached, soonest=True)
            if soonest and (reason := why_direct(soonest[1].ttft_s, split[1].ttft_s, self.ttft_s)):
                return soonest[1].because(reason, split[1])
        if direct and job.path == "auto" and short:
            if direct[0] < split[0]:
                return direct[1].because("direct_is_cheaper", split[1])
            return split[1].because("prefill_is_cheaper", direct[1])
        reason = "long_uncached_prompt" if job.path == "auto" else "path_given"
        return split[1].because(reason, direct[1] if direct else None)

    def would_be_late(self, choice: Choice, waited_s: float, now: float) -> bool:
        """Whether a prompt of some length, which has waited for so long, is expected to miss the objective there, and to make
        those late that keep it."""
        if not self.ttft_s or choice.uncached_tokens <= self.direct_max_tokens:
            return False
        return waited_s + choice.ttft_s > self.ttft_s and not self.has_gap(choice, now)

    def has_gap(self, choice: Choice, now: float) -> bool:
        """Whether the worker that is to compute the prompt has next to no others."""
        worker = self._workers[choice.prefill or choice.decode]
        return backlog_s(worker, tokens_per_s=self._tokens_per_s, now=now) <= GAP * self.ttft_s

    def choose_decode(self, prefill: WorkerRef, job: Job, *, tried: Iterable[str]) -> WorkerRef | None:
        """Another decode worker for KV that `prefill` holds. None: no worker has room now.

        One that says that it has too few blocks is asked only now and then: that it hears of the request is what lets it keep
        blocks for it (`services/decode/kept_place.py`)."""
        tried = frozenset(tried)
        for pair in self._pairs_of(prefill):
            candidates = [w for w in self._candidates(self._pairs[pair][1], {}, job) if w.ref.id not in tried]
            candidates = [w for w in candidates if job.num_tokens <= w.room or job.now - w.asked_in_vain_at >= IN_VAIN_APART_S]
            candidates = [w for w in candidates if works(self._workers[prefill], w)] or candidates
            if candidates:
                return min(candidates, key=lambda w: (job.num_tokens > w.room, self._decode_cost(w, job, {}))).ref
        return None

    def may_redirect(self, prefill: WorkerRef, num_tokens: int, *, tried: Iterable[str]) -> bool:
        """Is there an untried decode worker, with or without room, that could read so many tokens which `prefill` holds?"""
        tried = frozenset(tried)
        members = itertools.chain.from_iterable(self._pairs[pair][1].members.values() for pair in self._pairs_of(prefill))
        return any(w.usable and num_tokens < w.longest and w.ref.id not in tried for w in members)

    # -- inside

    def _spill(self, job: Job, cached: Mapping[int, int]) -> Choice | None:
        """A prefill worker that has no prompts, for a request that it answers itself."""
        idle = [w for w in self._candidates(self.prefill, cached, job) if w.presence.capacity.rows and not w.backlog]
        if not idle:
            return None
        costs = [(self._direct_cost(worker, job, cached), worker) for worker in idle]
        worker = min(costs, key=_cost)[1]
        uncached = job.num_tokens - cached.get(worker.serial, 0)
        return Choice(None, worker.ref, uncached, costed("direct", costs, cached), "decode_pool_is_full")

    @property
    def _decode_is_full(self) -> bool:
        """Whether prefill workers may have to decode: with an objective, while no decode worker takes rows within its own."""
        return self.ttft_s > 0 and self.prefill.has_room and (self._decode_is_slow or not self.decode.has_room)

    def cached(self, job: Job) -> Mapping[int, int]:
        """Tokens of the prompt that each worker is believed to hold, by its serial."""
        if job.cached is not None:
            return job.cached
        return {worker: min(tokens, job.num_tokens - 1) for worker, tokens in self.prefixes.match(job.keys, job.prompt).items()}

    def _is_busy(self, choice: Choice) -> bool:
        """Whether the prefill worker has prompts to compute. One that has none gets the prompt however slow it seems: it may
        have been slow once, while it compiled, and shows no other speed without prompts."""
        return choice.prefill is not None and self._workers[choice.prefill].backlog > 0

    def _overflow(self, job: Job, cached: Mapping[int, int]) -> Choice | None:
        """A decode worker for a long prompt while no prefill worker has room: one that keeps the objective for first tokens, or
        if the prompt has waited in vain, one that computes no other such prompt of ours."""
        soonest = self._direct(job, cached, soonest=True)
        if soonest and soonest[1].ttft_s <= self.ttft_s:
            return soonest[1].because("no_room_at_prefill")
        found = None if job.patient else self._direct(job, cached, idle=True)
        return found[1].because("no_room_at_prefill_for_long") if found else None

    def _direct(
        self, job: Job, cached: Mapping[int, int], *, idle: bool = False, soonest: bool = False
    ) -> tuple[float, Choice] | None:
        """`idle`: only among workers that compute no prompt of ours. `soonest`: the one whose first token comes first, in place
        of the one that costs least."""
        candidates = self._candidates(self.decode, cached, job, only=job.only)
        costs = [(self._direct_cost(worker, job, cached), worker) for worker in candidates if not (idle and worker.tokens)]
        if not costs:
            return None
        ttft_s = {worker: self._first_token_s(worker, job, cached) for _, worker in costs}
        cost, worker = min(costs, key=(lambda found: ttft_s[found[1]]) if soonest else _cost)
        uncached = job.num_tokens - cached.get(worker.serial, 0)
        return cost, Choice(None, worker.ref, uncached, costed("direct", costs, cached, ttft_s), ttft_s=ttft_s[worker])

    def _direct_cost(self, worker: Worker, job: Job, cached: Mapping[int, int]) -> float:
        # while it computes the prompt, everyone who decodes there waits
        return self._load_cost(worker, job) + self._prompt_s(worker, job, cached) * (1 + worker.load)

    def _split(self, job: Job, cached: Mapping[int, int]) -> tuple[float, Choice] | None:
        best, compared, failing = None, [], None
        for pair, (prefills, decodes) in self._open_pairs():
            candidates = self._candidates(prefills, cached, job, only=job.only)
            if not candidates:
                continue
            prefill_costs = [(self._prompt_s(w, job, cached), w) for w in candidates]
            decode_costs = [(self._decode_cost(w, job, cached), w) for w in self._candidates(decodes, cached, job)]
            if not decode_costs:
                continue
            ttft_s = {worker: self._first_token_s(worker, job, cached) + HANDOFF_S for _, worker in prefill_costs}
            costs = [*costed("prefill", prefill_costs, cached, ttft_s), *costed("decode", decode_costs, cached)]
            compared += [one for one in costs if one not in compared]  # a worker may be in two pairs
            found = cheapest(prefill_costs, decode_costs)
            if found is None:
                failing = failing or (prefill_costs, decode_costs)
                continue
            (prefill_cost, prefill), (decode_cost, decode) = found
            cost = prefill_cost + HANDOFF_S + decode_cost + pull_s(pair, decode, job.num_tokens)
            if best is None or cost < best[0]:
                uncached = job.num_tokens - cached.get(prefill.serial, 0)
                best = cost, Choice(prefill.ref, decode.ref, uncached, compared, ttft_s=ttft_s[prefill])
        if best is None and failing is not None and (found := cheapest(*failing, working=False)):
            (prefill_cost, prefill), (decode_cost, decode) = found
            uncached = job.num_tokens - cached.get(prefill.serial, 0)
            ttft = self._first_token_s(prefill, job, cached) + HANDOFF_S
            choice = Choice(prefill.ref, decode.ref, uncached, compared, "no_working_path", ttft_s=ttft)
            return prefill_cost + HANDOFF_S + decode_cost, choice
        return best

    def _open_pairs(self) -> list[tuple[Pair, tuple[Pool, Pool]]]:
        if len(self._pairs) <= COMPARED_PAIRS:
            return [(pair, pools) for pair, pools in self._pairs.items() if pools[0].has_room and pools[1].has_room]
        pairs, found = list(self._pairs.items()), []
        self._turn += 1
        for index in range(len(pairs)):
            pair, pools = pairs[(self._turn * 7 + index) % len(pairs)]
            if pools[0].has_room and pools[1].has_room:
                found.append((pair, pools))
                if len(found) == COMPARED_PAIRS:
                    break
        return found

    def _candidates(self, pool: Pool, cached: Mapping[int, int], job: Job, *, only: WorkerRef | None = None) -> list[Worker]:
        """Workers with room to compare; one to avoid only when there is no other."""
        if only is not None:
            worker = self._workers.get(only)
            found = [worker] if worker is not None and worker.ref.id in pool.members else []
            return [worker for worker in found if worker.takes(job.num_tokens, job.request)]
        found = list(pool.sample(COMPARED))
        if cached and len(pool) > COMPARED:
            known = {worker.serial for worker in found}
            found += [worker for worker in self._remembering(pool, cached) if worker.serial not in known]
        found = [worker for worker in found if worker.takes(job.num_tokens, job.request)]
        if job.avoid:
            found = [worker for worker in found if worker.ref.id not in job.avoid] or found
        return found

    def _remembering(self, pool: Pool, cached: Mapping[int, int]) -> list[Worker]:
        serials = itertools.islice(sorted(cached, key=lambda serial: -cached[serial]), COMPARED)
        workers = (self._by_serial.get(serial) for serial in serials)
        return [worker for worker in workers if worker is not None and pool.members.get(worker.ref.id) is worker]

    def _prompt_s(self, worker: Worker, job: Job, cached: Mapping[int, int]) -> float:
        uncached = job.num_tokens - cached.get(worker.serial, 0)
        return prompt_s(worker, uncached, tokens_per_s=self._tokens_per_s)

    def _first_token_s(self, worker: Worker, job: Job, cached: Mapping[int, int]) -> float:
        if not self.ttft_s:
            return self._prompt_s(worker, job, cached)
        uncached = job.num_tokens - cached.get(worker.serial, 0)
        return first_token_s(worker, uncached, tokens_per_s=self._tokens_per_s, now=job.now)

    def _decode_cost(self, worker: Worker, job: Job, cached: Mapping[int, int]) -> float:
        copied = job.num_tokens - cached.get(worker.serial, 0)
        return self._load_cost(worker, job) + copied / COPY_TOKENS_PER_S

    def _load_cost(self, worker: Worker, job: Job) -> float:
        step_s = worker.presence.step_ms / 1000 or self._step_s
        slowness = min(max(step_s / self._step_s, 0.5), 2.0)
        return worker.load * slowness * self._step_s * STEP_SHARE * min(job.max_tokens, MAX_EXPECTED_TOKENS)


def _cost(found: tuple[float, Worker]) -> float:
    return found[0]


def _idle(pool: Pool, job: Job) -> WorkerRef | None:
    idle = [worker for worker in pool.members.values() if worker.takes(job.num_tokens, job.request) and not worker.load]
    untried = [worker for worker in idle if worker.ref.id not in job.avoid]
    return next((worker.ref for worker in untried or idle), None)
