"""Where the API key comes from, and who is told that there is none."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from msgspec.structs import replace

from common.protocol.errors import ConfigError
from services.gateway.config import GatewayConfig
from tests.actors.edge import ScriptedCore, app_of

ROOT = Path(__file__).parents[2]


def test_a_key_is_given_or_read_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("from-a-file\n", encoding="utf-8-sig")  # as some editors do
    assert GatewayConfig().key == ""
    assert GatewayConfig(api_key="given").key == "given"
    assert GatewayConfig(api_key_file=str(file)).key == "from-a-file"


@pytest.mark.parametrize(
    ("content", "api_key"), [(b"", ""), (b" \n", ""), (b"\xff\xfe", ""), (None, ""), (b"secret-1", "given")]
)
def test_a_file_that_gives_no_key_is_an_error_and_not_an_open_door(tmp_path: Path, content: bytes | None, api_key: str) -> None:
    file = tmp_path / "key"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError) as refused:
        app_of(ScriptedCore(), GatewayConfig(api_key_file=str(file), api_key=api_key))
    assert "secret-1" not in str(refused.value)


@pytest.mark.parametrize("setting", ["api_key_file", "api_keys"])
def test_a_gateway_that_can_not_read_its_keys_says_so_as_it_starts(tmp_path: Path, setting: str) -> None:
    file = tmp_path / "keys"
    with pytest.raises(ConfigError, match=f"can't read {file}"):
        replace(GatewayConfig(), **{setting: str(file)}).check()


async def test_the_key_of_the_file_is_asked_for(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("from-a-file\n")
    app = app_of(ScriptedCore(), GatewayConfig(api_key_file=str(file)))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://gateway") as http:
        assert (await http.get("/v1/models")).status_code == 401
        assert (await http.get("/v1/models", headers={"authorization": "Bearer from-a-file"})).status_code == 200


@pytest.mark.parametrize(
    ("flags", "warned"),
    [
        (["--http-host", "0.0.0.0"], True),
        (["--http-host", "0.0.0.0", "--api-key-file", "key"], False),
        (["--http-host", "::"], True),
        (["--http-host", "127.0.0.1"], False),
        ([], False),
    ],
)
def test_an_api_that_the_network_reaches_without_a_key_is_warned_of(flags: list[str], warned: bool) -> None:
    program = (
        "import sys\nfrom common.cli import up, up_settings\n"
        "asked = up_settings.read(sys.argv[1:], {})\nprint(up._open_api(asked))"
    )
    said = subprocess.run([sys.executable, "-c", program, *flags], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert ("without a key" in said) == warned
