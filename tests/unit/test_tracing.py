"""When traces are on, what is said when they can't be, and that they cost nothing when they are off."""

from __future__ import annotations

import subprocess
import sys

import pytest

from common.protocol.trace_context import child_of, span_id_of, trace_id_of, traceparent
from common.runtime.metrics import Metrics
from common.runtime.tracing import OFF, is_asked_for, open_tracing, problem_of

ENDPOINT = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4318"}


@pytest.mark.parametrize(
    ("environ", "asked"),
    [
        ({}, False),
        (ENDPOINT, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://127.0.0.1:4318/v1/traces"}, True),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": " "}, False),
        ({"OTEL_SERVICE_NAME": "x"}, False),
        (ENDPOINT | {"OTEL_SDK_DISABLED": "True"}, False),
        (ENDPOINT | {"OTEL_TRACES_EXPORTER": "none"}, False),
        (ENDPOINT | {"OTEL_TRACES_EXPORTER": "otlp"}, True),
    ],
)
def test_an_endpoint_turns_traces_on(environ: dict[str, str], asked: bool) -> None:
    assert is_asked_for(environ) == asked


@pytest.mark.parametrize(
    ("environ", "named"),
    [
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "localhost:4318"}, "OTEL_EXPORTER_OTLP_ENDPOINT must be a URL"),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://"}, "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT must be a URL"),
        (ENDPOINT | {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, "OTEL_EXPORTER_OTLP_PROTOCOL must be http/protobuf"),
        (ENDPOINT | {"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/json"}, "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL must be"),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://[::1"}, "OTEL_EXPORTER_OTLP_ENDPOINT must be a URL"),
    ],
)
def test_what_is_wrong_is_named(environ: dict[str, str], named: str) -> None:
    assert problem_of(environ, lambda _: True).startswith(named)


def test_a_protocol_for_traces_wins_over_the_general_one() -> None:
    both = {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf"}
    assert problem_of(ENDPOINT | both, lambda _: True) == ""


def test_the_missing_extra_is_named() -> None:
    assert problem_of(ENDPOINT, lambda _: False).endswith("pip install 'penstock[otel]'")


def test_a_service_that_cannot_trace_serves_without() -> None:
    environ = ENDPOINT | {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}
    assert open_tracing("gateway", "gateway-0", Metrics(role="gateway"), environ) is OFF


def test_values_that_opentelemetry_refuses_turn_traces_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "10")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "100")
    assert open_tracing("gateway", "gateway-0", Metrics(role="gateway"), ENDPOINT) is OFF


def test_off_imports_nothing() -> None:
    script = (
        "import os, sys\n"
        "import services.gateway.actor, common.worker.actor, common.runtime.service\n"
        "from common.runtime.metrics import Metrics\n"
        "from common.runtime.tracing import OFF, open_tracing\n"
        "assert open_tracing('decode', 'd', Metrics(role='decode'), {}) is OFF\n"
        "print([name for name in sys.modules if name.startswith(('opentelemetry', 'google', 'requests'))])\n"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert ended.stdout == "[]\n"


def test_a_child_has_the_same_id_wherever_it_is_named() -> None:
    parent = traceparent("ab" * 16, "cd" * 8)
    assert child_of(parent, "r/1") == child_of(parent, "r/1") != child_of(parent, "r/2")
    child = child_of(parent, "r/1")
    assert trace_id_of(child) == "ab" * 16 and len(span_id_of(child)) == 16 and span_id_of(child) != "cd" * 8
    assert child.endswith("-01") and len(child) == 55
    assert child_of("", "r/1") == ""
