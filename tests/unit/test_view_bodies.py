"""No step of reading a huge body holds the event loop, whatever the view."""

from __future__ import annotations

import gc
import time

import pytest

from common.protocol.errors import InvalidParameter, RequestError
from services.gateway import openai
from services.gateway.arguments import Notes
from services.gateway.views.messages import MESSAGES
from services.gateway.views.openai_views import CHAT
from services.gateway.views.responses import RESPONSES
from services.gateway.views.view import View

MIB = 1024 * 1024
MAX_STEP_S = 0.015
LONG = "x" * 300


def repeated(piece: str, count: int = 0) -> str:
    """`piece` so often, or until there are 8 MiB."""
    return ",".join([piece] * (count or 8 * MIB // (len(piece) + 1)))


CALL = '{"type":"function_call","call_id":"a","name":"f","arguments":"{}"}'
OUTPUT = '{"type":"function_call_output","call_id":"a","output":"' + LONG + '"}'
USE = '{"role":"assistant","content":[{"type":"tool_use","id":"a","name":"f","input":{}}]}'
RESULT = '{"role":"user","content":[{"type":"tool_result","tool_use_id":"a","content":"' + LONG + '"}]}'
TOOL = '{"type":"function","function":{"name":"f","parameters":{"enum":[%s]}}}'
FLAT_TOOL = '{"type":"function","name":"f","%s":{"enum":[%s]}}'
NUMBERS = repeated("1", 32_000)
BLOCK = '{"type":"text","text":"' + LONG + '","cache_control":{}}'

SERVED: dict[str, tuple[View, str]] = {
    "turns": (RESPONSES, '{"input":[' + repeated(f"{CALL},{OUTPUT}", openai.MAX_MESSAGES // 2) + "]}"),
    "text": (RESPONSES, '{"input":"' + "\\n" * (4 * MIB) + '"}'),
    "turns of blocks": (
        MESSAGES,
        '{"max_tokens":1,"messages":[' + repeated(f"{USE},{RESULT}", openai.MAX_MESSAGES // 2) + "]}",
    ),
    "tools of a chat": (CHAT, '{"messages":[{"role":"user","content":"x"}],"tools":[' + repeated(TOOL % NUMBERS, 16) + "]}"),
    "tools of a response": (RESPONSES, '{"input":"x","tools":[' + repeated(FLAT_TOOL % ("parameters", NUMBERS), 16) + "]}"),
    "tools of a message": (
        MESSAGES,
        '{"max_tokens":1,"messages":[{"role":"user","content":"x"}],"tools":['
        + repeated(FLAT_TOOL.replace("function", "custom") % ("input_schema", NUMBERS), 16)
        + "]}",
    ),
    "blocks": (
        MESSAGES,
        '{"max_tokens":1,"messages":[{"role":"user","content":[' + repeated(BLOCK, openai.MAX_PARTS) + "]}]}",
    ),
}
REFUSED: dict[str, tuple[View, str]] = {
    "items": (RESPONSES, '{"input":[' + repeated('{"role":"user","content":""}') + "]}"),
    "parts": (RESPONSES, '{"input":[{"role":"user","content":[' + repeated('{"type":"input_text","text":""}') + "]}]}"),
    "tools": (RESPONSES, '{"input":"x","tools":[' + repeated("{}") + "]}"),
    "large tools": (
        RESPONSES,
        '{"input":"x","tools":[' + repeated('{"type":"function","name":"' + "f" * 30_000 + '"}', 40) + "]}",
    ),
    "metadata": (RESPONSES, '{"input":"x","metadata":{' + repeated('"a":"b"') + "}}"),
    "messages": (MESSAGES, '{"max_tokens":1,"messages":[' + repeated('{"role":"user","content":""}') + "]}"),
    "input": (
        MESSAGES,
        '{"max_tokens":1,"messages":[{"role":"assistant","content":[{"type":"tool_use","id":"a","name":"f","input":{'
        + repeated('"a":1')
        + "}}]}]}",
    ),
    "system": (MESSAGES, '{"max_tokens":1,"messages":[],"system":[' + repeated('{"type":"text","text":""}') + "]}"),
}


def longest_step_s(view: View, body: bytes) -> float:
    """CPU seconds, without the garbage collector, as `Intake.run` does it."""
    steps = view.parse(body, max_prompt_tokens=8191, notes=Notes())
    longest_s = 0.0
    gc.collect()
    gc.disable()
    try:
        while True:
            began = time.thread_time()
            try:
                next(steps)
            finally:
                longest_s = max(longest_s, time.thread_time() - began)
    except StopIteration:
        return longest_s
    except RequestError as error:
        assert longest_s < MAX_STEP_S
        raise error
    finally:
        gc.enable()


@pytest.mark.parametrize("name", SERVED)
def test_a_large_body_is_read_in_short_steps(name: str) -> None:
    view, body = SERVED[name]
    assert longest_step_s(view, body.encode()) < MAX_STEP_S


@pytest.mark.parametrize("name", REFUSED)
def test_a_huge_body_is_refused_in_short_steps(name: str) -> None:
    view, body = REFUSED[name]
    with pytest.raises(InvalidParameter):
        longest_step_s(view, body.encode())
