"""One request at the gateway: what it has, who holds it, and what is done about everything that can go wrong. Pure.

    queued ─► placing ─► prefilling ─► handing_off ─► decoding ─► done
       ▲         │  └─ direct ──────────────────────────▲ │
       └─────────┴──── the next attempt, elsewhere ◄──────┘

The request owns its tokens. Each placement is a new attempt, sent out with the prompt and all tokens so far; frames of
attempts before, or from a worker that does not hold the request, are dropped, and whoever sent them is told to let go.

Nothing hangs: `placing` ends with the task's answer, `prefilling` after `prefill_timeout_s`, `handing_off` after
`handoff_timeout_s`; in `decoding`, silence and gaps make us fetch frames again, then move on. The deadline ends every state.

Methods return what has to be done (`Action`s); the dispatcher does it.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from common.protocol import errors
from common.protocol import tokens as token_bytes
from common.protocol.errors import PenstockError
from common.protocol.handles import WorkerRef
from common.protocol.messages import (
    DecodeTask,
    FetchFrames,
    FinishReason,
    Generation,
    PrefillTask,
    Redirect,
    SamplingParams,
    TokenFrame,
)
from services.gateway.actions import NOTHING, Action, Actions, Ask, Ended, Free, Limits, Path, Requeue, Reroute, State, Tell
from services.gateway.failures import for_client, is_final, is_loss, is_refusal
from services.gateway.transcript import Output as Output  # the edges take it from here
from services.gateway.transcript import Transcript

UNKNOWN_APART_S = 0.5
"""Two answers to one round of questions count once."""


class GenerationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What an edge asks for. `id` is unique among what runs here; `deadline_s` counts from now; `salt` separates tenants'
    prefix caches."""

    id: str
    prompt: list[int]
    sampling: SamplingParams
    deadline_s: float
    salt: bytes = b""


