"""A model is called what the operator typed, however it was spelled, and whatever the files behind it are called."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.models.naming import expanded, model_name
from common.models.source import default_cache_dir, resolve
from common.protocol import subjects
from common.protocol.errors import ConfigError
from common.runtime.settings import ServiceConfig


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("spec", "name"),
    [
        ("smollm2-135m-instruct", "smollm2-135m-instruct"),
        ("dummy:llama-3.1-8b", "dummy:llama-3.1-8b"),
        ("./my-model.gguf", "my-model"),
        ("my-model.gguf", "my-model"),
        ("/srv/models/My Model v1.5 (Q4_K_M).gguf", "My Model v1.5 (Q4_K_M)"),
        ("models/UPPER.GGUF", "UPPER"),
        ("./Qwen3-0.6B", "Qwen3-0.6B"),
        ("./Qwen3-0.6B/", "Qwen3-0.6B"),
        ("/srv/a/../Qwen3-0.6B/.", "Qwen3-0.6B"),
        ("~nobody-of-this-name/größe-7b", "größe-7b"),
        ("./模型.gguf", "模型"),
        ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B"),
        ("Qwen/Qwen3-0.6B@refs/pr/1", "Qwen/Qwen3-0.6B"),
        ("/cache/hub/models--Qwen--Qwen3-0.6B/snapshots/c1899de289a04d12", "Qwen/Qwen3-0.6B"),
        ("/cache/hub/models--owner--x-GGUF/snapshots/c1899de2/x-Q4_K_M.gguf", "x-Q4_K_M"),
        ("/", "model"),
    ],
)
def test_names_come_from_what_was_typed(spec: str, name: str, here: Path) -> None:
    assert model_name(spec) == name
    assert ServiceConfig(model=spec).served_name == name
    assert ServiceConfig(model=spec, served_model_name="alias").served_name == "alias"


def test_a_local_folder_wins_over_a_hub_id_and_a_dot_names_its_folder(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (here / "Qwen" / "Qwen3-0.6B").mkdir(parents=True)
    assert model_name("Qwen/Qwen3-0.6B") == "Qwen3-0.6B"
    monkeypatch.chdir(here / "Qwen" / "Qwen3-0.6B")
    assert model_name(".") == "Qwen3-0.6B" and model_name("..") == "Qwen"


def test_every_spelling_of_a_file_gives_one_name_and_the_same_files(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (here / "models").mkdir()
    (here / "models" / "m.gguf").write_bytes(b"GGUF")
    monkeypatch.setenv("HOME", str(here))
    for spec in ("models/m.gguf", "./models/m.gguf", str(here / "models/m.gguf"), "~/models/m.gguf", "models/../models/m.gguf"):
        assert resolve(spec).name == model_name(spec) == "m"
        assert resolve(spec).path == here / "models" / "m.gguf"


def test_a_link_is_called_by_its_own_name(here: Path) -> None:
    """As files lie in a hub's cache: links to blobs that bear a digest."""
    blob = here / "blobs" / "0123456789abcdef"
    blob.parent.mkdir()
    blob.write_bytes(b"GGUF")
    (here / "nice.gguf").symlink_to(blob)
    found = resolve("./nice.gguf")
    assert (found.name, found.path, found.format) == ("nice", blob, "gguf")

    (here / "digest").mkdir()
    (here / "digest" / "config.json").write_text("{}")
    (here / "digest" / "model.safetensors").write_bytes(b"weights")
    (here / "Nice-1.5B").symlink_to(here / "digest")
    assert resolve("./Nice-1.5B").name == "Nice-1.5B"


def test_a_folder_with_one_gguf_is_called_by_the_folder(here: Path) -> None:
    (here / "my-model").mkdir()
    (here / "my-model" / "ggml-model-q4_0.GGUF").write_bytes(b"GGUF")
    assert resolve("./my-model").name == model_name("./my-model") == "my-model"


def test_every_name_has_a_subject_of_its_own() -> None:
    assert subjects.slug("HuggingFaceTB/SmolLM2-135M") == "huggingfacetb-smollm2-135m"
    assert subjects.slug("My Model v1.5 (Q4_K_M)") == "my-model-v1-5-q4_k_m"
    assert subjects.slug("größe-7b") == "gr-e-7b-5b31a1e0"
    others = [subjects.slug(name) for name in ("模型", "另一个", "模型-7b", "另一个-7b", "é" * 300, "é" * 301)]
    assert len(set(others)) == len(others)
    assert all(subjects.chat(slug) for slug in others)


def test_a_folder_of_a_user_who_is_not_there_is_named(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(here))
    assert expanded("~/kv", "data_dir") == here / "kv"
    with pytest.raises(ConfigError, match="data_dir is '~nobody-of-that-name/x', and there is no such user"):
        expanded("~nobody-of-that-name/x", "data_dir")
    monkeypatch.setenv("PENSTOCK_HOME", "~nobody-of-that-name")
    with pytest.raises(ConfigError, match="PENSTOCK_HOME is"):
        default_cache_dir()
