"""The bodies of `/tokenize` and `/detokenize`, as vLLM has them. Pure."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from common.protocol.errors import InvalidParameter
from services.gateway import openai
from services.gateway.json_slices import Steps
from services.gateway.openai import ChatMessage, ChatRequest, TokenId

TokenKind = Literal["tokenize", "detokenize"]


class TokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """POST /tokenize: either a completion's `prompt`, or a chat's `messages` with what makes a prompt of them.

    `add_special_tokens` is true by default for a prompt, and false for messages, whose template adds them. `return_token_strs`:
    the answer also has the tokens' names.
    """

    model: Annotated[str, Meta(max_length=512)] | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: Annotated[str, Meta(max_length=65536)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    reasoning_effort: Annotated[str, Meta(max_length=32)] | None = None
    enable_thinking: bool | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None

    @property
    def chat(self) -> ChatRequest:
        """The chat request that has the same prompt."""
        return ChatRequest(
            messages=self.messages or [],
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=self.continue_final_message,
            chat_template=self.chat_template,
            chat_template_kwargs=self.chat_template_kwargs,
            documents=self.documents,
            reasoning_effort=self.reasoning_effort,
            enable_thinking=self.enable_thinking,
            tools=self.tools,
            tool_choice=self.tool_choice,
        )


class DetokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """POST /detokenize."""

    tokens: list[TokenId]
    model: Annotated[str, Meta(max_length=512)] | None = None


class TokenizeAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """`max_model_len`: the model's context in tokens. `token_strs`: the tokens' names in the vocabulary, if asked for."""

    count: Annotated[int, Meta(ge=0)]
    max_model_len: Annotated[int, Meta(ge=1)]
    tokens: list[TokenId]
    token_strs: list[str] | None = None


class DetokenizeAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """`prompt`: the text, special tokens included."""

    prompt: str


CHAT_ONLY = (
    "add_generation_prompt",
    "continue_final_message",
    "chat_template",
    "chat_template_kwargs",
    "documents",
    "reasoning_effort",
    "enable_thinking",
    "tools",
    "tool_choice",
)
"""What says something of messages alone."""


def check_tokenize(request: TokenizeRequest) -> Steps[None]:
    """Check all but messages; a step for each tool and document.

    :raises InvalidParameter: for what is well-formed and yet makes no sense.
    """
    if request.messages is None:
        if request.prompt is None:
            raise InvalidParameter("prompt or messages is missing: send one of them", param="prompt")
        for name in CHAT_ONLY:
            if getattr(request, name):
                raise InvalidParameter(f"{name} goes with messages alone", param=name)
        return
    if request.prompt is not None:
        raise InvalidParameter("prompt and messages are both given: send one of them", param="messages")
    if not request.messages:
        raise InvalidParameter("messages is empty: send at least one message", param="messages")
    yield from openai.check_chat(request.chat)
