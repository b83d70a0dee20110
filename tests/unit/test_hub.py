"""GGUF models of a repository are named by how their files' names end. The real client fetches from a local hub."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from common.models.hub import _models
from common.models.naming import model_name
from tests.fixtures.hub import COMMIT, hub_of

FILES = [
    "README.md",
    "Tiny-0.6B-Q4_K_M.gguf",
    "Tiny-0.6B-UD-Q4_K_M.gguf",
    "tiny.bf16.gguf",
    "mmproj-Q4_K_M.gguf",
    "Q8_0/Tiny-0.6B-Q8_0-00001-of-00002.gguf",
    "Q8_0/Tiny-0.6B-Q8_0-00002-of-00002.gguf",
    "a-[x]-IQ4_XS.gguf",
    "one-F16.gguf",
    "other-F16.gguf",
]
ASK = """
import sys
from common.models.source import pull, resolve
from common.protocol.errors import UnknownModel
for spec in sys.argv[2:]:
    try:
        found = (pull if sys.argv[1] == "pull" else resolve)(spec)
        print(found.name, found.format, found.path, found.revision, sep="|")
    except UnknownModel as error:
        print(error)
"""


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "repository"
    for name in FILES:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(name.encode())
    return folder


def ask(how: str, url: str, home: Path, *specs: str) -> list[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PENSTOCK_", "HF_"))}
    env = clean | {"HF_ENDPOINT": url, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1"}
    command = [sys.executable, "-c", ASK, how, *specs]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_a_label_brings_that_model_alone(repository: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"
    wanted = {
        "owner/name:Q4_K_M": "Tiny-0.6B-Q4_K_M.gguf",
        "owner/name:ud-q4_k_m": "Tiny-0.6B-UD-Q4_K_M.gguf",
        "owner/name:BF16@main": "tiny.bf16.gguf",
        "owner/name:Q8_0": "Q8_0/Tiny-0.6B-Q8_0-00001-of-00002.gguf",
        "owner/name:IQ4_XS": "a-[x]-IQ4_XS.gguf",
    }
    with hub_of(repository) as hub:
        assert "penstock pull owner/name:Q4_K_M" in ask("resolve", hub.url, home, "owner/name:Q4_K_M")[0]
        found = ask("pull", hub.url, home, *wanted)
        fetched = set(hub.fetched)
    for line, (spec, name) in zip(found, wanted.items(), strict=True):
        assert "|" in line, line
        served, kind, path, revision = line.split("|")
        assert (served, kind, revision) == (spec.removesuffix("@main"), "gguf", COMMIT)
        assert path.endswith(f"snapshots/{COMMIT}/{name}")
    second = "Tiny-0.6B-Q8_0-00002-of-00002.gguf"
    assert fetched == {Path(name).name for name in wanted.values()} | {second}
    nowhere = "http://127.0.0.1:9"
    assert ask("resolve", nowhere, home, *wanted) == found
    next((home / "hub").rglob(second)).unlink()
    assert "penstock pull owner/name:Q8_0" in ask("resolve", nowhere, home, "owner/name:Q8_0")[0]


def test_what_is_not_one_model_is_said(repository: Path, tmp_path: Path) -> None:
    with hub_of(repository) as hub:
        none, several, plain = ask("pull", hub.url, tmp_path / "home", "owner/name:Q2_K", "owner/name:F16", "owner/name")
        assert not [name for name in hub.fetched if name.endswith(".gguf")]
    listed = "of its GGUF models name one, such as owner/name:F16: F16, IQ4_XS, Q4_K_M, Q8_0, UD-Q4_K_M, bf16"
    assert none == f"owner/name has no GGUF model Q2_K; {listed}"
    assert several == "owner/name has several GGUF models F16: one-F16.gguf, other-F16.gguf; fetch the file"
    assert plain == f"owner/name has no .safetensors weights; {listed}"


@pytest.mark.parametrize(
    ("name", "label"),
    [
        ("Qwen3-0.6B-Q4_K_M.gguf", "q4_k_m"),
        ("qwen2.5-0.5b-instruct-q4_k_m.gguf", "q4_k_m"),
        ("gpt-oss-20b-mxfp4.gguf", "mxfp4"),
        ("SmolLM2-135M-Instruct.Q4_1.gguf", "q4_1"),
        ("UD-Q4_K_XL/GLM-4.5-Air-UD-Q4_K_XL-00001-of-00002.gguf", "ud-q4_k_xl"),
        ("model.gguf", "model"),
    ],
)
def test_labels_of_published_names(name: str, label: str) -> None:
    assert _models([name]) == {label: [[name]]}


def test_a_whole_file_beside_its_parts_is_another_model() -> None:
    parts = [f"x-Q8_0-0000{number}-of-00002.gguf" for number in (1, 2)]
    assert _models(["x-Q8_0.gguf", *reversed(parts)]) == {"q8_0": [parts, ["x-Q8_0.gguf"]]}


def test_a_model_is_called_by_repository_and_label() -> None:
    assert model_name("unsloth/Qwen3-0.6B-GGUF:Q4_K_M@main") == "unsloth/Qwen3-0.6B-GGUF:Q4_K_M"