class Request:
    """`wake` is called when `transcript` has something new. `wire_id` names it to workers, unlike any other ever; `client_id`
    is the edge's. `path` forces a path (canaries)."""

    def __init__(
        self,
        request: GenerationRequest,
        *,
        wire_id: str,
        gateway: WorkerRef,
        limits: Limits,
        now: float,
        wall_ms: int,
        path: Path = "auto",
    ) -> None:
        self.id = wire_id
        self.client_id = request.id
        self.prompt_tokens = len(request.prompt)
        self.packed_prompt = token_bytes.pack(request.prompt)
        self.sampling = request.sampling
        self.salt = request.salt
        self.gateway = gateway
        self.limits = limits
        self.path: Path = path
        self.arrived_at = now
        self.deadline = now + request.deadline_s
        self.deadline_ms = wall_ms + int(request.deadline_s * 1000)
        self.wake: Callable[[], None] = lambda: None

        self.state = State.QUEUED
        self.since = now
        self.attempt = 0
        self.prefill: WorkerRef | None = None
        self.decode: WorkerRef | None = None
        self.holders: set[WorkerRef] = set()
        self.avoid: set[str] = set()
        self.tried: set[str] = set()
        self.failures = 0
        self.unknowns = 0
        self.unknown_at = 0.0

        self.transcript = Transcript(request.sampling)
        self.tokens = self.transcript.tokens
        self.first_token_at = 0.0
        self.heard_at = now
        self.progressed_at = now
        self.fetched_at = 0.0
        self.fetches = 0
        self.gap = False
        self.dropped_frames = 0
        self.sent_fetches = 0

    # -- placing

    def place(self, prefill: WorkerRef | None, decode: WorkerRef, now: float) -> Actions:
        """Begin the next attempt on these workers."""
        self.attempt += 1
        self.prefill, self.decode = prefill, decode
        self.holders = {decode} if prefill is None else {prefill, decode}
        self.tried = {decode.id}
        self._enter(State.PLACING, now)
        self.unknowns = self.fetches = 0
        self.gap = False
        generation = Generation(
            request=self.id,
            attempt=self.attempt,
            gateway=self.gateway,
            tokens=self.packed_prompt + token_bytes.pack(self.tokens),
            prompt_tokens=self.prompt_tokens,
            sampling=self.sampling,
            deadline_ms=self.deadline_ms,
            remaining_ms=max(1, int((self.deadline - now) * 1000)),
            salt=self.salt,
        )
        task = DecodeTask(generation=generation) if prefill is None else PrefillTask(generation=generation, decode=decode)
        return [Ask(prefill or decode, task, self.attempt)]

    def accepted(self, worker: WorkerRef, attempt: int, now: float) -> Actions:
        if attempt != self.attempt or worker not in self.holders:
            return [Free(worker, attempt)]
        if self.state is State.PLACING:
            self._enter(State.PREFILLING, now)
        return NOTHING

    def refused(
        self, worker: WorkerRef, attempt: int, error: PenstockError, now: float, *, bus_was_away: bool = False
    ) -> Actions:
        """The task was rejected, or nobody answered it in time (then the worker may hold it all the same)."""
        if attempt == self.attempt and self.state in _HELD and worker in self.holders:
            return NOTHING  # its frames came, and only its answer was lost
        if attempt != self.attempt or self.state is not State.PLACING:
            return [Free(worker, attempt)] if isinstance(error, errors.RequestTimeout) else NOTHING
        if not isinstance(error, errors.RequestTimeout):
            self.holders.clear()
        if isinstance(error, errors.ContextLengthExceeded) and self.tokens:
            return self._end("length", None)
        if isinstance(error, errors.RequestError):
            return self._end(None, error)
        self.avoid.add(worker.id)
        return self._next_attempt(error, now, counted=not bus_was_away and not is_refusal(error))

    # -- what workers say

    def frame(self, worker: WorkerRef, frame: TokenFrame, now: float) -> Actions:
        """The hot path: once per request and step."""
        if frame.attempt != self.attempt or self.state is State.QUEUED or self.state is State.DONE:
            self.dropped_frames += 1
            return [Free(worker, frame.attempt)]
        if worker == self.decode:
            if self.state is not State.DECODING:
                self._handed_over(now)
        elif worker == self.prefill:
            if frame.tokens and self.state < State.HANDING_OFF and frame.finish is None:
                self._enter(State.HANDING_OFF, now)
        else:
            self.dropped_frames += 1
            return [Free(worker, frame.attempt)]
        if now >= self.deadline:  # ticks are far apart: a short answer could come whole between two
            return self.tick(now)
        self.heard_at = now
        self.fetches = self.unknowns = 0
        finish = frame.finish
        if finish == "error" or finish == "cancelled":
            return self._failed(worker, frame, now)

        expected = len(self.tokens)
        skip = expected - frame.start
        if skip < 0:
            return self._saw_gap(now)
        if len(frame.tokens) > skip:
            self._append(frame, skip, now)
            if self.prefill is not None and worker == self.decode:
                self.holders.discard(self.prefill)
                self.prefill = None
        elif frame.tokens:
            self.dropped_frames += 1
        if self.transcript.cached_tokens < 0:
            self.transcript.cached_tokens = frame.cached_tokens
        if finish is not None and frame.start + len(frame.tokens) >= len(self.tokens):
            return self._end(finish, None)
        if self.transcript.full:
            return self._end(self.transcript.complete(), None)
        return NOTHING

    def handed_off(self, attempt: int, decode: WorkerRef, now: float) -> Actions:
        if attempt != self.attempt or decode != self.decode or self.state is State.DONE:
            return [Free(decode, attempt)]
        if self.state is not State.DECODING:
            self._handed_over(now)
        return NOTHING

    def handoff_failed(self, worker: WorkerRef, attempt: int, code: str, now: float) -> Actions:
        """The prefill worker keeps the KV and waits for a `Redirect`."""
        if attempt != self.attempt or worker != self.prefill or self.state not in _BEFORE_DECODING or self.decode is None:
            return NOTHING
        refused = self.decode
        self.decode = None
        self.holders.discard(refused)
        self._enter(State.HANDING_OFF, now)
        if isinstance(errors.from_wire(code, ""), (errors.OutOfCredits, errors.OutOfBlocks)):
            self.tried.discard(refused.id)
            return [Reroute()]
        # its answer may have been lost; and it must not be tried again, for this cancel would refuse this very attempt
        return [Free(refused, attempt), Reroute()]

    def redirect(self, decode: WorkerRef, now: float) -> Actions:
        assert self.prefill is not None and self.state is State.HANDING_OFF
        self.decode = decode
        self.holders.add(decode)
        self.tried.add(decode.id)
        self.since = now
        return [Tell(self.prefill, Redirect(request=self.id, attempt=self.attempt, decode=decode))]

    def stranded(self, now: float) -> Actions:
        """No other decode worker can ever read this KV: begin again elsewhere."""
        return self._next_attempt(errors.WorkerLost("no decode worker is left beside the KV"), now, counted=False)

    def unknown(self, worker: WorkerRef, attempt: int, now: float) -> Actions:
        """`worker` does not hold us. Once may be a message that crossed another; twice in a row is the truth."""
        if attempt != self.attempt or worker != self.holder or self.state is State.PLACING:
            return NOTHING
        if self.unknowns and now - self.unknown_at < UNKNOWN_APART_S:
            return NOTHING
        self.unknowns += 1
        self.unknown_at = now
        if self.unknowns < 2:
            # prefill forgets a request that it handed off: perhaps it did, and only its word was lost
            return [] if self.prefill is None or self.decode is None else [self._fetch_from(self.decode)]
        self.holders.discard(worker)
        return self._next_attempt(errors.WorkerLost(f"{worker.id} no longer holds the request"), now, counted=True)

    def worker_lost(self, worker: WorkerRef, now: float) -> Actions:
        self.holders.discard(worker)
        if worker == self.holder:
            return self._next_attempt(errors.WorkerLost(f"{worker.id} is gone"), now, counted=False)
        if worker == self.decode:
            self.tried.add(worker.id)  # prefill finds out by itself and asks for another
        return NOTHING

    # -- time

    def tick(self, now: float, *, patience_s: float = 0.0) -> Actions:
        """`patience_s`: silence that is no stall, because the worker's steps take so long."""
        if now >= self.deadline:
            return self._end(None, errors.DeadlineExceeded("the request took longer than its deadline allows"))
        if self.transcript.unread_for(now) > self.limits.slow_reader_timeout_s:
            return self._end(None, errors.Cancelled("the client read nothing for too long"))
        limits, state = self.limits, self.state
        if state is State.QUEUED or state is State.DONE:
            return NOTHING
        in_state_s, stall_s = now - self.since, max(limits.stall_s, patience_s)
        if state is State.PLACING:
            if in_state_s > limits.placing_timeout_s:
                return self._next_attempt(errors.RequestTimeout("no worker answered"), now, counted=True)
        elif state is State.PREFILLING:
            if in_state_s > limits.prefill_timeout_s:
                return self._next_attempt(errors.RequestTimeout("the prompt took too long"), now, counted=True)
            if now - max(self.heard_at, self.fetched_at) >= 2 * stall_s:
                return self.fetch(now)
        elif state is State.HANDING_OFF:
            if in_state_s > limits.handoff_timeout_s:
                late = errors.RequestTimeout("no decode worker took over")
                return self._next_attempt(late, now, counted=self.decode is not None)
            if now - max(self.heard_at, self.fetched_at) >= 2 * stall_s:
                return self.fetch(now)
        elif self.gap and now - self.progressed_at > stall_s * (limits.max_fetches + 1):
            return self._next_attempt(errors.WorkerLost("lost frames did not come again"), now, counted=True)
        elif now - max(self.heard_at, self.fetched_at) >= stall_s * (2 if self.fetches else 1):
            if self.fetches >= limits.max_fetches:
                return self._next_attempt(errors.WorkerLost("the worker fell silent"), now, counted=False)
            self.fetches += 1
            return self.fetch(now)
        return NOTHING

    def reconnected(self, now: float) -> Actions:
        """The bus was away and has lost what it carried: ask at once for what was missed. Time away does not count."""
        self.heard_at = self.progressed_at = now
        self.since = max(self.since, now)
        self.fetches = self.unknowns = 0
        return self.fetch(now) if self.is_held else NOTHING

    def fetch(self, now: float) -> Actions:
        """Ask whoever may have them for the tokens we have not seen."""
        self.fetched_at = now
        workers = [w for w in (self.decode, None if self.state is State.DECODING else self.prefill) if w is not None]
        return [self._fetch_from(worker) for worker in workers]

    # -- the end

    def fail(self, error: PenstockError) -> Actions:
        return NOTHING if self.state is State.DONE else self._end(None, error)

    # -- who holds it

    @property
    def holder(self) -> WorkerRef | None:
        """Whoever the request cannot go on without."""
        if self.state in _BEFORE_DECODING:
            return self.prefill or self.decode
        return self.decode if self.state is State.DECODING else None

    @property
    def is_held(self) -> bool:
        """Some worker said that it has taken the request."""
        return self.state in _HELD

    @property
    def occupies(self) -> tuple[WorkerRef | None, WorkerRef | None]:
        """The prefill and the decode worker whose credits this request uses, or is about to."""
        if self.state is State.QUEUED or self.state is State.DONE:
            return None, None
        return (None if self.state is State.DECODING else self.prefill), self.decode

    # -- inside

    def _fetch_from(self, worker: WorkerRef) -> Tell:
        self.sent_fetches += 1
        message = FetchFrames(gateway=self.gateway, request=self.id, attempt=self.attempt, start=len(self.tokens))
        return Tell(worker, message)

    def _enter(self, state: State, now: float) -> None:
        self.state = state
        self.since = self.heard_at = now

    def _handed_over(self, now: float) -> None:
        self._enter(State.DECODING, now)
        self.progressed_at = now
        self.fetches = self.unknowns = 0

    def _append(self, frame: TokenFrame, skip: int, now: float) -> None:
        if not self.tokens:
            self.first_token_at = now
        if skip:
            self.transcript.append(frame.tokens[skip:], frame.logprobs[skip:] if frame.logprobs else None)
        else:
            self.transcript.append(frame.tokens, frame.logprobs)
        self.progressed_at = now
        self.gap = False
        self.wake()

    def _saw_gap(self, now: float) -> Actions:
        self.dropped_frames += 1
        if not self.gap:
            self.gap = True
            self.progressed_at = now
        elif now - self.fetched_at < self.limits.refetch_s:
            return NOTHING
        return self.fetch(now)

    def _failed(self, worker: WorkerRef, frame: TokenFrame, now: float) -> Actions:
        """The worker gave up this attempt, and has freed it."""
        self.holders.discard(worker)
        error = errors.from_wire(frame.error_code or frame.finish or "", frame.error_message)
        if is_final(error):
            return self._end(None, error)
        self.avoid.add(worker.id)
        return self._next_attempt(error, now, counted=not is_loss(error))

    def _next_attempt(self, error: PenstockError, now: float, *, counted: bool) -> Actions:
        finish = self.transcript.complete()
        if finish is not None:
            return self._end(finish, None)
        self.failures += counted
        if self.failures >= self.limits.max_attempts:
            return self._end(None, for_client(error))
        freed = self._free_all()
        self.prefill = self.decode = None
        self._enter(State.QUEUED, now)
        delay_s = 0.1 * (1 << self.failures) if counted and self.failures > 1 else 0.0
        return [*freed, Requeue(now + delay_s)]

    def _end(self, finish: FinishReason | None, error: PenstockError | None) -> Actions:
        freed = self._free_all()
        self.state = State.DONE
        self.transcript.end(finish, error)
        self.wake()
        return [*freed, Ended()]

    def _free_all(self) -> list[Action]:
        freed: list[Action] = [Free(worker, self.attempt) for worker in self.holders]
        self.holders = set()
        return freed


_BEFORE_DECODING = (State.PLACING, State.PREFILLING, State.HANDING_OFF)
_HELD = (State.PREFILLING, State.HANDING_OFF, State.DECODING)
