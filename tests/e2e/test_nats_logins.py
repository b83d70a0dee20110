"""Buses of others: TLS in both directions, nkeys and JWTs, on a real nats-server."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import os
import shutil
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest
from nats.aio.client import Client

from common.protocol.errors import BusError, BusRefused
from common.runtime import nats_bus
from common.runtime.bus import BusMessage
from common.runtime.bus_login import BusLogin
from tests.fixtures.nats import LocalNatsServer

MakeServer = Callable[[str], LocalNatsServer]


async def works(url: str, login: BusLogin) -> None:
    """A message comes back over a connection that is logged in so."""
    bus = await nats_bus.connect(url, name="test", login=login, connect_timeout_s=1.5)
    try:
        heard: list[BusMessage] = []
        await bus.subscribe("test.subject", heard.append)
        await bus.publish("test.subject", b"hello")
        with anyio.fail_after(10):
            while not heard:
                await anyio.sleep(0.01)
    finally:
        await bus.close()


# ── TLS ──────────────────────────────────────────────────────────────────────────────────────────────────────────────────


class Authority:
    """A certificate authority that signs what is asked of it."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder = folder
        self.name = name
        self.openssl(
            *("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2"),
            *("-subj", f"/CN={name}", "-keyout", self.path("ca.key"), "-out", self.path("ca.pem")),
        )

    def path(self, name: str) -> str:
        return str(self.folder / f"{self.name}-{name}")

    def openssl(self, *arguments: str) -> None:
        subprocess.run(["openssl", *arguments], check=True, capture_output=True)

    def issue(self, name: str, address: str) -> tuple[str, str]:
        """Paths of a certificate for `address` and of its key."""
        request, extensions = self.path(f"{name}.csr"), Path(self.path(f"{name}.ext"))
        extensions.write_text(f"subjectAltName=IP:{address}\n")
        cert, key = self.path(f"{name}.pem"), self.path(f"{name}.key")
        new_key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-keyout", key)
        self.openssl("req", *new_key, "-subj", f"/CN={name}", "-out", request)
        signer = ("-CA", self.path("ca.pem"), "-CAkey", self.path("ca.key"), "-CAcreateserial")
        self.openssl("x509", "-req", "-in", request, *signer, "-days", "2", "-extfile", str(extensions), "-out", cert)
        return cert, key


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    if shutil.which("openssl") is None:
        pytest.skip("no openssl to make certificates with")
    return Authority(tmp_path, "ours")


def tls_config(authority: Authority, *, verify: bool, address: str = "127.0.0.1") -> str:
    cert, key = authority.issue("server", address)
    options = {"cert_file": cert, "key_file": key, "ca_file": authority.path("ca.pem"), "verify": verify}
    return f"tls: {json.dumps(options)}\n"


async def test_a_server_with_tls_is_trusted_by_its_authority_alone(
    authority: Authority, nats_server_factory: MakeServer, tmp_path: Path
) -> None:
    server = nats_server_factory(tls_config(authority, verify=False))
    login = BusLogin(tls_ca=authority.path("ca.pem"))
    for url in (server.url, server.url.replace("nats://", "tls://")):
        await works(url, login)
    other = Authority(tmp_path, "other")
    for stranger in (BusLogin(tls_ca=other.path("ca.pem")), BusLogin()):
        with pytest.raises(BusRefused, match=r"certificate verify failed.*nats_tls_ca"):
            await nats_bus.connect(server.url.replace("nats://", "tls://"), name="test", login=stranger, connect_timeout_s=2)


async def test_a_certificate_for_another_address_is_refused(authority: Authority, nats_server_factory: MakeServer) -> None:
    server = nats_server_factory(tls_config(authority, verify=False, address="10.0.0.1"))
    with pytest.raises(BusError, match="certificate"):
        await nats_bus.connect(server.url, name="test", login=BusLogin(tls_ca=authority.path("ca.pem")), connect_timeout_s=1.5)


async def test_a_server_that_wants_a_certificate_gets_one(authority: Authority, nats_server_factory: MakeServer) -> None:
    server = nats_server_factory(tls_config(authority, verify=True))
    cert, key = authority.issue("gateway", "127.0.0.1")
    await works(server.url, BusLogin(tls_ca=authority.path("ca.pem"), tls_cert=cert, tls_key=key))
    with pytest.raises(BusError):
        await nats_bus.connect(server.url, name="test", login=BusLogin(tls_ca=authority.path("ca.pem")), connect_timeout_s=1.5)


async def test_a_tls_connection_comes_back_by_itself(authority: Authority, nats_server_factory: MakeServer) -> None:
    server = nats_server_factory(tls_config(authority, verify=False))
    bus = await nats_bus.connect(server.url, name="test", login=BusLogin(tls_ca=authority.path("ca.pem")))
    try:
        server.stop()
        with anyio.fail_after(10):
            while bus.connected:
                await anyio.sleep(0.01)
            server.start()
            while not bus.connected:
                await anyio.sleep(0.01)
            await bus.flush()
    finally:
        await bus.close()


