"""The recipe for EAGLE-3-style heads on a tiny random target."""

from __future__ import annotations

import argparse
import json
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from common.models.head_config import read_spec
from common.models.head_tensors import head_shapes
from common.models.source import DEFAULT_MODEL, ModelFiles, resolve
from common.ops.cpu_int8.head_reference import HeadWeightsReference, head_reference
from common.ops.drafting.head_layer_tensors import HeadLayerTensors
from common.ops.sampling.sample_reference import sample_reference
from common.protocol.errors import ConfigError
from common.text.bundle import load_bundle
from recipes.draft import session, write
from recipes.draft.acceptance import Start, mean_accepted, starts_of, survival
from recipes.draft.batched import Ask, BatchedWriter
from recipes.draft.card import write_card
from recipes.draft.eagle import EagleHead, default_layer_ids, draft_step_by_step, fit_features, new_head
from recipes.draft.eagle_acceptance import eagle_proposer
from recipes.draft.export_eagle import export_eagle, load_eagle
from recipes.draft.llama import Decoder, LlamaShape, rotary_tables
from recipes.draft.samples import Sample, read_judged, read_samples, shard_path, shards, write_shard
from recipes.draft.target import Target, frozen
from recipes.draft.train_eagle import EagleSettings, EagleTrainer
from recipes.draft.trainer import read_checkpoint
from recipes.draft.vocabulary import answer_counts, choose_ids
from tests.fixtures.slow import some_slow

SHAPE = LlamaShape(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    rms_norm_eps=1e-5,
    rope_theta=10_000.0,
    max_position_embeddings=64,
)
SETTINGS = EagleSettings(
    layers=1, muon=0, steps=150, warmup=5, batch_tokens=128, max_length=32, learning_rate=3e-3, intermediate_size=40, unroll=3
)
NEVER_S = float("inf")


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Tensors this small are computed faster without other threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def target() -> Target:
    torch.manual_seed(1)
    decoder = Decoder(SHAPE)
    embedding = torch.randn(SHAPE.vocab_size, SHAPE.hidden_size)
    for parameter in decoder.parameters():
        parameter.data.mul_(2.0)  # layers that matter beside the residual
    frozen(decoder)
    head = torch.randn(SHAPE.vocab_size, SHAPE.hidden_size) / SHAPE.hidden_size**0.5
    return Target("tiny", "1", SHAPE, decoder, embedding, head)


@pytest.fixture(scope="module")
def samples(target: Target) -> list[Sample]:
    """Answers of the target: greedy, and sampled at T = 0.7; of several lengths."""
    tokens = torch.stack([torch.randint(0, 8, (4,), generator=torch.Generator().manual_seed(seed)) for seed in range(48)])
    temperatures = [(0.0, 0.7)[seed % 2] for seed in range(48)]
    while (length := tokens.shape[1]) < 24:
        logits = target.hidden(tokens)[:, -1] @ target.head.T
        drawn = [
            sample_reference(row, temperature=temperature, top_k=0, top_p=1, min_p=0, seed=seed, position=length)
            for seed, (row, temperature) in enumerate(zip(logits, temperatures, strict=True))
        ]
        tokens = torch.cat([tokens, torch.tensor(drawn)[:, None]], 1)
    return [
        Sample(row.numpy().astype(np.uint32)[: 24 - seed % 3], 4, seed, temperatures[seed]) for seed, row in enumerate(tokens)
    ]


@pytest.fixture(scope="module")
def ids(samples: list[Sample]) -> torch.Tensor:
    return torch.from_numpy(choose_ids(answer_counts(samples, SHAPE.vocab_size), 48, {0, 63}))


class Trained(NamedTuple):
    """A trainer whose run has ended, the losses of its steps, and the acceptance before the first one."""

    trainer: EagleTrainer
    losses: list[float]
    before: list[float]


