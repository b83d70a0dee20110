"""Who asks, and what each may take: limits per minute, at a time, and in length. Pure: `now` is an argument.

    enter: one request more this minute, one more at a time ─► reserve: its prompt and the longest answer ─► leave: what it was

Limits per minute are token buckets that hold a minute's worth. What a request reserves is capped at that, so a request larger
than a minute's worth runs as soon as the bucket is full; what it took beyond its reservation is owed when it ends, and the next
one waits until that has been made up for. Limits are each gateway's own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import TYPE_CHECKING

from common.protocol.errors import Forbidden, RateLimited
from common.runtime.api_keys import TenantSettings

if TYPE_CHECKING:
    from services.gateway.usage import UsageEvent

MINUTE_S = 60.0
BUSY_RETRY_S = 1.0
_SALT_BYTES = 16


class Bucket:
    """`per_minute` at most in a minute, all at once if nothing was taken in the minute before; 0: any number."""

    def __init__(self, per_minute: float, now: float) -> None:
        self.per_minute = per_minute
        self.level = per_minute
        self._at = now

    def resize(self, per_minute: float, now: float) -> None:
        """From now on there is another limit; what was taken before stays taken."""
        self._fill(now)
        self.level += per_minute - self.per_minute
        self.per_minute = per_minute

    def take(self, amount: float, now: float) -> float:
        """Return 0 if `amount`, or all of it that the bucket can hold, was there and has been taken; else the seconds until it
        is."""
        if not self.per_minute:
            return 0.0
        self._fill(now)
        missing = min(amount, self.per_minute) - self.level
        if missing > 1e-9:
            return missing * MINUTE_S / self.per_minute
        self.level -= min(amount, self.per_minute)
        return 0.0

    def give(self, amount: float, now: float) -> None:
        """Give back what was taken too much; negative: take what was taken too little, whether or not it is there."""
        if self.per_minute:
            self._fill(now)
            self.level = min(self.level + amount, self.per_minute)

    def _fill(self, now: float) -> None:
        if now > self._at:
            self.level = min(self.per_minute, self.level + (now - self._at) * self.per_minute / MINUTE_S)
            self._at = now


class Tenant:
    """One tenant of a gateway. `on_usage` is told what each of its requests took."""

    def __init__(self, name: str, settings: TenantSettings, now: float) -> None:
        self.name = name
        self.settings = settings
        self.num_running = 0
        self.on_usage: Callable[[UsageEvent], None] = lambda event: None
        self._requests = Bucket(settings.requests_per_minute, now)
        self._tokens = Bucket(settings.tokens_per_minute, now)

    def change(self, settings: TenantSettings, now: float) -> None:
        """Apply new settings; what runs goes on."""
        self.settings = settings
        self._requests.resize(settings.requests_per_minute, now)
        self._tokens.resize(settings.tokens_per_minute, now)

    def enter(self, now: float) -> Visit:
        """:raises RateLimited: it has as many requests as it may, at a time or this minute; nothing has been taken then."""
        limit = self.settings.max_concurrent
        if limit and self.num_running >= limit:
            raise RateLimited(f"{self.name} has {limit} requests running, as many as it may", retry_after_s=BUSY_RETRY_S)
        wait_s = self._requests.take(1, now)
        if wait_s:
            limit = self.settings.requests_per_minute
            raise RateLimited(f"{self.name} may send {limit} requests a minute", retry_after_s=wait_s)
        self.num_running += 1
        return Visit(self)

    def enter_in_background(self) -> Visit:
        """A line of a batch: limits per minute and at a time are for requests that somebody waits for."""
        return Visit(self, counts=False)

    def may_use(self, model: str) -> bool:
        return not self.settings.models or model in self.settings.models

    def check_model(self, model: str) -> None:
        """:raises Forbidden: this model is not among those that it may use."""
        if not self.may_use(model):
            raise Forbidden(f"{self.name} may not use the model {model}", param="model")

    def reserve(self, num_tokens: int, now: float) -> float:
        """Return what was taken of its tokens per minute.

        :raises RateLimited: they are used up; nothing has been taken then.
        """
        limit = self.settings.tokens_per_minute
        wait_s = self._tokens.take(num_tokens, now)
        if wait_s:
            raise RateLimited(
                f"{self.name} may use {limit} tokens a minute, and this request may need {num_tokens}; a smaller max_tokens "
                "needs fewer",
                retry_after_s=wait_s,
            )
        return min(num_tokens, limit)

    def settle(self, reserved: float, used: int, now: float) -> None:
        self._tokens.give(reserved - used, now)


class Visit:
    """One request of a tenant's, from its arrival to `leave`."""

    __slots__ = ("_counts", "_open", "_reserved", "tenant")

    def __init__(self, tenant: Tenant, *, counts: bool = True) -> None:
        """`counts`: as one of the requests that its tenant may have at a time."""
        self.tenant = tenant
        self._counts = counts
        self._reserved: float | None = None
        self._open = True

    def reserve(self, num_tokens: int, now: float) -> None:
        """Take what the request needs at the most. `num_tokens`: of its prompts and longest answers.

        :raises RateLimited: its tenant's tokens per minute are used up.
        """
        self._reserved = self.tenant.reserve(num_tokens, now)

    def leave(self, used_tokens: int, now: float) -> None:
        """It has ended, and took so many tokens of prompt and answer. Harmless twice."""
        if self._open:
            self._open = False
            self.tenant.num_running -= self._counts
            if self._reserved is not None:
                self.tenant.settle(self._reserved, used_tokens, now)


def salt_of(tenant: str, cache_salt: str | None) -> bytes:
    """Return what keeps the KV of a request's prompt apart from that of other tenants and other values of `cache_salt`.

    The same at every gateway; empty for nobody's request without one. It is part of the first block's hash, so that no chain of
    hashes under one salt ever meets one under another.
    """
    own = (
        b""
        if cache_salt is None
        else hashlib.blake2b(cache_salt.encode(), digest_size=_SALT_BYTES, person=b"cache_salt").digest()
    )
    if not tenant:
        return own
    return hashlib.blake2b(own, digest_size=_SALT_BYTES, key=tenant.encode(), person=b"tenant").digest()
