"""What this worker has written lately, apart for each salt. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from services.decode.token_index import SEPARATOR, TokenIndex


class RecentTexts:
    """Outputs of requests that have ended, at most `max_tokens` of all salts and a quarter of that of one.

    As in the prefix cache, a request finds only what was written under its own salt: proposals can't change a token, but how
    fast one comes would tell what others were told. The salt that was used least recently is forgotten first.
    """

    def __init__(self, *, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self._indices: dict[bytes, TokenIndex] = {}

    def __len__(self) -> int:
        """Tokens that are kept."""
        return sum(index.num_kept for index in self._indices.values())

    def add(self, salt: bytes, tokens: Sequence[int]) -> None:
        index = self._indices.pop(salt, None) or TokenIndex(max_tokens=self.max_tokens // 4)
        index.extend([*tokens, SEPARATOR])
        self._indices[salt] = index
        while len(self) > self.max_tokens:
            del self._indices[next(iter(self._indices))]

    def of(self, salt: bytes) -> TokenIndex | None:
        """Return what was written under this salt."""
        return self._indices.get(salt)

    def clear(self) -> None:
        self._indices.clear()
