"""Which format `/metrics` answers in, by the request's Accept header."""

from __future__ import annotations

import pytest

from common.runtime.metrics import OPENMETRICS, PLAIN_TEXT, Metrics

PROMETHEUS = (
    "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,"
    "text/plain;version=0.0.4;q=0.5,*/*;q=0.1"
)


@pytest.mark.parametrize(
    "accept",
    [
        PROMETHEUS,
        "application/openmetrics-text",
        "Application/OpenMetrics-Text; version=1.0.0; charset=utf-8",
        "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,text/plain;q=0.5",
        "text/plain, application/openmetrics-text",
    ],
)
def test_who_asks_for_openmetrics_gets_it(accept: str) -> None:
    content, kind = Metrics(role="draft").page(accept)
    assert kind == OPENMETRICS and content.endswith(b"# EOF\n")


@pytest.mark.parametrize(
    "accept",
    [
        "",
        "*/*",
        "text/html,application/xhtml+xml,*/*;q=0.8",
        "text/plain",
        "text/plain;version=0.0.4, application/openmetrics-text;version=1.0.0;q=0.3",
        "application/openmetrics-text;version=1.0.0;q=0",
        "application/openmetrics-text;version=0.0.1",
        "application/openmetrics-text;version=2.0.0",
        "application/openmetrics-text;q=much",
        "application/json",
        ";;;,,=,q",
    ],
)
def test_everybody_else_gets_the_classic_text(accept: str) -> None:
    content, kind = Metrics(role="draft").page(accept)
    assert kind == PLAIN_TEXT and b"# EOF" not in content


def test_names_with_a_colon_stay_as_they_are() -> None:
    metrics = Metrics(role="decode")
    metrics.counter("vllm:prefix_cache_hits_total", "Found", ["model_name"]).labels("m").inc()
    for accept in ("", PROMETHEUS):
        assert b'vllm:prefix_cache_hits_total{model_name="m"} 1.0' in metrics.page(accept)[0]
