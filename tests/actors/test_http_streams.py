"""The HTTP edge on a scripted core: streams in OpenAI's form, and nothing held for clients that left."""

from __future__ import annotations

import anyio
import pytest

from common.protocol.errors import WorkerLost
from tests.actors.edge import EOS, AsgiClient, ScriptedCore, app_of, ids, until
from tests.actors.http_client import CHAT, COMPLETIONS, HI, config, streaming


async def test_a_stream_chunk_by_chunk() -> None:
    async with streaming({**HI, "stream_options": {"include_usage": True}}) as (request, core):
        stream = core.streams[0]
        assert request.status == 0, "the status waits for the first output"
        stream.say("Hel")
        await until(lambda: request.text == "Hel")
        stream.say("lo")
        await until(lambda: request.text == "Hello")
        stream.give([EOS], finish="stop", cached=3)
        await until(lambda: request.done)
        *chunks, usage, done = request.events
        assert request.headers["content-type"].startswith("text/event-stream")
        assert done == "[DONE]"
        assert [choice["delta"] for chunk in chunks for choice in chunk["choices"]] == [
            {"role": "assistant", "content": ""},
            {"content": "Hel"},
            {"content": "lo"},
            {},
        ]
        assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, None, "stop"]
        assert all(chunk["usage"] is None for chunk in chunks)
        assert usage["choices"] == []
        assert usage["usage"]["completion_tokens"] == 6
        assert usage["usage"]["prompt_tokens_details"] == {"cached_tokens": 3}
        assert len({event["id"] for event in [*chunks, usage]}) == 1
        assert not core.live


async def test_tokens_that_waited_while_the_client_read_slowly_share_a_chunk() -> None:
    async with streaming(HI) as (request, core):
        core.streams[0].say("a")
        await until(lambda: request.text == "a")
        request.stall()
        for letter in "bcdefg":
            core.streams[0].say(letter)
            await anyio.sleep(0.002)
        request.reading.set()
        core.streams[0].say("", finish="length")
        await until(lambda: request.done)
        assert request.text == "abcdefg"
        assert len(request.writes) <= 4


async def test_characters_are_never_split() -> None:
    async with streaming(HI) as (request, core):
        for token in ids("🙂é"):
            core.streams[0].give([token])
            await anyio.sleep(0.001)
        core.streams[0].say("", finish="stop")
        await until(lambda: request.done)
        texts = [choice["delta"].get("content") for event in request.events[:-1] for choice in event["choices"]]
        assert texts == ["", "🙂", "é", None]


async def test_a_stop_string_ends_the_stream_and_frees_the_workers() -> None:
    async with streaming({**HI, "stop": ["END"]}) as (request, core):
        core.streams[0].say("ab E")
        await until(lambda: request.text == "ab ")
        core.streams[0].say("ND and more")
        await until(lambda: request.done)
        assert request.text == "ab "
        assert request.events[-2]["choices"][0]["finish_reason"] == "stop"
        assert not core.live


async def test_an_error_in_a_stream_is_its_last_event() -> None:
    async with streaming(HI) as (request, core):
        core.streams[0].say("a")
        await until(lambda: request.text == "a")
        core.streams[0].give([], error=WorkerLost("the worker went away"))
        await until(lambda: request.done)
        assert request.events[-1]["error"]["code"] == "worker_lost"
        assert not core.live


async def test_choices_are_interleaved_and_each_ends_by_itself() -> None:
    async with streaming({**HI, "n": 3}, streams=3) as (request, core):
        first, second, third = core.streams
        second.say("b")
        await until(lambda: request.text == "b")
        first.say("a")
        third.say("c", finish="length")
        await until(lambda: len(request.text) == 3)
        assert not request.done
        first.say("", finish="stop")
        second.say("B", finish="stop")
        await until(lambda: request.done)
        by_choice = {0: "", 1: "", 2: ""}
        ends = {}
        for event in request.events[:-1]:
            for choice in event["choices"]:
                by_choice[choice["index"]] += choice["delta"].get("content", "")
                ends[choice["index"]] = choice["finish_reason"]
        assert by_choice == {0: "a", 1: "bB", 2: "c"}
        assert ends == {0: "stop", 1: "stop", 2: "length"}
        assert len({stream.request.sampling.seed for stream in core.streams}) == 3


