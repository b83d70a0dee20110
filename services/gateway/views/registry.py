"""The views, by name."""

from __future__ import annotations

import os

from services.gateway.views.messages import MESSAGES, MESSAGES_COUNT
from services.gateway.views.openai_views import CHAT, COMPLETION
from services.gateway.views.responses import RESPONSES
from services.gateway.views.view import CountingView, View, ViewName

VIEWS: dict[ViewName, View] = {"chat": CHAT, "completion": COMPLETION, "responses": RESPONSES, "messages": MESSAGES}
COUNTING: dict[ViewName, CountingView] = {"responses": RESPONSES, "messages": MESSAGES_COUNT}
"""Those that read bodies whose prompt is only counted."""


def new_id(view: ViewName) -> str:
    """Unguessable: whoever has it may cancel the request."""
    return f"{VIEWS[view].id_prefix}{os.urandom(12).hex()}"
