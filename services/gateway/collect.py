"""A whole answer, for a client that did not ask for a stream: put together as it comes, within the memory for such answers."""

from __future__ import annotations

from common.protocol.errors import PayloadTooLarge
from services.gateway.answer import Answer
from services.gateway.intake import Intake
from services.gateway.logprobs import TokenNames
from services.gateway.whole import Pieces

_FREE_BYTES = 64 * 1024
"""Answers below this size are not counted: there are at most `max_requests` of them."""


class Holding:
    """What one answer holds of the memory for whole answers. Use as a context manager: at its end the memory is given back."""

    def __init__(self, intake: Intake) -> None:
        self._intake = intake
        self._held = 0

    def __enter__(self) -> Holding:
        return self

    def __exit__(self, *_: object) -> None:
        self._intake.dropped(self._held)
        self._held = 0

    def hold(self, size: int) -> None:
        """Make sure of `size` bytes in all.

        :raises Overloaded: if whole answers fill the memory there is for them.
        """
        if size - self._held > _FREE_BYTES:
            self._intake.collect(size - self._held)
            self._held = size


class Collector:
    """Use as a context manager: at its end the memory is given back."""

    def __init__(self, answer: Answer, names: TokenNames, intake: Intake, *, max_bytes: int | None = None) -> None:
        """`max_bytes`: a larger answer can't be sent."""
        self._answer = answer
        self._names = names
        self._holding = Holding(intake)
        self._max_bytes = max_bytes

    def __enter__(self) -> Collector:
        return self

    def __exit__(self, *_: object) -> None:
        self._holding.__exit__()

    async def body(self) -> Pieces:
        """The body, once the answer has ended.

        :raises Overloaded: if whole answers fill the memory there is for them.
        :raises PayloadTooLarge: if it gets longer than `max_bytes`.
        :raises PenstockError: a choice failed.
        """
        answer = self._answer
        whole = answer.job.writers.whole(answer.job, self._names)
        while not answer.finished:
            for index, delta in await answer.next():
                whole.add(index, delta)
            if self._max_bytes is not None and whole.size > self._max_bytes:
                raise PayloadTooLarge(f"the answer is longer than a message may be ({self._max_bytes} bytes): stream it")
            self._holding.hold(whole.size)
        return whole.finish(answer.usage())
