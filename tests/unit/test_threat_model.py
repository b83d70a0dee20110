"""docs/threat-model.md names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from common.cli import own_bus
from common.cli.up_config import UpConfig
from common.runtime.http_access import is_loopback
from common.runtime.sections import ROLES, config_type

ROOT = Path(__file__).parents[2]
NOT_YET = "*not yet*"


def rows() -> list[list[str]]:
    """The cells of every row of a table about what somebody could do."""
    found: list[list[str]] = []
    heading: list[str] = []
    for line in (ROOT / "docs" / "threat-model.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("|") else []
        if not cells or set(line) <= set("|- "):
            heading = heading if cells else []
        elif not heading:
            heading = cells
        elif heading[-1] == "test":
            found.append(cells)
    return found


def test_there_is_a_line_for_everyone_who_can_reach_something() -> None:
    text = (ROOT / "docs" / "threat-model.md").read_text()
    parts = re.findall(r"^## (.*)$", text, re.MULTILINE)
    assert parts == ["HTTP client", "Web page in a visitor's browser", "Tenant on NATS", "Process on the host", "Peer host"]
    assert len(rows()) > 50


@pytest.mark.parametrize("row", rows(), ids=lambda row: row[0][:60])
def test_every_line_has_a_test_that_exists_or_says_not_yet(row: list[str]) -> None:
    assert len(row) == 3 and all(row)
    if row[2] == NOT_YET:
        return
    named = re.fullmatch(r"`(tests/[\w/]+\.py)::(test_\w+)`", row[2])
    assert named, row[2]
    path, name = named.groups()
    assert re.search(rf"^(async )?def {name}\(", (ROOT / path).read_text(), re.MULTILINE), f"{path} has no {name}"


def test_everything_listens_on_loopback_by_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for config in (UpConfig(), *(config_type(role)() for role in ROLES)):
        assert is_loopback(config.http_host)
    monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path))
    with own_bus.prepared(4321, clients=(), reply_prefixes=("_INBOX.",)) as folder:
        assert own_bus.config_path(folder).read_text().startswith("listen: 127.0.0.1:4321\n")
    assert not folder.exists()