@pytest.fixture(scope="module")
def trained(target: Target, ids: torch.Tensor, samples: list[Sample]) -> Trained:
    """Read by the tests that need a trained head: training takes seconds."""
    trainer = EagleTrainer(target, ids, samples, SETTINGS)
    before = survival(starts_of(samples, 4, 32), eagle_proposer(trainer.draft, target))
    return Trained(trainer, [float(one["cross_entropy_0"]) for one in trainer.run(NEVER_S)], before)


@pytest.fixture
def head(target: Target, ids: torch.Tensor) -> EagleHead:
    return odd_head(target, ids)


def odd_head(target: Target, ids: torch.Tensor, layers: int = 1, layer_ids: Sequence[int] = ()) -> EagleHead:
    """Return a head with weights that are nobody's, and with scales."""
    torch.manual_seed(7)
    head = new_head(target, ids, 40, layer_ids, layers)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
        head.feature_scale.uniform_(0.5, 2.0)
    return head


@pytest.mark.parametrize("layers", [1, 2])
@torch.no_grad()
def test_an_unrolled_draft_equals_drafting_step_by_step(
    target: Target, ids: torch.Tensor, samples: list[Sample], layers: int
) -> None:
    """From every position, along the tokens that the draft itself proposes; in one batch with a longer sequence."""
    head, steps, tolerance = odd_head(target, ids, layers), 5, 1e-4 if layers == 1 else 1e-3
    for known in (2, 3, 7, 15):
        context = torch.from_numpy(samples[0].tokens[:known].astype(np.int64))
        residuals, _ = target.states(context[None, :-1], head.layer_ids)
        outputs, proposed = draft_step_by_step(head, residuals[0], context, steps)
        longer = torch.randint(0, 64, (30,), generator=torch.Generator().manual_seed(known))
        row = torch.cat([context, torch.tensor(proposed), torch.zeros(30 - known - steps, dtype=torch.int64)])
        tokens = torch.stack([longer, row])
        unrolled = head.unroll(target.states(tokens, head.layer_ids)[0], tokens, steps)
        for step in range(steps):
            found = unrolled[step][1, known - 2 + step]
            torch.testing.assert_close(found, outputs[step], rtol=tolerance, atol=tolerance)
            assert int(head.ids[head.logits(found).argmax()]) == proposed[step]


@torch.no_grad()
def test_a_later_token_changes_no_draft(target: Target, head: EagleHead) -> None:
    tokens = torch.randint(0, 64, (1, 20), generator=torch.Generator().manual_seed(3))
    before = head.unroll(target.states(tokens, head.layer_ids)[0], tokens, 4)
    tokens[0, 12:] = 5
    after = head.unroll(target.states(tokens, head.layer_ids)[0], tokens, 4)
    for step, (one, other) in enumerate(zip(before, after, strict=True)):
        torch.testing.assert_close(one[0, step:11], other[0, step:11])
        assert not torch.allclose(one[0, 11], other[0, 11])


@torch.no_grad()
def test_residuals_are_those_that_enter_the_layers(target: Target) -> None:
    tokens = torch.randint(0, 64, (2, 9), generator=torch.Generator().manual_seed(4))
    residuals, final = target.states(tokens, (0, 2, 4))
    first, middle, last = residuals.chunk(3, -1)
    cosines, sines = rotary_tables(9, SHAPE, tokens.device)
    torch.testing.assert_close(first, target.embedding[tokens])
    two = target.decoder.layers[1](target.decoder.layers[0](first, cosines, sines), cosines, sines)
    torch.testing.assert_close(middle, two)
    torch.testing.assert_close(target.decoder.norm(last), final)
    torch.testing.assert_close(final, target.hidden(tokens))
    assert default_layer_ids(30) == (2, 15, 27)


def test_training_lowers_the_loss_and_raises_acceptance(target: Target, samples: list[Sample], trained: Trained) -> None:
    after = survival(starts_of(samples, 4, 32), eagle_proposer(trained.trainer.draft, target))
    assert len(trained.losses) == 150
    assert np.mean(trained.losses[-10:]) < 0.8 * trained.losses[0]
    assert mean_accepted(after, 4) > mean_accepted(trained.before, 4) + 0.2


