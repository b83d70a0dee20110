"""The documents say what the code does: generated pages are current, links lead somewhere, commands exist."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

from common.cli.main import app
from common.protocol import messages
from common.protocol.document import document

ROOT = Path(__file__).parents[2]
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


def test_commands_that_the_readme_names_exist() -> None:
    text = (ROOT / "README.md").read_text()
    commands = {command.name for command in app.registered_commands}
    assert set(re.findall(r"\bpenstock (pull|up|[a-z]+)\b(?=[ `\n])", code_of(text))) <= commands
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"\bmake ([a-z]+)", code_of(text))) <= targets


def code_of(text: str) -> str:
    """Fenced blocks and inline code."""
    return "\n".join(re.findall(r"```.*?```|`[^`]+`", text, re.DOTALL))


def test_decisions_are_short_and_have_the_three_parts() -> None:
    for page in (ROOT / "docs" / "decisions").glob("*.md"):
        text = page.read_text()
        assert all(f"## {part}" in text for part in ("Context", "Decision", "Consequences")), page.name
        assert len(text.splitlines()) <= 40, page.name


def test_the_raw_nats_example_stays_small() -> None:
    assert len((ROOT / "examples" / "raw_nats.py").read_text().splitlines()) <= 20
