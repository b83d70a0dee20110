"""Which models what is shipped is for: the very one, or one like it by name and sizes."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.models.config import load_config
from common.models.draft_folder import draft_spec
from common.models.head_folder import check_head, find_head
from common.models.shipped import TrainedFor, index_for, trained_for
from common.models.source import DEFAULT_MODEL, ModelFiles, resolve
from tests.fixtures.tiny_model import SHAPE, write_tiny_model

SIZES = SHAPE["vocab_size"], SHAPE["hidden_size"]


def named(tmp_path: Path, name: str) -> ModelFiles:
    return resolve(str(write_tiny_model(tmp_path / name)))


@pytest.mark.parametrize("name", ["Tiny-Llama", "tiny-llama-Q8_0", "tiny_llama.instruct", "tiny-llama"])
def test_the_same_model_by_another_name_or_in_another_precision_is_alike(tmp_path: Path, name: str) -> None:
    target = named(tmp_path, name)
    assert index_for(target, [TrainedFor("other", "1", *SIZES), TrainedFor("tiny-llama", "1", *SIZES)]) == 1


@pytest.mark.parametrize("name", ["tiny", "tiny-llamas", "a-tiny-llama", "llama"])
def test_another_name_is_another_model(tmp_path: Path, name: str) -> None:
    assert index_for(named(tmp_path, name), [TrainedFor("tiny-llama", "1", *SIZES)]) is None


def test_sizes_must_be_those_of_the_model(tmp_path: Path) -> None:
    target = named(tmp_path, "tiny-llama")
    for sizes in ((SIZES[0] + 1, SIZES[1]), (SIZES[0], 2 * SIZES[1]), (0, 0)):
        assert index_for(target, [TrainedFor("tiny-llama", "1", *sizes)]) is None


def test_the_very_model_comes_before_one_like_it(tmp_path: Path) -> None:
    target = named(tmp_path, "tiny-llama")
    alike, same = TrainedFor("tiny-llama", "1", *SIZES), TrainedFor(target.name, target.revision)
    assert index_for(target, [alike, same]) == 1
    assert index_for(target, []) is None


def test_a_model_that_cannot_be_read_is_like_none(tmp_path: Path) -> None:
    target = named(tmp_path, "tiny-llama")
    (target.path / "config.json").write_text("{}")
    assert index_for(target, [TrainedFor("tiny-llama", "1", *SIZES)]) is None


@pytest.mark.parametrize("said", [None, [], {"name": "a", "revision": "b", "vocab_size": "512"}])
def test_what_is_not_said_is_like_nothing(tmp_path: Path, said: object) -> None:
    assert trained_for(said)[2:] == (0, 0)
    assert index_for(named(tmp_path, "a"), [trained_for(said)]) is None


def test_the_default_model_by_a_path_has_the_head_and_the_draft_model_that_are_shipped_for_it(tmp_path: Path) -> None:
    path = tmp_path / "SmolLM2-135M-Instruct.Q4_1.gguf"
    path.symlink_to(resolve(DEFAULT_MODEL).path)
    files = resolve(str(path))
    assert files.revision != resolve(DEFAULT_MODEL).revision
    head = find_head("auto", files)
    assert head is not None and head.name == "smollm2-135m-instruct"
    check_head(head, load_config(files), files.name)
    assert draft_spec("auto", str(path)) == draft_spec("auto", DEFAULT_MODEL)
