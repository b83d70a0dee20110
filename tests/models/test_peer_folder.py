"""The folder that a peer loads holds the model that we make up: both give the same tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from bench.peer.model_folder import write
from common.models.source import resolve
from tests.models.driver import Request, open_runner, run


def test_a_written_model_counts_as_the_made_up_one_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path / "home"))
    name = "dummy:smollm2-135m-2-layers-counting-60"
    assert write(name, tmp_path / "model", torch.device("cpu")) > 2 * 49_152 * 576 * 2
    prompts = [[7, 100 * n] for n in range(8)]
    ours = run(open_runner(resolve(name), dtype="bfloat16"), [Request(prompt, 6) for prompt in prompts])
    loaded = run(open_runner(resolve(str(tmp_path / "model"))), [Request(prompt, 6) for prompt in prompts])
    theirs: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    for prompt, mine, read in zip(prompts, ours, loaded, strict=True):
        with torch.inference_mode():
            made = theirs.generate(torch.tensor([prompt]), max_new_tokens=6, do_sample=False, eos_token_id=None)[0, 2:].tolist()
        assert mine == read == made
        assert all((token - before) in (1, 2) for before, token in zip([prompt[-1], *mine], mine, strict=False))
