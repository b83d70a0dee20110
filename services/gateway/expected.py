"""When a worker would give a prompt's first token, and whether that is soon enough. Pure."""

from __future__ import annotations

import sys
from collections.abc import Iterable

from services.gateway.pools import Worker
from services.gateway.routes import Reason

DEFAULT_TOKENS_PER_S = 2000.0
SAFE = 0.6
"""Prefill is expected to keep the objective if its time is below this share of it: what comes meanwhile makes it later."""
SOONER = 0.95
"""A decode worker takes a long prompt if it needs less than this share of prefill's time: expectations are no better than that,
and its rows are slowed down."""
_MOST = 0.9
"""Of a prompt, what is taken for computed while its first token has not come."""
GAP = 0.1
"""A worker whose prompts take less than this share of the objective has a gap, in which one that is late anyhow makes hardly
another one late."""


def prompt_s(worker: Worker, uncached_tokens: int, *, tokens_per_s: float) -> float:
    """Return the seconds until a worker has computed what it has and so many tokens more. tokens_per_s: of one that has
    computed no prompt yet."""
    return (worker.backlog + uncached_tokens) / (_speed(worker) or tokens_per_s)


def first_token_s(worker: Worker, uncached_tokens: int, *, tokens_per_s: float, now: float) -> float:
    """Return the seconds until a worker would have computed so many tokens of a new prompt: those with fewer tokens left go
    first. tokens_per_s: see `prompt_s`."""
    speed = _speed(worker) or tokens_per_s
    return max(0.0, worker.ahead_of(uncached_tokens) / speed - _under_way_s(worker, speed, now)) + uncached_tokens / speed


def backlog_s(worker: Worker, *, tokens_per_s: float, now: float) -> float:
    """Return the seconds until a worker has computed what it has. tokens_per_s: see `prompt_s`."""
    speed = _speed(worker) or tokens_per_s
    return max(0.0, worker.ahead_of(sys.maxsize) / speed - _under_way_s(worker, speed, now))


def _under_way_s(worker: Worker, speed: float, now: float) -> float:
    """How long it has been at a prompt, as far as that can be so: nobody says before its first token."""
    return min(now - worker.began_at, _MOST * worker.prompts[-1] / speed) if worker.prompts else 0.0


def usual_tokens_per_s(workers: Iterable[Worker]) -> float:
    """Return the mean of those that have computed prompts: what is expected of one that has not, and would never be asked if
    it were taken for slow."""
    known = [speed for worker in workers if (speed := _speed(worker))]
    return sum(known) / len(known) if known else DEFAULT_TOKENS_PER_S


def why_direct(direct_s: float, split_s: float, objective_s: float) -> Reason:
    """Return why a decode worker is to compute a long prompt, whose first token it would give after `direct_s`, and prefill
    after `split_s`; empty: it is not to. objective_s: for first tokens, 0 for none."""
    if not objective_s or split_s <= SAFE * objective_s or direct_s >= SOONER * split_s:
        return ""
    return "prefill_would_be_late" if direct_s <= objective_s else "sooner_at_decode"


def all_are_slow(workers: Iterable[Worker]) -> bool:
    """Whether each of the workers that are ready says that its rows take longer than its objective; not if there is none."""
    ready = [worker.presence.capacity for worker in workers if worker.usable]
    return bool(ready) and all(capacity.itl_ms > 0 and not capacity.rows for capacity in ready)


def _speed(worker: Worker) -> float:
    """Tokens of prompts a second; 0: unknown. A worker of an older version says no more than its speed without rows."""
    return worker.presence.capacity.prompt_tokens_per_s or worker.presence.prefill_tokens_per_s
