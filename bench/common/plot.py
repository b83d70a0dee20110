"""Plots, where matplotlib is installed; without it a benchmark says what to install and goes on."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

MISSING = "no plot: matplotlib is not installed here; `pip install 'penstock[bench]'` brings it"


@contextmanager
def figure(path: Path, title: str, *, columns: int = 1, rows: int = 1) -> Iterator[Sequence[Any] | None]:
    """Yields the figure's axes, row by row, and saves it under `path` at the end. None: there is no matplotlib."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        print(MISSING, file=sys.stderr)
        yield None
        return
    shown, axes = pyplot.subplots(rows, columns, figsize=(6.0 * columns, 4.2 * rows), squeeze=False, layout="constrained")
    try:
        yield [axis for line in axes for axis in line]
        shown.suptitle(title, fontsize=9)
        path.parent.mkdir(parents=True, exist_ok=True)
        shown.savefig(path, dpi=110)
    finally:
        pyplot.close(shown)


def bars(axis: Any, names: Sequence[str], series: dict[str, Sequence[float | None]], label: str) -> None:
    """Grouped bars; what is None is left out."""
    width = 0.8 / max(1, len(series))
    for index, (name, values) in enumerate(series.items()):
        places = [at + index * width for at, value in enumerate(values) if value]
        axis.bar(places, [value for value in values if value], width, label=name)
    axis.set_xticks([at + 0.4 - width / 2 for at in range(len(names))], names, rotation=20, fontsize=7)
    axis.set_ylabel(label)
    axis.grid(axis="y", alpha=0.3)
    axis.legend(fontsize=7)
