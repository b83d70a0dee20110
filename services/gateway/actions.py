"""What a request asks to be done, its states and its limits: the words between `requests.py` and `dispatch.py`. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Literal

import msgspec

from common.protocol.handles import WorkerRef
from common.protocol.messages import DecodeTask, FetchFrames, Generation, PrefillTask, ReadTask, Redirect

Path = Literal["auto", "prefill", "direct", "read"]
"""How a prompt is computed: as the router sees fit, by a prefill worker, or by the decode worker itself; or read by a prefill
worker, with no part for a decode worker unless that is all there is."""


class State(IntEnum):
    QUEUED = 0
    PLACING = 1
    PREFILLING = 2
    HANDING_OFF = 3
    DECODING = 4
    DONE = 5


BEFORE_DECODING = (State.PLACING, State.PREFILLING, State.HANDING_OFF)
HELD = (State.PREFILLING, State.HANDING_OFF, State.DECODING)


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Times are seconds. `first_token_s`: the objective for first tokens; 0: none."""

    stall_s: float = 1.0
    max_fetches: int = 3
    max_attempts: int = 4
    max_losses: int = 3
    placing_timeout_s: float = 5.0
    prefill_timeout_s: float = 120.0
    handoff_timeout_s: float = 10.0
    slow_reader_timeout_s: float = 30.0
    refetch_s: float = 0.1
    first_token_s: float = 0.0


class Ask(msgspec.Struct, frozen=True):
    """Send a task to `worker` and report the answer with `accepted` or `refused`."""

    worker: WorkerRef
    message: PrefillTask | DecodeTask | ReadTask
    attempt: int


def ask_for(generation: Generation, prefill: WorkerRef | None, decode: WorkerRef | None) -> Ask:
    """The task that begins an attempt on these workers, one at least; without a decode worker the prompt is read."""
    if prefill is None:
        assert decode is not None
        return Ask(decode, DecodeTask(generation=generation), generation.attempt)
    if decode is None:
        return Ask(prefill, ReadTask(generation=generation), generation.attempt)
    return Ask(prefill, PrefillTask(generation=generation, decode=decode), generation.attempt)


class Tell(msgspec.Struct, frozen=True):
    worker: WorkerRef
    message: FetchFrames | Redirect


class Free(msgspec.Struct, frozen=True):
    """Tell `worker` to free this request's attempts up to `attempt`."""

    worker: WorkerRef
    attempt: int


class Requeue(msgspec.Struct, frozen=True):
    """Find workers for the next attempt, before requests that came later, but not before `not_before`."""

    not_before: float


class Reroute(msgspec.Struct, frozen=True):
    """Find another decode worker for the KV that the prefill worker holds, and call `redirect`."""


class Ended(msgspec.Struct, frozen=True):
    """The request is done."""


Action = Ask | Tell | Free | Requeue | Reroute | Ended
Actions = Sequence[Action]

NOTHING: Actions = ()
