"""Credentials and permissions as data; that a server enforces them is shown in tests/e2e/test_nats_permissions.py."""

from __future__ import annotations

import re
import stat
from pathlib import Path

import msgspec
import pytest

from common.protocol.errors import ConfigError, InvalidParameter
from common.runtime import nats_access
from common.runtime.bus_login import BusLogin, ResolvedLogin, credentials_path, read_credentials, run_folder, write_private
from common.runtime.nats_access import Credentials, draw_credentials, server_config
from services.decode.actor import DecodeActor
from services.draft.actor import DraftActor
from services.gateway.actor import GatewayActor
from services.kvstore.actor import KvstoreActor
from services.prefill.actor import PrefillActor

README = Path(__file__).parents[2] / "README.md"
URL = "nats://127.0.0.1:4321"


@pytest.mark.parametrize("actor", [GatewayActor, PrefillActor, DecodeActor, DraftActor, KvstoreActor])
def test_whoever_hears_a_role_may_look_whether_it_is_there(actor: type) -> None:
    assert set(actor.hears) <= set(nats_access.WRITES_TO[actor.role])


def test_the_readme_lists_what_a_further_client_may() -> None:
    listed = re.search(r"```text\npublish:(.*?)subscribe:(.*?)```", README.read_text(), re.DOTALL)
    assert listed is not None
    publish, subscribe = (
        re.findall(r"(?:penstock\.v1|_INBOX)\.\S+", part.replace("<user>", "alice")) for part in listed.groups()
    )
    allowed = nats_access.permissions("alice")
    assert (set(publish), set(subscribe)) == (set(allowed.publish), set(allowed.subscribe))


def test_passwords_are_drawn_anew_and_are_nowhere_but_in_the_files() -> None:
    one, two = draw_credentials(URL), draw_credentials(URL)
    passwords = [known.password for known in (*one.values(), *two.values())]
    assert len(set(passwords)) == len(passwords) == 2 * len(nats_access.USERS)
    assert all(len(password) >= 43 for password in passwords)
    assert all(known.password not in repr(known) + str(known) for known in one.values())
    config = server_config(one)
    assert all(config.count(known.password) == 1 for known in one.values())


@pytest.mark.parametrize("user", ["", "a.b", "*", ">", "a b", 'x"'])
def test_a_user_that_would_be_more_than_one_token_is_refused(user: str) -> None:
    with pytest.raises(InvalidParameter):
        draw_credentials(URL, [user])


def test_private_files_can_be_read_by_nobody_else(tmp_path: Path) -> None:
    path = tmp_path / "run" / "client.json"
    path.parent.mkdir(mode=0o755)
    path.write_text("old")
    path.chmod(0o644)
    write_private(path, "{}")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert [entry.name for entry in path.parent.iterdir()] == ["client.json"]


def test_a_link_in_place_of_the_file_is_replaced_and_not_followed(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_text("untouched")
    path = tmp_path / "run" / "client.json"
    path.parent.mkdir()
    path.symlink_to(target)
    write_private(path, "secret")
    assert target.read_text() == "untouched" and path.read_text() == "secret" and not path.is_symlink()


def test_a_folder_that_cannot_be_written_is_a_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="PENSTOCK_HOME"):
        write_private(tmp_path / "file" / "client.json", "")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path))
    return tmp_path


def test_a_user_without_a_home_has_no_credentials_of_a_bus_of_this_machine(homeless: None) -> None:
    assert credentials_path(URL, "client") is None
    assert BusLogin().resolve(URL, user="decode").options == {}


def save(path: Path, credentials: Credentials) -> Path:
    write_private(path, msgspec.json.encode(credentials).decode())
    return path


def said(login: ResolvedLogin) -> tuple[str, str]:
    """User and password, as nats-py asks for them."""
    return login.options["user"](), login.options["password"]()


def test_credentials_of_a_bus_of_this_machine_are_found_by_its_address(home: Path) -> None:
    known = draw_credentials(URL)["client"]
    save(run_folder(4321) / "client.json", known)
    for url in (URL, "nats://localhost:4321", "127.0.0.1:4321", "tls://[::1]:4321"):
        login = BusLogin().resolve(url, user="client")
        assert said(login) == ("client", known.password)
        assert login.inbox_prefix == "_INBOX.client"
    for url in (
        "nats://127.0.0.1:4322",
        "nats://127.0.0.1",
        "nats://10.0.0.1:4321",
        "nats://x:4321",
        f"{URL},nats://127.0.0.1:4322",
    ):
        assert BusLogin().resolve(url, user="client").options == {}
    assert credentials_path("nats://127.0.0.1:port", "client") is None


