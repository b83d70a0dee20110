"""A body of `/v1/messages`: what it may hold, and how what is not obeyed is judged. Pure."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from common.protocol.errors import InvalidParameter
from services.gateway import arguments, openai
from services.gateway.arguments import ANY, Notes, Scope
from services.gateway.json_slices import Steps
from services.gateway.objects import Objects
from services.gateway.openai import SharedArguments, StopString
from services.gateway.parse import SMALL_BYTES, TOOLS

Id = Annotated[str, Meta(max_length=256)]


class InnerBlock(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """A block of a tool's result, or of the system prompt."""

    type: str
    text: str | None = None


class Block(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A block of a message, of any type. `input` is JSON as it was sent."""

    type: str
    text: str | None = None
    thinking: str | None = None
    id: Id | None = None
    name: str | None = None
    input: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    tool_use_id: Id | None = None
    content: str | list[InnerBlock] | None = None


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    role: str
    content: str | list[Block]


class Thinking(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`budget_tokens` is checked, and has no effect: nothing here ends reasoning early."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Meta(ge=1)] | None = None


class OutputConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    effort: Annotated[str, Meta(max_length=32)] | None = None
    format: dict[str, Any] | None = None


class ToolChoice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    type: Literal["auto", "any", "tool", "none"]
    name: Annotated[str, Meta(max_length=256)] | None = None
    disable_parallel_tool_use: bool | None = None


class MessagesRequest(SharedArguments, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/messages. `stop` is another name of `stop_sequences`; `output_format` is one of `output_config.format`."""

    messages: list[Message]
    max_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    system: str | list[InnerBlock] | None = None
    stop_sequences: Annotated[list[StopString], Meta(max_length=openai.MAX_STOPS)] | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: dict[str, Any] | None = None
    tool_choice: ToolChoice | None = None
    tools: list[dict[str, Any]] | None = None


REFUSED: arguments.Table = {
    **arguments.REFUSED,
    "add_generation_prompt": (True,),
    "best_of": (1,),
    "chat_template_kwargs": ({},),
    "container": (),
    "context_management": ({}, {"edits": []}, {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}),
    "input": (),
    "instructions": (),
    "logprobs": (False,),
    "max_completion_tokens": (),
    "mcp_servers": ([],),
    "n": (1,),
    "response_format": ({"type": "text"},),
    "structured_outputs": ({},),
    "prompt_logprobs": (),  # 0 asks for those of the tokens themselves
    "top_logprobs": (0,),
}
IGNORED: arguments.Table = {
    **arguments.IGNORED,
    "prediction": (),  # looked up for chats and completions alone
    "inference_geo": (),
    "metadata": ({},),
    "service_tier": ("auto", "standard_only"),
    "speed": ("standard",),
    "stream_options": ({}, {"include_usage": True}),
}
_BLOCK_REFUSED: arguments.Table = dict.fromkeys(("source", "file_id", "image_url", "input_audio"), ())
_REFUSAL = "content with {} is not supported yet: send text"
_INNER = Scope(
    InnerBlock.__struct_fields__,
    _BLOCK_REFUSED,
    {"cache_control": (), "citations": (ANY,)},
    "messages[].content[].content[].",
    _REFUSAL,
)
_SYSTEM = Scope(InnerBlock.__struct_fields__, _BLOCK_REFUSED, _INNER.ignored, "system[].", _REFUSAL)
_BLOCK = Scope(
    Block.__struct_fields__,
    _BLOCK_REFUSED,
    {
        "cache_control": (),
        "caller": (ANY,),
        "citations": (ANY,),
        "data": (),  # of redacted_thinking
        "is_error": (False,),  # no template has a place for it
        "signature": (ANY,),
    },
    "messages[].content[].",
    _REFUSAL,
)
_MESSAGE = Scope(Message.__struct_fields__, {}, {"id": (ANY,), "cache_control": ()}, "messages[].")
_THINKING = Scope(Thinking.__struct_fields__, {}, {"display": (ANY,)}, "thinking.")
_OUTPUT = Scope(OutputConfig.__struct_fields__, {"task_budget": ()}, {}, "output_config.")
_CHOICE = Scope(ToolChoice.__struct_fields__, {}, {}, "tool_choice.")
_BODY = Scope(
    MessagesRequest.__struct_fields__,
    REFUSED,
    IGNORED,
    hints={
        "input": "send messages",
        "instructions": "send system",
        "max_completion_tokens": "send max_tokens",
        "reasoning_effort": "send output_config: {effort: …}",
        "response_format": "send output_config: {format: …}",
    },
)
MESSAGES_SCOPES: dict[type[msgspec.Struct], Scope] = {
    MessagesRequest: _BODY,
    Message: _MESSAGE,
    Block: _BLOCK,
    InnerBlock: _INNER,
    Thinking: _THINKING,
    OutputConfig: _OUTPUT,
    ToolChoice: _CHOICE,
}
"""Every type that something in a body is decoded with, and how the rest of the object is judged."""
TOOL = Scope(
    ("name", "description", "input_schema", "type", "strict"),
    {},
    {
        "allowed_callers": (["direct"],),
        "cache_control": (),
        "defer_loading": (False,),
        "eager_input_streaming": (ANY,),
        "input_examples": ([],),
    },
    "tools[].",
)
BUDGET = Scope((), {}, {"budget_tokens": ()}, "thinking.")


def too_many_blocks(_: str = "") -> InvalidParameter:
    return InvalidParameter(f"messages have more than {openai.MAX_PARTS} content blocks", param="messages")


def too_many_messages(_: str = "") -> InvalidParameter:
    return InvalidParameter(f"messages has more than {openai.MAX_MESSAGES} entries", param="messages")


_INNERS = Objects(InnerBlock, _INNER, limit=openai.MAX_PARTS, too_many=too_many_blocks, texts=("text",))
_SYSTEMS = Objects(InnerBlock, _SYSTEM, limit=openai.MAX_PARTS, too_many=too_many_blocks, texts=("text",))
_BLOCKS = Objects(
    Block,
    _BLOCK,
    limit=openai.MAX_PARTS,
    too_many=too_many_blocks,
    texts=("text", "thinking", "content"),
    lists={"content": _INNERS},
)
_MESSAGES = Objects(
    Message,
    _MESSAGE,
    limit=openai.MAX_MESSAGES,
    too_many=too_many_messages,
    texts=("content",),
    lists={"content": _BLOCKS},
    required={"content": b'""'},
)
_REQUEST = Objects(
    MessagesRequest,
    _BODY,
    texts=("system",),
    lists={"messages": _MESSAGES, "system": _SYSTEMS},
    free={"tools": TOOLS},
    inner={"thinking": _THINKING, "output_config": _OUTPUT, "tool_choice": _CHOICE},
    required={"messages": b"[]"},
)


def read_messages(body: bytes, notes: Notes) -> Steps[MessagesRequest]:
    """:raises InvalidParameter: naming the argument."""
    if len(body) <= SMALL_BYTES:
        return _REQUEST.one(body, notes)
    return (yield from _REQUEST.large(body, None, notes))
