"""One request at the gateway: what it has, who holds it, and what is done about everything that can go wrong. Pure.

    queued ─► placing ─► prefilling ─► handing_off ─► decoding ─► done
       ▲         │  └─ direct ──────────────────────────▲ │
       └─────────┴──── the next attempt, elsewhere ◄──────┘

A prompt that is read, not continued, is done at the end of its prefilling, and no decode worker hears of it.

The request owns its tokens. Each placement is a new attempt, sent out with the prompt and all tokens so far; frames of
attempts before, or from a worker that does not hold the request, are dropped, and whoever sent them is told to let go.

Nothing hangs: what time does to it is in `patience.py`.

Methods return what has to be done (`Action`s); the dispatcher does it.
"""

from __future__ import annotations

from collections.abc import Callable

from common.engine.shares import PRIORITY_STEP_S, bounded
from common.protocol import errors
from common.protocol import tokens as token_bytes
from common.protocol.errors import PenstockError
from common.protocol.handles import WorkerRef
from common.protocol.messages import FetchFrames, FinishReason, Generation, Pooling, TokenFrame
from common.protocol.trace_context import child_of
from services.gateway.actions import (
    BEFORE_DECODING,
    HELD,
    NOTHING,
    Action,
    Actions,
    Ended,
    Free,
    Limits,
    Path,
    Requeue,
    State,
    Tell,
    ask_for,
)
from services.gateway.failures import for_client, is_final, is_loss, is_refusal
from services.gateway.generation import GenerationRequest as GenerationRequest  # the edges take both from here
from services.gateway.history import STALL_NOTED_S, History
from services.gateway.losses import Losses, Suspicion
from services.gateway.silence import Silence
from services.gateway.transcript import Output as Output
from services.gateway.transcript import Transcript

UNKNOWN_APART_S = 0.5
"""Two answers to one round of questions count once."""


