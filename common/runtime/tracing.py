"""Traces in OpenTelemetry's form, if its standard variables ask for them; else nothing at all.

    open_tracing ─► Off                 no variable, or something is wrong with what they say: one warning, nothing imported
                 └► OtlpTracing         `otlp.py`: spans go to OTEL_EXPORTER_OTLP_ENDPOINT from a thread of their own

Traces never stop a service: one that can't export them serves without.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol
from urllib.parse import urlsplit

from common.runtime import logs
from common.runtime.metrics import Metrics
from common.runtime.spans import Begun, Span

log = logs.get("tracing")

ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
PACKAGES = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")


class Tracing(Protocol):
    """Where a process's spans go. One event loop only."""

    @property
    def enabled(self) -> bool: ...

    def begin(self, traceparent: str, tracestate: str) -> Begun | None:
        """Begin the trace of a request with these headers, or go on with its client's. None: it is not sampled."""
        ...

    def record(self, spans: Iterable[Span], now: float) -> None:
        """Export spans that have ended, without waiting for anything. `now`: the time on the clock of their `began_at`."""
        ...

    async def close(self) -> None:
        """Export what is left, within a short limit."""
        ...


class Off:
    """No traces."""

    enabled = False

    def begin(self, traceparent: str, tracestate: str) -> Begun | None:
        return None

    def record(self, spans: Iterable[Span], now: float) -> None:
        pass

    async def close(self) -> None:
        pass


OFF: Tracing = Off()


def open_tracing(role: str, worker: str, metrics: Metrics, environ: Mapping[str, str]) -> Tracing:
    """Return where the spans of this process go, as `environ` says: OpenTelemetry's standard variables."""
    if not is_asked_for(environ):
        return OFF
    problem = problem_of(environ, _is_installed)
    if problem:
        log.warning("traces_off", reason=problem)
        return OFF
    from common.runtime import otlp  # imports OpenTelemetry, half a second

    try:
        return otlp.OtlpTracing(role=role, worker=worker, metrics=metrics, environ=environ)
    except Exception as error:  # whatever OpenTelemetry makes of its variables
        log.warning("traces_off", reason=str(error))
        return OFF


def is_asked_for(environ: Mapping[str, str]) -> bool:
    """Whether the variables name a collector, and do not turn traces off."""
    if environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return False
    if environ.get("OTEL_TRACES_EXPORTER", "otlp").strip().lower() not in ("otlp", ""):
        return False
    return bool(_first(ENDPOINTS, environ)[1])


def problem_of(environ: Mapping[str, str], is_installed: Callable[[str], bool]) -> str:
    """Return why traces that are asked for can't be exported; empty if they can."""
    name, endpoint = _first(ENDPOINTS, environ)
    if not _is_url(endpoint):
        return f"{name} must be a URL such as http://localhost:4318"  # without the value, which may hold a password
    spoken, protocol = _first(PROTOCOLS, environ)
    if protocol.lower() not in ("", "http/protobuf"):
        return f"{spoken} must be http/protobuf (as a rule on port 4318), not {protocol!r}"
    if not all(map(is_installed, PACKAGES)):
        return f"{name} is set, but OpenTelemetry is not installed: pip install 'penstock[otel]'"
    return ""


def _is_url(endpoint: str) -> bool:
    try:
        return endpoint.startswith(("http://", "https://")) and bool(urlsplit(endpoint).netloc)
    except ValueError:  # brackets of an IPv6 address that do not match
        return False


def _first(names: Iterable[str], environ: Mapping[str, str]) -> tuple[str, str]:
    """The first of these variables that is set, and what it is."""
    found = ((name, environ.get(name, "").strip()) for name in names)
    return next(((name, value) for name, value in found if value), ("", ""))


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:
        return False
