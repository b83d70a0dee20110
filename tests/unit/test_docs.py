"""The documents say what the code does: generated pages are current, links lead somewhere, commands exist."""

from __future__ import annotations

import inspect
import re
import shlex
from pathlib import Path

import pytest
from typer.core import TyperGroup as Group
from typer.main import get_command

from common.cli import up_settings
from common.cli.app import app
from common.protocol import messages, subjects
from common.protocol.document import document
from common.runtime import config as configuration
from common.runtime.sections import config_type, service_fields, unknown_variables

ROOT = Path(__file__).parents[2]
API = ROOT / "docs" / "http.md"
COMMAND_PAGES = [ROOT / "README.md", ROOT / "docs" / "cli.md", ROOT / "docs" / "performance.md"]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
LINK = re.compile(r"\]\((?!https?:|#)([^)#]+)")
FILE = re.compile(r"`((?:common|services|tests|docs|bench|examples)/[\w./-]+)`")


def test_the_protocol_page_is_current() -> None:
    assert (ROOT / "docs" / "protocol.md").read_text() == document(), "run `make docs`"


def test_the_protocol_page_names_every_message() -> None:
    page = document()
    for message in messages.Message.__args__:
        assert f"### {message.__name__}" in page
        assert (inspect.getdoc(message) or "no docstring") in page


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_named_files_exist(page: Path) -> None:
    text = page.read_text()
    missing = [link for link in LINK.findall(text) if not (page.parent / link).exists()]
    missing += [name for name in FILE.findall(text) if "NAME" not in name and not (ROOT / name).exists()]
    assert not missing


def anchors(page: Path) -> set[str]:
    """What a link to a heading of the page ends with, as GitHub makes it."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    headings = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading) for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE)]
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_to_headings_lead_there(page: Path) -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]*)#([^)]+)\)", page.read_text())
    assert [link for link in links if link[1] not in anchors(page.parent / link[0] if link[0] else page)] == []


def test_files_of_the_layout_exist() -> None:
    layout = (ROOT / "docs" / "architecture.md").read_text().split("```text")[1].split("```")[0]
    named = {name for name in re.findall(r"\b\w+\.py\b", layout) if not name.startswith("X")}
    assert named <= {file.name for top in ("common", "services", "bench", "recipes") for file in (ROOT / top).rglob("*.py")}


def test_commands_that_the_readme_names_exist() -> None:
    text = (ROOT / "README.md").read_text()
    commands = {command.name for command in (*app.registered_commands, *app.registered_groups)}
    assert set(re.findall(r"\bpenstock (pull|up|[a-z]+)\b(?=[ `\n])", code_of(text))) <= commands
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"\bmake ([a-z]+)", code_of(text))) <= targets


def commands_of(page: Path) -> list[list[str]]:
    """Words of each of our commands in the page's shell blocks, without variables before them and comments behind."""
    found: list[list[str]] = []
    for block in re.findall(r"```sh\n(.*?)```", page.read_text(), re.DOTALL):
        for line in block.splitlines():
            for command in re.split(r"\s\|\s|\s&$", line.split(" #")[0]):
                if match := re.match(r"(?:[A-Z_]+=\S+ )*((?:penstock|python -m services).*)", command):
                    found.append(shlex.split(match[1]))
    return found


@pytest.mark.parametrize("page", COMMAND_PAGES, ids=lambda page: page.name)
def test_commands_in_the_documents_are_understood_as_typed(page: Path) -> None:
    """Flags and their values; what they do is tested elsewhere."""
    cli = get_command(app)
    assert isinstance(cli, Group)
    assert commands_of(page)
    for words in commands_of(page):
        if words[:2] == ["penstock", "up"]:
            assert up_settings.read(words[2:], {}) is not None, words
        elif words[0] == "penstock" and words[1].startswith("--"):
            assert words[1] in [option for parameter in cli.params for option in parameter.opts]
        elif words[0] == "penstock":
            cli.commands[words[1]].make_context(words[1], words[2:]).close()
        else:
            role = words[2].removeprefix("services.")
            configuration.load(config_type(role), section=role, argv=words[3:], environ={})


def code_of(text: str) -> str:
    """Fenced blocks and inline code."""
    return "\n".join(re.findall(r"```.*?```|`[^`]+`", text, re.DOTALL))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_variables_that_a_document_names_are_read(page: Path) -> None:
    named = set(re.findall(r"(?<!\w)PENSTOCK_[A-Z0-9_]+", page.read_text())) - set(subjects.STREAMS)
    assert unknown_variables(dict.fromkeys(named, "x"), {}) == []


def test_defaults_that_the_page_of_the_api_lists_are_those_of_the_settings() -> None:
    units = {"": 1, "MiB": 1 << 20, "GiB": 1 << 30, "days": 24 * 3600}
    tables = re.findall(r"^\| setting of the gateway \| default \|.*\n\|[-|]+\n((?:\|.*\n)+)", API.read_text(), re.MULTILINE)
    checked = 0
    for row in "".join(tables).splitlines():
        names, defaults = re.findall(r"`(\w+)`", row.split("|")[1]), row.split("|")[2].split(";")
        for name, default in zip(names, defaults, strict=True):
            number, _, unit = default.strip().partition(" ")
            assert service_fields("gateway")[name].default == int(number.replace(",", "")) * units[unit], name
            checked += 1
    assert checked > 10


def test_log_events_that_the_operations_page_explains_exist() -> None:
    tables = re.findall(r"^\| log \|.*\n\|[-|]+\n((?:\|.*\n)+)", (ROOT / "docs" / "operations.md").read_text(), re.MULTILINE)
    named = {event for table in tables for row in table.splitlines() for event in re.findall(r"`([a-z_]+)`", row.split("|")[1])}
    assert {"fenced", "kv_disk_off", "kv_path_failed"} <= named
    sources = "".join(file.read_text() for top in ("common", "services") for file in (ROOT / top).rglob("*.py"))
    assert {event for event in named if f'"{event}"' not in sources} == set()


def test_decisions_are_short_and_have_the_three_parts() -> None:
    for page in (ROOT / "docs" / "decisions").glob("*.md"):
        text = page.read_text()
        assert all(f"## {part}" in text for part in ("Context", "Decision", "Consequences")), page.name
        assert len(text.splitlines()) <= 40, page.name


def test_the_raw_nats_example_stays_small() -> None:
    assert len((ROOT / "examples" / "raw_nats.py").read_text().splitlines()) <= 25
