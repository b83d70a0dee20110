"""nats-py's client where that waits too long: for a flush, and for a server that takes nothing any more."""

from __future__ import annotations

import asyncio
import math

from nats.aio.client import Client

POLL_S = 0.01


class NatsClient(Client):
    """Leaves a server that hangs, whatever it has not taken."""

    async def _process_op_err(self, e: Exception) -> None:
        """nats-py closes the broken connection, and waits until what was written has been sent: to a server that is frozen, or
        whose host is off, that is when it answers again or TCP gives up, a quarter of an hour later."""
        writer = getattr(self._transport, "_io_writer", None)
        if writer is not None and not (self.is_closed or self.is_reconnecting):
            writer.transport.abort()
        await super()._process_op_err(e)


async def flush(client: Client, timeout_s: float) -> None:
    """nats-py writes the PING of a flush to the socket at once, past commands that its flusher task has yet to write: so
    wait for those first, or a subscription may not be known yet when this returns."""
    async with asyncio.timeout(timeout_s):
        turns = 0
        while client.is_connected and client.pending_data_size:
            turns += 1
            await asyncio.sleep(0 if turns < 10 else POLL_S)
    await client.flush(math.ceil(timeout_s))
