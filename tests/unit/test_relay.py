"""The relay of benches that lose, delay and cut messages: whole messages are lost, nothing else changes."""

from __future__ import annotations

import anyio
import pytest

from bench.common.relay import Counts, Faults, FrameSplitter, is_message, payload_of, relayed

CONNECT = b'CONNECT {"verbose":false}\r\n'
SENT = [
    CONNECT,
    b"PING\r\n",
    b"PUB a.b 5\r\nhe\r\no\r\n",  # a payload may hold what ends a line
    b"PUB a.b _INBOX.1 0\r\n\r\n",
    b"HPUB a.b 12 14\r\nNATS/1.0\r\n\r\nhi\r\n",
    b"MSG a.b 1 4\r\nPING\r\n",
    b"HMSG a.b 1 reply 12 12\r\nNATS/1.0\r\n\r\n\r\n",
    b"SUB a.> 1\r\n",
]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_frames_are_found_however_the_stream_is_cut(size: int) -> None:
    splitter, stream = FrameSplitter(), b"".join(SENT)
    found = [frame for at in range(0, len(stream), size) for frame in splitter.feed(stream[at : at + size])]
    assert found == SENT
    assert [is_message(frame) for frame in found] == [False, False, True, True, True, True, True, False]


def test_a_message_is_what_it_carries_without_headers() -> None:
    assert [payload_of(frame) for frame in SENT if is_message(frame)] == [b"he\r\no", b"", b"hi", b"PING", b""]


def test_a_stream_that_is_not_nats_is_refused() -> None:
    with pytest.raises(ValueError, match="does not end"):
        FrameSplitter().feed(b"x" * 70_000)


async def what_arrives(faults: Faults, *, seed: int = 1) -> tuple[bytes, Counts, float]:
    """What a server hears of SENT through a relay, the relay's counts, and after how many seconds it had heard it."""
    heard = bytearray()
    over = anyio.Event()

    async def serve(stream: anyio.abc.SocketStream) -> None:
        async with stream:
            try:
                while True:
                    heard.extend(await stream.receive())
            except (anyio.EndOfStream, anyio.BrokenResourceError):
                over.set()

    listener = await anyio.create_tcp_listener(local_host="127.0.0.1")
    counts, seconds = Counts(), 0.0
    async with listener, anyio.create_task_group() as group:
        group.start_soon(listener.serve, serve)
        with relayed(listener.extra(anyio.abc.SocketAttribute.local_port), faults, seed) as relay:
            began = anyio.current_time()
            async with await anyio.connect_tcp("127.0.0.1", relay.port) as client:
                await client.send(b"".join(SENT))
                with anyio.fail_after(10):
                    while not heard.endswith(SENT[-1]) and not over.is_set():
                        await anyio.sleep(0.005)
                seconds, counts = anyio.current_time() - began, relay.counts
        group.cancel_scope.cancel()
    return bytes(heard), counts, seconds


async def test_without_faults_everything_arrives() -> None:
    heard, counts, _ = await what_arrives(Faults())
    assert heard == b"".join(SENT)
    assert counts == (len(SENT), 0, 0, 0, 0)


async def test_only_whole_messages_are_lost() -> None:
    heard, counts, _ = await what_arrives(Faults(drop=1.0))
    assert heard == b"".join([CONNECT, b"PING\r\n", b"SUB a.> 1\r\n"])
    assert counts.dropped == 5


async def test_delayed_frames_keep_their_order() -> None:
    heard, counts, seconds = await what_arrives(Faults(delay=1.0, max_delay_s=0.1))
    assert heard == b"".join(SENT)
    assert counts.delayed == len(SENT) and seconds > 0.1


async def test_in_a_partition_nothing_passes_and_a_cut_ends_connections() -> None:
    heard, counts, _ = await what_arrives(Faults(delay=1.0, max_delay_s=0.2, open_s=(0.05, 0.05), closed_s=(0.1, 0.1), cut=1.0))
    assert len(heard) < len(b"".join(SENT))
    assert counts.partitions >= 1 and counts.cuts >= 1