def test_a_run_continued_from_its_checkpoint_equals_one_without_a_break(
    target: Target, ids: torch.Tensor, samples: list[Sample], tmp_path: Path
) -> None:
    settings = msgspec.structs.replace(SETTINGS, steps=20)
    whole = EagleTrainer(target, ids, samples, settings)
    losses = list(whole.run(NEVER_S))
    first = EagleTrainer(target, ids, samples, settings)
    steps = first.run(NEVER_S)
    begin = [next(steps) for _ in range(13)]
    first.save(tmp_path / "eagle.pt")
    second = EagleTrainer(target, ids, samples, settings)
    second.load(tmp_path / "eagle.pt")
    assert begin + list(second.run(NEVER_S)) == losses
    for name, tensor in whole.draft.state_dict().items():
        assert torch.equal(second.draft.state_dict()[name], tensor), name


def test_acceptance_counts_what_step_by_step_drafts_would_have_accepted(
    target: Target, samples: list[Sample], trained: Trained
) -> None:
    draft = trained.trainer.draft
    starts = [start for start in starts_of(samples, 5, 32) if start.sample.temperature == 0]
    expected = np.zeros(4)
    with torch.no_grad():
        for start in starts:
            context = torch.from_numpy(start.sample.tokens[: start.context].astype(np.int64))
            residuals, _ = target.states(context[None, :-1], draft.layer_ids)
            _, proposed = draft_step_by_step(draft, residuals[0], context, 4)
            equal = np.array(proposed) == start.sample.tokens[start.context : start.context + 4]
            expected += np.logical_and.accumulate(equal)
    found = survival(starts, eagle_proposer(draft, target, batch_tokens=70), 4)
    assert found == pytest.approx((expected / len(starts)).tolist())
    assert 0 < found[0] < 1


def test_drafts_are_judged_with_the_noise_of_the_answers(target: Target, samples: list[Sample], trained: Trained) -> None:
    """With noise of other seeds fewer proposals are accepted, at T = 0.7 only."""
    propose = eagle_proposer(trained.trainer.draft, target)

    def accepted(samples: list[Sample], temperature: float) -> float:
        starts = [start for start in starts_of(samples, 8, 32) if start.sample.temperature == temperature]
        return survival(starts, propose, 2)[0]

    others = [Sample(one.tokens, one.prompt_length, one.seed + 1000, one.temperature) for one in samples]
    assert accepted(others, 0.0) == accepted(samples, 0.0)
    assert accepted(others, 0.7) < accepted(samples, 0.7)


@torch.no_grad()
def test_the_head_of_an_exported_folder_drafts_as_the_runtimes_reference_does(
    target: Target, ids: torch.Tensor, tmp_path: Path
) -> None:
    """Of two layers, by the names and shapes that the runtime asks for."""
    export_eagle(tmp_path, odd_head(target, ids, 2, (0, 1, 3)), target)
    head, spec = load_eagle(tmp_path, target), read_spec(json.loads((tmp_path / "config.json").read_text()), "config.json")
    stored = {name: tensor.float() for name, tensor in load_file(tmp_path / "model.safetensors").items()}
    assert {name: tuple(tensor.shape) for name, tensor in stored.items()} == head_shapes(spec)

    def layer(prefix: str, input_norm: str | None) -> HeadLayerTensors:
        return HeadLayerTensors(
            qkv=torch.cat([stored[f"{prefix}self_attn.{name}_proj.weight"] for name in "qkv"]),
            output=stored[f"{prefix}self_attn.o_proj.weight"],
            mlp_norm=stored[f"{prefix}post_attention_layernorm.weight"],
            gate_up=torch.cat([stored[f"{prefix}mlp.{name}_proj.weight"] for name in ("gate", "up")]),
            down=stored[f"{prefix}mlp.down_proj.weight"],
            input_norm=None if input_norm is None else stored[input_norm],
        )

    weights = HeadWeightsReference(
        fc=stored["fc.weight"],
        embedding_norm=stored["midlayer.input_layernorm.weight"],
        feature_norm=stored["midlayer.hidden_norm.weight"],
        layers=[layer("midlayer.", None), layer("layers.1.", "layers.1.input_layernorm.weight")],
        norm=stored["norm.weight"],
        lm_head=head.head,
    )
    tokens = torch.randint(0, 64, (12,), generator=torch.Generator().manual_seed(2))
    residuals, _ = target.states(tokens[None, :-1], head.layer_ids)
    outputs, proposed = draft_step_by_step(head, residuals[0], tokens, 1)
    x, logits = head_reference(
        weights,
        residuals[0],
        torch.empty(0, 32),
        target.embedding[tokens[1:]],
        head_dim=spec.head_dim,
        num_kv_heads=spec.num_kv_heads,
        rope_theta=spec.rope.theta,
        eps=spec.rms_eps,
    )
    torch.testing.assert_close(x[-1], outputs[0], rtol=1e-4, atol=1e-4)
    assert int(head.ids[logits[-1].argmax()]) == proposed[0]


