"""A body of `/v1/responses`: what it may hold, and how what is not obeyed is judged. Pure."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from common.protocol.errors import InvalidParameter
from services.gateway import arguments, openai
from services.gateway.arguments import ANY, Notes, Scope
from services.gateway.json_slices import Steps
from services.gateway.objects import Objects
from services.gateway.openai import SharedArguments
from services.gateway.parse import SMALL_BYTES, TOOLS

MAX_ITEMS = openai.MAX_MESSAGES
LOGPROBS = "message.output_text.logprobs"
"""What `include` adds to an answer."""
STATELESS = "nothing is stored here: send the earlier items in input"

Name = Annotated[str, Meta(max_length=256)]


class InputPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """A piece of text in an item. `refusal` is the text of a part of that type."""

    type: str
    text: str | None = None
    refusal: str | None = None


class InputItem(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An item of any type; one without a type is a message. `summary` stands for reasoning that has no `content`."""

    type: Annotated[str, Meta(max_length=64)] | None = None
    role: str | None = None
    content: str | list[InputPart] | None = None
    call_id: Name | None = None
    name: str | None = None
    arguments: str | None = None
    namespace: Name | None = None
    input: str | None = None
    output: str | list[InputPart] | None = None
    summary: list[InputPart] | None = None


class ReasoningOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    effort: Annotated[str, Meta(max_length=32)] | None = None


class TextOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    format: dict[str, Any] | None = None


class ResponsesRequest(SharedArguments, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/responses. `metadata` and `user` come back in the answer."""

    input: str | list[InputItem]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    include: Annotated[list[Annotated[str, Meta(max_length=64)]], Meta(max_length=32)] | None = None
    metadata: (
        Annotated[dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]], Meta(max_length=16)] | None
    ) = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningOptions | None = None
    text: TextOptions | None = None
    tool_choice: str | dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=openai.MAX_LOGPROBS)] | None = None
    user: Annotated[str, Meta(max_length=512)] | None = None


REFUSED: arguments.Table = {
    **arguments.REFUSED,
    "add_generation_prompt": (True,),
    "background": (False,),
    "best_of": (1,),
    "chat_template_kwargs": ({},),
    "context_management": ([],),
    "conversation": (),
    "logprobs": (False,),
    "max_completion_tokens": (),
    "max_tokens": (),
    "messages": (),
    "n": (1,),
    "previous_response_id": ("",),
    "prompt": (),
    "response_format": ({"type": "text"},),
    "structured_outputs": ({},),
    "prompt_logprobs": (),  # 0 asks for those of the tokens themselves
    "truncation": ("disabled",),
}
IGNORED: arguments.Table = {
    **arguments.IGNORED,
    "prediction": (),  # looked up for chats and completions alone
    "max_tool_calls": (),  # OpenAI's limits its own tools
    "stream_options": ({}, {"include_obfuscation": False}, {"include_usage": True}),
}
_PARTS_REFUSED: arguments.Table = {
    **arguments.PART_REFUSED,
    **dict.fromkeys(("file_data", "file_id", "file_url"), ()),
}
_PART = Scope(
    InputPart.__struct_fields__,
    _PARTS_REFUSED,
    {"annotations": (ANY,), "cache_control": (), "detail": (ANY,), "id": (ANY,), "logprobs": (ANY,), "parsed": (ANY,)},
    "input[].content[].",
    "content with {} is not supported yet: send text",
)
_ITEM = Scope(
    InputItem.__struct_fields__,
    {},
    {
        "async": (False,),
        "caller": ({"type": "direct"},),
        "encrypted_content": ("",),
        "id": (ANY,),
        "parsed_arguments": (ANY,),  # what openai's client made of `arguments`
        "phase": (ANY,),
        "status": (ANY,),
    },
    "input[].",
)
_BODY = Scope(
    ResponsesRequest.__struct_fields__,
    REFUSED,
    IGNORED,
    hints={
        "chat_template_kwargs": "send reasoning, or use /v1/chat/completions",
        "conversation": STATELESS,
        "logprobs": f"send include: [{LOGPROBS}]",
        "max_completion_tokens": "send max_output_tokens",
        "max_tokens": "send max_output_tokens",
        "messages": "send input",
        "previous_response_id": STATELESS,
        "reasoning_effort": "send reasoning: {effort: …}",
        "response_format": "send text: {format: …}",
        "truncation": "send disabled, and what fits the context",
    },
)
INCLUDE = Scope(
    (LOGPROBS,),
    {},
    dict.fromkeys(
        (
            "code_interpreter_call.outputs",
            "computer_call_output.output.image_url",
            "file_search_call.results",
            "message.input_image.image_url",
            "reasoning.encrypted_content",  # reasoning is told as it is
            "web_search_call.action.sources",
            "web_search_call.results",
        ),
        (),
    ),
    "include.",
)
_REASONING = Scope(
    ReasoningOptions.__struct_fields__, {}, {"generate_summary": (), "summary": (), "context": ("auto",)}, "reasoning."
)
_TEXT = Scope(TextOptions.__struct_fields__, {"verbosity": ("medium",)}, {}, "text.")
RESPONSES_SCOPES: dict[type[msgspec.Struct], Scope] = {
    ResponsesRequest: _BODY,
    InputItem: _ITEM,
    InputPart: _PART,
    ReasoningOptions: _REASONING,
    TextOptions: _TEXT,
}
"""Every type that something in a body is decoded with, and how the rest of the object is judged."""


def too_many_parts(_: str = "") -> InvalidParameter:
    return InvalidParameter(f"input has more than {openai.MAX_PARTS} content parts", param="input")


def too_many_items(_: str = "") -> InvalidParameter:
    return InvalidParameter(f"input has more than {MAX_ITEMS} items", param="input")


_PARTS = Objects(InputPart, _PART, limit=openai.MAX_PARTS, too_many=too_many_parts, texts=("text",), numbered=False)
_ITEMS = Objects(
    InputItem,
    _ITEM,
    limit=MAX_ITEMS,
    too_many=too_many_items,
    texts=("content", "arguments", "input", "output"),
    lists={"content": _PARTS, "output": _PARTS, "summary": _PARTS},
)
_REQUEST = Objects(
    ResponsesRequest,
    _BODY,
    texts=("input", "instructions"),
    lists={"input": _ITEMS},
    free={"tools": TOOLS},
    inner={"reasoning": _REASONING, "text": _TEXT},
    required={"input": b'""'},
)


def read_responses(body: bytes, notes: Notes) -> Steps[ResponsesRequest]:
    """:raises InvalidParameter: naming the argument."""
    if len(body) <= SMALL_BYTES:
        return _REQUEST.one(body, notes)
    return (yield from _REQUEST.large(body, None, notes))
