"""The views, by name."""

from __future__ import annotations

import os

from services.gateway.views.openai_views import CHAT, COMPLETION
from services.gateway.views.view import View, ViewName

VIEWS: dict[ViewName, View] = {"chat": CHAT, "completion": COMPLETION}


def new_id(view: ViewName) -> str:
    """Unguessable: whoever has it may cancel the request."""
    return f"{VIEWS[view].id_prefix}{os.urandom(12).hex()}"
