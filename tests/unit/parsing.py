"""Bodies to requests, as the gateway does it but in one go."""

from __future__ import annotations

from typing import TypeVar

from services.gateway.arguments import Notes
from services.gateway.json_slices import Steps
from services.gateway.openai import ChatRequest, CompletionRequest
from services.gateway.parse import parse

T = TypeVar("T")
MAX_PROMPT_TOKENS = 1_000_000


def finish(steps: Steps[T]) -> T:
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value


def decode_chat(body: bytes, notes: Notes | None = None) -> ChatRequest:
    request = finish(parse("chat", body, max_prompt_tokens=MAX_PROMPT_TOKENS, notes=notes or Notes()))
    assert isinstance(request, ChatRequest)
    return request


def decode_completion(
    body: bytes, notes: Notes | None = None, *, max_prompt_tokens: int = MAX_PROMPT_TOKENS
) -> CompletionRequest:
    request = finish(parse("completion", body, max_prompt_tokens=max_prompt_tokens, notes=notes or Notes()))
    assert isinstance(request, CompletionRequest)
    return request
