"""A file that a process waits for before it measures: so that many may start at once and measure one after the other.

the process     opens its engine ─► `arrive(gate)`: GATE.ready is there ─► `wait(gate)` ─► measures
who started it  waits until all that it started have arrived ─► `release(gate)`: GATE is there ─► waits for the end
"""

from __future__ import annotations

import time
from pathlib import Path

_LOOK_S = 0.02


def arrive(gate: Path) -> None:
    _ready(gate).touch()


def has_arrived(gate: Path) -> bool:
    return _ready(gate).exists()


def wait(gate: Path) -> None:
    while not gate.exists():
        time.sleep(_LOOK_S)


def release(gate: Path) -> None:
    gate.touch()


def clear(gate: Path) -> None:
    """Before anybody starts: an earlier run may have left its files."""
    gate.unlink(missing_ok=True)
    _ready(gate).unlink(missing_ok=True)


def _ready(gate: Path) -> Path:
    return gate.with_name(f"{gate.name}.ready")
