"""Addresses of NATS servers: are they any, and how they are shown."""

from __future__ import annotations

from urllib.parse import urlsplit

from common.protocol.errors import ConfigError


def redacted(url: str) -> str:
    """The URL without user and password, for logs."""
    try:
        parts = urlsplit(url)
        return url if parts.username is None else f"{parts.scheme}://{parts.hostname}:{parts.port or 4222}"
    except ValueError:  # no URL at all, or a port that is none
        return url.rpartition("@")[2]


def check_nats_url(url: str) -> None:
    """:raises ConfigError: if `url` can't be taken apart: a port or an IPv6 address that is none."""
    try:
        _ = urlsplit(url).port
    except ValueError as error:
        raise ConfigError(f"{redacted(url)} is not a NATS URL; try nats://127.0.0.1:4222", param="nats_url") from error
