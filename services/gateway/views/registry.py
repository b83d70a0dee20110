"""The views, by name."""

from __future__ import annotations

import os

from services.gateway.token_bodies import TokenKind
from services.gateway.views.messages import MESSAGES, MESSAGES_COUNT
from services.gateway.views.openai_views import CHAT, COMPLETION
from services.gateway.views.responses import RESPONSES
from services.gateway.views.view import CountingView, View, ViewName

VIEWS: dict[ViewName, View] = {"chat": CHAT, "completion": COMPLETION, "responses": RESPONSES, "messages": MESSAGES}
COUNTING: dict[ViewName, CountingView] = {"responses": RESPONSES, "messages": MESSAGES_COUNT}
"""Those that read bodies whose prompt is only counted."""


def view_of(kind: ViewName | TokenKind) -> View:
    """The view in whose form an answer's errors are; OpenAI's for tokens."""
    return COMPLETION if kind == "tokenize" or kind == "detokenize" else VIEWS[kind]


def new_id(kind: ViewName | TokenKind) -> str:
    """Unguessable: whoever has it may cancel the request."""
    prefix = VIEWS[kind].id_prefix if kind in VIEWS else f"{kind}-"
    return f"{prefix}{os.urandom(12).hex()}"