@pytest.mark.parametrize("muon", some_slow([0, 1], quick=[1]))
def test_a_run_begins_with_what_was_exported(
    target: Target, ids: torch.Tensor, samples: list[Sample], tmp_path: Path, muon: int
) -> None:
    settings = msgspec.structs.replace(SETTINGS, layers=2, intermediate_size=40, muon=muon)
    head = odd_head(target, ids, 2)
    export_eagle(tmp_path, head, target)
    trainer = EagleTrainer(target, ids, samples, settings)
    trainer.begin_with(load_eagle(tmp_path, target))
    residuals = torch.randn(5, 96)
    torch.testing.assert_close(
        trainer.draft.features(residuals), load_eagle(tmp_path, target).features(residuals), rtol=1e-4, atol=1e-4
    )
    assert not torch.equal(trainer.draft.feature_scale, torch.ones(96))
    losses = [float(one["cross_entropy_0"]) for one in trainer.run(NEVER_S)]
    assert losses[-1] < losses[0]
    with pytest.raises(ConfigError, match="another shape"):
        EagleTrainer(target, ids, samples, SETTINGS).begin_with(head)


@torch.no_grad()
def test_the_exported_folder_is_what_was_trained(target: Target, head: EagleHead, ids: torch.Tensor, tmp_path: Path) -> None:
    export_eagle(tmp_path, head, target)
    stored = load_file(tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    assert {name: list(tensor.shape) for name, tensor in stored.items()} == {
        "fc.weight": [32, 96],
        "midlayer.input_layernorm.weight": [32],
        "midlayer.hidden_norm.weight": [32],
        "midlayer.self_attn.q_proj.weight": [32, 64],
        "midlayer.self_attn.k_proj.weight": [16, 64],
        "midlayer.self_attn.v_proj.weight": [16, 64],
        "midlayer.self_attn.o_proj.weight": [32, 32],
        "midlayer.post_attention_layernorm.weight": [32],
        "midlayer.mlp.gate_proj.weight": [40, 32],
        "midlayer.mlp.up_proj.weight": [40, 32],
        "midlayer.mlp.down_proj.weight": [32, 40],
        "norm.weight": [32],
        "d2t": [48],
    }
    assert {tensor.dtype for name, tensor in stored.items() if name != "d2t"} == {torch.bfloat16}
    assert (torch.arange(48) + stored["d2t"]).tolist() == ids.tolist()
    assert config["architectures"] == ["LlamaForCausalLMEagle3"] and config["model_type"] == "llama"
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 2, 1] and config["num_hidden_layers"] == 1
    assert config["vocab_size"] == 64 and config["draft_vocab_size"] == 48 and config["intermediate_size"] == 40
    assert config["embedding_from_target"] and config["head_from_target"] and config["target"]["name"] == "tiny"
    again = load_eagle(tmp_path, target)
    expected = {name: tensor.bfloat16().float() for name, tensor in head.state_dict().items()}
    expected["fc.weight"] = (head.fc.weight / head.feature_scale).bfloat16().float()
    expected["feature_scale"] = torch.ones(96)
    for name, tensor in again.state_dict().items():
        assert torch.equal(tensor, expected[name]), name
    residuals = torch.randn(5, 96)
    torch.testing.assert_close(again.features(residuals), head.features(residuals), rtol=0.02, atol=0.05)
    d2t = stored["d2t"]
    for damaged in ({"d2t": d2t[:-1]}, {"d2t": d2t + 64}, {"norm.weight": stored["norm.weight"][:-1]}):
        save_file(stored | damaged, tmp_path / "model.safetensors")
        with pytest.raises(ConfigError):
            load_eagle(tmp_path, target)


