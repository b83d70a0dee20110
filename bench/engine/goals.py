"""Reads `goals.toml`: what is wanted of a cell, and what the peer was measured at before. Pure but for `load_goals`."""

from __future__ import annotations

from pathlib import Path

import msgspec

FILE = Path(__file__).with_name("goals.toml")
NOT_IN_FILE: dict[str, float] = {}


class Figures(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Of one model in one precision on one card. Tokens per second by cell."""

    card: str
    model: str
    precision: str
    peer: str = ""
    recorded: dict[str, float] = NOT_IN_FILE
    goal: dict[str, float] = NOT_IN_FILE
    recorded_first_token_ms: float = 0.0
    recorded_start_s: float = 0.0


class _File(msgspec.Struct, forbid_unknown_fields=True):
    figures: list[Figures]


NOTHING = Figures(card="", model="", precision="")


def load_goals(path: Path = FILE) -> list[Figures]:
    """:raises msgspec.MsgspecError: if the file holds something else."""
    return msgspec.toml.decode(path.read_bytes(), type=_File).figures


def find(figures: list[Figures], *, device: str, model: str, precision: str) -> Figures:
    """Those of `model` (`dummy:` in front does not matter) in `precision` on the card `device`; `NOTHING` without any."""
    name = model.removeprefix("dummy:")
    for one in figures:
        if one.card in device and one.model == name and one.precision == precision:
            return one
    return NOTHING
