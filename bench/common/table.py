"""Tables that read well in a terminal and in Markdown alike, and where results are written. Pure but for `write_json`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

RIGHT = frozenset("0123456789+-±~—<>≥≤")


def markdown(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table with columns in line; a column whose cells all begin like numbers stands to the right."""
    columns = list(zip(titles, *rows, strict=True))
    widths = [max(map(len, column)) for column in columns]
    right = [all(cell[:1] in RIGHT for cell in column[1:] if cell) and len(column) > 1 for column in columns]

    def line(cells: Sequence[str]) -> str:
        padded = [cell.rjust(w) if r else cell.ljust(w) for cell, w, r in zip(cells, widths, right, strict=True)]
        return f"| {' | '.join(padded)} |"

    rule = [("-" * (w - 1) + ":") if r else "-" * w for w, r in zip(widths, right, strict=True)]
    return "\n".join([line(titles), line(rule), *map(line, rows)])


def number(value: float | None, digits: int = 0) -> str:
    """With thousands' commas; a dash for None and for 0, which stands for "not known"."""
    return f"{value:,.{digits}f}" if value else "—"


def percent(part: float | None, whole: float | None) -> str:
    return f"{100 * part / whole:.0f}%" if part and whole else "—"


def ratio(ours: float | None, theirs: float | None) -> str:
    return f"{ours / theirs:.2f}" if ours and theirs else "—"


def write_json(path: Path, value: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(value), indent=1) + b"\n")
