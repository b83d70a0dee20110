"""Scores of prompts at both edges: what clients see of them, and what the core is asked for."""

from __future__ import annotations

import json
from typing import Any

import pytest

from common.protocol.errors import Overloaded
from common.protocol.messages import SamplingParams
from services.gateway.config import GatewayConfig
from services.gateway.generation import GenerationRequest
from services.gateway.prompt_scores import ScoredStream
from tests.actors.edge import EOS, AsgiClient, ScriptedCore, ScriptedStream, app_of, ids
from tests.actors.http_site import CHAT
from tests.actors.nats_client import front

COMPLETIONS = "/v1/completions"


def play(stream: ScriptedStream) -> None:
    """Scores what is to be scored, in two parts, and answers `z`."""
    if stream.request.given:
        stream.give(stream.request.given, finish="stop")
    else:
        stream.say("z", finish="length")


async def post(body: dict[str, Any], *, path: str = COMPLETIONS, core: ScriptedCore | None = None, **settings: Any) -> Any:
    client = AsgiClient(app_of(core or ScriptedCore(play), GatewayConfig(**settings)), path, body)
    await client.run()
    return client


async def answer(body: dict[str, Any], **options: Any) -> Any:
    client = await post(body, **options)
    assert client.status == 200, client.body
    return json.loads(client.body)


async def test_echo_lists_the_prompt_and_the_answer_as_lm_eval_reads_them() -> None:
    core = ScriptedCore(play)
    body = await answer({"prompt": "abc", "echo": True, "logprobs": 1, "max_tokens": 1, "temperature": 0}, core=core)
    (choice,) = body["choices"]
    assert choice["text"] == "abcz"
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == ["a", "b", "c", "z"]
    assert logprobs["token_logprobs"] == [None, -0.25, -0.25, -0.25]
    assert logprobs["text_offset"] == [0, 1, 2, 3]
    assert logprobs["top_logprobs"][0] is None
    assert all(len(one) == 2 for one in logprobs["top_logprobs"][1:])
    assert body["usage"]["prompt_tokens"] == 3 and body["usage"]["completion_tokens"] == 1
    scoring, generation = (stream.request for stream in core.streams)
    assert (scoring.prompt, scoring.given) == (ids("a"), ids("bc"))
    assert (scoring.sampling.max_tokens, scoring.sampling.logprobs, scoring.sampling.stop_token_ids) == (2, 1, [])
    assert (generation.prompt, generation.given) == (ids("abc"), [])
    assert not core.live


async def test_kv_that_the_reading_of_a_prompt_computed_is_not_told_as_cached() -> None:
    def play_cached(stream: ScriptedStream) -> None:
        if stream.request.given:
            play(stream)
        else:
            stream.say("z", finish="length", cached=2)

    body = await answer({"prompt": "abc", "prompt_logprobs": 1, "max_tokens": 1}, core=ScriptedCore(play_cached))
    assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    body = await answer({"prompt": "abc", "max_tokens": 1}, core=ScriptedCore(play_cached))
    assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}


