"""The recipe for draft models on a tiny random target: each part, and what they hand to each other."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from bench.cpu import chat
from common.models.config import load_config
from common.models.source import ModelFiles, resolve
from common.ops.sampling.gumbel_reference import gumbel_noise_reference
from common.ops.sampling.sample_reference import sample_reference
from common.protocol.errors import ConfigError
from recipes.draft import session, templates, write
from recipes.draft.acceptance import (
    Start,
    coupled_choice,
    draft_proposer,
    gumbel_rows,
    mean_accepted,
    ngram_proposer,
    starts_of,
    survival,
)
from recipes.draft.card import write_card
from recipes.draft.draft_model import DraftSize, new_draft
from recipes.draft.export import draft_of_checkpoint, export, load_folder
from recipes.draft.llama import Decoder, LlamaShape
from recipes.draft.prompts import prompts
from recipes.draft.samples import Sample, batches, collate, read_samples, read_shard, shard_path, write_shard
from recipes.draft.target import Target, frozen, load_target, shape_of
from recipes.draft.train import Settings, Trainer
from recipes.draft.vocabulary import answer_counts, choose_ids, d2t_of

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
SETTINGS = Settings(steps=30, warmup=3, batch_tokens=128, max_length=32, learning_rate=3e-3)
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
    """Answers of the target as decode workers would give them: greedy, and sampled at T = 0.7."""
    prompts = [torch.randint(0, 8, (4,), generator=torch.Generator().manual_seed(seed)) for seed in range(48)]
    tokens = torch.stack(prompts)
    temperatures = [(0.0, 0.7)[seed % 2] for seed in range(48)]
    while (length := tokens.shape[1]) < 24:
        logits = target.hidden(tokens)[:, -1] @ target.head.T
        drawn = [
            sample_reference(row, temperature=temperature, top_k=0, top_p=1, min_p=0, seed=seed, position=length)
            for seed, (row, temperature) in enumerate(zip(logits, temperatures, strict=True))
        ]
        tokens = torch.cat([tokens, torch.tensor(drawn)[:, None]], 1)
    return [Sample(row.numpy().astype(np.uint32), 4, seed, temperatures[seed]) for seed, row in enumerate(tokens)]


@pytest.fixture(scope="module")
def ids(samples: list[Sample]) -> torch.Tensor:
    return torch.from_numpy(choose_ids(answer_counts(samples, SHAPE.vocab_size), 48, {0, 63}))


def trainer_of(target: Target, ids: torch.Tensor, samples: list[Sample], settings: Settings = SETTINGS) -> Trainer:
    return Trainer(target, ids, samples, settings)


def test_held_out_prompts_share_no_template_topic_or_passage_with_training() -> None:
    train, held_out = prompts("train", 1500, 0), prompts("held_out", 300, 0)
    assert not {prompt.template for prompt in train} & {prompt.template for prompt in held_out}
    texts = ["\n".join(message.content for message in prompt.messages) for prompt in train]
    last = {prompt.messages[-1].content for prompt in train}
    assert not last & {prompt.messages[-1].content for prompt in held_out}
    for topic in ("volcanoes", "the Silk Road", templates.TOPICS[4]):
        held = templates.TOPICS.index(topic) % 5 == 4
        assert any(f"{topic}." in text or f"{topic} " in text for text in texts) != held
    everything = {turn for turns in templates.TRAIN.values() for turn in turns}
    assert not everything & {turn for turns in templates.HELD_OUT.values() for turn in turns}


def test_questions_are_in_no_training_prompt() -> None:
    """Those that judge drafts, and those of `bench.cpu.chat`, by which answers are timed."""
    asked = prompts("questions", 0, 0)
    assert len(asked) == len(set(asked)) >= 60 and all(len(one.messages) == 1 for one in asked)
    judged = {one.messages[0].content.lower() for one in asked} | {prompt.lower() for prompt in chat.PROMPTS}
    assert not {message.content.lower() for one in prompts("train", 20_000, 0) for message in one.messages} & judged


def test_prompts_are_a_function_of_their_seed_and_differ() -> None:
    found = prompts("train", 400, 3)
    assert found == prompts("train", 400, 3)
    assert len(set(found)) == 400
    assert found != prompts("train", 400, 4)
    assert {len(prompt.messages) for prompt in found} >= {1, 2, 3}
    assert not any("{" + name + "}" in str(found) for name in ("topic", "style", "prose", "number", "sentence", "person"))


def test_shards_come_back_as_they_were_and_damaged_ones_are_refused(samples: list[Sample], tmp_path: Path) -> None:
    write_shard(shard_path(tmp_path, "train", 0), samples[:10])
    write_shard(shard_path(tmp_path, "train", 1), samples[10:])
    write_shard(shard_path(tmp_path, "held_out", 0), samples[:1])
    found = read_samples(tmp_path, "train")
    assert len(found) == len(samples)
    for one, other in zip(found, samples, strict=True):
        assert one.tokens.tolist() == other.tokens.tolist()
        assert (one.prompt_length, one.seed) == (other.prompt_length, other.seed)
        assert one.temperature == pytest.approx(other.temperature)
    path = shard_path(tmp_path, "train", 1)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ConfigError, match="is not a shard"):
        read_shard(path)
    with pytest.raises(ConfigError, match="no samples of other"):
        read_samples(tmp_path, "other")


def test_batches_hold_every_sample_once_and_mark_the_answers(samples: list[Sample]) -> None:
    found = batches(samples, 128, 32, seed=5, epoch=2)
    assert sorted(index for batch in found for index in batch) == list(range(len(samples)))
    assert found == batches(samples, 128, 32, seed=5, epoch=2)
    assert found != batches(samples, 128, 32, seed=5, epoch=3)
    batch = collate([samples[0], samples[1]], max_length=20)
    assert batch.tokens.shape == batch.answers.shape == (2, 20)
    # the position before an answer's token predicts it
    assert batch.answers[0].nonzero()[:, 0].tolist() == list(range(3, 19))


def test_the_draft_vocabulary_is_the_most_frequent_ids_and_the_special_ones() -> None:
    counts = np.array([0, 9, 3, 0, 7, 3, 0, 0], np.int64)
    found = choose_ids(counts, 4, {7})
    assert found.tolist() == [1, 4, 2, 7]
    d2t = d2t_of(found)
    assert (np.arange(4) + d2t).tolist() == found.tolist()
    assert d2t.dtype == np.int64
    for size, always in ((9, {7}), (1, {1, 2}), (4, {8})):
        with pytest.raises(ConfigError):
            choose_ids(counts, size, always)


@pytest.mark.slow
def test_training_lowers_the_loss_and_raises_acceptance(target: Target, ids: torch.Tensor, samples: list[Sample]) -> None:
    settings = msgspec.structs.replace(SETTINGS, steps=150)
    trainer = trainer_of(target, ids, samples, settings)
    starts = starts_of(samples, 4, 32)
    before = survival(starts, draft_proposer(trainer.draft))
    losses = list(trainer.run(NEVER_S))
    after = survival(starts, draft_proposer(trainer.draft))
    assert len(losses) == 150
    assert np.mean([float(one["kl"]) for one in losses[-10:]]) < 0.5 * float(losses[0]["kl"])
    assert mean_accepted(after, 4) > mean_accepted(before, 4) + 0.3


def test_a_run_continued_from_its_checkpoint_equals_one_without_a_break(
    target: Target, ids: torch.Tensor, samples: list[Sample], tmp_path: Path
) -> None:
    whole = trainer_of(target, ids, samples)
    losses = list(whole.run(NEVER_S))
    first = trainer_of(target, ids, samples)
    steps = first.run(NEVER_S)
    begin = [next(steps) for _ in range(13)]
    first.save(tmp_path / "checkpoint.pt")
    second = trainer_of(target, ids, samples)
    second.load(tmp_path / "checkpoint.pt")
    assert begin + list(second.run(NEVER_S)) == losses
    for name, tensor in whole.draft.state_dict().items():
        assert torch.equal(second.draft.state_dict()[name], tensor), name


def test_a_run_begins_with_what_was_exported(target: Target, ids: torch.Tensor, samples: list[Sample], tmp_path: Path) -> None:
    first = Trainer(target, ids, samples, SETTINGS)
    list(first.run(float("inf")))
    export(tmp_path, first.draft, target)
    again = Trainer(target, ids, samples, SETTINGS)
    again.begin_with(load_folder(tmp_path, target))
    tokens = torch.randint(0, 64, (2, 9), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(again.draft.hidden(tokens), load_folder(tmp_path, target).hidden(tokens))
    other = Trainer(target, ids, samples, msgspec.structs.replace(SETTINGS, layers=2))
    with pytest.raises(ConfigError, match="another shape"):
        other.begin_with(first.draft)


def test_a_checkpoint_of_another_run_is_refused(
    target: Target, ids: torch.Tensor, samples: list[Sample], tmp_path: Path
) -> None:
    path = tmp_path / "checkpoint.pt"
    trainer_of(target, ids, samples).save(path)
    with pytest.raises(ConfigError, match="other settings"):
        trainer_of(target, ids, samples, msgspec.structs.replace(SETTINGS, seed=1)).load(path)
    with pytest.raises(ConfigError, match="another draft vocabulary"):
        trainer_of(target, ids[:-1], samples).load(path)
    path.write_bytes(b"nonsense")
    with pytest.raises(ConfigError, match="not a checkpoint"):
        trainer_of(target, ids, samples).load(path)


def test_a_run_stops_at_its_deadline_and_learns_its_length_from_its_speed(
    target: Target, ids: torch.Tensor, samples: list[Sample]
) -> None:
    trainer = trainer_of(target, ids, samples, msgspec.structs.replace(SETTINGS, steps=0))
    assert list(trainer.run(time.monotonic() - 1)) == []
    taken = len(list(trainer.run(time.monotonic() + 1.0)))
    assert trainer.progress.step == taken > SETTINGS.warmup
    assert trainer.progress.total >= taken


def test_settings_that_do_not_fit_are_refused(target: Target, ids: torch.Tensor, samples: list[Sample]) -> None:
    for changed in ({"layers": 5}, {"layers": 0}, {"intermediate_size": 49}, {"warmup": 0}, {"max_length": 3}):
        with pytest.raises(ConfigError):
            trainer_of(target, ids, samples, msgspec.structs.replace(SETTINGS, **changed))
    with pytest.raises(ConfigError, match="ids below 64"):
        new_draft(target, torch.tensor([1, 64]), DraftSize())


def test_a_draft_model_that_is_the_target_is_always_accepted(target: Target, samples: list[Sample]) -> None:
    """Greedy and sampled: proposals use the noise that the answers were drawn with."""
    draft = new_draft(target, torch.arange(64), DraftSize(layers=4, intermediate_size=48))
    starts = starts_of(samples, 3, 32)
    assert {start.sample.temperature for start in starts} == {0.0, 0.7}
    assert survival(starts, draft_proposer(draft, batch_size=7)) == [1.0] * 8


def test_noise_of_rows_is_the_noise_of_the_engine() -> None:
    tokens = torch.tensor([0, 5, 63, 49_151])
    found = gumbel_rows(torch.tensor([7, 2**40 + 3]), torch.tensor([11, 900]), tokens)
    assert torch.equal(found[0], gumbel_noise_reference(7, 11, tokens))
    assert torch.equal(found[1], gumbel_noise_reference(2**40 + 3, 900, tokens))
    logits = torch.zeros(2, 4)
    chosen = coupled_choice(logits, tokens, torch.tensor([7, 7]), torch.tensor([11, 11]), torch.tensor([0.0, 1.0]))
    assert chosen.tolist() == [0, int(found[0].argmax())]


def test_survival_counts_leading_tokens_only() -> None:
    sample = Sample(np.array([1, 2, 1, 2, 1, 2, 1, 2, 1, 2, 1, 2, 9], np.uint32), 1, 0, 0.0)
    starts = [Start(sample, 4), Start(sample, 5)]
    assert survival(starts, ngram_proposer()) == [1.0] * 7 + [0.5]
    assert mean_accepted([1.0, 0.5, 0.25], 2) == 1.5
    with pytest.raises(ConfigError, match="no held-out answer"):
        starts_of([sample], 1, 6)


def test_the_exported_folder_is_what_was_trained(
    target: Target, ids: torch.Tensor, samples: list[Sample], tmp_path: Path
) -> None:
    trainer = trainer_of(target, ids, samples)
    list(trainer.run(NEVER_S))
    trainer.save(tmp_path / "checkpoint.pt")
    draft, state = draft_of_checkpoint(tmp_path / "checkpoint.pt", target)
    size = export(tmp_path / "small", draft, target)
    stored = load_file(tmp_path / "small" / "model.safetensors")
    config = json.loads((tmp_path / "small" / "config.json").read_text())
    assert (torch.arange(len(ids)) + stored["d2t"]).tolist() == ids.tolist()
    assert config["draft_vocab_size"] == len(ids) and config["vocab_size"] == 64
    assert config["embedding_from_target"] and config["head_from_target"]
    assert not {"lm_head.weight", "model.embed_tokens.weight"} & set(stored)
    assert {tensor.dtype for name, tensor in stored.items() if name != "d2t"} == {torch.bfloat16}
    assert export(tmp_path / "whole", draft, target, complete=True) > size
    again = load_folder(tmp_path / "small", target)
    for name, tensor in again.model.state_dict().items():
        assert torch.equal(tensor, draft.model.state_dict()[name].bfloat16().float()), name
    starts = starts_of(samples, 2, 32)
    assert mean_accepted(survival(starts, draft_proposer(again)), 8) > 0
    write_shard(shard_path(tmp_path, "train", 0), samples)
    write_card(tmp_path / "small", tmp_path, state, "| a table |")
    card = (tmp_path / "small" / "README.md").read_text()
    assert "| a table |" in card and "30 steps" in card and "48 of 64 ids" in card


def test_transformers_computes_the_same_logits_from_the_complete_folder(
    target: Target, ids: torch.Tensor, samples: list[Sample], tmp_path: Path
) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    trainer = trainer_of(target, ids, samples)
    list(trainer.run(NEVER_S))
    export(tmp_path, trainer.draft, target, complete=True)
    stored = load_file(tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    model = LlamaForCausalLM(LlamaConfig(**{k: v for k, v in config.items() if k not in ("architectures", "torch_dtype")}))
    head = torch.zeros(64, SHAPE.hidden_size)
    head[ids] = stored.pop("lm_head.weight").float()
    stored.pop("d2t")
    model.load_state_dict({**{name: tensor.float() for name, tensor in stored.items()}, "lm_head.weight": head})
    draft = load_folder(tmp_path, target)
    tokens = torch.from_numpy(samples[0].tokens.astype(np.int64))[None]
    with torch.no_grad():
        expected = model.eval()(tokens).logits[..., ids]
        torch.testing.assert_close(draft.logits(draft.hidden(tokens)), expected, rtol=1e-4, atol=1e-4)


def test_a_damaged_folder_is_refused(target: Target, ids: torch.Tensor, tmp_path: Path) -> None:
    draft = new_draft(target, ids, DraftSize())
    path = tmp_path / "model.safetensors"
    with pytest.raises(ConfigError, match="is not a draft model"):
        load_folder(tmp_path, target)
    export(tmp_path, draft, target)
    stored = load_file(path)
    for d2t in (stored["d2t"][:-1], stored["d2t"] + 64, stored["d2t"] - torch.arange(len(ids))):
        save_file({**stored, "d2t": d2t}, path)
        with pytest.raises(ConfigError, match="d2t"):
            load_folder(tmp_path, target)
    other = msgspec.structs.replace(SHAPE, vocab_size=65)
    with pytest.raises(ConfigError, match="vocabulary or hidden size"):
        load_folder(tmp_path, Target("other", "", other, target.decoder, target.embedding, target.head))


def test_a_target_that_is_no_llama_is_refused() -> None:
    with pytest.raises(ConfigError, match="Llama"):
        shape_of(load_config(resolve("dummy:qwen3-8b")))


def test_a_carried_file_is_put_together_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "PIECE_BYTES", 1000)
    content = bytes(range(256)) * 13
    (tmp_path / "model.gguf").write_bytes(content)
    session.split(tmp_path / "model.gguf", tmp_path / "pieces")
    assert len(list((tmp_path / "pieces").iterdir())) == 4
    whole = session.join(tmp_path / "pieces")
    assert whole.read_bytes() == content and whole.name == "model.gguf"
    (tmp_path / "pieces" / "model.gguf.02-of-04").unlink()
    with pytest.raises(ConfigError, match="3 of 4 pieces"):
        session.join(tmp_path / "pieces")
    with pytest.raises(ConfigError, match="no pieces"):
        session.join(tmp_path)


@pytest.mark.slow
def test_the_target_of_the_recipe_computes_what_transformers_computes(
    smollm2: ModelFiles, smollm2_in_transformers: Any
) -> None:
    target = load_target(smollm2, torch.device("cpu"), torch.float32)
    tokens = torch.tensor([[1, 4093, 198, 19556, 338, 253, 1123]])
    with torch.no_grad():
        expected = smollm2_in_transformers(tokens).logits
    torch.testing.assert_close(target.hidden(tokens) @ target.head.T, expected, rtol=1e-3, atol=2e-3)


@pytest.mark.slow
def test_each_sitting_answers_other_turns_of_the_user(tmp_path: Path) -> None:
    for sitting in (1, 2):
        flags = ["--turns=6", "--rows=6", "--max-tokens=4", "--device=cpu", "--minutes=5"]
        write.main([str(tmp_path), f"--sitting={sitting}", *flags])
    first, second = (read_shard(shard_path(tmp_path, "train", sitting * write.SITTING_SHARDS)) for sitting in (1, 2))
    prompts = [{tuple(sample.tokens[: sample.prompt_length]) for sample in samples} for samples in (first, second)]
    assert prompts[0] and prompts[1] and not prompts[0] & prompts[1]
    assert all(1 <= len(sample.tokens) - sample.prompt_length <= 4 for sample in (*first, *second))
    with pytest.raises(SystemExit, match="needs --turns"):
        write.main([str(tmp_path), "--sitting=1"])
