"""The workers that a gateway knows, as the dashboard shows them: totals of each pool, and one row for each worker. Pure.

census = Census(models, now)
for some in slices: census.add(some)        a slice of SLICE workers takes less than a millisecond
census.pools(); census.rows("text to look for")
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import itemgetter
from typing import Literal

import msgspec

from common.cache.usage import fullest
from common.protocol.handles import WorkerRef
from common.protocol.messages import Presence
from services.gateway.dispatch import Dispatcher

SLICE = 64
MAX_WORKERS = 4096
"""Workers that are looked at; of more, only the number is told."""
MAX_ROWS = 100
"""Rows in one answer: whoever looks for another worker searches for it."""
MAX_NAME = 128
"""Characters of a model's name, which is a worker's to choose."""
ROLES = ("gateway", "prefill", "decode", "draft", "kvstore")

Health = Literal["", "ok", "unproven", "stuck", "quarantined", "unused"]
"""As this gateway sees a prefill or decode worker. `unused`: of a model or of weights that this gateway does not serve."""

_SEVERE = {"quarantined": "q", "stuck": "x"}
_STATES = {"starting": "s", "draining": "d"}
_MILD = {"unused": "o", "unproven": "u"}
_TROUBLE = frozenset(("quarantined", "stuck", "starting", "draining"))


class WatchedModel(msgspec.Struct, frozen=True):
    """A model that this gateway serves, by its name for clients, and the requests and workers of it."""

    name: str
    dispatcher: Dispatcher


class Kv(msgspec.Struct, array_like=True):
    """Blocks. `total` is 0 for a worker that keeps none."""

    total: int = 0
    owned: int = 0
    leased: int = 0
    cached: int = 0


class WorkerRow(msgspec.Struct, kw_only=True):
    """`ours`: requests of this gateway there; the rest is what the worker says of itself. `loaded`, `load`: shares."""

    id: str
    role: str
    model: str
    state: str
    health: Health
    load: float
    running: int
    waiting: int
    credits: int
    ours: int
    kv: Kv
    tokens_per_s: float
    prefill_tokens_per_s: float
    step_ms: float
    step_age_ms: float
    loaded: float


class PoolRow(msgspec.Struct, kw_only=True):
    """All workers of a role and a model. `marks`: one character for each worker, what is wrong or the load in tenths."""

    role: str
    model: str
    workers: int = 0
    ready: int = 0
    troubled: int = 0
    running: int = 0
    waiting: int = 0
    credits: int = 0
    ours: int = 0
    kv: Kv = msgspec.field(default_factory=Kv)
    tokens_per_s: float = 0.0
    prefill_tokens_per_s: float = 0.0
    marks: str = ""


class WorkerList(msgspec.Struct):
    """`rows` are at most MAX_ROWS of the `matching` ones; `known`: all workers."""

    known: int
    matching: int
    rows: list[WorkerRow]


class _Known(msgspec.Struct, frozen=True, gc=False):
    row: WorkerRow
    mark: str
    is_trouble: bool


class Census:
    """Of one moment. Call `pools` and `rows` after the last `add`."""

    def __init__(self, models: Sequence[WatchedModel], now: float) -> None:
        self._models = models
        self._now = now
        self._known: list[tuple[tuple[int, str, str], _Known]] = []
        self._pools: dict[tuple[int, str], PoolRow] = {}
        self._is_sorted = False
        self.num_workers = 0

    def add(self, presences: Iterable[Presence]) -> None:
        for presence in presences:
            self.num_workers += 1
            if self.num_workers > MAX_WORKERS:
                continue
            row = self._row(presence)
            mark = _mark(row)
            is_trouble = row.state in _TROUBLE or row.health in _TROUBLE
            rank = ROLES.index(row.role)
            self._known.append(((rank, row.model, row.id), _Known(row, mark, is_trouble)))
            pool = self._pools.get((rank, row.model))
            if pool is None:
                pool = self._pools[rank, row.model] = PoolRow(role=row.role, model=row.model)
            _count(pool, row, is_trouble)
        self._is_sorted = False

    def pools(self) -> list[PoolRow]:
        """In the order of ROLES, then of models."""
        marks: dict[tuple[int, str], list[str]] = {key: [] for key in self._pools}
        for (rank, model, _), known in self._sorted():
            marks[rank, model].append(known.mark)
        for key, pool in self._pools.items():
            pool.marks = "".join(marks[key])
        return [pool for _, pool in sorted(self._pools.items())]

    def rows(self, search: str = "") -> WorkerList:
        """Workers of whose id, role, model, state or health `search` is a part; of too many, those in trouble come first."""
        wanted = search.lower()
        matching = [known for _, known in self._sorted() if not wanted or wanted in _searched(known.row)]
        first = matching
        if len(matching) > MAX_ROWS:
            ill = [known for known in matching if known.is_trouble]
            first = ill if len(ill) >= MAX_ROWS else ill + [known for known in matching if not known.is_trouble]
        return WorkerList(self.num_workers, len(matching), [known.row for known in first[:MAX_ROWS]])

    def _sorted(self) -> list[tuple[tuple[int, str, str], _Known]]:
        if not self._is_sorted:
            self._known.sort(key=itemgetter(0))
            self._is_sorted = True
        return self._known

    def _row(self, presence: Presence) -> WorkerRow:
        ref, kv = presence.worker, fullest(presence.kv)
        health, ours = self._health(ref)
        if ref.role == "kvstore":
            load = (kv.total - kv.free) / kv.total if kv.total else 0.0
        else:
            busy = presence.running + presence.waiting
            load = busy / (busy + presence.credits) if busy else 0.0
        return WorkerRow(
            id=ref.id,
            role=ref.role,
            model=presence.model[:MAX_NAME],
            state=presence.state,
            health=health,
            load=round(load, 2),
            running=presence.running,
            waiting=presence.waiting,
            credits=presence.credits,
            ours=ours,
            kv=Kv(kv.total, kv.owned, kv.leased, kv.cached),
            tokens_per_s=presence.tokens_per_s,
            prefill_tokens_per_s=presence.prefill_tokens_per_s,
            step_ms=presence.step_ms,
            step_age_ms=presence.step_age_ms,
            loaded=presence.loaded,
        )

    def _health(self, ref: WorkerRef) -> tuple[Health, int]:
        """And how many of this gateway's requests the worker has."""
        if ref.role not in ("prefill", "decode"):
            return "", 0
        for model in self._models:
            router, health = model.dispatcher.router, model.dispatcher.health
            pool = router.prefill if ref.role == "prefill" else router.decode
            worker = pool.members.get(ref.id)
            if worker is None or worker.ref != ref:
                continue
            if health.quarantined(ref, self._now):
                return "quarantined", worker.ours
            if worker.is_stuck:
                return "stuck", worker.ours
            return ("unproven" if health.doubtful((ref,), self._now) else "ok"), worker.ours
        return "unused", 0


def _mark(row: WorkerRow) -> str:
    """What is wrong, the worst first, or the load in tenths."""
    wrong = _SEVERE.get(row.health) or _STATES.get(row.state) or _MILD.get(row.health)
    return wrong or str(min(9, int(row.load * 10)))


def _count(pool: PoolRow, row: WorkerRow, is_trouble: bool) -> None:
    pool.workers += 1
    pool.ready += row.state == "ready"
    pool.troubled += is_trouble
    pool.running += row.running
    pool.waiting += row.waiting
    pool.credits += row.credits
    pool.ours += row.ours
    pool.tokens_per_s += row.tokens_per_s
    pool.prefill_tokens_per_s += row.prefill_tokens_per_s
    kv, more = pool.kv, row.kv
    kv.total += more.total
    kv.owned += more.owned
    kv.leased += more.leased
    kv.cached += more.cached


def _searched(row: WorkerRow) -> str:
    return f"{row.id} {row.role} {row.model} {row.state} {row.health}".lower()
