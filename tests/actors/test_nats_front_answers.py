"""The NATS edge on the memory bus: numbered chunks, one final message, nothing held for clients that left."""

from __future__ import annotations

import json

import anyio
import pytest

from common.protocol import headers
from common.protocol.errors import NoWorkers, WorkerLost
from tests.actors.edge import EOS, ScriptedCore, ids, until
from tests.actors.nats_client import HI, TRACE, front, says

# ── answers ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_stream_is_numbered_and_its_last_message_says_all() -> None:
    async with front() as setup:
        await setup.client.ask(HI, Penstock_Request_Id="mine", traceparent=TRACE)
        stream = await setup.core.nth(0)
        assert not setup.client.replies
        stream.say("Hel")
        await until(lambda: setup.client.text == "Hel")
        stream.give([*ids("lo"), EOS], finish="stop", cached=2)
        await setup.client.final()
        replies = setup.client.replies
        assert [reply.headers[headers.SEQUENCE] for reply in replies] == [str(number) for number in range(len(replies))]
        assert {reply.headers[headers.REQUEST_ID] for reply in replies} == {"mine"}
        assert [headers.FINAL in reply.headers for reply in replies] == [False] * (len(replies) - 1) + [True]
        assert replies[0].headers[headers.TRACEPARENT] == replies[-1].headers[headers.TRACEPARENT] == TRACE
        chunks = [json.loads(reply.data) for reply in replies]
        assert {chunk["id"] for chunk in chunks} == {"mine"}
        assert setup.client.text == "Hello"
        assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
        assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
        assert chunks[-1]["usage"]["completion_tokens"] == 6
        assert chunks[-1]["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}
        assert stream.request.id != "mine", "ids inside are the server's own"


async def test_without_an_id_the_server_mints_one_and_tells_it() -> None:
    async with front() as setup:
        await setup.client.ask(HI)
        (await setup.core.nth(0)).say("x")
        await until(lambda: len(setup.client.replies) >= 2)
        minted = setup.client.last.headers[headers.REQUEST_ID]
        assert minted.startswith("chatcmpl-")
        await setup.client.cancel(minted)
        await setup.client.final()
        setup.client.check_error("cancelled")


async def test_a_whole_answer_is_one_message() -> None:
    async with front(says("hello")) as setup:
        await setup.client.ask({**HI, "stream": False}, Penstock_Request_Id="mine")
        await setup.client.final()
        [reply] = setup.client.replies
        body = json.loads(reply.data)
        assert body["object"] == "chat.completion"
        assert body["id"] == "mine"
        assert body["choices"][0]["message"]["content"] == "hello"


async def test_completions_and_several_choices() -> None:
    async with front(ScriptedCore(lambda stream: stream.say("ab", finish="length"))) as setup:
        await setup.client.ask({"prompt": "hi", "n": 3}, kind="completion")
        await setup.client.final()
        chunks = [json.loads(reply.data) for reply in setup.client.replies]
        texts = dict.fromkeys(range(3), "")
        for chunk in chunks:
            for choice in chunk["choices"]:
                texts[choice["index"]] += choice["text"]
        assert texts == dict.fromkeys(range(3), "ab")
        assert chunks[-1]["usage"]["completion_tokens"] == 6
        assert len(setup.client.finals) == 1


async def test_the_deadline_header_reaches_the_core() -> None:
    async with front(says("x")) as setup:
        await setup.client.ask(HI, Penstock_Deadline_Ms="1500")
        await setup.client.final()
        assert setup.core.streams[0].request.deadline_s == 1.5


@pytest.mark.parametrize("text", ["", "a"])
async def test_an_error_before_or_in_a_stream_is_the_final_message(text: str) -> None:
    async with front() as setup:
        await setup.client.ask(HI)
        stream = await setup.core.nth(0)
        stream.say(text, error=None if text else NoWorkers("none"))
        if text:
            await until(lambda: setup.client.text == "a")
            stream.give([], error=WorkerLost("gone"))
        await setup.client.final()
        setup.client.check_error("worker_lost" if text else "no_workers")


# ── ends ─────────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("n", [1, 3])
async def test_a_cancel_frees_everything_and_is_answered(n: int) -> None:
    async with front() as setup:
        await setup.client.ask({**HI, "n": n}, Penstock_Request_Id="mine")
        await setup.core.nth(n - 1)
        await setup.client.cancel("mine")
        await setup.client.final()
        setup.client.check_error("cancelled")
        await until(lambda: not setup.core.live)
        await setup.client.cancel("mine")
        await anyio.sleep(0.01)
        assert len(setup.client.finals) == 1


async def test_a_client_that_left_is_noticed_and_its_request_freed() -> None:
    async with front() as setup:
        await setup.client.ask(HI)
        stream = await setup.core.nth(0)
        stream.say("a")
        await until(lambda: setup.client.text == "a")
        await setup.client.leave()
        with anyio.fail_after(5):
            while setup.core.live:
                stream.say("b")
                await anyio.sleep(0.01)


async def test_most_chunks_ask_for_no_sign_of_life() -> None:
    async with front() as setup:
        await setup.client.ask(HI)
        stream = await setup.core.nth(0)
        for letter in "abcdefghij":
            stream.say(letter)
            await anyio.sleep(0.001)
        stream.say("", finish="stop")
        await setup.client.final()
        assert sum(bool(reply.reply) for reply in setup.client.replies) == 1


async def test_a_control_message_that_a_client_forges_ends_only_its_own_request() -> None:
    async with front() as setup:
        await setup.client.ask(HI)
        stream = await setup.core.nth(0)
        stream.say("a")
        await until(lambda: setup.client.text == "a")
        control = next(reply.reply for reply in setup.client.replies if reply.reply)
        await setup.client.bus.publish(control, b"anything")
        await anyio.sleep(0.01)
        assert setup.core.live == [stream]
        stream.say("", finish="stop")
        await setup.client.final()


async def test_during_a_drain_nothing_new_is_taken_and_what_runs_ends_well() -> None:
    async with front() as setup, anyio.create_task_group() as group:
        await setup.client.ask(HI)
        stream = await setup.core.nth(0)
        drained = anyio.Event()

        async def drain() -> None:
            await setup.front.drain()
            drained.set()

        group.start_soon(drain)
        await anyio.sleep(0.01)
        await setup.client.ask(HI)
        await anyio.sleep(0.01)
        assert len(setup.core.streams) == 1
        assert not drained.is_set()
        stream.say("x", finish="stop")
        await setup.client.final()
        with anyio.fail_after(5):
            await drained.wait()


async def test_a_front_that_is_stopped_tells_its_clients() -> None:
    async with front() as setup:
        await setup.client.ask(HI)
        (await setup.core.nth(0)).say("a")
        await until(lambda: setup.client.text == "a")
    await until(lambda: bool(setup.client.finals))
    setup.client.check_error("shutting_down")
