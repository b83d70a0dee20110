"""One client's request while it runs: its choices, as one flow of deltas, whatever the edge.

    answer = Answer(core, job, text, metrics)
    await answer.run(send)              all choices are admitted, or none; then `send` takes what comes:
        while not answer.finished:
            for index, delta in await answer.next(): …
                                        and however it ends, everything is freed

With one choice, nothing stands between the edge and the core's stream. With more, a task per choice waits for it; each waits
until its last output was taken before it asks for the next, so that a slow client holds everything up to the core, where it
is noticed. The first choice that fails ends them all.

However much has arrived at once, `next` works through SLICE_VALUES of it, and then others have a turn of the event loop.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from typing import Protocol

import anyio
import anyio.lowlevel

from common.protocol.errors import Cancelled, InternalError, PenstockError
from common.protocol.handles import WorkerRef
from common.runtime.metrics import Metrics
from common.runtime.tracing import Tracing
from common.text.detokenize import detokenizer
from common.text.output.call_ids import call_id
from common.text.output.parser import OutputParser
from common.text.tokenizer import Tokenizer
from services.gateway.arrived import Arrived
from services.gateway.bodies import Usage
from services.gateway.choice_events import AnswerFormat, ChoiceEvents
from services.gateway.choices import ChoiceRules, ChoiceText, Delta, ScoredToken, choice_seed
from services.gateway.generation import UNKNOWN_ARRIVAL, Arrival
from services.gateway.job import Job
from services.gateway.metrics import EdgeMetrics
from services.gateway.prompt_scores import OutputStream, PromptText, ScoredStream
from services.gateway.requests import GenerationRequest, Output

SLICE_VALUES = 1024
"""Tokens, and alternatives listed beside them, that are turned into text at a time: about a millisecond."""
_SEARCH_COST = 4  # stop strings are looked for character by character; parsing and comparing go token by token


class Core(Protocol):
    """What the edges need of the gateway's actor.

    `generate` raises Overloaded, ShuttingDown or DuplicateRequest, and has then taken nothing.
    """

    @property
    def ref(self) -> WorkerRef: ...

    @property
    def ready(self) -> bool: ...

    @property
    def metrics(self) -> Metrics: ...

    @property
    def tracing(self) -> Tracing: ...

    def generate(self, request: GenerationRequest) -> OutputStream: ...


class OfferedCore(Core, Protocol):
    """Of one model."""

    @property
    def obstacle(self) -> str:
        """Why a request would not be answered now, as far as it is known."""
        ...

    @property
    def longest(self) -> int:
        """Tokens that a prompt and its answer may have on some worker that is alive; 0: unknown."""
        ...

    @property
    def longest_read(self) -> int:
        """Tokens that a prompt may have which is read, not continued; 0: unknown."""
        ...


class _Choice:
    def __init__(self, stream: OutputStream, text: ChoiceText | ChoiceEvents, echo: str, prompt: int) -> None:
        self.stream = stream
        self.text = text
        self.echo = echo
        self.prompt = prompt
        self.prompt_text: PromptText | None = None
        self.cached_tokens = -1  # not told yet


class Answer:
    """See above. Not to be used from two tasks at once. `on_start` is called when the first tokens have come. `arrival`: how
    the request came to its edge."""

    def __init__(
        self,
        core: Core,
        job: Job,
        tokenizer: Tokenizer,
        metrics: EdgeMetrics,
        *,
        on_start: Callable[[], None] = lambda: None,
        arrival: Arrival = UNKNOWN_ARRIVAL,
    ) -> None:
        self.job = job
        self._arrival = arrival
        self._on_start = on_start
        self._core = core
        self._tokenizer = tokenizer
        self._metrics = metrics
        self._rules = ChoiceRules(
            stops=job.stops,
            include_stop=job.include_stop,
            min_tokens=job.sampling.min_tokens,
            stop_token_ids=job.sampling.stop_token_ids,
            scored=job.top_logprobs >= 0,
            prediction=job.prediction,
        )
        self._choices: list[_Choice] = []
        self._open = 0
        self._begun_at = time.monotonic()
        self._last_at = 0.0
        self.ttft_s: float | None = None
        listed = max(job.top_logprobs, job.prompt_top)
        cost = 2 + listed if listed >= 0 else _SEARCH_COST if job.stops or job.format or job.prediction else 1
        self._slice = max(1, SLICE_VALUES // cost)
        self._reasons = job.format is not None and job.format.reasons
        self._backlog: deque[Arrived] = deque()
        self._send, self._receive = anyio.create_memory_object_stream[tuple[int, Output]](0)

    @property
    def finished(self) -> bool:
        return self._open == 0

    async def run(
        self,
        send: Callable[[], Awaitable[None]],
        *,
        watch: Callable[[anyio.CancelScope], Coroutine[None, None, None]] | None = None,
    ) -> None:
        """Ask the core for every choice, and see `send` through, which calls `next` until all is `finished`.

        `watch` runs beside it, and may cancel the scope: then this returns, with nothing more sent.

        :raises Overloaded, ShuttingDown, DuplicateRequest: and then nothing was taken.
        :raises PenstockError: what `send` raised.
        """
        self._begin()
        failure: PenstockError | None = None
        whole = False
        try:
            async with anyio.create_task_group() as group:
                if len(self._choices) > 1:
                    for index in range(len(self._choices)):
                        group.start_soon(self._pump, index)
                if watch is not None:
                    group.start_soon(watch, group.cancel_scope)
                try:
                    await send()
                    whole = True
                except PenstockError as error:
                    failure = error
                group.cancel_scope.cancel()
        finally:
            self.cancel()
            elapsed_s = time.monotonic() - self._begun_at
            self._metrics.ended(self.finish if whole else "", elapsed_s, self.usage(), len(self._choices))
        if failure is not None:
            try:
                raise failure
            finally:
                del failure  # or the error and this frame would hold each other

    def _begin(self) -> None:
        job = self.job
        try:
            for prompt in range(len(job.prompts)):
                for number in range(job.n):
                    self._choices.append(self._begin_choice(prompt, number))
        except BaseException:
            self.cancel()
            raise
        self._open = len(self._choices)
        self._metrics.began(self._open)

    def _begin_choice(self, prompt: int, number: int) -> _Choice:
        job = self.job
        index = len(self._choices)
        text = self._reader(job, job.echoes[prompt]) if job.format is None else self._event_reader(job, job.format, index)
        request = GenerationRequest(
            id=job.id if job.num_choices == 1 else f"{job.id}-{index}",
            prompt=job.prompts[prompt],
            sampling=job.sampling_of(choice_seed(job.sampling.seed, number)),
            deadline_s=job.deadline_s,
            salt=job.salt,
            tenant=job.tenant,
            weight=job.weight,
            priority=job.priority,
            trace=self._arrival.trace,
            shown_id=self._arrival.shown_id,
            received_at=self._arrival.at,
            background=job.background,
            prediction=job.prediction_of(prompt),
        )
        top = job.prompt_top_of(index)
        if top < 0 and job.generates:
            return _Choice(self._core.generate(request), text, job.echoes[prompt], prompt)
        stream = ScoredStream(self._core.generate, request, top=top, generates=job.generates)
        choice = _Choice(stream, text, job.echoes[prompt], prompt)
        if top >= 0:
            source = detokenizer(self._tokenizer, skip_special=job.skip_special)
            length = len(job.echoes[prompt]) if job.echo_top >= 0 else 1 << 60
            choice.prompt_text = PromptText(source, job.prompts[prompt][0], length)
        return choice

    def _reader(self, job: Job, echo: str) -> ChoiceText:
        return ChoiceText(
            detokenizer(self._tokenizer, skip_special=job.skip_special, continues=job.continues),
            self._rules,
            begins_at=len(echo),
        )

    def _event_reader(self, job: Job, format: AnswerFormat, index: int) -> ChoiceEvents:
        length = format.dialect.id_length
        parser = OutputParser(
            format.dialect,
            tools=format.tools,
            is_open=format.is_open,
            call_id=lambda call: call_id(job.id, index, call, length),
            max_calls=format.max_calls,
        )
        return ChoiceEvents(
            detokenizer(self._tokenizer, skip_special=job.skip_special, continues=job.continues, shown=format.shown),
            self._rules,
            parser,
            shows_reasoning=format.shows_reasoning,
        )

    async def next(self) -> list[tuple[int, Delta]]:
        """What is new, by choice; waits until something is. Call only while not `finished`.

        :raises PenstockError: a choice failed. The others are then cancelled by `cancel`.
        """
        if self._backlog:
            await anyio.lowlevel.checkpoint()
        elif len(self._choices) == 1:
            output = await self._choices[0].stream.next()
            self._measure()
            if len(output.tokens) <= self._slice:  # as a rule
                return [(0, self._take(0, output))]
            self._backlog.append(Arrived(0, output))
        else:
            await self._arrive()
            self._measure()
        deltas: list[tuple[int, Delta]] = []
        room = self._slice
        while self._backlog and room > 0:
            arrived = self._backlog[0]
            if self._choices[arrived.index].text.finish is not None:
                self._backlog.popleft()  # what the cancelled stream of a choice that has ended still said
                continue
            part = arrived.take(room)
            if arrived.is_done:
                self._backlog.popleft()
            room -= len(part.tokens) + 1
            deltas.append((arrived.index, self._take(arrived.index, part)))
        return deltas

    async def _arrive(self) -> None:
        try:
            self._backlog.append(Arrived(*await self._receive.receive()))
            while True:
                self._backlog.append(Arrived(*self._receive.receive_nowait()))
        except anyio.WouldBlock:
            pass
        except (anyio.EndOfStream, anyio.ClosedResourceError) as error:
            raise Cancelled("the request was cancelled") from error

    def _measure(self) -> None:
        """Something has arrived."""
        now = time.monotonic()
        if self._last_at:
            self._metrics.gap(now - self._last_at)
        else:
            self.ttft_s = now - self._begun_at
            self._metrics.first_token(self.ttft_s)
            self._on_start()
        self._last_at = now

    @property
    def finish(self) -> str:
        """The first choice's finish reason; empty while it has none."""
        return (self._choices[0].text.finish or "") if self._choices else ""

    @property
    def finishes(self) -> list[str]:
        """The finish reason of each choice that has ended."""
        return [choice.text.finish for choice in self._choices if choice.text.finish]

    def cancel(self) -> None:
        """Frees whatever the core still holds. Harmless twice, and after the end."""
        for choice in self._choices:
            choice.stream.cancel()
        self._send.close()
        self._receive.close()

    def usage(self) -> Usage:
        """Return what was used so far. A prompt counts once, so what one of its choices computed is not cached, although the
        others found it."""
        cached: dict[int, int] = {}
        for choice in self._choices:
            if choice.cached_tokens >= 0:
                cached[choice.prompt] = min(cached.get(choice.prompt, choice.cached_tokens), choice.cached_tokens)
        return Usage(
            prompt_tokens=sum(map(len, self.job.prompts)),
            completion_tokens=sum(choice.text.token_count for choice in self._choices),
            cached_tokens=sum(cached.values()),
            reasoning_tokens=sum(choice.text.reasoning_count for choice in self._choices) if self._reasons else None,
            predicted_tokens=len(self.job.prediction) * len(self._choices),
            repeated_tokens=sum(choice.text.repeated.count for choice in self._choices),
        )

    async def _pump(self, index: int) -> None:
        stream = self._choices[index].stream
        while True:
            output = await stream.next()
            try:
                await self._send.send((index, output))
            except (anyio.ClosedResourceError, anyio.BrokenResourceError):
                return  # cancelled meanwhile
            if output.finish is not None or output.error is not None:
                return

    def _take(self, index: int, output: Output) -> Delta:
        choice = self._choices[index]
        scored = self._prompt_scores(choice, output)
        delta = Delta("") if output.of_prompt else self._take_answer(choice, output)
        if scored is not None:
            delta.prompt = scored if self.job.prompt_top >= 0 else None
            if self.job.echo_top >= 0:
                delta.scored = [*scored, *(delta.scored or ())]
        if choice.echo:
            delta.text = choice.echo + delta.text
            choice.echo = ""
        return delta

    def _prompt_scores(self, choice: _Choice, output: Output) -> list[ScoredToken] | None:
        """What an output tells of its prompt. That of one token has no scores, and no output of its own."""
        if choice.prompt_text is None:
            return None
        if output.of_prompt:
            return choice.prompt_text.push(output.tokens, output.logprobs)
        first, choice.prompt_text = choice.prompt_text.push([], None), None
        return first or None

    def _take_answer(self, choice: _Choice, output: Output) -> Delta:
        finish = output.finish if output.finish in ("stop", "length") else None
        choice.cached_tokens = max(choice.cached_tokens, output.cached_tokens)
        delta = choice.text.push(output.tokens, output.logprobs, finish)
        if delta.finish is None:
            if output.error is not None:
                raise output.error
            if output.finish == "cancelled":
                raise Cancelled("the request was cancelled")
            if output.finish is not None:
                raise InternalError(f"generation failed; the logs have it under {self.job.id}")
        else:
            self._open -= 1
            choice.stream.cancel()
        return delta
