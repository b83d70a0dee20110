"""MiMo: its decoder is Qwen2's, and its MTP layer drafts as transformers' parts would compute it, on either engine.

What it drafts changes no token, useful or not.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import Qwen2Config, Qwen2ForCausalLM
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer, Qwen2RMSNorm, Qwen2RotaryEmbedding

from common.engine.cpu import head as head_module
from common.engine.cpu.head import Head
from common.engine.engine import Engine
from common.engine.load.head import attach_head
from common.engine.plan import RowSamples, StepPlan, StepRow
from common.engine.sequence import Sequence
from common.models.head_folder import own_head
from common.models.head_tensors import MTP_PREFIX
from common.models.head_weights import load_head
from common.models.source import ModelFiles, resolve
from common.ops.cpu_int8.head_reference import HeadWeightsReference, head_reference
from common.protocol.messages import SamplingParams
from services.decode.head_drafts import HeadDrafts
from services.decode.proposers import Proposers
from services.decode.speculation import DraftBook
from services.decode.speculation_policy import SpeculationPolicy
from tests.fixtures.head import write_head
from tests.fixtures.mtp import CONFIG, edit_mtp, read_shards, write_mimo
from tests.models.drafting_world import DraftingWorld
from tests.models.driver import GREEDY, Request, open_runner, run
from tests.models.oracles import greedy_choices, oracle_prompt
from tests.models.test_device_lookup_step import World, sequence_of
from tests.models.test_head import Site, is_right


@pytest.fixture(scope="module")
def mimo(tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    return resolve(str(write_mimo(tmp_path_factory.mktemp("model") / "mimo")))


@pytest.fixture(scope="module")
def useful(tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    return resolve(str(write_mimo(tmp_path_factory.mktemp("model") / "useful", useful=True)))


def qwen2(files: ModelFiles) -> Any:
    """The same decoder in transformers."""
    fields = {name: value for name, value in CONFIG.items() if name not in ("architectures", "auto_map", "model_type")}
    config = Qwen2Config(**fields)
    config._attn_implementation = "eager"
    model = Qwen2ForCausalLM(config).eval()
    tensors = {name: tensor for name, tensor in read_shards(files.path).items() if not name.startswith(MTP_PREFIX)}
    model.load_state_dict(tensors)
    return model


def test_the_decoder_is_qwen2s(mimo: ModelFiles) -> None:
    model, runner = qwen2(mimo), open_runner(mimo)
    requests = [
        Request(oracle_prompt(seed=i, length=length), 20, chunk=chunk) for i, (length, chunk) in enumerate([(53, 7), (9, 99)])
    ]
    for request, output in zip(requests, run(runner, requests), strict=True):
        assert output == greedy_choices(model, request.prompt, output)


def test_the_reference_is_a_layer_of_transformers_behind_a_linear(mimo: ModelFiles) -> None:
    """Two passes: over pairs whose states are the target's, and a pair whose state is the layer's own output."""
    model, stored = qwen2(mimo), read_shards(mimo.path)
    own = {name.removeprefix(MTP_PREFIX): tensor for name, tensor in stored.items() if name.startswith(MTP_PREFIX)}
    layer, rotary = Qwen2DecoderLayer(model.config, 0).eval(), Qwen2RotaryEmbedding(model.config)
    assert not layer.load_state_dict(own, strict=False).missing_keys
    norms = {name: Qwen2RMSNorm(64, 1e-5) for name in ("token_layernorm", "hidden_layernorm", "final_layernorm")}
    for name, norm in norms.items():
        norm.weight = nn.Parameter(own[f"{name}.weight"])
    prompt = oracle_prompt(length=11)
    runner: Any = open_runner(mimo)
    head = own_head(mimo)
    assert head is not None and head.name == "MTP layer of mimo"
    tensors = load_head(head, runner.decoder, mimo.name)
    weights = HeadWeightsReference(
        **{name: getattr(tensors, name) for name in HeadWeightsReference._fields if name != "lm_head"},
        lm_head=stored["lm_head.weight"],
    )

    @torch.inference_mode()
    def computed(features: torch.Tensor, embedded: torch.Tensor, first: int) -> torch.Tensor:
        joined = torch.cat((norms["hidden_layernorm"](features), norms["token_layernorm"](embedded)), -1)
        x = joined @ own["input_proj.weight"].T
        positions = torch.arange(first, first + len(x))[None]
        mask = torch.full((len(x), len(x)), -torch.inf).triu(1)[None, None]
        x = layer(x[None], attention_mask=mask, position_ids=positions, position_embeddings=rotary(x[None], positions))
        return norms["final_layernorm"](x if x.ndim == 2 else x[0])

    with torch.inference_mode():
        seen: list[torch.Tensor] = []
        hook = model.model.norm.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0][0]))
        model(torch.tensor([prompt]), use_cache=False)
        hook.remove()
        (states,) = seen
        embedded = model.model.embed_tokens(torch.tensor([*prompt[1:], 40, 41]))
        known = computed(states, embedded[:-1], 3)
        expected = computed(torch.cat((states, known[-1:])), embedded, 3)
        found, logits = head_reference(
            weights,
            states,
            known[-1:],
            embedded,
            head_dim=16,
            num_kv_heads=2,
            rope_theta=640000.0,
            eps=1e-5,
            first=3,
            is_mtp=True,
        )
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(logits, expected @ stored["lm_head.weight"].T)


@pytest.mark.parametrize("dtype", ["float32", "auto"])
@pytest.mark.parametrize(("chunk", "num_first"), [(100, 4096), (7, 4096), (1, 4096), (100, 64)])
def test_drafts_are_those_of_the_reference(
    mimo: ModelFiles, monkeypatch: pytest.MonkeyPatch, dtype: str, chunk: int, num_first: int
) -> None:
    monkeypatch.setattr(head_module, "FIRST_IDS", num_first)
    monkeypatch.setattr(head_module, "_STANDS_OUT", 1.1)
    site = Site(mimo, None, dtype=dtype)
    prompt, blocks = oracle_prompt(length=37), list(range(10))
    samples, states = site.read(prompt, chunk, blocks)
    assert site.runner.head.state_size == 64
    assert len(samples.drafted.tokens) == 4
    assert is_right(site.tensors, states, [*prompt[1:], *samples.tokens], samples.drafted.tokens)
    (again,) = site.step(StepRow(samples.tokens, 37, blocks, 1, GREEDY, len(prompt), serial=7, drafts=4))
    tokens = [*prompt[1:], *samples.tokens, *again.tokens]
    assert is_right(site.tensors, torch.cat([states, *site.states]), tokens, again.drafted.tokens)


def test_columns_of_very_different_size_are_told_apart(mimo: ModelFiles) -> None:
    """Norms may make some channels thousands of times as large as others, and the first linear makes up for it."""
    site = Site(mimo, None)
    size = torch.ones(64)
    size[3], size[50] = 3000.0, 1e-3
    tensors = replace(
        site.tensors,
        fc=site.tensors.fc / torch.cat((size, size.flip(0))),
        feature_norm=site.tensors.feature_norm * size,
        embedding_norm=site.tensors.embedding_norm * size.flip(0),
    )
    head = Head(tensors, max_sequences=1, threads=1)
    states, prompt = torch.randn(20, 64, generator=torch.Generator().manual_seed(1)), oracle_prompt(length=20)
    samples = RowSamples([5])
    head.draft([StepRow(prompt, 0, [0], 1, GREEDY, 20, serial=0, drafts=3)], [samples], states.numpy(), [0])
    assert samples.drafted is not None and len(samples.drafted.tokens) == 3
    assert is_right(site.tensors, states, [*prompt[1:], 5], samples.drafted.tokens)


@pytest.mark.parametrize("dtype", ["float32", "auto"])
def test_a_layer_whose_numbers_overflow_proposes_nothing(tmp_path: Path, dtype: str) -> None:
    files = resolve(str(write_mimo(tmp_path / "mimo")))
    edit_mtp(files.path, input_proj__weight=torch.full((64, 128), 3e38))
    runner: Any = open_runner(files, num_blocks=20, dtype=dtype)
    attach_head(Engine(runner, None, files=files), "auto", max_sequences=4)  # type: ignore[arg-type]
    row = StepRow([3, 4, 5], 0, [0], 1, GREEDY, 3, serial=0, drafts=2)
    (found,) = runner.execute(StepPlan(0, [row])).rows
    assert found.tokens[0] >= 0 and found.drafted is not None and not found.drafted.tokens


@dataclass
class Drafting(DraftingWorld):
    """As a decode worker on a CPU, but that everything drafted is verified, whether that pays or not."""

    def __post_init__(self) -> None:
        super().__post_init__()
        policy = SpeculationPolicy(max_tokens=4, max_step_tokens=64, always=True)
        self.proposers = Proposers(DraftBook(policy, vocab_size=CONFIG["vocab_size"]), [], HeadDrafts(policy))
        scheduler, proposers = self.scheduler, self.proposers
        scheduler.propose, scheduler.begin_step, scheduler.wanted = proposers.propose, proposers.begin_step, proposers.wanted


def sequences() -> list[Sequence]:
    """Of different lengths and temperatures; the last one's prompt begins as the first one's does, which is cached by then."""
    params = [
        SamplingParams(temperature=0.0, max_tokens=40),
        SamplingParams(temperature=0.7, seed=5, max_tokens=40),
        SamplingParams(temperature=0.7, seed=6, max_tokens=30, top_p=0.9),
        SamplingParams(temperature=0.0, max_tokens=20),
    ]
    made = [sequence_of(index, one, 5 + 9 * index) for index, one in enumerate(params[:3])]
    return [*made, sequence_of(2, params[3], 60)]


@pytest.mark.parametrize("dtype", ["float32", "auto"])
@pytest.mark.parametrize("head", ["auto", "folder", "off"])
@pytest.mark.parametrize("kind", ["mimo", "useful"])
def test_answers_are_those_without_it(request: pytest.FixtureRequest, tmp_path: Path, kind: str, head: str, dtype: str) -> None:
    files: ModelFiles = request.getfixturevalue(kind)
    plain = World(open_runner(files, dtype=dtype)).run(sequences(), lambda index: 6 * index)
    runner: Any = open_runner(files, dtype=dtype)
    engine = Engine(runner, None, files=files)  # type: ignore[arg-type]
    setting = str(write_head(tmp_path / "head", files)) if head == "folder" else head
    attach_head(engine, setting, max_sequences=4)
    assert engine.head == {"auto": f"MTP layer of {files.name}", "folder": "head", "off": ""}[head]
    world = Drafting(runner)
    assert world.run(sequences(), lambda index: 6 * index) == plain
    counters = world.proposers.by_source["head"]
    assert (counters.num_draft_tokens > 20) == (head != "off")
    if kind == "useful" and head == "auto":
        assert counters.num_accepted_tokens > 0.7 * counters.num_draft_tokens


def test_behind_a_cached_prefix_it_drafts_on(useful: ModelFiles) -> None:
    """The prefix has no states: the context begins behind it."""
    runner: Any = open_runner(useful)
    engine = Engine(runner, None, files=useful)  # type: ignore[arg-type]
    attach_head(engine, "auto", max_sequences=2)
    prompt, blocks = oracle_prompt(length=60), list(range(6))
    runner.execute(StepPlan(0, [StepRow(prompt[:48], 0, blocks, 0, GREEDY, 60)]))
    (samples,) = runner.execute(StepPlan(0, [StepRow(prompt[48:], 48, blocks, 1, GREEDY, 60, serial=1, drafts=4)])).rows
    assert len(samples.drafted.tokens) == 4
    verified = StepRow([*samples.tokens, *samples.drafted.tokens], 60, blocks, 5, GREEDY, 60, serial=1, drafts=2)
    (found,) = runner.execute(StepPlan(0, [verified])).rows
    assert found.tokens[:4] == samples.drafted.tokens
