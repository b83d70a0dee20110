"""What several modules here start from: a tiny model, and the GPU's kernels interpreted on a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from common.models.source import ModelFiles
from common.ops.backend import interpreted
from common.ops.linear.candidates import Candidate
from tests.models.oracles import build, save
from tests.ops.interpreter import act_as_a_gpu


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Linears are the library's: their kernels have tests of their own, and are slow to interpret. Prompts add to the residual
    what they multiply, decoding rows leave it to the next norm."""
    monkeypatch.setattr("common.ops.linear.device._choose", lambda *_: Candidate("library"))
    monkeypatch.setattr("common.ops.linear.device._ADDED_ROWS", 12)
    act_as_a_gpu()
    with interpreted():
        yield


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, ModelFiles]:
    """A model of transformers, and its files."""
    model = build("llama")
    return model, save(model, tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def files(llama: tuple[Any, ModelFiles]) -> ModelFiles:
    return llama[1]
