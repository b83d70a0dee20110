"""Weights that differ anywhere are other weights: KV on disk outlives a change of the files."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from common.models.config import load_config
from common.models.shapes import write_model
from common.models.source import resolve
from tests.fixtures.tiny_model import edit_config, write_tiny_model

MIB = 1 << 20


def identity_with(folder: Path, weights: bytes | bytearray) -> str:
    (folder / "model.safetensors").write_bytes(weights)
    return load_config(resolve(str(folder))).identity


def test_a_change_in_the_middle_of_a_file_is_another_model(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "tiny")
    edit_config(folder, tie_word_embeddings=False)  # of a tied model the header is read
    weights = random.Random(1).randbytes(8 * MIB)
    identity = identity_with(folder, weights)
    assert identity_with(folder, weights) == identity
    for start in (0, 3 * MIB, 4 * MIB + 12345, 8 * MIB - 64 * 1024):
        changed = bytearray(weights)
        changed[start : start + 64 * 1024] = bytes(64 * 1024)
        assert identity_with(folder, changed) != identity, f"64 KiB from {start} on"


@pytest.mark.parametrize(
    ("shape", "identity"),
    [
        ("llama-3.2-1b", "c9006025fd517c6445e8658649546679"),
        ("gpt-oss-20b", "a3348e231d936b452475acfe459551af"),
        ("qwen3-30b-a3b-fp8", "269489949ccffaa45739889a6792bdd3"),
    ],
)
def test_identities_are_those_of_earlier_versions(tmp_path: Path, shape: str, identity: str) -> None:
    """Gateways leave workers of another identity alone, so that a fleet of two versions would fall into two. A new field of a
    specification is to be left out of `_identity` where it has its default."""
    write_model(shape, tmp_path)
    edit_config(tmp_path, tie_word_embeddings=False)
    assert identity_with(tmp_path, bytes(1024)) == identity
