"""A head on a card: its kernels as compiled, in CUDA graphs, behind steps that are a step ahead of the host."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from common.engine.load.layout import EngineConfig
from common.engine.load.runners import load_runner
from common.engine.plan import StepPlan, StepRow
from common.models.head_folder import open_head, own_head
from common.models.head_model import head_model
from common.models.head_weights import HeadTensors, lm_head_rows, load_head
from common.models.source import ModelFiles, resolve
from common.ops.drafting.head_layer_tensors import HeadLayerTensors
from common.protocol.messages import SamplingParams
from tests.fixtures.head import write_head
from tests.fixtures.mtp import write_mimo
from tests.models.driver import GREEDY
from tests.models.oracles import build, oracle_prompt, save
from tests.models.test_device_head import Drafting, drafted, reference_drafts
from tests.models.test_device_lookup_step import World, sequence_of

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    return save(build("llama"), tmp_path_factory.mktemp("llama"))


def on_gpu(files: ModelFiles, folder: Path | None = None, *, own: bool = False, layers: int = 1) -> Any:
    """folder: where a head of random weights is written to, which drafts, with so many `layers`; own: the model's MTP layer
    drafts."""
    engine = EngineConfig(device="cuda", dtype="float32", quantization="none", num_blocks=400, max_running=16, token_budget=512)
    runner: Any = load_runner(files, engine)
    head = (
        own_head(files) if own else None if folder is None else open_head(write_head(folder, files, num_hidden_layers=layers))
    )
    if head is not None:
        tensors = load_head(head, runner.decoder, files.name)
        runner.attach_head(head_model(tensors, dtype=torch.float32, device=runner.decoder.device))
    return runner


@pytest.fixture(scope="module")
def mimo(tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    return resolve(str(write_mimo(tmp_path_factory.mktemp("model") / "mimo", useful=True)))


@pytest.mark.parametrize("kind", ["eagle3", "eagle3 of two layers", "mtp"])
def test_drafts_are_those_of_the_reference(request: pytest.FixtureRequest, tmp_path: Path, kind: str) -> None:
    """Behind a prompt, and behind verified rows and rows of one token, which have graphs."""
    files: ModelFiles = request.getfixturevalue("mimo" if kind == "mtp" else "files")
    runner = on_gpu(files, tmp_path / "head", own=kind == "mtp", layers=2 if "two" in kind else 1)
    head = own_head(files) if kind == "mtp" else open_head(tmp_path / "head")
    assert head is not None
    tensors = load_head(head, runner.decoder, files.name)
    tensors = replace(tensors, lm_head=lm_head_rows(tensors))
    tensors = _on_cpu(tensors)
    prompt = oracle_prompt(length=21)
    states, noted, drafts = list[torch.Tensor](), list[torch.Tensor](), runner._head.draft
    vars(runner._head).update(
        draft=lambda planned, step: (noted.append(torch.cat(list(step.noted), -1)), drafts(planned, step))
    )

    def step(tokens: list[int], start: int, num_samples: int) -> list[int]:
        row = StepRow(tokens, start, [0, 1, 2, 3], num_samples, GREEDY, len(prompt), serial=7, drafts=4, board=16)
        (samples,) = runner.execute(StepPlan(0, [row])).rows
        torch.cuda.synchronize()
        states.append(noted[-1][: len(tokens)].cpu())
        return samples.tokens

    came = step(prompt, 0, 1)
    tokens = [*prompt[1:], *came]
    for guess in ([], [5, 6, 7], [], [8], [5, 6, 7, 8, 9]):
        expected = reference_drafts(tensors, torch.cat(states), tokens, 4)
        assert drafted(runner, 0)[-4:] == expected
        came = step([tokens[-1], *guess], len(tokens), 1 + len(guess))
        accepted = next((i for i, token in enumerate(guess) if token != came[i]), len(guess))
        states[-1] = states[-1][: accepted + 1]
        tokens += came[: accepted + 1]


def _on_cpu(value: Any) -> Any:
    """Tensors, also within a head's."""
    if isinstance(value, (HeadTensors, HeadLayerTensors)):
        return type(value)(**{name: _on_cpu(getattr(value, name)) for name in value.__slots__})
    if isinstance(value, tuple):
        return tuple(map(_on_cpu, cast(tuple[Any, ...], value)))
    return value.cpu() if isinstance(value, torch.Tensor) else value


@pytest.mark.parametrize("kind", ["eagle3", "mtp"])
def test_texts_are_those_without_it(request: pytest.FixtureRequest, tmp_path: Path, kind: str) -> None:
    files: ModelFiles = request.getfixturevalue("mimo" if kind == "mtp" else "files")
    params = [
        SamplingParams(temperature=0.0, max_tokens=60),
        SamplingParams(temperature=0.7, seed=5, max_tokens=60),
        SamplingParams(temperature=1.0, seed=6, max_tokens=50, top_p=0.9),
        SamplingParams(temperature=0.0, max_tokens=12, presence_penalty=0.5),
    ]

    def texts(world: World) -> list[list[int]]:
        return world.run([sequence_of(i, one, 3 + 40 * i) for i, one in enumerate(params)], lambda index: 5 * index)

    world = Drafting(on_gpu(files, tmp_path / "head", own=kind == "mtp"))
    found = texts(world)
    assert found == texts(World(on_gpu(files)))
    assert world.proposers.by_source["head"].num_draft_tokens > 100