async def test_max_tokens_0_generates_nothing() -> None:
    core = ScriptedCore(play)
    body = await answer({"prompt": ["abc", "de", "f"], "echo": True, "logprobs": 0, "max_tokens": 0}, core=core)
    assert [choice["text"] for choice in body["choices"]] == ["abc", "de", "f"]
    assert [choice["logprobs"]["token_logprobs"] for choice in body["choices"]] == [[None, -0.25, -0.25], [None, -0.25], [None]]
    assert [choice["finish_reason"] for choice in body["choices"]] == ["length"] * 3
    assert body["choices"][0]["logprobs"]["top_logprobs"] is None
    assert body["usage"] == {
        "prompt_tokens": 6,
        "completion_tokens": 0,
        "total_tokens": 6,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert [stream.request.given for stream in core.streams] == [ids("bc"), ids("e")]  # one token follows nothing
    bare = await answer({"prompt": "abc", "echo": True, "max_tokens": 0})
    assert bare["choices"][0]["text"] == "abc" and bare["choices"][0]["logprobs"] is None


async def test_token_ids_are_scored_as_they_are() -> None:
    core = ScriptedCore(play)
    body = await answer({"prompt": [[*ids("ab"), EOS], ids("cd")], "echo": True, "logprobs": 2, "max_tokens": 1}, core=core)
    first, second = body["choices"]
    assert (first["text"], second["text"]) == ("abz", "cdz")
    assert first["logprobs"]["text_offset"] == [0, 1, 2, 2]
    assert core.streams[0].request.given == [*ids("b"), EOS]
    assert second["logprobs"]["tokens"] == ["c", "d", "z"]


async def test_prompt_logprobs_are_those_of_vllm() -> None:
    body = await answer({"prompt": "abc", "prompt_logprobs": 1, "max_tokens": 1})
    (choice,) = body["choices"]
    assert choice["text"] == "z" and choice["logprobs"] is None
    first, second, third = choice["prompt_logprobs"]
    assert first is None
    token = str(ids("b")[0])
    assert list(second) == [token, "0"]
    assert second[token] == {"logprob": -0.25, "rank": 0, "decoded_token": "b"}
    assert second["0"]["rank"] == 1 and second["0"]["logprob"] == -1.0
    assert next(iter(third)) == str(ids("c")[0])


async def test_a_chat_tells_prompt_logprobs_once_beside_its_choices() -> None:
    core = ScriptedCore(play)
    messages = [{"role": "user", "content": "hi"}]
    body = await answer({"messages": messages, "prompt_logprobs": 0, "max_tokens": 1, "n": 2}, path=CHAT, core=core)
    assert [choice["message"]["content"] for choice in body["choices"]] == ["z", "z"]
    assert "prompt_logprobs" not in body["choices"][0]
    told = body["prompt_logprobs"]
    assert told[0] is None and all(len(one) == 1 for one in told[1:])
    assert len(told) == body["usage"]["prompt_tokens"]
    assert sum(bool(stream.request.given) for stream in core.streams) == 1


async def test_echo_and_prompt_logprobs_may_list_different_numbers() -> None:
    body = await answer({"prompt": "abc", "echo": True, "logprobs": 1, "prompt_logprobs": 3, "max_tokens": 0})
    (choice,) = body["choices"]
    assert [len(one) for one in choice["logprobs"]["top_logprobs"][1:]] == [2, 2]
    assert [len(one) for one in choice["prompt_logprobs"][1:]] == [4, 4]


async def test_a_stream_tells_the_prompt_first() -> None:
    body = {"prompt": "abc", "echo": True, "logprobs": 0, "max_tokens": 1, "stream": True}
    client = await post(body)
    events = [event for event in client.events if isinstance(event, dict)]
    assert "".join(event["choices"][0]["text"] for event in events) == "abcz"
    tokens = [token for event in events for token in (event["choices"][0]["logprobs"] or {"tokens": []})["tokens"]]
    assert tokens == ["a", "b", "c", "z"]


async def test_a_worker_without_room_for_the_answer_is_an_error_with_nothing_held() -> None:
    def full_for_the_answer(stream: ScriptedStream) -> None:
        core.capacity = 0
        stream.give(stream.request.given, finish="stop")

    core = ScriptedCore(full_for_the_answer)
    client = await post({"prompt": "abc", "echo": True, "logprobs": 0, "max_tokens": 1}, core=core)
    assert client.status == Overloaded.http_status
    assert not core.live


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": "a", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "a", "max_tokens": 0, "logprobs": 1}, "max_tokens"),
        ({"prompt": "a", "prompt_logprobs": -1}, "prompt_logprobs"),
        ({"prompt": "a", "prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt": "a", "prompt_logprobs": True}, "prompt_logprobs"),
        ({"prompt": "a", "prompt_logprobs": "1"}, "prompt_logprobs"),
        ({"prompt": "a", "prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"prompt": [[5, 100000]], "echo": True, "logprobs": 1}, "prompt"),
        ({"prompt": [], "echo": True, "logprobs": 1}, "prompt"),
        ({"prompt": "", "echo": True, "logprobs": 1}, "prompt"),
        ({"prompt": "a" * 512, "echo": True, "logprobs": 1}, "prompt"),
        ({"prompt": "abcdefgh", "echo": True, "logprobs": 20, "max_tokens": 0}, "prompt"),
    ],
)
async def test_what_can_not_be_told_is_refused_by_name_before_anything_is_asked(body: dict[str, Any], param: str) -> None:
    core = ScriptedCore(play)
    client = await post(body, core=core, max_answer_values=100)
    assert client.status == 400, client.body
    assert json.loads(client.body)["error"]["param"] == param
    assert not core.streams


async def test_false_asks_for_nothing() -> None:
    body = await answer({"prompt": "a", "prompt_logprobs": False, "max_tokens": 1})
    assert "prompt_logprobs" not in body["choices"][0]


async def test_over_nats_scores_come_in_chunks_and_prompt_logprobs_in_one_answer() -> None:
    async with front(ScriptedCore(play)) as setup:
        for tokens, asked in ((1, "abc"), (0, "abc"), (0, "a")):
            setup.client.replies.clear()
            body = {"prompt": asked, "echo": True, "logprobs": 0, "max_tokens": tokens}
            await setup.client.ask(body, kind="completion")
            await setup.client.final()
            choices = [json.loads(reply.data)["choices"][0] for reply in setup.client.replies]
            assert "".join(choice["text"] for choice in choices) == asked + "z" * tokens
            told = [token for choice in choices for token in (choice["logprobs"] or {"tokens": []})["tokens"]]
            assert told == list(asked) + ["z"] * tokens
        setup.client.replies.clear()
        await setup.client.ask({"prompt": "abc", "prompt_logprobs": 0, "max_tokens": 0}, kind="completion")
        await setup.client.final()
        assert setup.client.check_error("invalid_parameter")["param"] == "prompt_logprobs"
        setup.client.replies.clear()
        whole = {"prompt": "abc", "prompt_logprobs": 0, "max_tokens": 0, "stream": False}
        await setup.client.ask(whole, kind="completion")
        await setup.client.final()
        assert len(json.loads(setup.client.last.data)["choices"][0]["prompt_logprobs"]) == 3


async def test_a_long_prompt_is_told_in_chunks_that_a_message_holds() -> None:
    async with front(ScriptedCore(play)) as setup:
        body = {"prompt": "x" * 500, "echo": True, "logprobs": 20, "max_tokens": 1}
        await setup.client.ask(body, kind="completion")
        await setup.client.final()
        choices = [json.loads(reply.data)["choices"][0] for reply in setup.client.replies]
        assert sum(len((choice["logprobs"] or {"tokens": []})["tokens"]) for choice in choices) == 501
        assert len(choices) > 10
        assert max(len(reply.data) for reply in setup.client.replies) < 64 * 1024


async def test_a_prompt_that_took_its_time_leaves_less_for_the_answer() -> None:
    core, now = ScriptedCore(), [10.0]
    request = GenerationRequest(id="r", prompt=[1, 2, 3], sampling=SamplingParams(max_tokens=4), deadline_s=5.0)
    stream = ScoredStream(core.generate, request, top=0, generates=True, clock=lambda: now[0])
    now[0] += 3.0
    core.streams[0].give([2, 3], finish="length")
    await stream.next()
    assert [each.request.deadline_s for each in core.streams] == [5.0, 2.0]
