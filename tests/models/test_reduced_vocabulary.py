"""Draft models with a head of a part of the vocabulary: their logits are those of the whole head, where they have one."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from common.cli.preflight import check_model
from common.engine.load.layout import EngineConfig
from common.engine.load.open import open_engine
from common.engine.load.precision import DtypeSetting, has_int8
from common.engine.settings import EngineServiceConfig
from common.models.config import load_config
from common.models.reduced_vocabulary import ABSENT_LOGIT
from common.models.source import resolve
from common.protocol.errors import ConfigError
from common.protocol.messages import SamplingParams
from tests.fixtures.tiny_model import edit_config, write_tiny_model
from tests.models.driver import Request, open_runner, run

IDS = np.random.default_rng(0).permutation(np.concatenate([np.arange(5, 300, 7), np.array([500, 511])]))


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    folder = write_tiny_model(tmp_path / "whole")
    edit_config(folder, tie_word_embeddings=False)
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"][::-1].copy()
    save_file(tensors, folder / "model.safetensors")
    return folder


def reduced(whole: Path, change: Callable[[dict[str, np.ndarray]], None] = lambda tensors: None) -> Path:
    folder = whole.with_name("reduced")
    shutil.copytree(whole, folder)
    edit_config(folder, draft_vocab_size=len(IDS))
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["lm_head.weight"][IDS]
    tensors["d2t"] = IDS.astype(np.int64) - np.arange(len(IDS))
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_logits_are_those_of_the_whole_head_and_none_elsewhere(whole: Path) -> None:
    torch.manual_seed(0)
    states = torch.randn(3, load_config(resolve(str(whole))).hidden_size)
    every, some = (open_runner(resolve(str(folder))).decoder.logits(states) for folder in (whole, reduced(whole)))  # type: ignore[attr-defined]
    torch.testing.assert_close(some[:, IDS], every[:, IDS])
    absent = np.setdiff1d(np.arange(512), IDS)
    assert some.shape == every.shape and bool((some[:, absent] == ABSENT_LOGIT).all())


@pytest.mark.parametrize("dtype", ["float32", "auto"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_token_is_drawn_as_if_the_others_were_forbidden(whole: Path, temperature: float, dtype: DtypeSetting) -> None:
    """The noise is that of the target's ids: the target with a bias against all other tokens writes the same. With `auto` in
    8 bits, on machines that have them."""
    absent = np.setdiff1d(np.arange(512), IDS).tolist()
    params = SamplingParams(seed=3, temperature=temperature)
    biased = SamplingParams(seed=3, temperature=temperature, logit_bias=dict.fromkeys(absent, -900.0))
    folder = reduced(whole)
    (drafted,) = run(open_runner(resolve(str(folder)), dtype=dtype), [Request([1, 2, 3], 20, params)])
    (written,) = run(open_runner(resolve(str(whole)), dtype=dtype), [Request([1, 2, 3], 20, biased)])
    assert drafted == written and set(drafted) <= set(IDS.tolist())


def out_of_range(tensors: dict[str, np.ndarray]) -> None:
    tensors["d2t"] = tensors["d2t"] + 1


def named_twice(tensors: dict[str, np.ndarray]) -> None:
    tensors["d2t"][1] = tensors["d2t"][0] - 1


def short(tensors: dict[str, np.ndarray]) -> None:
    tensors["d2t"] = tensors["d2t"][:-1]


def absent(tensors: dict[str, np.ndarray]) -> None:
    del tensors["d2t"]


def floats(tensors: dict[str, np.ndarray]) -> None:
    tensors["d2t"] = tensors["d2t"].astype(np.float32)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (out_of_range, "outside the vocabulary of 512"),
        (named_twice, "each once at most"),
        (short, "d2t has shape"),
        (absent, "lack d2t"),
        (floats, "int64"),
    ],
)
def test_offsets_that_are_wrong_are_one_error(whole: Path, change: Callable[[dict[str, np.ndarray]], None], says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        open_runner(resolve(str(reduced(whole, change))))
    assert "\n" not in str(caught.value)


def test_it_can_draft_and_is_not_served(whole: Path, tmp_path: Path) -> None:
    folder = reduced(whole)
    config = EngineServiceConfig(model=str(folder), shm_dir=str(tmp_path), num_blocks=8, threads=1)
    with pytest.raises(ConfigError, match="it can draft for another model"):
        open_engine(config, "decode-1")
    with pytest.raises(ConfigError, match="it can draft for another model"):
        check_model(str(folder))
    engine = open_engine(config, "draft-1", drafts=True)
    engine.close()
    found = check_model(str(folder), EngineConfig(), drafts=True)
    assert found.precision.weights == ("int8" if has_int8() else "none")


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"draft_vocab_size": 600}, "between 1 and vocab_size"),
        ({"draft_vocab_size": "all"}, "between 1 and vocab_size"),
        ({"tie_word_embeddings": True}, "needs a head of its own"),
    ],
)
def test_a_configuration_that_contradicts_itself_is_refused(whole: Path, fields: dict[str, object], says: str) -> None:
    folder = reduced(whole)
    edit_config(folder, **fields)
    with pytest.raises(ConfigError, match=says):
        load_config(resolve(str(folder)))
