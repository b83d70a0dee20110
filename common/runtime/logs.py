"""Structured logs on stderr: one event name and its fields per line. Standard output belongs to no service.

`get(name)` may be called at import time; `configure` decides later how lines look. Libraries that log through the
standard library come out in the same shape.
"""

from __future__ import annotations

import logging
import sys
import traceback
from typing import Any, Literal

import msgspec
import structlog

LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


SHARED_PROCESSORS: list[Any] = [
    structlog.contextvars.merge_contextvars,
    structlog.stdlib.add_log_level,
    structlog.stdlib.add_logger_name,
    structlog.processors.TimeStamper(fmt="iso", utc=True),
]

# At import, because structlog's own default writes to standard output until it is configured.
structlog.configure(
    processors=[
        structlog.stdlib.filter_by_level,
        *SHARED_PROCESSORS,
        structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
    ],
    logger_factory=structlog.stdlib.LoggerFactory(),
    wrapper_class=structlog.stdlib.BoundLogger,
    cache_logger_on_first_use=False,
)


def get(name: str) -> Any:
    """A logger: `log.info("request_admitted", request=id, prompt_tokens=n)`."""
    return structlog.stdlib.get_logger(name)


class _Stderr:
    """One write per line, past the standard library."""

    def info(self, line: str) -> None:
        sys.stderr.write(line)
        sys.stderr.flush()


def get_fast(name: str) -> Any:
    """A logger with the method `info` alone, for events that come hundreds of times a second: a line costs 10 µs, not 80. It
    passes neither through the standard library nor to its handlers; lines look as `configure` decided."""
    wrapped = structlog.wrap_logger(
        _Stderr(),
        processors=[_drop_below_level, structlog.processors.TimeStamper(fmt="iso", utc=True), _render_fast],
        wrapper_class=structlog.BoundLogger,
        cache_logger_on_first_use=True,
    )
    return wrapped.bind(logger=name)


_encode = msgspec.json.Encoder().encode
_fast_format: Literal["console", "json"] = "console"


def _drop_below_level(_: Any, __: str, event: Any) -> Any:
    if logging.getLogger().level > logging.INFO:
        raise structlog.DropEvent
    return event


def _render_fast(_: Any, level: str, event: Any) -> str:
    if _fast_format == "json":
        return _encode({**event, "level": level}).decode() + "\n"
    head = f"{event.pop('timestamp')} [{level:<9}] {event.pop('event'):<30} [{event.pop('logger')}]"
    return " ".join([head, *[f"{name}={value}" for name, value in event.items()]]) + "\n"


def without_messages(_: Any, __: str, event: Any) -> Any:
    """Replace an exception by its type and where it was raised: its message may hold what a client sent."""
    found = event.pop("exc_info", None)
    event.pop("exc_text", None)
    error = sys.exc_info()[1] if found is True else found[1] if isinstance(found, tuple) else found
    if isinstance(error, BaseException):
        frames = traceback.extract_tb(error.__traceback__)
        event["exception_type"] = type(error).__name__
        event["raised_at"] = " < ".join(f"{frame.filename}:{frame.lineno}" for frame in reversed(frames))
    return event


def configure(level: str = "info", format: Literal["console", "json"] = "console", *, with_messages: bool = True) -> None:
    """Send everything at `level` (debug, info, warning, error) and above to stderr. `with_messages`: exceptions in full."""
    global _fast_format
    _fast_format = format
    renderer: list[Any]
    if format == "json":
        renderer = [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    else:
        plain = structlog.dev.plain_traceback
        renderer = [structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), exception_formatter=plain)]
    if not with_messages:
        renderer.insert(0, without_messages)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=SHARED_PROCESSORS,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *renderer],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(LEVELS[level])
    for noisy in ("uvicorn.access", "asyncio", "httpx", "httpcore"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


class Once:
    """Whether a reason comes for the first time, of `limit` reasons: for lines that would be said a thousand times."""

    def __init__(self, limit: int = 64) -> None:
        self._limit = limit
        self._known: set[str] = set()

    def __call__(self, reason: str) -> bool:
        if reason in self._known or len(self._known) >= self._limit:
            return False
        self._known.add(reason)
        return True
