"""Folders of a bus that `penstock up` starts: room for files and batches, and what killed owners leave."""

from __future__ import annotations

import os
import shutil
import subprocess
from contextlib import AbstractContextManager
from pathlib import Path

import msgspec
import pytest

from common.cli import own_bus, owned_folder
from common.cli.up_config import UpConfig
from common.protocol.errors import ConfigError
from common.runtime.nats_server import find_binary


class Disk(msgspec.Struct):
    free: int


def test_a_disk_without_room_for_files_and_batches_is_told_before_the_bus_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Disk(free=4000 << 20))
    assert own_bus.lack_of_room(tmp_path, 3000) == []
    (warning,) = own_bus.lack_of_room(tmp_path, 3001)
    assert str(tmp_path) in warning and "4,000 MiB free" in warning and "--batch-storage-mb 3001" in warning
    (tmp_path / "jetstream" / "jetstream" / "$G" / "streams" / "PENSTOCK_FILES").mkdir(parents=True)
    assert own_bus.lack_of_room(tmp_path, 3001) == [], "its room is taken by itself"


def test_up_names_no_place_of_batches_where_none_are_taken() -> None:
    assert own_bus.place_of_batches(UpConfig(data_dir="/data")) == "/data"
    assert "--data-dir" in own_bus.place_of_batches(UpConfig())
    assert own_bus.place_of_batches(UpConfig(data_dir="/data", zero_retention=True)) == ""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path))
    return tmp_path


def bus(port: int) -> AbstractContextManager[Path]:
    return own_bus.prepared(port, clients=(), reply_prefixes=("_INBOX.",))


def test_the_next_bus_removes_what_killed_ones_left_and_nothing_else(home: Path) -> None:
    run = home / "run"
    with bus(4321) as folder, bus(4322) as other:
        shutil.copytree(folder, kept := home / "as-it-was")
        names = folder.name, other.name
    for name in names:  # what kill -9 leaves: all of it, and nobody has the lock
        shutil.copytree(kept, run / name)
    (run / "of-an-earlier-version").mkdir()
    (run / "linked").symlink_to(kept)
    with bus(4323) as alive, bus(4322) as taken:
        assert {path.name for path in run.iterdir()} == {alive.name, taken.name, "of-an-earlier-version", "linked"}
        assert (taken / "client.json").is_file() and (alive / "client.json").is_file()
    assert {path.name for path in run.iterdir()} == {"of-an-earlier-version", "linked"}
    assert (kept / "client.json").is_file()


def test_the_server_reads_its_configuration_whatever_the_folders_are_called(home: Path, tmp_path: Path) -> None:
    data = tmp_path / 'jürgen\'s "größte" Daten $HOME \\ 数据'
    with own_bus.prepared(4321, clients=(), reply_prefixes=("_INBOX.",), data=data) as folder:
        command = [find_binary(), "-t", "-c", own_bus.config_path(folder)]
        tested = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert tested.returncode == 0, tested.stderr


def test_two_have_not_the_same_folder_at_a_time(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owned_folder, "_WAIT_S", 0.0)
    with bus(4321) as folder:
        said = (folder / "client.json").read_bytes()
        with pytest.raises(ConfigError, match=r"another `penstock up` uses .*--nats-port"), bus(4321):
            pass
        assert (folder / "client.json").read_bytes() == said


def test_logs_of_a_dead_owner_are_kept_for_a_while(tmp_path: Path) -> None:
    folder = tmp_path / "penstock-logs-x"
    with owned_folder.owned(folder):
        (folder / "decode-0.log").write_text("…")
        for path in (folder / "decode-0.log", folder / owned_folder.LOCK, folder):
            os.utime(path, (0, 0))
        assert owned_folder.sweep([folder], idle_s=60) == [], "its owner lives"
    os.utime(folder / "decode-0.log")
    assert owned_folder.sweep([folder], idle_s=60) == []
    os.utime(folder / "decode-0.log", (0, 0))
    assert owned_folder.sweep([folder], idle_s=60) == [folder] and not folder.exists()


def test_a_folder_for_files_that_cannot_be_made_names_both_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a home that can be written, `--data-dir` alone would lead to the next error."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path / "file"))
    with pytest.raises(ConfigError, match="set PENSTOCK_HOME, or choose another"), own_bus.data_folder(UpConfig(), 4321):
        pass