# ── keys ─────────────────────────────────────────────────────────────────────────────────────────────────────────────────


class Key:
    """An nkey: of a user ("U"), an account ("A") or an operator ("O")."""

    def __init__(self, kind: str) -> None:
        nkeys = pytest.importorskip("nkeys", reason="nkeys and JWTs need the package nkeys")
        prefix = {"U": nkeys.PREFIX_BYTE_USER, "A": nkeys.PREFIX_BYTE_ACCOUNT, "O": nkeys.PREFIX_BYTE_OPERATOR}[kind]
        self.seed: bytes = bytes(nkeys.encode_seed(os.urandom(32), prefix))
        self._pair = nkeys.from_seed(bytearray(self.seed))
        self.public: str = bytes(self._pair.public_key).decode()

    def jwt(self, subject: Key, kind: str, content: dict[str, Any]) -> str:
        """A claim about `subject`, signed with this key."""
        claims = {
            "iss": self.public,
            "sub": subject.public,
            "name": kind,
            "iat": 1,
            "nats": {"type": kind, "version": 2, **content},
        }
        claims["jti"] = base64.b32encode(hashlib.sha256(json.dumps(claims).encode()).digest()).decode().rstrip("=")
        parts = [_base64(json.dumps(part).encode()) for part in ({"typ": "JWT", "alg": "ed25519-nkey"}, claims)]
        return ".".join((*parts, _base64(bytes(self._pair.sign(".".join(parts).encode())))))


def _base64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


async def test_a_user_is_known_by_its_nkey(nats_server_factory: MakeServer, tmp_path: Path) -> None:
    key, stranger = Key("U"), Key("U")
    server = nats_server_factory(f"authorization {{ users: [ {{ nkey: {key.public} }} ] }}\n")
    for name, seed in (("user.nk", key.seed), ("stranger.nk", stranger.seed)):
        (tmp_path / name).write_bytes(seed)
    await works(server.url, BusLogin(nkey=str(tmp_path / "user.nk")))
    with pytest.raises(BusRefused):
        stranger_login = BusLogin(nkey=str(tmp_path / "stranger.nk"))
        await nats_bus.connect(server.url, name="test", login=stranger_login, connect_timeout_s=1.5)


async def test_a_user_is_known_by_a_file_with_its_jwt_and_seed(nats_server_factory: MakeServer, tmp_path: Path) -> None:
    operator, account, user = Key("O"), Key("A"), Key("U")
    everything = {"limits": dict.fromkeys(("subs", "conn", "leaf", "imports", "exports", "data", "payload"), -1)}
    account_jwt = operator.jwt(account, "account", everything)
    server = nats_server_factory(
        f"operator: {operator.jwt(operator, 'operator', {})}\nresolver: MEMORY\n"
        f"resolver_preload: {{ {account.public}: {account_jwt} }}\n"
    )
    creds = tmp_path / "user.creds"
    limits = {"subs": -1, "data": -1, "payload": -1}
    creds.write_text(
        f"-----BEGIN NATS USER JWT-----\n{account.jwt(user, 'user', limits)}\n------END NATS USER JWT------\n\n"
        f"-----BEGIN USER NKEY SEED-----\n{user.seed.decode()}\n------END USER NKEY SEED------\n"
    )
    await works(server.url, BusLogin(creds=str(creds)))
    with pytest.raises(BusRefused):
        await nats_bus.connect(server.url, name="test", connect_timeout_s=1.5)


@pytest.mark.parametrize("then", ["fails", "goes on"])
async def test_a_timeout_that_the_client_swallows_still_ends_the_attempt(monkeypatch: pytest.MonkeyPatch, then: str) -> None:
    """In Python 3.11, `asyncio.wait_for` inside nats-py loses a cancellation that comes together with a result."""

    connect = Client.connect
    swallowed = 0

    async def swallows(self: Client, *given: Any, **more: Any) -> None:
        nonlocal swallowed
        try:
            await connect(self, *given, **more)
        except asyncio.CancelledError:
            swallowed += 1
            if then == "fails":
                raise OSError("interrupted") from None
            await asyncio.sleep(60)

    monkeypatch.setattr(Client, "connect", swallows)
    answers = pytest.raises(BusError, match="no NATS server answers")
    with socket.create_server(("127.0.0.1", 0)) as silent, anyio.fail_after(5), answers:
        await nats_bus.connect(f"nats://127.0.0.1:{silent.getsockname()[1]}", name="test", connect_timeout_s=0.1)
    assert swallowed == 1
