"""Requests of `bench.crossing` are made from their numbers alone, and there is something of everything among them."""

from __future__ import annotations

from bench.crossing.requests import PATHS, drawn


def test_a_number_is_a_request() -> None:
    requests = [drawn(number) for number in range(300)]
    assert requests == [drawn(number) for number in range(300)]
    assert {asked.kind for asked in requests} == set(PATHS)
    seen = {name for asked in requests for name in asked.body}
    assert {
        "n",
        "stop",
        "prediction",
        "response_format",
        "tools",
        "logprobs",
        "echo",
        "seed",
        "min_tokens",
        "logit_bias",
    } <= seen
    assert all("seed" in asked.body for asked in requests if asked.body["temperature"])
    assert {asked.leaves for asked in requests} == {True, False}
    assert not [asked for asked in requests if asked.leaves and not asked.body["stream"]]