class Request:
    """`wake` is called when `transcript` has something new. `wire_id` names it to workers, unlike any other ever; `client_id`
    is the edge's. `path` forces a path, and `only` the worker that is to compute the prompt (canaries). Of a tenant's requests,
    the least `rank` is placed first. `longest`: tokens that some worker held for one sequence when it was last placed; 0:
    unknown."""

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
        only: WorkerRef | None = None,
    ) -> None:
        self.id, self.client_id, self.shown_id = wire_id, request.id, request.shown_id or request.id
        self.prompt_tokens, self.packed_prompt = len(request.prompt), token_bytes.pack(request.prompt)
        self.packed_prediction = token_bytes.pack(request.prediction)
        self.sampling = request.sampling
        self.salt, self.trace = request.salt, request.trace
        self.tenant, self.weight, self.background = request.tenant, request.weight, request.background
        self.priority = bounded(request.priority, background=request.background)
        self.rank = now + self.priority * PRIORITY_STEP_S
        self.gateway, self.limits = gateway, limits
        self.given = request.given
        self.pooling: Pooling = request.pooling
        self.is_read = request.is_read
        self.path: Path = path
        self.only = only
        self.alone = self.is_unsettled = self.stuck = self.is_too_long = False
        self.arrived_at = self.since = now
        self.due_at = now + limits.first_token_s if limits.first_token_s and not request.background else 0.0
        self.deadline = now + request.deadline_s
        self.deadline_ms = wall_ms + int(request.deadline_s * 1000)
        self.wake: Callable[[], None] = lambda: None

        self.state, self.attempt = State.QUEUED, 0
        self.prefill: WorkerRef | None = None
        self.decode: WorkerRef | None = None
        self.holders: set[WorkerRef] = set()
        self.avoid: set[str] = set()
        self.tried: set[str] = set()
        self.failures = self.unknowns = self.longest = 0
        self.unknown_at = self.first_token_at = 0.0
        self.losses = Losses()
        self.produced = 0

        self.transcript = Transcript(request.sampling)
        self.tokens = self.transcript.tokens
        self.silence = Silence(now)
        self.dropped_frames = self.sent_fetches = 0
        self.history = History(now, request.received_at)

    # -- placing

    def place(
        self, prefill: WorkerRef | None, decode: WorkerRef | None, now: float, *, alone: bool = False, window: int = 0
    ) -> Actions:
        """Begin the next attempt on these workers: see `ask_for`. `alone`, `window`: see `Generation`."""
        self.attempt += 1
        self.alone = alone
        self.prefill, self.decode = prefill, decode
        self.holders = {worker for worker in (prefill, decode) if worker is not None}
        self.tried = set() if decode is None else {decode.id}
        self.enter(State.PLACING, now)
        self.unknowns = self.produced = 0
        self.silence.placed()
        generation = Generation(
            request=self.id,
            attempt=self.attempt,
            gateway=self.gateway,
            tokens=self.packed_prompt + token_bytes.pack(self.tokens),
            prompt_tokens=self.prompt_tokens,
            sampling=self.sampling,
            deadline_ms=self.deadline_ms,
            remaining_ms=max(1, int((self.deadline - now) * 1000)),
            first_token_ms=0 if self.tokens else max(0, int((self.due_at - now) * 1000)),
            salt=self.salt,
            alone=alone,
            window=window,
            given=token_bytes.pack(self.given[len(self.tokens) :]),
            pooling=self.pooling,
            prediction=self.packed_prediction,
            tenant=self.tenant,
            weight=self.weight,
            priority=self.priority,
            trace=child_of(self.trace, f"{self.id}/{self.attempt}"),
        )
        return [ask_for(generation, prefill, decode)]

    def accepted(self, worker: WorkerRef, attempt: int, now: float) -> Actions:
        if attempt != self.attempt or worker not in self.holders:
            return [Free(worker, attempt)]
        if self.state is State.PLACING:
            self.enter(State.PREFILLING, now)
        return NOTHING

    def refused(
        self, worker: WorkerRef, attempt: int, error: PenstockError, now: float, *, bus_was_away: bool = False
    ) -> Actions:
        """The task was rejected, or nobody answered it in time (then the worker may hold it all the same)."""
        if attempt == self.attempt and self.state in HELD and worker in self.holders:
            return NOTHING  # its frames came, and only its answer was lost
        if attempt != self.attempt or self.state is not State.PLACING:
            return [Free(worker, attempt)] if isinstance(error, errors.RequestTimeout) else NOTHING
        if not isinstance(error, errors.RequestTimeout):
            self.holders.clear()
        if isinstance(error, errors.ContextLengthExceeded) and self.tokens:
            return self.end("length", None)
        if isinstance(error, errors.RequestError):
            return self.end(None, error)
        self.avoid.add(worker.id)
        return self.next_attempt(error, now, counted=not bus_was_away and not is_refusal(error))

    # -- what workers say

    def frame(self, worker: WorkerRef, frame: TokenFrame, now: float) -> Actions:
        """The hot path: once per request and step."""
        if frame.attempt != self.attempt or self.state is State.QUEUED or self.state is State.DONE:
            self.dropped_frames += 1
            return [Free(worker, frame.attempt)]
        if worker == self.decode:
            self.handed_over(now)
        elif worker == self.prefill:
            if self.is_read:
                if self.state is State.PLACING:
                    self.enter(State.PREFILLING, now)
            elif frame.tokens and self.state < State.HANDING_OFF and frame.finish is None:
                self.enter(State.HANDING_OFF, now)
        else:
            self.dropped_frames += 1
            return [Free(worker, frame.attempt)]
        if now >= self.deadline:  # ticks are far apart: a short answer could come whole between two
            return self.end(None, errors.DeadlineExceeded("the request took longer than its deadline allows"))
        finish = frame.finish
        if frame.tokens or finish is not None or not self.stuck:
            self.silence.heard(now)
        self.unknowns = 0
        if finish == "error" or finish == "cancelled":
            return self._failed(worker, frame, now)

        expected = len(self.tokens)
        skip = expected - frame.start
        if skip < 0:
            return self._saw_gap(now)
        if len(frame.tokens) > skip:
            self.produced += 1
            self._append(frame, skip, now)
            if self.prefill is not None and worker == self.decode:
                self.holders.discard(self.prefill)
                self.prefill = None
                self.is_unsettled = True
        elif frame.tokens:
            self.dropped_frames += 1
        if self.transcript.cached_tokens < 0:
            self.transcript.cached_tokens = frame.cached_tokens
        if finish is not None and frame.start + len(frame.tokens) >= len(self.tokens):
            self.transcript.embedding = frame.embedding
            if finish == "length" and not self.is_read and not self.transcript.full and self.num_tokens < self.longest:
                return self.next_attempt(errors.ContextLengthExceeded(f"{worker.id} holds no more"), now, counted=False)
            return self.end(finish, None)
        if self.transcript.full:
            return self.end(self.transcript.complete(), None)
        return NOTHING

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
        return self.next_attempt(errors.WorkerLost(f"{worker.id} no longer holds the request"), now, counted=True)

    def worker_lost(self, worker: WorkerRef, now: float) -> Actions:
        self.holders.discard(worker)
        if worker == self.holder:
            self.losses.lost(produced=self.produced)
            if self.losses.count >= self.limits.max_losses and self.transcript.complete() is None:
                died = f"{self.losses.count} workers ended while they ran this request; it is not tried again"
                return self.end(None, errors.WorkersDied(died))
            return self.next_attempt(errors.WorkerLost(f"{worker.id} is gone"), now, counted=False)
        if worker == self.decode:
            self.tried.add(worker.id)  # prefill finds out by itself and asks for another
        return NOTHING

    # -- time

    def reconnected(self, now: float) -> Actions:
        """The bus was away and has lost what it carried: ask at once for what was missed. Time away does not count."""
        self.silence.away(now)
        self.since = max(self.since, now)
        self.unknowns = 0
        return self.fetch(now) if self.is_held else NOTHING

    def new_life(self, gateway: WorkerRef, now: float) -> Actions:
        """This gateway was away for so long that workers have let go of what it held: go on under its new epoch, elsewhere."""
        self.gateway = gateway
        self.silence.away(now)
        self.transcript.away()
        if self.state is State.QUEUED or self.state is State.DONE:
            return NOTHING
        return self.next_attempt(errors.WorkerLost("the gateway was away"), now, counted=False)

    def fetch(self, now: float) -> Actions:
        """Ask whoever may have them for the tokens we have not seen."""
        self.silence.fetched(now)
        workers = [w for w in (self.decode, None if self.state is State.DECODING else self.prefill) if w is not None]
        return [self._fetch_from(worker) for worker in workers]

    # -- the end

    def next_attempt(self, error: PenstockError, now: float, *, counted: bool) -> Actions:
        """Go on elsewhere, unless that was tried too often. `counted`: this attempt's failure is held against the request."""
        finish = self.transcript.complete()
        if finish is not None:
            return self.end(finish, None)
        if self.only is not None and not is_refusal(error):
            return self.end(None, for_client(error))
        self.failures += counted
        if self.failures >= self.limits.max_attempts:
            return self.end(None, for_client(error))
        freed = self._free_all()
        self.prefill = self.decode = None
        self.enter(State.QUEUED, now, error.code)
        delay_s = 0.1 * (1 << self.failures) if counted and self.failures > 1 else 0.0
        return [*freed, Requeue(now + delay_s)]

    def end(self, finish: FinishReason | None, error: PenstockError | None) -> Actions:
        """Everyone lets go of it, and the reader gets the end."""
        freed = self._free_all()
        self.state = State.DONE
        self.transcript.end(finish, error)
        self.wake()
        return [*freed, Ended()]

    def fail(self, error: PenstockError) -> Actions:
        return NOTHING if self.state is State.DONE else self.end(None, error)

    # -- who holds it

    @property
    def holder(self) -> WorkerRef | None:
        """Whoever the request cannot go on without."""
        if self.state in BEFORE_DECODING:
            return self.prefill or self.decode
        return self.decode if self.state is State.DECODING else None

    @property
    def is_held(self) -> bool:
        """Some worker said that it has taken the request."""
        return self.state in HELD

    @property
    def computing(self) -> WorkerRef | None:
        """Whoever computes the prompt, as far as is known."""
        if self.state in (State.PLACING, State.PREFILLING):
            return self.prefill or self.decode
        return None

    @property
    def num_tokens(self) -> int:
        """Of the prompt, given ones included, and those generated so far."""
        return self.prompt_tokens + max(len(self.given), len(self.tokens))

    @property
    def must_be_alone(self) -> bool:
        return self.losses.suspicion is Suspicion.STRONG

    @property
    def alone_on(self) -> WorkerRef | None:
        """The worker that is to run nothing else."""
        return (self.decode or self.prefill) if self.alone and self.losses.suspicion and self.state is not State.DONE else None

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

    def enter(self, state: State, now: float, reason: str = "") -> None:
        """`reason`: the code of the error that ended the attempt before."""
        self.state = state
        self.since = now
        self.history.note(now, state, self.attempt, self.prefill, self.decode, reason)
        self.is_unsettled = True
        self.silence.began(now)

    def handed_over(self, now: float) -> None:
        """The decode worker has it now."""
        if self.state is State.DECODING:
            return
        self.enter(State.DECODING, now)
        self.silence.handed_over(now)
        self.unknowns = 0
        if self.prefill is not None:
            self.produced = 0

    def _append(self, frame: TokenFrame, skip: int, now: float) -> None:
        if not self.tokens:
            self.first_token_at = now
        elif now - self.silence.progressed_at > STALL_NOTED_S:
            self.history.stalled(self.silence.progressed_at, now, self.attempt)
        if skip:
            self.transcript.append(frame.tokens[skip:], frame.logprobs[skip:] if frame.logprobs else None)
        else:
            self.transcript.append(frame.tokens, frame.logprobs)
        self.silence.progressed(now)
        if self.losses.suspicion:
            self.losses.produced()
            self.is_unsettled = True
        self.wake()

    def _saw_gap(self, now: float) -> Actions:
        self.dropped_frames += 1
        return self.fetch(now) if self.silence.saw_gap(now, self.limits.refetch_s) else NOTHING

    def _failed(self, worker: WorkerRef, frame: TokenFrame, now: float) -> Actions:
        """The worker gave up this attempt, and has freed it."""
        self.holders.discard(worker)
        error = errors.from_wire(frame.error_code or frame.finish or "", frame.error_message)
        if is_final(error):
            return self.end(None, error)
        self.avoid.add(worker.id)
        return self.next_attempt(error, now, counted=not is_loss(error))

    def _free_all(self) -> list[Action]:
        freed: list[Action] = [Free(worker, self.attempt) for worker in self.holders]
        self.holders = set()
        return freed
