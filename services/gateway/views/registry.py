"""The views, by name, and all that a client may ask for."""

from __future__ import annotations

import os
from typing import Literal

from services.gateway.token_bodies import TokenKind
from services.gateway.vectors import VectorKind
from services.gateway.views.messages import MESSAGES, MESSAGES_COUNT
from services.gateway.views.openai_views import CHAT, COMPLETION
from services.gateway.views.responses import RESPONSES
from services.gateway.views.view import CountingView, View, ViewName

CountKind = Literal["input_tokens", "count_tokens"]
"""How many tokens the prompt of a response, or of messages, has."""
RequestKind = ViewName | TokenKind | VectorKind | CountKind

VIEWS: dict[ViewName, View] = {"chat": CHAT, "completion": COMPLETION, "responses": RESPONSES, "messages": MESSAGES}
COUNTING: dict[CountKind, CountingView] = {"input_tokens": RESPONSES, "count_tokens": MESSAGES_COUNT}
"""Those that read bodies whose prompt is only counted."""

_ID_PREFIXES: dict[RequestKind, str] = {"embedding": "embd-", "score": "score-"}


def view_of(kind: RequestKind) -> View:
    """The view in whose form an answer's errors are; OpenAI's for tokens and vectors."""
    if kind == "input_tokens" or kind == "count_tokens":
        return COUNTING[kind]
    if kind == "tokenize" or kind == "detokenize" or kind == "embedding" or kind == "score":
        return COMPLETION
    return VIEWS[kind]


def new_id(kind: RequestKind) -> str:
    """Unguessable: whoever has it may cancel the request."""
    prefix = _ID_PREFIXES.get(kind) or (VIEWS[kind].id_prefix if kind in VIEWS else f"{kind}-")
    return f"{prefix}{os.urandom(12).hex()}"