def test_settings_that_do_not_fit_are_refused(target: Target, ids: torch.Tensor, samples: list[Sample]) -> None:
    for changed in (
        {"layer_ids": "1,2"},
        {"layer_ids": "1,2,5"},
        {"layer_ids": "low"},
        {"unroll": 0},
        {"intermediate_size": 49},
    ):
        with pytest.raises(ConfigError):
            EagleTrainer(target, ids, samples, msgspec.structs.replace(SETTINGS, **changed))


def test_answers_written_together_are_those_of_each_prompt_alone(target: Target) -> None:
    """Prompts of several lengths, greedy and sampled; rows end at different steps and are dropped."""
    generator = torch.Generator().manual_seed(5)
    asks = [
        Ask(torch.randint(0, 64, (3 + seed % 5,), generator=generator).tolist(), seed, (0.0, 0.7)[seed % 2])
        for seed in range(14)
    ]
    eos_ids = {3, 9, 17, 20, 41}
    found = BatchedWriter(target, eos_ids).write(asks, 40)
    for ask, answer in zip(asks, found, strict=True):
        tokens, expected = list(ask.prompt), []
        while len(expected) < 40 and not (expected and expected[-1] in eos_ids):
            logits = target.hidden(torch.tensor([tokens]))[0, -1] @ target.head.T
            drawn = {"temperature": ask.temperature, "seed": ask.seed, "position": len(tokens)}
            expected.append(int(sample_reference(logits, top_k=0, top_p=1, min_p=0, **drawn)))
            tokens.append(expected[-1])
        assert answer == expected
    assert len({len(answer) for answer in found}) > 3


