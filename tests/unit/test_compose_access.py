"""The bus of compose.yaml: each container sees the credentials of its own role, and nobody publishes the bus's port."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from common.cli.write_access import write
from common.protocol.errors import ConfigError
from common.runtime import nats_bus
from common.runtime.bus_login import BusLogin, read_credentials
from common.runtime.nats_access import ROLES, USERS
from tests.fixtures.nats import LocalNatsServer

ROOT = Path(__file__).parents[2]
FOLDER, LOGIN = "/run/penstock-access", "/run/penstock-login"


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    yaml = pytest.importorskip("yaml")
    return yaml.safe_load((ROOT / "compose.yaml").read_text())


def test_each_container_sees_the_credentials_of_its_own_role_alone(compose: dict[str, Any]) -> None:
    services = compose["services"]
    assert set(services) == {"access", "nats", *ROLES}
    for role in ROLES:
        service = services[role]
        assert [volume for volume in service["volumes"] if "access" in volume] == [f"access-{role}:{LOGIN}:ro,nocopy"]
        assert service["environment"]["PENSTOCK_NATS_CREDENTIALS_FILE"] == f"{LOGIN}/login.json"
    assert set(services["access"]["volumes"]) == {f"access-{user}:{FOLDER}/{user}" for user in ("nats", *USERS)}
    assert services["nats"]["depends_on"] == {"access": {"condition": "service_completed_successfully"}}
    assert {name for name in compose["volumes"] if name.startswith("access-")} == {
        f"access-{user}" for user in ("nats", *USERS)
    }
    assert "ports" not in services["nats"] and "ports" not in services["access"]


def test_the_image_has_a_folder_for_each_user_that_the_volumes_take_after() -> None:
    assert f"for user in nats {' '.join(USERS)}; do" in (ROOT / "Dockerfile").read_text()


async def test_what_is_written_is_a_bus_with_every_user(
    tmp_path: Path, nats_server_factory: Callable[[str], LocalNatsServer]
) -> None:
    def command() -> str:
        argv = [sys.executable, "-m", "common.cli.write_access", str(tmp_path), "nats://nats:4222"]
        return subprocess.run(argv, cwd=ROOT, check=True, capture_output=True, text=True).stderr

    assert command().startswith("wrote")
    before = (tmp_path / "nats" / "nats-server.conf").read_text()
    assert command().startswith("kept")
    assert (tmp_path / "nats" / "nats-server.conf").read_text() == before
    server = nats_server_factory(before[before.index("authorization") :])
    for user in USERS:
        login = BusLogin(credentials_file=str(tmp_path / user / "login.json"))
        bus = await nats_bus.connect(server.url, name="test", user=user, login=login)
        assert bus.new_inbox().startswith(read_credentials(tmp_path / user / "login.json").inbox_prefix)
        await bus.close()
        assert bus.denied == []


def test_a_part_that_is_missing_makes_all_anew(tmp_path: Path) -> None:
    assert write(tmp_path, "nats://nats:4222")
    before = read_credentials(tmp_path / "client" / "login.json")
    (tmp_path / "decode" / "login.json").unlink()
    assert write(tmp_path, "nats://nats:4222")
    assert read_credentials(tmp_path / "client" / "login.json") != before


def test_a_folder_that_cannot_be_written_is_a_line(tmp_path: Path) -> None:
    (tmp_path / "gateway").write_text("")
    with pytest.raises(ConfigError):
        write(tmp_path, "nats://nats:4222")
