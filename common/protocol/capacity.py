"""What an engine says it could do next, for the router's expectations."""

from __future__ import annotations

import msgspec

WINDOW_MS = 100.0


class Capacity(msgspec.Struct, frozen=True, array_like=True):
    """What an engine could do in the next `WINDOW_MS`, by what its steps took lately; all 0: unknown.

    prompt_tokens: of prompts that it could compute, beside its decoding rows and within its objective for their ITL.
    backlog_tokens: of prompts that it holds and has not computed. itl_ms: the time between tokens of its rows as they are now,
    without prompts. rows: how many more sequences it would decode, none where its rows take longer than its objective.
    """

    prompt_tokens: int = 0
    backlog_tokens: int = 0
    itl_ms: float = 0.0
    rows: int = 0

    @property
    def prompt_tokens_per_s(self) -> float:
        return self.prompt_tokens / (WINDOW_MS / 1000)
