"""The file of tenants and keys: what it says, what is no such file, and the command that adds to it."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from common.cli import keys
from common.cli.app import app
from common.protocol.errors import ConfigError
from common.runtime import api_keys
from services.gateway.config import GatewayConfig

KEY = "pk-abc"
SHA = api_keys.digest(KEY.encode()).hex()


def test_a_file_names_tenants_and_whose_each_key_is() -> None:
    text = f'[tenants.acme]\nrequests_per_minute = 5\nweight = 2\n[tenants.zoo]\n[[keys]]\nsha256 = "{SHA}"\ntenant = "acme"\n'
    file = api_keys.parse(text, "keys.toml")
    assert file.owners == {api_keys.digest(b"pk-abc"): "acme"}
    assert (file.tenants["acme"].requests_per_minute, file.tenants["acme"].weight) == (5, 2.0)
    assert file.tenants["zoo"].requests_per_minute == 0


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "no tenants"),
        (
            "[tenants.acme]\nrequest_per_minute = 5",
            "'acme' in keys.toml: request_per_minute; did you mean requests_per_minute?",
        ),
        ("[tenant.acme]", "table in keys.toml: tenant; did you mean tenants?"),
        ("tenants = 3", "keys.toml"),
        ("[tenants.acme]\ntokens_per_minute = -1", "tokens_per_minute"),
        ("[tenants.acme]\nweight = 0", "weight"),
        ("[tenants.'a.b']", "a.b"),
        ("[tenants.'a*']", "a*"),
        ("[tenants.'a\\nb']", "a"),
        ("[tenants.acme", "keys.toml"),
        (f'[tenants.acme]\n[[keys]]\nsha256 = "{SHA}"\ntenant = "amce"', "amce"),
        ('[tenants.acme]\n[[keys]]\nsha256 = "pk-secret"\ntenant = "acme"', "sha256"),
        (f'[tenants.a]\n[tenants.b]\n[[keys]]\nsha256="{SHA}"\ntenant="a"\n[[keys]]\nsha256="{SHA}"\ntenant="b"', "keys[1]"),
    ],
)
def test_a_mistake_in_the_file_is_named_and_no_key_is_shown(text: str, named: str) -> None:
    with pytest.raises(ConfigError) as refused:
        api_keys.parse(text, "keys.toml")
    assert named in str(refused.value)
    assert "keys.toml" in str(refused.value) or "tenant" in str(refused.value)
    assert "pk-secret" not in str(refused.value)


def test_the_command_prints_the_key_once_and_keeps_its_digest(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    for tenant in ("acme", "zoo", "acme"):
        result = CliRunner().invoke(app, ["keys", "add", tenant, "--file", str(path), "--note", 'the "new" one'])
        assert result.exit_code == 0, result.output
        key = result.stdout.strip().splitlines()[-1]
        text = path.read_text()
        assert key.startswith("pk-") and key not in text
        assert api_keys.parse(text, "keys.toml").owners[api_keys.digest(key.encode())] == tenant
    assert len(api_keys.parse(text, "keys.toml").owners) == 3
    assert path.stat().st_mode & 0o777 == 0o600
    assert [file.name for file in tmp_path.iterdir()] == ["keys.toml"]


def test_the_command_leaves_a_broken_file_alone(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text("[tenants.acme]\nnonsense = 1\n")
    with pytest.raises(ConfigError):
        keys.append(path, "pk-x", "acme")
    assert path.read_text() == "[tenants.acme]\nnonsense = 1\n"
    with pytest.raises(ConfigError):
        keys.append(tmp_path / "new.toml", "pk-x", "acme", note="two\nlines")
    assert not (tmp_path / "new.toml").exists()


@pytest.mark.parametrize("key", ["two\nlines", "with space", "tab\t", "ключ", "x" * 600, "\x7f"])
def test_a_key_that_no_header_can_hold_is_refused_at_the_start(tmp_path: Path, key: str) -> None:
    with pytest.raises(ConfigError) as refused:
        _ = GatewayConfig(api_key=key).key
    assert refused.value.param == "api_key" and key not in str(refused.value)
    file = tmp_path / "key"
    file.write_text(key.strip() + " and more")
    with pytest.raises(ConfigError):
        _ = GatewayConfig(api_key_file=str(file)).key


def test_brackets_without_end_are_a_mistake_in_the_file() -> None:
    """A gateway reads the file again while it serves."""
    with pytest.raises(ConfigError, match=r"keys\.toml"):
        api_keys.parse("x = " + "[" * 100_000, "keys.toml")
