"""`docs/metrics.md` has every metric, and no document names one that does not exist."""

from __future__ import annotations

import re

import pytest

from tests.unit import metrics_page
from tests.unit.metrics_page import ROOT, SECTIONS

NAME = re.compile(r"\b(?:penstock_|vllm:)[a-z0-9_]*[a-z0-9](?![a-z0-9_]|\*)")
OF_HISTOGRAM = re.compile(r"_(bucket|sum|count)$")
PAGES = ("README.md", "docs/cli.md", "docs/http.md", "docs/operations.md", "CHANGELOG.md")


def test_the_page_is_current() -> None:
    assert (ROOT / "docs" / "metrics.md").read_text() == metrics_page.page(), "run `make docs`"


def test_every_file_that_makes_metrics_is_in_a_section() -> None:
    places = [ROOT / place for listed in SECTIONS.values() for place in listed]
    left_out = {file for file in metrics_page.sources() if not any(file.is_relative_to(place) for place in places)}
    assert not left_out


@pytest.mark.parametrize("name", PAGES)
def test_the_metrics_that_a_document_names_exist(name: str) -> None:
    known = {metric for named in metrics_page.metrics().values() for metric in named}
    named = set(NAME.findall((ROOT / name).read_text()))
    missing = {metric for metric in named if not {metric, OF_HISTOGRAM.sub("", metric)} & known}
    ends = set(re.findall(r"`(_[a-z0-9][a-z0-9_]*)`", (ROOT / name).read_text()))
    assert not missing | {end for end in ends if not any(metric.endswith(end) for metric in known)}
