"""A draft worker with a model, on the memory bus, with a real engine: what it drafts is what its model would write."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import anyio
import msgspec
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from common.engine.load.layout import EngineConfig
from common.engine.load.runners import load_runner
from common.engine.outcomes import accept
from common.engine.plan import StepPlan, StepRow
from common.models.source import resolve
from common.protocol.draft_messages import DraftRow, DraftSampling, DraftUpdate
from common.protocol.messages import SamplingParams
from common.testing.memory_bus import MemoryBroker
from services.draft.config import DraftConfig
from services.draft.mirror import Mirror
from services.draft.model_actor import MAX_FAILURES, MAX_PROBLEM_CHARS, ModelDraftActor
from services.draft.model_engine import DraftEngine, open_draft_engine
from tests.actors.test_draft import Decoder, running, until
from tests.fixtures.slow import some_slow
from tests.fixtures.tiny_model import edit_config, write_tiny_model

NUM_BLOCKS = 64


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def make(model: Path, tmp_path: Path) -> Callable[..., ModelDraftActor]:
    def make(broker: MemoryBroker, **given: object) -> ModelDraftActor:
        plain: dict[str, object] = {
            "model": str(model),
            "draft_model": str(model),
            "dtype": "float32",
            "threads": 1,
            "num_blocks": NUM_BLOCKS,
            "shm_dir": str(tmp_path),
            "heartbeat_s": 0.02,
            "dead_after_s": 2.0,
            "proposal_tokens": 6,
        }
        config = DraftConfig(**(plain | given))  # type: ignore[arg-type]
        return ModelDraftActor(bus=broker.connect("draft"), config=config, open_engine=partial(open_draft_engine, config))

    return make


def free(draft: ModelDraftActor) -> bool:
    assert draft.drafter is not None
    draft.drafter.check()
    usage = draft.drafter.blocks.pool.usage()
    return usage.free == usage.total and len(draft.proposer) == 0


@pytest.mark.parametrize("temperature", [0.0, 0.8])
async def test_a_draft_model_equal_to_the_target_is_always_right(
    temperature: float, make: Callable[..., ModelDraftActor], model: Path
) -> None:
    broker = MemoryBroker()
    decoder, draft = Decoder(broker), make(broker)
    target = load_runner(resolve(str(model)), EngineConfig(dtype="float32", threads=1, num_blocks=NUM_BLOCKS))
    prompts = {"a": [1, 2, 3], "b": list(range(40, 90))}
    said = {name: SamplingParams(seed=seed, temperature=temperature, top_p=0.95, top_k=40) for seed, name in enumerate(prompts)}
    tokens = {name: list(prompt) for name, prompt in prompts.items()}
    blocks = {name: list(range(16 * index, 16 * index + 16)) for index, name in enumerate(prompts)}

    def caught_up() -> bool:
        drafter = draft.drafter
        keys = {name: (decoder.ref, name) for name in tokens}
        return drafter is not None and all(
            drafter.length(key) == len(tokens[name]) and drafter.num_drafted(key) == 6 for name, key in keys.items()
        )

    async with running(decoder, draft):
        await until(lambda: any(peer.credits > 0 for peer in decoder.registry.alive("draft", decoder.clock())))
        decoder.tick(decoder.clock())
        for name, prompt in prompts.items():
            first = StepRow(prompt[:-1], 0, blocks[name], 0, said[name], len(prompt))
            await anyio.to_thread.run_sync(target.execute, StepPlan(0, [first]))  # workers that wait too long fence themselves
            params = said[name]
            sampling = DraftSampling(
                seed=params.seed,
                temperature=params.temperature,
                top_p=params.top_p,
                top_k=params.top_k,
                prompt_tokens=len(prompt),
            )
            decoder.book.open(name, tokens[name], sampling)
        for step in range(40):
            decoder.book.begin_step(len(tokens))
            for name, own in tokens.items():
                proposed = decoder.book.propose(name, 4)
                row = StepRow(
                    [own[-1], *proposed], len(own) - 1, blocks[name], 1 + len(proposed), said[name], len(prompts[name])
                )
                (sampled,) = (await anyio.to_thread.run_sync(target.execute, StepPlan(step, [row]))).rows
                assert accept(proposed, sampled.tokens) == len(proposed), "its own model would have written the same"
                own += sampled.tokens
                decoder.book.record(name, len(proposed), len(proposed))
            for worker, message in decoder.book.messages(decoder.ref):
                decoder.send(worker, message)
            await anyio.sleep(0.01)
            if step % 4 == 3:  # however slow this machine is
                await until(caught_up)
        assert decoder.book.counters.num_accepted_tokens > 20
        for name in tokens:
            decoder.book.close(name)
        for worker, message in decoder.book.messages(decoder.ref):
            decoder.send(worker, message)
        await until(lambda: free(draft))
        metrics = draft.metrics.render().decode()
        assert "penstock_draft_model_steps_total " in metrics
        assert "penstock_draft_model_step_seconds_total " in metrics


def disturbed(model: Path, folder: Path) -> Path:
    """The same model with noise on its weights: it is right now and then."""
    shutil.copytree(model, folder)
    rng = np.random.default_rng(0)
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if tensor.ndim == 2:
            noise = rng.standard_normal(tensor.shape).astype(np.float32) * np.float32(0.3) * tensor.astype(np.float32).std()
            tensors[name] = (tensor.astype(np.float32) + noise).astype(tensor.dtype)
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("temperature", some_slow([0.0, 0.05], quick=[0.05]))
async def test_where_another_model_is_wrong_its_branches_are_right_now_and_then_and_no_token_changes(
    temperature: float, make: Callable[..., ModelDraftActor], model: Path, tmp_path: Path
) -> None:
    broker = MemoryBroker()
    folder = disturbed(model, tmp_path / "disturbed")
    decoder = Decoder(broker, always=True)  # else a text that the model is bad at is not sent to it for a while
    draft = make(broker, draft_model=str(folder), draft_branches=6, draft_branch_tokens=3)
    target = load_runner(resolve(str(model)), EngineConfig(dtype="float32", threads=1, num_blocks=NUM_BLOCKS))
    prompt, blocks = [1, 2, 3, 4, 5], list(range(16))
    params = SamplingParams(seed=3, temperature=temperature)

    def sampled(own: list[int], proposed: list[int]) -> list[int]:
        row = StepRow([own[-1], *proposed], len(own) - 1, blocks, 1 + len(proposed), params, len(prompt))
        return target.execute(StepPlan(0, [row])).rows[0].tokens

    def idle() -> bool:
        """Whether everything is drafted that may be."""
        assert draft.drafter is not None
        mirrors = list(draft.drafter._mirrors.values())
        return all(one.num_confirmed == len(tokens) and one.num_drafted == 6 and settled(one) for one in mirrors)

    def settled(mirror: Mirror) -> bool:
        assert draft.drafter is not None
        return bool(mirror.branches) and draft.drafter.branches.is_settled(mirror)

    tokens = list(prompt)
    target.execute(StepPlan(0, [StepRow(prompt[:-1], 0, blocks, 0, params, len(prompt))]))
    expected = list(prompt)
    while len(expected) < len(prompt) + 130:
        expected += sampled(expected, [])
    async with running(decoder, draft):
        await until(lambda: any(peer.credits > 0 for peer in decoder.registry.alive("draft", decoder.clock())))
        decoder.tick(decoder.clock())
        decoder.book.open("a", tokens, DraftSampling(seed=3, temperature=temperature, prompt_tokens=len(prompt)))
        after_a_hit = 0
        while len(tokens) < len(prompt) + 120:
            hits = decoder.book.counters.num_table_hits
            decoder.book.begin_step(1)
            proposed = decoder.book.propose("a", 4)
            came = sampled(tokens, proposed)
            accepted = accept(proposed, came)
            tokens += came[: accepted + 1]
            decoder.book.record("a", len(proposed), accepted)
            if decoder.book.counters.num_table_hits > hits:
                after_a_hit += len(decoder.book.propose("a", 4)) > 0  # no message has come since
            for worker, message in decoder.book.messages(decoder.ref):
                decoder.send(worker, message)
            await anyio.sleep(0.01)
            if len(tokens) % 3:
                await until(idle)
                assert draft.drafter is not None
                draft.drafter.check()
        assert tokens == expected[: len(tokens)]
        counters = decoder.book.counters
        assert after_a_hit and counters.num_table_hits + counters.num_table_misses > 10
        assert 0 < counters.num_accepted_tokens < counters.num_draft_tokens
        decoder.book.close("a")
        for worker, message in decoder.book.messages(decoder.ref):
            decoder.send(worker, message)
        await until(lambda: free(draft))
        metrics = draft.metrics.render().decode()
        (taken,) = [line for line in metrics.splitlines() if line.startswith("penstock_draft_model_branches_taken_total ")]
        assert float(taken.split()[1]) > 0
        assert all(len(msgspec.msgpack.encode(message)) <= 1024 for message in decoder.proposals)


async def test_mirrors_of_a_lost_worker_and_of_a_fenced_one_give_their_blocks_back(
    make: Callable[..., ModelDraftActor],
) -> None:
    broker = MemoryBroker()
    decoder, draft = Decoder(broker), make(broker, dead_after_s=0.3)
    async with running(decoder, draft):
        decoder.update(draft, DraftRow("a", 0, list(range(100))), DraftRow("b", 0, [1]))
        await until(lambda: len(draft.proposer) == 2 and draft.registry.get(decoder.ref.id) is not None)
        decoder.connection.kill()
        await until(lambda: free(draft))
        draft.handle(DraftUpdate(decode=decoder.ref, rows=[DraftRow("a", 0, [1, 2])]), "")
        await until(lambda: len(draft.proposer) == 1)
        draft.fenced()
        await until(lambda: free(draft))


async def test_a_failed_step_costs_its_mirrors_and_several_end_the_worker(make: Callable[..., ModelDraftActor]) -> None:
    broker = MemoryBroker()
    decoder, draft = Decoder(broker), make(broker)
    with pytest.raises(BaseExceptionGroup, match="unhandled errors"):
        async with running(decoder, draft):
            assert draft.opened is not None
            runner = draft.opened.engine.runner
            runner.decoder = None  # type: ignore[attr-defined]  # from here on each step raises
            for attempt in range(MAX_FAILURES):
                decoder.update(draft, DraftRow("a", 0, [attempt, 1, 2]))
                await until(lambda: bool(draft.watch.num_steps > attempt))  # noqa: B023
                assert free(draft)
            await anyio.sleep(1.0)


def other_tokenizer(folder: Path) -> None:
    path = folder / "tokenizer.json"
    said = json.loads(path.read_text())
    vocabulary = said["model"]["vocab"]
    first, second = list(vocabulary)[:2]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    path.write_text(json.dumps(said))


def missing(folder: Path) -> None:
    shutil.rmtree(folder)


def smaller_vocabulary(folder: Path) -> None:
    edit_config(folder, vocab_size=500)


@pytest.mark.parametrize(
    ("damage", "given", "says"),
    [
        (other_tokenizer, {}, "has another tokenizer than"),
        (missing, {}, "no model "),
        (smaller_vocabulary, {}, "has a vocabulary of 500, and"),
        (lambda folder: None, {"num_blocks": 1 << 23, "block_tokens": 1024}, "it is too small"),
        (lambda folder: None, {"num_blocks": 1 << 40}, "lower num_blocks or raise block_tokens"),
    ],
)
async def test_a_model_that_cannot_draft_is_one_line_in_the_log_and_takes_no_mirrors(
    damage: Callable[[Path], None],
    given: dict[str, object],
    says: str,
    make: Callable[..., ModelDraftActor],
    model: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    folder = tmp_path / "other"
    shutil.copytree(model, folder)
    damage(folder)
    broker = MemoryBroker()
    decoder, draft = Decoder(broker), make(broker, draft_model=str(folder), **given)
    async with running(decoder, draft):
        await until(lambda: bool(decoder.registry.alive("draft", decoder.clock())))
        seen = draft.presence("ready")
        assert (seen.credits, seen.vocabulary, len(draft.proposer)) == (0, "", 0)
    lines = [record.getMessage() for record in caplog.records if "draft_model_unusable" in record.getMessage()]
    assert len(lines) == 1 and says in lines[0], lines


async def test_heartbeats_say_why_a_model_can_not_be_used(make: Callable[..., ModelDraftActor], model: Path) -> None:
    broker = MemoryBroker()
    decoder, good, damaged = Decoder(broker), make(broker, draft_model=str(model)), make(broker, draft_model=str(model))

    def fails(*_: object) -> DraftEngine:
        raise MemoryError(f"no room for {'weights ' * 100}\nin these lines")

    damaged.open_engine = fails
    async with running(decoder, good, damaged):
        alive = lambda: decoder.registry.alive("draft", decoder.clock())  # noqa: E731
        await until(lambda: [beat.state for beat in alive()] == ["ready", "ready"])
        problems = {beat.worker: beat.drafting.problem for beat in alive()}
        longest = {beat.worker: beat.drafting.longest for beat in alive()}
        assert good.drafter is not None and longest == {good.ref: good.drafter.max_context, damaged.ref: 0}
    assert problems[good.ref] == ""
    assert problems[damaged.ref].startswith("no room for weights ") and len(problems[damaged.ref]) == MAX_PROBLEM_CHARS


async def test_where_no_draft_model_is_shipped_auto_drafts_nothing_and_says_why(
    make: Callable[..., ModelDraftActor], caplog: pytest.LogCaptureFixture
) -> None:
    broker = MemoryBroker()
    decoder, draft = Decoder(broker), make(broker, draft_model="auto")
    async with running(decoder, draft):
        await until(lambda: [beat.state for beat in decoder.registry.alive("draft", decoder.clock())] == ["ready"])
        seen = draft.presence("ready")
        assert seen.credits == 0 and seen.drafting.problem.startswith("no draft model is shipped for tiny (")
    (line,) = [record.getMessage() for record in caplog.records if "draft_model_unusable" in record.getMessage()]
    assert seen.drafting.problem in line


def reduced(model: Path, folder: Path, ids: np.ndarray) -> Path:
    """The same model with a head that writes the tokens `ids` alone."""
    shutil.copytree(model, folder)
    edit_config(folder, draft_vocab_size=len(ids), tie_word_embeddings=False)
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"][ids]
    tensors["d2t"] = ids.astype(np.int64) - np.arange(len(ids))
    save_file(tensors, folder / "model.safetensors")
    return folder


async def test_a_reduced_vocabulary_drafts_in_the_ids_of_the_target(
    make: Callable[..., ModelDraftActor], model: Path, tmp_path: Path
) -> None:
    ids = np.arange(3, 512, 3)
    broker = MemoryBroker()
    folder = reduced(model, tmp_path / "reduced", ids)
    decoder, draft = Decoder(broker), make(broker, draft_model=str(folder), dtype="auto", kv_cache_dtype="auto")
    async with running(decoder, draft):
        await until(lambda: draft.drafter is not None)
        decoder.update(draft, DraftRow("a", 0, [1, 2, 4]))
        await until(lambda: bool(decoder.proposals) and len(decoder.proposals[-1].rows[0].tokens) == 6)
        assert set(decoder.proposals[-1].rows[0].tokens) <= set(ids.tolist())
