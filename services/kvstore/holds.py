"""What one lease of a kvstore covers."""

from __future__ import annotations

import msgspec

from common.protocol.explain_messages import RequestContext
from services.kvstore.arena import Arena
from services.kvstore.write_back import NOBODY


class Hold(msgspec.Struct):
    """Slots somebody reads, or (`writing`) was granted and has not committed, for which request. `stages`: names of copies of
    them that a reader of another host asked for."""

    arena: Arena
    slots: list[int]
    writing: bool
    context: RequestContext = NOBODY
    granted_at: float = 0.0
    stages: set[str] = msgspec.field(default_factory=set)
