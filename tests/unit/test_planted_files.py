"""`/dev/shm` is everyone's: nothing that somebody else planted there is followed, opened, believed or removed."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from common.protocol.errors import ConfigError, TransportUnavailable
from common.runtime.gpu_claim import claim
from common.transfer.segment import Segment
from common.transfer.segment_file import sweep

SECRET = b"not yours"


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """A file of this user, elsewhere, that a link could lead to."""
    folder = tmp_path / "home"
    folder.mkdir()
    path = folder / "precious"
    path.write_bytes(SECRET)
    path.chmod(0o600)
    return path


@pytest.fixture
def shm(tmp_path: Path) -> Path:
    folder = tmp_path / "shm"
    folder.mkdir()
    return folder


def create(shm: Path) -> Segment:
    return Segment.create(shm, "one", num_blocks=4, block_bytes=100, fingerprint="m")


def test_a_link_under_a_segments_name_is_not_written_through(shm: Path, victim: Path) -> None:
    (shm / "penstock-one").symlink_to(victim)
    with pytest.raises(ConfigError, match="link or belongs to another user"):
        create(shm)
    assert victim.read_bytes() == SECRET
    assert [path.name for path in shm.iterdir()] == ["penstock-one"]


def test_a_link_that_leads_nowhere_makes_no_file(shm: Path, tmp_path: Path) -> None:
    (shm / "penstock-one").symlink_to(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="link or belongs to another user"):
        create(shm)
    assert not (tmp_path / "nowhere").exists()


def test_a_reader_follows_no_link_not_even_to_a_real_segment(shm: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    segment = create(elsewhere)
    (shm / "penstock-one").symlink_to(segment.path)
    with pytest.raises(TransportUnavailable, match="can't be opened"):
        Segment.open(shm, "one", fingerprint="m")
    segment.close()


def test_a_sweep_removes_neither_a_link_nor_what_it_leads_to(shm: Path, victim: Path) -> None:
    (shm / "penstock-one").symlink_to(victim)
    draft = shm / ".penstock-two.00000000"
    draft.symlink_to(victim)
    os.utime(victim, (0, 0))
    assert sweep(shm) == []
    assert victim.read_bytes() == SECRET
    assert (shm / "penstock-one").is_symlink()


def test_a_fifo_keeps_nobody_waiting(shm: Path) -> None:
    os.mkfifo(shm / "penstock-one", 0o600)
    began = time.monotonic()
    with pytest.raises(TransportUnavailable, match="not a private file"):
        Segment.open(shm, "one", fingerprint="m")
    with pytest.raises(ConfigError):
        create(shm)
    assert sweep(shm) == []
    assert time.monotonic() - began < 2


@pytest.mark.parametrize("mode", [0o644, 0o620, 0o606])
def test_a_file_that_others_may_read_or_write_is_no_segment(shm: Path, mode: int) -> None:
    segment = create(shm)
    segment.path.chmod(mode)
    with pytest.raises(TransportUnavailable, match="not a private file"):
        Segment.open(shm, "one", fingerprint="m")
    segment.path.chmod(0o600)
    segment.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_another_users_file_is_neither_read_nor_swept(shm: Path) -> None:
    segment = create(shm)
    copy = shm / "penstock-two"
    copy.write_bytes(segment.path.read_bytes())
    copy.chmod(0o600)
    os.chown(copy, 12345, 12345)
    with pytest.raises(TransportUnavailable, match="not a private file"):
        Segment.open(shm, "two", fingerprint="m")
    assert sweep(shm) == []
    assert copy.exists()
    segment.close()


def test_a_link_in_a_gpu_locks_place_is_an_error(shm: Path, victim: Path) -> None:
    (shm / "gpu-0.lock").symlink_to(victim)
    with pytest.raises(ConfigError, match=r"gpu-0\.lock"):
        claim(shm, 1)
    (shm / "gpu-0.lock").unlink()
    (shm / "gpu-0.lock").symlink_to(shm / "made")
    with pytest.raises(ConfigError, match=r"gpu-0\.lock"):
        claim(shm, 1)
    assert not (shm / "made").exists()