def test_writing_for_a_folder_of_prompts_leaves_shards_and_goes_on(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, count in (("train", 9), ("held_out", 3), ("questions", 2)):
        prompts = [Sample(np.array([1, 2, number + 3], np.uint32), 3, 0, 0.0) for number in range(count)]
        write_shard(tmp_path / f"prompts-{name}.npz", prompts)
    monkeypatch.setattr(write, "load_target", lambda files, device, dtype: target)
    flags = [str(tmp_path), "--rows=4", "--max-tokens=5", "--written-share=0", "--device=cpu"]
    write.main([*flags, "--minutes=0"])
    assert not shards(tmp_path, "train")
    write.main(flags)
    assert len(shards(tmp_path, "train")) == 3 and len(read_samples(tmp_path, "train")) == 9
    assert sorted(sample.seed for sample in read_samples(tmp_path, "held_out")) == [0, 1, 2]
    assert sorted(sample.seed for sample in read_judged(tmp_path)) == [0, 1]
    assert {round(sample.temperature, 3) for sample in read_samples(tmp_path, "train")} == {0.0, 0.7, 1.0}


def test_a_user_turn_is_what_lies_between_the_tokens_around_it(smollm2: ModelFiles) -> None:
    bundle = load_bundle(smollm2)
    before, behind = write.turn_around(bundle)
    turn = bundle.tokenizer.encode("Why is the sky blue?")
    assert [*before, *turn, *behind] == bundle.encode_chat([{"role": "user", "content": "Why is the sky blue?"}])


def test_the_card_of_a_head_says_what_it_was_trained_on(
    target: Target, ids: torch.Tensor, samples: list[Sample], tmp_path: Path
) -> None:
    trainer = EagleTrainer(target, ids, samples, msgspec.structs.replace(SETTINGS, steps=3))
    list(trainer.run(NEVER_S))
    trainer.save(tmp_path / "eagle.pt")
    export_eagle(tmp_path / "eagle", trainer.draft, target)
    write_shard(shard_path(tmp_path, "train", 0), samples)
    write_shard(shard_path(tmp_path, "held_out", 0), samples)
    write_card(tmp_path / "eagle", tmp_path, read_checkpoint(tmp_path / "eagle.pt", torch.device("cpu")), "| a table |")
    card = (tmp_path / "eagle" / "README.md").read_text()
    assert "| a table |" in card and "3 steps" in card and "layers [2, 2, 1]" in card and "50 % at T = 0," in card
    session.pack(tmp_path, tmp_path / "out")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["data-0.zip", "eagle.zip", "rest.zip"]
    with zipfile.ZipFile(tmp_path / "out" / "eagle.zip") as archive:
        assert {"eagle/config.json", "eagle/model.safetensors", "eagle/README.md"} <= set(archive.namelist())


def test_a_carried_target_is_found_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path / "here"))
    file = tmp_path / "here" / "models" / DEFAULT_MODEL / "0.1.2" / "SmolLM2-135M-Instruct.Q4_1.gguf"
    file.parent.mkdir(parents=True)
    file.write_bytes(bytes(3000))
    monkeypatch.setattr(session, "WORK", tmp_path / "work")
    monkeypatch.setattr(session, "PIECE_BYTES", 1000)
    monkeypatch.setattr(session.prompts, "main", lambda argv: None)
    monkeypatch.setattr(session, "load_bundle", lambda files: None)
    monkeypatch.setattr(session, "encode", lambda folder, bundle, split: [])
    session.prepare(1, 1)
    assert session.carried_target(tmp_path / "work" / "target") == DEFAULT_MODEL
    files = resolve(DEFAULT_MODEL)
    assert files.path.is_relative_to(tmp_path / "work") and files.path.read_bytes() == bytes(3000)
    assert (files.name, files.revision) == (DEFAULT_MODEL, "0.1.2")


def test_parts_that_need_a_failed_one_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[str] = []

    def run_module(name: str, flags: Sequence[str]) -> int:
        begun.append(name)
        return int(name == "train_eagle")

    monkeypatch.setattr(session, "run_module", run_module)
    parts = [("vocabulary", 1.0), ("train-eagle", 1.0), ("evaluate-eagle", 1.0), ("train", 1.0), ("evaluate", 1.0)]
    assert session.run(parts, tmp_path / "out", tmp_path, "target", {}) == 1
    assert begun == ["vocabulary", "train_eagle", "evaluate", "train", "export", "evaluate"]
    with pytest.raises(argparse.ArgumentTypeError):
        session.parsed_part("trian=3")


def test_scales_come_from_usual_tokens(head: EagleHead) -> None:
    residuals = torch.randn(400, 96, generator=torch.Generator().manual_seed(1))
    residuals[:, 10] *= 50
    residuals[0] *= 1000
    fit_features(head, residuals)
    assert 40 < float(head.feature_scale[10]) < 60
    assert float(head.feature_scale[11]) == pytest.approx(1, abs=0.2)


def test_a_start_without_its_answer_is_not_accepted(target: Target, head: EagleHead, samples: list[Sample]) -> None:
    wrong = Sample(samples[0].tokens.copy(), 4, 0, 0.0)
    outside = next(token for token in range(64) if token not in head.ids.tolist())
    wrong.tokens[10:] = outside
    assert survival([Start(wrong, 10)], eagle_proposer(head, target), 4) == [0.0] * 4
