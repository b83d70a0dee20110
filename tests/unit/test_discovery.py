"""Where Prometheus is told to find metrics."""

from __future__ import annotations

import socket

import pytest

from common.runtime.http_access import reachable_host
from services.gateway.discovery import targets_of
from tests.unit.presences import presence


def test_who_says_where_its_port_is_becomes_a_target() -> None:
    told = presence("decode", 1, http_host="10.0.0.7", http_port=9000)
    over_ipv6 = presence("kvstore", 2, http_host="fd00::7", http_port=9001)
    older, without_http = presence("decode", 3, http_port=9002), presence("draft", 4, http_host="10.0.0.7")
    first, second = targets_of([told, over_ipv6, older, without_http])
    assert first.targets == ["10.0.0.7:9000"]
    assert first.labels == {"role": "decode", "worker": "decode-1", "__meta_penstock_model": "tiny"}
    assert second.targets == ["[fd00::7]:9001"]


@pytest.mark.parametrize("everywhere", ["0.0.0.0", "::"])
def test_who_listens_on_every_address_is_reached_by_the_machines_name(everywhere: str) -> None:
    assert reachable_host(everywhere) == socket.gethostname()
    assert reachable_host("10.0.0.7") == "10.0.0.7" and reachable_host("localhost") == "localhost"
