"""The engine's benchmark: its tables say what is known, and compare it with goals and a peer."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

from bench.common import plot
from bench.common.machine import Machine
from bench.common.table import markdown
from bench.engine.cells import Cell, Measured, Opened
from bench.engine.goals import NOTHING, find, load_goals
from bench.engine.report import Part, Report, Side, draw, render

MACHINE = Machine(taken_at="now", commit="abc", cpu="x", cores=2, load=0.0, gpus=["NVIDIA H200"], versions={})


def report_of(tok_s: float, peer: Side | None = None) -> Report:
    ours = Side(
        lines=[
            Opened(name="m", device="NVIDIA H200", first_token_s=9.0, kv_tokens=100, ahead=True),
            Measured(cell="1x128x256", first_s=0.01, total_s=1.0, tok_s=tok_s, limit_tok_s=282, limit_by="memory"),
            Measured(cell="1x2048", first_s=0.05, total_s=0.05, tok_s=40_960, limit_tok_s=50_000, limit_by="compute"),
        ]
    )
    goals = find(load_goals(), device="NVIDIA H200", model="dummy:llama-3.1-8b", precision="bf16")
    part = Part(model="dummy:llama-3.1-8b", precision="bf16", ours=ours, peer=peer, goals=goals)
    return Report(machine=MACHINE, command="python -m bench.engine", parts=[part])


def test_a_recorded_peer_is_marked_and_a_goal_is_compared() -> None:
    text = render(report_of(255.0))
    line = next(line for line in text.splitlines() if "1x128x256" in line)
    assert "207*" in line and "1.23" in line and "yes" in line and "90%" in line
    assert "no" in next(line for line in text.splitlines() if "| 1x2048" in line.replace("|    ", "| "))


def test_a_peer_of_the_same_run_replaces_the_recorded_one() -> None:
    measured = Measured(cell="1x128x256", first_s=0.01, total_s=1.2, tok_s=212.0)
    peer = Side(lines=[Opened(name="vLLM", device="", version="vLLM 9.9"), measured], error="ended after its 60 s")
    text = render(report_of(255.0, peer))
    assert "vLLM 9.9" in text and "212 " in text and "207*" not in text and "ended after its 60 s" in text


def test_unknown_cards_have_no_goals() -> None:
    assert find(load_goals(), device="NVIDIA B200", model="dummy:llama-3.1-8b", precision="bf16") is NOTHING


def test_every_goal_names_a_cell_and_is_above_the_peer() -> None:
    for figures in load_goals():
        assert all(Cell.parse(name) for name in [*figures.goal, *figures.recorded])
        assert all(goal > figures.recorded[name] for name, goal in figures.goal.items())


def test_a_table_stands_in_line() -> None:
    lines = markdown(("a", "number"), [("x", "1,000"), ("yyy", "5")]).splitlines()
    assert len({len(line) for line in lines}) == 1
    assert lines[1].endswith(":|") or lines[1].endswith(": |")


def test_the_plot_is_a_png(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert draw(report_of(255.0), tmp_path / "a" / "engine.png")
    assert (tmp_path / "a" / "engine.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_the_plot_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert not draw(report_of(255.0), tmp_path / "engine.png")
    assert "penstock[bench]" in capsys.readouterr().err == plot.MISSING + "\n"