def test_a_user_in_an_address_is_that_of_every_server_of_the_cluster(home: Path) -> None:
    save(run_folder(4321) / "client.json", draw_credentials(URL)["client"])
    known = {"user": "me", "password": "a,b"}
    for url in ("nats://me:a,b@127.0.0.1:4321", "nats://me:a,b@10.0.0.1,nats://10.0.0.2", "nats://x:1,me:a@10.0.0.1"):
        options = BusLogin().resolve(url, user="client").options
        assert options == (known if url.startswith("nats://me") else {"user": "x", "password": "1,me:a"}), url
    assert BusLogin().resolve("nats://token@10.0.0.1", user="client").options == {"token": "token"}
    assert BusLogin().resolve("nats://a:b@10.0.0.1,nats://c:d@10.0.0.2", user="client").options == {}


def test_where_nothing_is_known_a_client_and_a_role_keep_their_inboxes_apart(home: Path) -> None:
    assert BusLogin().resolve(URL, user="client").inbox_prefix == "_INBOX"
    assert BusLogin().resolve(URL, user="decode").inbox_prefix == "penstock.v1.int.reply.decode"


def test_a_named_file_is_used_wherever_the_bus_is(home: Path, tmp_path: Path) -> None:
    path = save(tmp_path / "elsewhere" / "c.json", Credentials(user="alice", password="x", inbox_prefix="_INBOX.alice"))
    login = BusLogin(credentials_file=str(path)).resolve("nats://10.0.0.1:4222", user="client")
    assert (said(login), login.inbox_prefix) == (("alice", "x"), "_INBOX.alice")


def test_credentials_are_read_again_for_each_connection(home: Path) -> None:
    path = save(run_folder(4321) / "client.json", Credentials(user="client", password="before"))
    login = BusLogin().resolve(URL, user="client")
    assert said(login) == ("client", "before")
    save(path, Credentials(user="client", password="after"))
    assert said(login) == ("client", "after")
    path.unlink()
    assert said(login) == ("client", "after"), "while the bus is away, so is its file"


def test_a_context_of_the_nats_tool_is_understood(tmp_path: Path) -> None:
    path = tmp_path / "context.json"
    path.write_text(
        '{"description":"","url":"nats://x","socks_proxy":"","token":"","user":"bob","password":"p","jetstream_domain":""}'
    )
    assert read_credentials(path).user == "bob"


@pytest.mark.parametrize("content", ["", "user:password-5", "[]", '{"user": 5}', '{"password": "password-5"'])
def test_a_file_with_something_else_is_a_line_without_its_content(tmp_path: Path, content: str) -> None:
    path = tmp_path / "c.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match="holds no NATS credentials") as refused:
        BusLogin(credentials_file=str(path)).resolve(URL, user="client")
    assert "password-5" not in str(refused.value)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"credentials_file": "/none.json"}, "can't read /none.json"),
        ({"tls_ca": "/none.pem"}, "nats_tls_ca: can't read /none.pem"),
        ({"tls_ca": __file__}, "for TLS"),
        ({"tls_cert": "/none.pem"}, "together"),
        ({"creds": "/a", "nkey": "/b"}, "use one of them"),
        ({"creds": "/none.creds"}, "nats_creds: can't read /none.creds"),
        ({"creds": __file__}, "nats_creds: .* has no JWT and seed"),
        ({"nkey": __file__}, "nats_nkey: .* has no seed"),
        ({"nkey": "/dev/null"}, "nats_nkey: .* has no seed"),
    ],
)
def test_a_mistake_in_the_settings_is_a_line(settings: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        BusLogin(**settings).resolve(URL, user="client")


def test_commands_take_the_same_settings_from_the_environment() -> None:
    environ = {"PENSTOCK_NATS_CREDS": "a.creds", "PENSTOCK_NATS_TLS_CA": "ca.pem", "PENSTOCK_NATS_URL": "nats://x"}
    assert BusLogin.of_environment(environ) == BusLogin(creds="a.creds", tls_ca="ca.pem")
