"""A head in the files that is no copy of the embedding is read, as transformers reads it, whatever the configuration says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from common.models.config import load_config
from common.models.source import ModelFiles
from common.models.weights.inventory import take_inventory
from common.protocol.errors import ConfigError
from tests.models.driver import Request, open_runner, run
from tests.models.oracles import build, greedy_choices, oracle_prompt, save

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def says_tied(files: ModelFiles, **fields: Any) -> ModelFiles:
    path = files.path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_bytes()) | {"tie_word_embeddings": True} | fields))
    return files


@pytest.mark.parametrize("shard_bytes", [None, 60_000])
def test_greedy_tokens_are_those_of_the_head_in_the_files(tmp_path: Path, shard_bytes: int | None) -> None:
    model = build("qwen3")
    files = says_tied(save(model, tmp_path, shard_bytes))
    assert not load_config(files).tie_embeddings
    take_inventory(files, load_config(files))
    [output] = run(open_runner(files), [request := Request(oracle_prompt(), 6)])
    assert output == greedy_choices(model, request.prompt, output)


def test_a_family_that_ties_by_default_reads_it_too(tmp_path: Path) -> None:
    model = build("gemma2", tie_word_embeddings=False)
    files = says_tied(save(model, tmp_path), tie_word_embeddings=None)
    [output] = run(open_runner(files), [request := Request(oracle_prompt(), 6)])
    assert output == greedy_choices(model, request.prompt, output)


def test_a_copy_of_the_embedding_is_the_embedding(tmp_path: Path) -> None:
    files = says_tied(save(build("qwen3"), tmp_path))
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    save_file(tensors | {HEAD: tensors[EMBEDDING].clone()}, path)
    assert load_config(files).tie_embeddings
    tensors[HEAD] = tensors[EMBEDDING].clone()
    tensors[HEAD][-1, -1] += 1.0
    save_file(tensors, path)
    assert not load_config(files).tie_embeddings
    save_file(tensors | {HEAD: tensors[EMBEDDING].to(torch.bfloat16)}, path)
    assert not load_config(files).tie_embeddings


def test_a_damaged_file_of_a_tied_model_is_one_error(tmp_path: Path) -> None:
    files = says_tied(save(build("qwen3"), tmp_path))
    (tmp_path / "model.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0[]      ")
    with pytest.raises(ConfigError, match=r"model\.safetensors can't be read"):
        load_config(files)
