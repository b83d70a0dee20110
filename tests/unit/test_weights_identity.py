"""Weights that differ anywhere are other weights: KV on disk outlives a change of the files."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from common.models.config import load_config
from common.models.shapes import write_model
from common.models.source import ModelFiles, resolve
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


def test_a_field_of_a_later_version_counts_where_it_says_something_new(tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 256}
    found: set[str] = set()
    for factor in (1.0, 2.0, 4.0):
        config = {"model_type": "granite", **sizes, "logits_scaling": factor}
        (tmp_path / "config.json").write_text(json.dumps(config))
        (tmp_path / "model.safetensors").write_bytes(bytes(1024))
        found.add(load_config(ModelFiles(name="m", format="safetensors", path=tmp_path)).identity)
    assert len(found) == 3