async def test_a_stop_string_in_one_choice_leaves_the_others_alone() -> None:
    async with streaming({**HI, "n": 2, "stop": "."}, streams=2) as (request, core):
        core.streams[0].say("a.b")
        await until(lambda: core.streams[0].cancelled > 0)
        assert not core.streams[1].cancelled
        core.streams[1].say("c", finish="length")
        await until(lambda: request.done)
        assert request.text == "ac"
        assert request.events[-1] == "[DONE]"


async def test_one_choices_error_ends_them_all() -> None:
    async with streaming({**HI, "n": 3}, streams=3) as (request, core):
        core.streams[0].say("a")
        await until(lambda: request.text == "a")
        core.streams[1].give([], error=WorkerLost("gone"))
        await until(lambda: request.done)
        assert request.events[-1]["error"]["code"] == "worker_lost"
        assert not core.live


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("tokens_before", [0, 1])
async def test_a_client_that_hangs_up_frees_everything_at_once(n: int, tokens_before: int) -> None:
    async with streaming({**HI, "n": n}, streams=n) as (request, core):
        core.streams[0].say("a" * tokens_before)
        await anyio.sleep(0.01)
        request.hang_up()
        await until(lambda: not core.live, within_s=1)
        await until(lambda: request.done, within_s=1)


async def test_a_client_of_a_whole_answer_that_hangs_up_frees_everything() -> None:
    core = ScriptedCore()
    async with anyio.create_task_group() as group:
        request = AsgiClient(app_of(core, config()), CHAT, HI)
        group.start_soon(request.run)
        await core.nth(0)
        request.hang_up()
    assert not core.live


async def test_a_reader_that_stalls_is_cut_off_and_its_workers_are_freed() -> None:
    async with streaming(HI, slow_reader_timeout_s=0.1) as (request, core):
        core.streams[0].say("a")
        await until(lambda: request.text == "a")
        request.stall()
        core.streams[0].say("b")
        await until(lambda: not core.live, within_s=1)
        await until(lambda: request.done, within_s=1)
        taken = core.streams[0].taken
        core.streams[0].say("c" * 100)
        await anyio.sleep(0.01)
        assert core.streams[0].taken == taken, "nothing is read for a client that does not read"


async def test_an_idle_stream_is_kept_open_by_comments() -> None:
    async with streaming(HI, sse_keepalive_s=0.02) as (request, core):
        await anyio.sleep(0.1)
        assert request.status == 0
        core.streams[0].say("a")
        await until(lambda: b": keep-alive\n\n" in request.writes)
        core.streams[0].say("", finish="stop")
        await until(lambda: request.done)
        assert request.text == "a"


async def test_completion_chunks_and_streamed_logprobs() -> None:
    async with streaming({"prompt": "hi", "logprobs": 1, "echo": None, "stop": "XY"}, path=COMPLETIONS) as (request, core):
        core.streams[0].say("aX")
        await anyio.sleep(0.01)
        core.streams[0].say("b", finish="length")
        await until(lambda: request.done)
        choices = [choice for event in request.events[:-1] for choice in event["choices"]]
        assert "".join(choice["text"] for choice in choices) == "aXb"
        scored = [choice["logprobs"] for choice in choices if choice["logprobs"]]
        assert [token for scores in scored for token in scores["tokens"]] == ["a", "X", "b"]
        assert [offset for scores in scored for offset in scores["text_offset"]] == [0, 1, 2]
        assert choices[-1]["finish_reason"] == "length"
        assert request.events[0]["object"] == "text_completion"
