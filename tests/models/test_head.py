"""A head beside an engine: what it drafts is what its reference drafts, with a cache, in any company, and after rejections."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from common.engine.cpu.head import Head
from common.engine.plan import RowSamples, StepPlan, StepRow
from common.models.head_folder import open_head
from common.models.head_weights import HeadTensors, load_head
from common.models.source import ModelFiles, resolve
from common.ops.cpu_int8.head_reference import HeadWeightsReference, head_reference
from common.protocol.messages import SamplingParams
from tests.fixtures.head import write_head
from tests.fixtures.tiny_model import write_tiny_model
from tests.models.driver import GREEDY, open_runner
from tests.models.oracles import oracle_prompt

SEEDED = SamplingParams(temperature=0.8, seed=5, top_p=0.9)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    return resolve(str(write_tiny_model(tmp_path_factory.mktemp("model") / "tiny")))


class Site:
    """A runner with a head of random weights, and one sequence."""

    def __init__(self, files: ModelFiles, folder: Path, *, context_tokens: int = 1024, **settings: Any) -> None:
        self.runner: Any = open_runner(files, **settings)
        self.tensors = load_head(open_head(write_head(folder, files)), self.runner.decoder, files.name)
        self.runner.head = Head(self.tensors, max_sequences=3, threads=1, context_tokens=context_tokens)
        self.states: list[torch.Tensor] = []
        told = self.runner.head.draft

        def draft(rows: Any, results: Any, states: Any, firsts: Any) -> Any:
            self.states = [
                torch.tensor(states[first : first + len(row.tokens)]) for row, first in zip(rows, firsts, strict=True)
            ]
            return told(rows, results, states, firsts)

        self.runner.head.draft = draft

    def step(self, *rows: StepRow) -> Any:
        return self.runner.execute(StepPlan(0, list(rows))).rows


def reference_drafts(tensors: HeadTensors, states: torch.Tensor, tokens: list[int], count: int, first: int = 0) -> list[int]:
    """Greedy drafts behind `tokens`, at positions first + 1 …, of which all but the last have `states`."""
    weights = HeadWeightsReference(*(getattr(tensors, name) for name in HeadWeightsReference._fields))
    spec, features, drafted = tensors.spec, torch.empty(0, tensors.spec.hidden_size), list[int]()
    for _ in range(count):
        embedded = tensors.embedding[torch.tensor([*tokens, *drafted])].float()
        x, logits = head_reference(
            weights,
            states,
            features,
            embedded,
            head_dim=spec.head_dim,
            num_kv_heads=spec.num_kv_heads,
            rope_theta=spec.rope_theta,
            eps=spec.rms_eps,
            first=first,
        )
        features = torch.cat((features, x[-1:]))
        drafted.append(int(tensors.ids[logits[-1].argmax()]))
    return drafted


@pytest.mark.parametrize("dtype", ["float32", "auto"])
@pytest.mark.parametrize("chunk", [100, 7, 1])
def test_drafts_are_those_of_the_reference(tiny: ModelFiles, tmp_path: Path, dtype: str, chunk: int) -> None:
    site = Site(tiny, tmp_path / "head", dtype=dtype)
    prompt, blocks = oracle_prompt(length=37), list(range(10))
    states: list[torch.Tensor] = []
    samples: Any = None
    for start in range(0, len(prompt), chunk):
        part = prompt[start : start + chunk]
        last = start + len(part) == len(prompt)
        row = StepRow(part, start, blocks, int(last), GREEDY, len(prompt), serial=7, drafts=4)
        (samples,) = site.step(row)
        states += site.states
    expected = reference_drafts(site.tensors, torch.cat(states), [*prompt[1:], samples.tokens[0]], 4)
    assert samples.drafted.tokens == expected
    assert all(0 < chance <= 1 for chance in samples.drafted.chances)


def test_states_of_very_different_size_are_told_apart(tiny: ModelFiles, tmp_path: Path) -> None:
    """As in trained models, where a channel may be thousands of times as large as the others, and `fc` makes up for it."""
    site = Site(tiny, tmp_path / "head")
    size = torch.ones(site.tensors.fc.shape[1])
    size[3], size[70] = 3000.0, 1e-3
    tensors = replace(site.tensors, fc=site.tensors.fc / size)
    head = Head(tensors, max_sequences=1, threads=1)
    states = torch.randn(20, len(size), generator=torch.Generator().manual_seed(1)) * size
    prompt = oracle_prompt(length=20)
    row = StepRow(prompt, 0, [0], 1, GREEDY, 20, serial=0, drafts=3)
    samples = RowSamples([5])
    head.draft([row], [samples], states.numpy(), [0])
    assert samples.drafted is not None
    assert samples.drafted.tokens == reference_drafts(tensors, states, [*prompt[1:], 5], 3)
