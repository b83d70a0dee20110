"""The vectors of one request while they are computed, and the body that tells them.

Each input is a request of its own to the core, at most AT_ONCE at a time, so that a large batch leaves room for others; in the
background one at a time. A vector is encoded when it comes. The first input that fails ends them all.
"""

from __future__ import annotations

import array
import base64
import math
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Protocol

import anyio
import msgspec

from common.protocol.errors import Cancelled, InternalError, PayloadTooLarge, PenstockError
from common.protocol.messages import SamplingParams
from services.gateway.bodies import Usage
from services.gateway.generation import UNKNOWN_ARRIVAL, Arrival, GenerationRequest
from services.gateway.intake import Intake
from services.gateway.metrics import EdgeMetrics
from services.gateway.prompt_scores import OutputStream
from services.gateway.stream import end_of
from services.gateway.vector_prepare import VectorJob
from services.gateway.whole import Pieces

AT_ONCE = 32

_encode = msgspec.json.Encoder().encode


class Core(Protocol):
    def generate(self, request: GenerationRequest) -> OutputStream: ...


class VectorAnswer:
    """Use `run` once."""

    ttft_s: float | None = None

    def __init__(
        self,
        core: Core,
        job: VectorJob,
        metrics: EdgeMetrics,
        intake: Intake,
        *,
        max_bytes: int | None = None,
        arrival: Arrival = UNKNOWN_ARRIVAL,
    ) -> None:
        """`max_bytes`: a larger answer can't be sent. `arrival`: how the request came to its edge."""
        self.job = job
        self._arrival = arrival
        self.finish = ""
        self._core = core
        self._metrics = metrics
        self._intake = intake
        self._max_bytes = max_bytes
        self._held = 0
        self._cached_tokens = 0
        self._deadline = time.monotonic() + job.deadline_s
        self._vectors: list[array.array[float] | None] = [None] * len(job.prompts)
        self._encoded: list[bytes] = [b""] * len(job.prompts)

    def usage(self) -> Usage:
        return Usage(prompt_tokens=sum(map(len, self.job.prompts)), completion_tokens=0, cached_tokens=self._cached_tokens)

    async def run(
        self,
        send: Callable[[Pieces], Coroutine[None, None, None]],
        *,
        watch: Callable[[anyio.CancelScope], Coroutine[None, None, None]] | None = None,
    ) -> None:
        """Compute every vector, and `send` the body. `watch` runs beside it, and may cancel the scope.

        :raises PenstockError: why it can't be answered; nothing is held any more then.
        """
        job, began_at = self.job, time.monotonic()
        self._metrics.began(len(job.prompts))
        failure: PenstockError | None = None
        try:
            async with anyio.create_task_group() as group:
                if watch is not None:
                    group.start_soon(watch, group.cancel_scope)
                try:
                    await self._compute_all()
                    body = self._body()
                    self._check_size(body.size)
                    await send(body)
                    self.finish = "stop"
                except PenstockError as error:
                    failure = error
                group.cancel_scope.cancel()
        finally:
            self._intake.dropped(self._held)
            self._metrics.ended(self.finish, time.monotonic() - began_at, self.usage(), len(job.prompts))
        if failure is not None:
            try:
                raise failure
            finally:
                del failure  # or the error and this frame would hold each other

    async def _compute_all(self) -> None:
        indices = iter(range(len(self.job.prompts)))
        failures: list[PenstockError] = []

        async def work(group: anyio.abc.TaskGroup) -> None:
            try:
                for index in indices:
                    await self._compute(index)
            except PenstockError as error:
                failures.append(error)
                group.cancel_scope.cancel()

        async with anyio.create_task_group() as group:
            for _ in range(1 if self.job.background else min(AT_ONCE, len(self.job.prompts))):
                group.start_soon(work, group)
        if failures:
            raise failures[0]

    async def _compute(self, index: int) -> None:
        job = self.job
        stream = self._core.generate(
            GenerationRequest(
                id=f"{job.id}-{index}",
                prompt=job.prompts[index],
                sampling=SamplingParams(temperature=0.0, max_tokens=1),
                deadline_s=max(self._deadline - time.monotonic(), 0.001),
                salt=job.salt,
                tenant=job.tenant,
                weight=job.weight,
                background=job.background,
                pooling=job.pooling,
                trace=self._arrival.trace,
                shown_id=self._arrival.shown_id,
                received_at=self._arrival.at,
            )
        )
        output = await end_of(stream)
        if output.finish == "cancelled":
            raise Cancelled("the request was cancelled")
        if not output.embedding:
            raise InternalError(f"a worker made no embedding; the logs have it under {job.id}")
        self._cached_tokens += output.cached_tokens
        self._keep(index, _vector_of(output.embedding, job.size))

    def _keep(self, index: int, vector: array.array[float]) -> None:
        """:raises Overloaded: if whole answers fill the memory there is for them. :raises PayloadTooLarge: as `_check_size`."""
        job = self.job
        if job.pairs:
            size = vector.itemsize * len(vector)
            self._vectors[index] = vector
        else:
            told = b'"' + base64.b64encode(_little_endian(vector)) + b'"' if job.base64 else _encode(vector.tolist())
            self._encoded[index] = b'{"object":"embedding","index":%d,"embedding":%b}' % (index, told)
            size = len(self._encoded[index])
        self._intake.collect(size)
        self._held += size
        if not job.pairs:
            self._check_size(self._held)

    def _check_size(self, size: int) -> None:
        """:raises PayloadTooLarge: an answer of this size can't be sent."""
        if self._max_bytes is not None and size > self._max_bytes:
            raise PayloadTooLarge(
                f"the answer is longer than a message may be ({self._max_bytes} bytes): send fewer inputs, or over HTTP"
            )

    def _body(self) -> Pieces:
        job, usage = self.job, self.usage().body()
        head = _encode({"id": job.id, "object": "list", "created": job.created, "model": job.model})[:-1]
        return Pieces([head, b',"data":[', *_separated(self._entries()), b'],"usage":', _encode(usage), b"}"])

    def _entries(self) -> Iterator[bytes]:
        if not self.job.pairs:
            yield from self._encoded
        for index, (one, other) in enumerate(self.job.pairs):
            first, second = self._vectors[one], self._vectors[other]
            assert first is not None and second is not None
            score = sum(map(float.__mul__, first, second))
            yield _encode({"index": index, "object": "score", "score": min(1.0, max(-1.0, score))})


def _separated(entries: Iterator[bytes]) -> Iterator[bytes]:
    for index, entry in enumerate(entries):
        yield b"," + entry if index else entry


def _vector_of(data: bytes, size: int) -> array.array[float]:
    """data: float32, little-endian. Its first `size` numbers, with length 1; 0: all."""
    vector = array.array("f", data)
    if sys.byteorder == "big":
        vector.byteswap()
    if 0 < size < len(vector):
        kept = vector[:size].tolist()
        norm = math.sqrt(math.fsum(number * number for number in kept)) or 1.0
        vector = array.array("f", [number / norm for number in kept])
    return vector


def _little_endian(vector: array.array[float]) -> bytes:
    if sys.byteorder == "big":
        vector = vector[:]
        vector.byteswap()
    return vector.tobytes()
