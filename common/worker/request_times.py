"""When a request's first token is due and when the request ends, by a worker's own clock. Pure but for the time of day."""

from __future__ import annotations

import time

from common.engine.sequence import Sequence


def set_times(sequence: Sequence, now: float) -> None:
    """Set `due_at` and `ends_at`. The deadline is by the time of day only if the sender does not know `remaining_ms`."""
    generation = sequence.generation
    sequence.due_at = now + generation.first_token_ms / 1000 if generation.first_token_ms else 0.0
    sequence.ends_at = now + (generation.remaining_ms or generation.deadline_ms - time.time() * 1000) / 1000
