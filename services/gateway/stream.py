"""One request as its edge sees it: outputs in order, as fast as they are read."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from services.gateway.prompt_scores import OutputStream
from services.gateway.requests import Request
from services.gateway.transcript import Output


class Stream:
    """For one reader. Whatever arrives between two reads comes as one `Output`, so a slow reader gets larger ones."""

    def __init__(self, request: Request, cancel: Callable[[str], None]) -> None:
        self.id = request.client_id
        self._transcript = request.transcript
        self._cancel = cancel
        self._arrived = asyncio.Event()
        request.wake = self._arrived.set

    async def next(self) -> Output:
        """Everything since the last call. After the last output (`finish` or `error` set) that end is returned again."""
        transcript = self._transcript
        while not transcript.unread and not transcript.ended:
            self._arrived.clear()
            await self._arrived.wait()
        return transcript.take()

    def cancel(self) -> None:
        """Frees the request wherever it is. Harmless twice, and after the end."""
        if not self._transcript.ended:
            self._cancel(self.id)


async def end_of(stream: OutputStream) -> Output:
    """Wait for the end of a stream, and return its last output. However the wait ends, the request is freed.

    :raises PenstockError: why it failed.
    """
    try:
        while True:
            output = await stream.next()
            if output.error is not None:
                raise output.error
            if output.finish is not None:
                return output
    finally:
        stream.cancel()
