"""Presence messages as the commands hear them."""

from __future__ import annotations

from common.protocol.handles import WorkerRef
from common.protocol.messages import Presence


def presence(role: str, number: int = 0, **fields: object) -> Presence:
    reference = WorkerRef(role=role, id=f"{role}-{number}", epoch=1)  # pyright: ignore[reportArgumentType]
    return Presence(worker=reference, **({"state": "ready", "model": "tiny"} | fields))  # pyright: ignore[reportArgumentType]
