"""Which hosts an HTTP request may be meant for, and which pages it may come from."""

from __future__ import annotations

import pytest

from common.protocol.errors import HostNotAllowed, OriginNotAllowed
from common.runtime.http_access import HttpAccess

LOOPBACK = ["127.0.0.1", "localhost", "::1", "127.3.2.1"]


def check(access: HttpAccess, host: str | None = None, origin: str | None = None) -> None:
    sent = {b"host": host, b"accept": "*/*", b"origin": origin}
    access.check([(name, value.encode("latin-1")) for name, value in sent.items() if value is not None])


@pytest.mark.parametrize("bound_to", LOOPBACK)
@pytest.mark.parametrize(
    "host", ["127.0.0.1:8000", "localhost", "LocalHost:1", "localhost.:8000", "[::1]:8000", "[::1]", "127.9.9.9", "10.0.0.7:80"]
)
def test_on_loopback_addresses_and_localhost_are_served(bound_to: str, host: str) -> None:
    check(HttpAccess(bound_to), host)


@pytest.mark.parametrize("bound_to", LOOPBACK)
@pytest.mark.parametrize(
    "host",
    [
        "attacker.example",
        "attacker.example:8000",
        "localhost.attacker.example",
        "127.0.0.1.attacker.example:8000",
        "localhost@attacker.example",
        "[::1].attacker.example",
        "[attacker.example]:80",
        "127.0.0.1:8000:attacker.example",
        "localhost/attacker",
        "0x7f000001",
        "",
        ":8000",
        "é.example",
    ],
)
def test_on_loopback_no_other_name_is_served(bound_to: str, host: str) -> None:
    with pytest.raises(HostNotAllowed) as refused:
        check(HttpAccess(bound_to), host)
    assert (refused.value.http_status, refused.value.code) == (421, "host_not_allowed")


def test_a_program_that_names_no_host_is_served() -> None:
    check(HttpAccess("127.0.0.1"))


def test_a_second_host_header_is_looked_at_too() -> None:
    with pytest.raises(HostNotAllowed):
        HttpAccess("127.0.0.1").check([(b"host", b"localhost"), (b"host", b"attacker.example")])


@pytest.mark.parametrize("bound_to", ["0.0.0.0", "::", "192.168.1.5", "gateway.example"])
def test_elsewhere_every_name_is_served_until_some_are_configured(bound_to: str) -> None:
    check(HttpAccess(bound_to), "gateway.example:8000")
    configured = HttpAccess(bound_to, allowed_hosts=["api.example"])
    check(configured, "api.example:8000")
    check(configured, "192.168.1.5:8000")
    with pytest.raises(HostNotAllowed):
        check(configured, "gateway.example:8000")


def test_names_are_allowed_one_by_one_by_domain_or_all() -> None:
    access = HttpAccess("127.0.0.1", allowed_hosts=["API.Example.com", "*.inner.example.com"])
    for host in ("api.example.com", "api.example.com.:443", "a.inner.example.com", "a.b.inner.example.com"):
        check(access, host)
    for host in ("example.com", "xapi.example.com", "inner.example.com", "xinner.example.com"):
        with pytest.raises(HostNotAllowed):
            check(access, host)
    check(HttpAccess("127.0.0.1", allowed_hosts=["*"]), "attacker.example")


@pytest.mark.parametrize(
    ("host", "origin"),
    [
        ("localhost:8000", "http://localhost:8000"),
        ("localhost:8000", "http://127.0.0.1:3000"),
        ("127.0.0.1:8000", "http://localhost:3000"),
        ("[::1]:8000", "https://LOCALHOST"),
        ("10.0.0.7:8000", "http://10.0.0.7"),
    ],
)
def test_pages_of_this_host_may_send_requests(host: str, origin: str) -> None:
    check(HttpAccess("127.0.0.1"), host, origin)


@pytest.mark.parametrize(
    "origin",
    ["https://attacker.example", "null", "", "file://", "http://localhost.attacker.example", "http://[bad", "http://10.0.0.8"],
)
@pytest.mark.parametrize("host", ["localhost:8000", "10.0.0.7:8000", None])
def test_pages_of_other_sites_may_not(host: str | None, origin: str) -> None:
    with pytest.raises(OriginNotAllowed) as refused:
        check(HttpAccess("0.0.0.0"), host, origin)
    assert (refused.value.http_status, refused.value.code) == (403, "origin_not_allowed")


def test_loopback_pages_may_not_use_a_server_elsewhere() -> None:
    with pytest.raises(OriginNotAllowed):
        check(HttpAccess("0.0.0.0"), "gateway.example:8000", "http://localhost:3000")


def test_origins_are_allowed_one_by_one_or_all() -> None:
    access = HttpAccess("127.0.0.1", allowed_origins=["https://chat.example.com/", "null"])
    check(access, "localhost:8000", "https://Chat.example.com")
    check(access, "localhost:8000", "null")
    for origin in ("http://chat.example.com", "https://chat.example.com:8443", "https://chat.example.com.attacker.example"):
        with pytest.raises(OriginNotAllowed):
            check(access, "localhost:8000", origin)
    check(HttpAccess("127.0.0.1", allowed_origins=["*"]), "localhost:8000", "https://attacker.example")
