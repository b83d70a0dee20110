"""One client's request while it runs: its choices, as one flow of deltas, whatever the edge.

    answer = Answer(core, job, text)
    answer.begin()                      all choices are admitted, or none
    async with create_task_group() as group:
        answer.start(group)
        while not answer.finished:
            for index, delta in await answer.next(): …
    answer.cancel()                     always, at the end: harmless when all is done

With one choice, nothing stands between the edge and the core's stream. With more, a task per choice waits for it; each waits
until its last output was taken before it asks for the next, so that a slow client holds everything up to the core, where it
is noticed. The first choice that fails ends them all.
"""

from __future__ import annotations

import time
from typing import Protocol

import anyio
from anyio.abc import TaskGroup

from common.protocol.errors import Cancelled, InternalError
from common.protocol.handles import WorkerRef
from common.runtime.metrics import Metrics
from common.text.detokenize import Detokenizer
from common.text.tokenizer import Tokenizer
from services.gateway.bodies import Usage, WholeChoice, whole_body
from services.gateway.choices import ChoiceText, Delta, ScoredToken, choice_seed
from services.gateway.metrics import EdgeMetrics
from services.gateway.prepare import Job
from services.gateway.requests import GenerationRequest, Output


class OutputStream(Protocol):
    """What the core returns for one generation."""

    async def next(self) -> Output: ...

    def cancel(self) -> None: ...


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

    def generate(self, request: GenerationRequest) -> OutputStream: ...


class _Choice:
    def __init__(self, stream: OutputStream, text: ChoiceText, echo: str, prompt: int) -> None:
        self.stream = stream
        self.text = text
        self.echo = echo
        self.prompt = prompt
        self.cached_tokens = 0


class Answer:
    """See above. Not to be used from two tasks at once."""

    def __init__(self, core: Core, job: Job, tokenizer: Tokenizer, metrics: EdgeMetrics) -> None:
        self.job = job
        self._core = core
        self._tokenizer = tokenizer
        self._metrics = metrics
        self._choices: list[_Choice] = []
        self._open = 0
        self._begun_at = time.monotonic()
        self._last_at = 0.0
        self._send, self._receive = anyio.create_memory_object_stream[tuple[int, Output]](0)

    @property
    def finished(self) -> bool:
        return self._open == 0

    def begin(self) -> None:
        """Asks the core for every choice.

        :raises Overloaded, ShuttingDown, DuplicateRequest: and then nothing was taken.
        """
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
        text = ChoiceText(
            Detokenizer(self._tokenizer, continues=job.kind == "completion"),
            stops=job.stops,
            include_stop=job.include_stop,
            min_tokens=job.sampling.min_tokens,
            stop_token_ids=job.sampling.stop_token_ids,
            scored=job.top_logprobs >= 0,
        )
        index = len(self._choices)
        request = GenerationRequest(
            id=job.id if job.num_choices == 1 else f"{job.id}-{index}",
            prompt=job.prompts[prompt],
            sampling=job.sampling_of(choice_seed(job.sampling.seed, number)),
            deadline_s=job.deadline_s,
        )
        return _Choice(self._core.generate(request), text, job.echoes[prompt], prompt)

    def start(self, group: TaskGroup) -> None:
        """`group` owns the tasks of several choices until it is cancelled."""
        if len(self._choices) > 1:
            for index in range(len(self._choices)):
                group.start_soon(self._pump, index)

    async def next(self) -> list[tuple[int, Delta]]:
        """What is new, by choice; waits until something is. Call only while not `finished`.

        :raises PenstockError: a choice failed. The others are then cancelled by `cancel`.
        """
        if len(self._choices) == 1:
            deltas = [(0, self._take(0, await self._choices[0].stream.next()))]
        else:
            index, output = await self._receive.receive()
            arrived = [(index, output)]
            while True:
                try:
                    arrived.append(self._receive.receive_nowait())
                except anyio.WouldBlock:
                    break
            # outputs of a choice that has ended already are what its cancelled stream still said
            deltas = [(i, self._take(i, out)) for i, out in arrived if self._choices[i].text.finish is None]
        now = time.monotonic()
        if self._last_at:
            self._metrics.gap(now - self._last_at)
        else:
            self._metrics.first_token(now - self._begun_at)
        self._last_at = now
        return deltas

    async def collect(self) -> bytes:
        """Waits for the end; the body of an answer that is not streamed.

        :raises PenstockError: a choice failed.
        """
        texts: list[list[str]] = [[] for _ in self._choices]
        scored: list[list[ScoredToken]] = [[] for _ in self._choices]
        while not self.finished:
            for index, delta in await self.next():
                texts[index].append(delta.text)
                scored[index] += delta.scored or []
        job = self.job
        choices = [
            WholeChoice("".join(text), choice.text.finish or "stop", scores if job.top_logprobs >= 0 else None)
            for choice, text, scores in zip(self._choices, texts, scored, strict=True)
        ]
        return whole_body(
            job.kind,
            id=job.shown_id,
            created=job.created,
            model=job.model,
            choices=choices,
            usage=self.usage(),
            names=self._tokenizer,
            top=job.top_logprobs,
        )

    @property
    def outcome(self) -> str:
        """The first choice's finish reason; empty while it has none."""
        return self._choices[0].text.finish or ""

    def cancel(self) -> None:
        """Frees whatever the core still holds. Harmless twice, and after the end."""
        for choice in self._choices:
            choice.stream.cancel()
        self._send.close()
        self._receive.close()

    def usage(self) -> Usage:
        cached = [0] * len(self.job.prompts)
        for choice in self._choices:
            cached[choice.prompt] = max(cached[choice.prompt], choice.cached_tokens)
        return Usage(
            prompt_tokens=sum(map(len, self.job.prompts)),
            completion_tokens=sum(choice.text.token_count for choice in self._choices),
            cached_tokens=sum(cached),
        )

    def ended(self, outcome: str) -> None:
        """Counts the request; call once, with a finish reason or an error's code."""
        self._metrics.ended(outcome, time.monotonic() - self._begun_at, self.usage(), len(self._choices))

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
        if choice.echo:
            delta.text = choice.echo + delta.text
            choice.echo = ""
        return delta
