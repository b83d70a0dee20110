"""A head in the stream of a GPU's steps: what it drafts is what its reference drafts, and texts are those without it.

The GPU's kernels are interpreted on this CPU. Where a scheduler drives the runner, the target is a table of what follows which
tokens (`test_device_lookup_step.Chain`), and hidden states are made up.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from common.engine.board import BOARD_SLOTS, HeadSlots
from common.engine.engine import Engine
from common.engine.gpu import head_contexts
from common.engine.gpu import runner as runners
from common.engine.gpu.runner import DeviceRunner
from common.engine.gpu.step_buffers import StepShape, layout
from common.engine.load.head import attach_head
from common.engine.outcomes import accept
from common.engine.plan import StepPlan, StepRow
from common.engine.sequence import Sequence
from common.models.blocks.border import Border
from common.models.head_folder import HeadFiles, open_head, own_head
from common.models.head_model import head_model
from common.models.head_weights import HeadTensors, load_head
from common.models.source import ModelFiles, resolve
from common.ops.sampling.board_layout import LINES
from common.protocol.messages import SamplingParams
from services.decode.device_head import CONTEXT_TOKENS, DeviceHeadDrafts
from services.decode.proposers import Proposers
from services.decode.speculation import DraftBook
from services.decode.speculation_policy import SpeculationPolicy
from tests.fixtures.head import edit_tensors, write_head
from tests.fixtures.mtp import write_mimo
from tests.models.drafting_world import DraftingWorld
from tests.models.driver import GREEDY
from tests.models.oracles import oracle_prompt
from tests.models.test_device_lookup_step import VOCAB, Chain, World, sequence_of
from tests.models.test_device_runner import device_runner
from tests.models.test_head import reference_drafts

pytestmark = pytest.mark.usefixtures("kernels")
slow_param = partial(pytest.param, marks=pytest.mark.slow)


class Noting:
    """In place of a runner's forward pass: `chain`, beside which it notes hidden states that depend on token and position."""

    def __init__(self, runner: DeviceRunner, chain: Chain, width: int) -> None:
        self.runner, self.chain = runner, chain
        dice = torch.Generator().manual_seed(4)
        self.by_token = torch.randn(VOCAB * 3, 3 * width, generator=dice)
        self.by_place = torch.randn(512, 3 * width, generator=dice)

    def states(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return self.by_token[tokens] + self.by_place[positions]

    def __call__(self, shape: StepShape, rows: Any = (), read: Any = None, *, notes: bool = False) -> torch.Tensor:
        fields = layout(self.runner._buffer, shape, len(self.runner.groups))
        sampled = self.runner._sampler.sampled
        tokens = torch.where(fields.feeds >= 0, sampled[fields.feeds.clamp_min(0)], fields.tokens)
        self.runner._noted = self.states(tokens, fields.positions).chunk(3, -1) if notes else ()
        return self.chain(shape, rows, read)


def with_head(files: ModelFiles, folder: Path, *, counts: bool = False) -> tuple[DeviceRunner, HeadTensors, Noting]:
    runner = device_runner(files)
    tensors = load_head(open_head(write_head(folder, files)), runner.decoder, files.name)
    runner.attach_head(head_model(tensors, dtype=torch.float32, device=torch.device("cpu")))
    noting = Noting(runner, Chain(runner, counts=counts), tensors.spec.hidden_size)
    runner._forward = noting  # type: ignore[method-assign]
    return runner, tensors, noting


def drafted(runner: DeviceRunner, context: int) -> list[int]:
    """The line that the device has posted for a context: what was sampled and holds, and what is drafted behind it."""
    words = runner._settling.board.drafted[context].tolist()
    return words[1 + LINES :][: words[1]]


@pytest.mark.parametrize(
    ("chunk", "normed", "layers"), [(100, False, 1), slow_param(7, False, 1), slow_param(100, True, 1), slow_param(7, False, 2)]
)
def test_drafts_of_a_model_are_those_of_the_reference(
    files: ModelFiles, tmp_path: Path, chunk: int, normed: bool, layers: int
) -> None:
    form = {"norm_before_residual": normed, "num_hidden_layers": layers}
    check_drafts(files, open_head(write_head(tmp_path / "head", files, **form)), chunk)


@pytest.mark.parametrize("chunk", [slow_param(100), 7])
def test_drafts_of_an_mtp_layer_are_those_of_the_reference(tmp_path: Path, chunk: int) -> None:
    files = resolve(str(write_mimo(tmp_path / "mimo")))
    head = own_head(files)
    assert head is not None
    check_drafts(files, head, chunk)


@pytest.mark.slow
def test_a_models_own_layer_drafts_and_texts_are_the_same(tmp_path: Path) -> None:
    """`auto` takes it on a GPU, and a step ahead it drafts what the model says; without it there is no head."""
    files = resolve(str(write_mimo(tmp_path / "mimo", useful=True)))

    def sequences() -> list[Sequence]:
        params = [SamplingParams(temperature=0.0, max_tokens=12), SamplingParams(temperature=0.7, seed=5, max_tokens=12)]
        return [sequence_of(index, one, 5 + 6 * index) for index, one in enumerate(params)]

    runner: Any = device_runner(files)
    engine = Engine(runner, None, on_gpu=True, files=files)  # type: ignore[arg-type]
    attach_head(engine, "off", max_sequences=2)
    assert runner._head is None and engine.head_slots is None
    plain = World(runner).run(sequences())
    attach_head(engine, "auto", max_sequences=2)
    assert runner._head is not None and engine.head == "MTP layer of mimo" and engine.head_slots is not None
    world = Drafting(runner)
    assert world.run(sequences()) == plain
    counters = world.proposers.by_source["head"]
    assert counters.num_accepted_tokens > 0.5 * counters.num_draft_tokens > 4


def test_auto_takes_no_shipped_head(files: ModelFiles) -> None:
    runner: Any = device_runner(files)
    engine = Engine(runner, None, on_gpu=True, files=files)  # type: ignore[arg-type]
    attach_head(engine, "auto", max_sequences=2)
    assert runner._head is None and not engine.head


def check_drafts(files: ModelFiles, head: HeadFiles, chunk: int) -> None:
    """Behind a prompt in one part and in several; behind verified tokens of which some hold, beside a row without drafts."""
    runner = device_runner(files)
    tensors = load_head(head, runner.decoder, files.name)
    runner.attach_head(head_model(tensors, dtype=torch.float32, device=torch.device("cpu")))
    prompt = oracle_prompt(length=21)
    assert runner._head is not None
    states, noted, drafts = list[torch.Tensor](), list[torch.Tensor](), runner._head.draft
    vars(runner._head).update(
        draft=lambda planned, step: (noted.append(torch.cat(list(step.noted), -1)), drafts(planned, step))
    )
    samples: Any = None

    def step(*rows: StepRow) -> Any:
        results = runner.execute(StepPlan(0, list(rows))).rows
        begin = sum(len(other.tokens) for other in rows[:-1])
        states.append(noted[-1][begin : begin + len(rows[-1].tokens)])
        return results[-1]

    for start in range(0, len(prompt), chunk):
        part = prompt[start : start + chunk]
        last = start + len(part) == len(prompt)
        row = StepRow(part, start, [0, 1, 2], int(last), GREEDY, len(prompt), serial=7, drafts=4, board=BOARD_SLOTS)
        row.following = 0 if last else prompt[start + chunk]
        samples = step(row)
    tokens = [*prompt[1:], *samples.tokens]
    expected = reference_drafts(tensors, torch.cat(states), tokens, 4)
    assert drafted(runner, 0) == [*samples.tokens, *expected]

    for guess in ([250, 251], expected[:2]):
        row = StepRow(
            [tokens[-1], *guess], len(tokens), [0, 1, 2], 3, GREEDY, len(prompt), serial=7, drafts=3, board=BOARD_SLOTS
        )
        samples = step(StepRow(prompt[:5], 0, [20], 1, GREEDY, 5, serial=8), row)
        accepted = accept(guess, samples.tokens)
        states[-1] = states[-1][: accepted + 1]
        came = samples.tokens[: accepted + 1]
        tokens += came
        expected = reference_drafts(tensors, torch.cat(states), tokens, 3)
        assert drafted(runner, 0) == [*came, *expected]


@pytest.mark.slow
def test_a_context_that_begins_in_the_middle_or_runs_over_drafts_on(
    files: ModelFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cached prefix has no states; a slot has another sequence later, and a sequence may come back behind a gap."""
    runner, tensors, noting = with_head(files, tmp_path / "head")
    text = [random.Random(2).randrange(3, VOCAB) for _ in range(60)]

    def step(serial: int, start: int, end: int, drafts: int) -> list[int]:
        row = StepRow(text[start:end], start, [0, 1, 2, 3], 1, GREEDY, 60, serial=serial, drafts=drafts, board=BOARD_SLOTS)
        (samples,) = runner.execute(StepPlan(0, [row])).rows
        return samples.tokens

    def expected(first: int, end: int, came: list[int]) -> list[int]:
        states = noting.states(torch.tensor(text[first:end]), torch.arange(first, end))
        return [*came, *reference_drafts(tensors, states, [*text[first + 1 : end], *came], 2)]

    step(-1, 0, 20, 0)
    came = step(1, 20, 30, 2)
    assert drafted(runner, 0) == expected(20, 30, came)
    came = step(1, 30, 33, 2)
    assert drafted(runner, 0) == expected(20, 33, came)
    step(1, 33, 35, 0)
    came = step(1, 35, 36, 2)
    assert drafted(runner, 0) == expected(35, 36, came), "nothing was noted of two positions"
    step(2, 0, 40, 2)
    came = step(2, 38, 41, 2)
    assert drafted(runner, 0) == expected(0, 41, came), "a step that failed is run again, from further back"
    came = step(1, 40, 44, 2)
    assert drafted(runner, 0) == expected(40, 44, came), "the slot had another sequence"


@dataclass
class Drafting(DraftingWorld):
    """Drafts are verified as a decode worker has them verified, whether that pays or not."""

    def __post_init__(self) -> None:
        super().__post_init__()
        policy = SpeculationPolicy(max_tokens=5, max_step_tokens=64, always=True)
        self.proposers = Proposers(DraftBook(policy, vocab_size=VOCAB), device_head=DeviceHeadDrafts(policy, HeadSlots()))
        scheduler, proposers = self.scheduler, self.proposers
        scheduler.begin_step, scheduler.room_for, scheduler.wanted = proposers.begin_step, proposers.room_for, proposers.wanted
        scheduler.recompute = proposers.recompute


def counting(files: ModelFiles, folder: Path, *, wrong: float = 0.0) -> DeviceRunner:
    """A target that counts, and a head that does, but for a share of the tokens. Its attention and linears are left out."""
    runner, tensors, _ = with_head(files, folder, counts=True)
    assert runner._head is not None
    layer, dice, hidden = runner._head._model, random.Random(6), tensors.spec.hidden_size

    def forward(tokens: torch.Tensor, features: torch.Tensor, attention: Any) -> Border:
        return Border(tokens.float()[:, None].expand(-1, hidden).clone())

    def logits(x: torch.Tensor) -> torch.Tensor:
        following = [int(token) + (1 if dice.random() >= wrong else 3) for token in x[:, 0]]
        return torch.nn.functional.one_hot(torch.tensor(following) % runner.vocab_size, runner.vocab_size).float()

    vars(layer).update(
        features=lambda states: states[:, :hidden], forward=forward, logits=logits, read=lambda one: one.residual
    )
    return runner


def test_a_head_that_is_right_takes_a_fraction_of_the_steps(files: ModelFiles, tmp_path: Path) -> None:
    """With a step in flight all the time: what is drafted behind it is verified by the next, and nobody waits for the host."""
    world = Drafting(counting(files, tmp_path / "head"))
    (found,) = world.run([sequence_of(1, SamplingParams(temperature=0.0, max_tokens=60), symbols=30)])
    assert found == list(range(found[0], found[0] + 60))
    assert len(world.progress) <= 13
    counters = world.proposers.by_source["head"]
    assert counters.num_accepted_tokens == counters.num_draft_tokens > 45
    assert world.proposers.device_head is not None and not world.proposers.device_head.num_invalid


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(temperature=0.7, seed=5, max_tokens=40),
        slow_param(SamplingParams(temperature=0.9, seed=6, max_tokens=40, top_k=5)),
        slow_param(SamplingParams(temperature=1.0, seed=7, max_tokens=40, top_p=0.3)),
        slow_param(SamplingParams(temperature=1.0, seed=8, max_tokens=40, min_p=0.9, top_p=0.9)),
    ],
)
def test_drafts_are_drawn_as_the_target_draws(files: ModelFiles, tmp_path: Path, sampling: SamplingParams) -> None:
    """The head's logits are the target's: with the same noise and filters it draws the same tokens, other rows beside it."""
    world = Drafting(counting(files, tmp_path / "head"))
    plain = SamplingParams(temperature=0.0, max_tokens=30)
    found = world.run([sequence_of(1, sampling, symbols=30), sequence_of(2, plain, symbols=30)])
    counters = world.proposers.by_source["head"]
    assert counters.num_accepted_tokens == counters.num_draft_tokens > 40
    assert len(found[0]) == 40


@pytest.mark.parametrize("wrong", [0.3, slow_param(1.0)])
def test_whatever_it_drafts_texts_are_the_same(files: ModelFiles, tmp_path: Path, wrong: float) -> None:
    """Rows that come at different times, at temperature, with filters, and with penalties, for which nothing is drafted."""
    long = SamplingParams(temperature=0.0, max_tokens=30)
    params = [
        long,
        SamplingParams(temperature=0.6, seed=5, max_tokens=30),
        SamplingParams(temperature=1.1, seed=6, max_tokens=9, top_k=5),
        SamplingParams(temperature=0.0, max_tokens=12, presence_penalty=0.5),
        SamplingParams(temperature=0.0, max_tokens=1),
    ]

    def sequences() -> list[Sequence]:
        return [sequence_of(index, one, 3 + 4 * index, symbols=60) for index, one in enumerate(params)]

    world = Drafting(counting(files, tmp_path / "head", wrong=wrong))
    found = world.run(sequences(), lambda index: 3 * index)
    plain_runner = counting(files, tmp_path / "other")
    assert found == World(plain_runner).run(sequences())
    counters = world.proposers.by_source["head"]
    if wrong < 1:
        assert counters.num_accepted_tokens > 10
    else:
        assert 0 < counters.num_accepted_tokens < counters.num_draft_tokens / 4, "at temperature a draw may be anything"


@pytest.mark.slow
def test_preempted_texts_and_steps_that_fail(files: ModelFiles, tmp_path: Path) -> None:
    def sequences() -> list[Sequence]:
        return [sequence_of(index, SamplingParams(temperature=0.0, max_tokens=40), 12, symbols=60) for index in range(4)]

    world = Drafting(counting(files, tmp_path / "head", wrong=0.2), num_blocks=10, watermark=0)
    running = sequences()
    world.run_with_failures(running)
    assert world.scheduler.num_preemptions > 0
    assert [one.output for one in running] == [list(range(one.tokens[11] + 1, one.tokens[11] + 41)) for one in running]
    assert world.proposers.by_source["head"].num_accepted_tokens > 20


def test_the_head_knows_the_end_of_a_prompt_that_was_computed_elsewhere(files: ModelFiles, tmp_path: Path) -> None:
    """The KV is copied here, and hidden states don't travel: the last tokens are computed once more."""
    runner = counting(files, tmp_path / "head")
    world = Drafting(runner)
    one = sequence_of(1, SamplingParams(temperature=0.0, max_tokens=30), 100, symbols=60)
    world.scheduler.admit(one)
    world.scheduler.begin_copy(one)
    runner.execute(StepPlan(0, [StepRow(one.tokens[:99], 0, one.blocks, 0, one.sampling, 100)]))
    world.proposers.open(one)
    world.scheduler.end_copy(one, 99)
    assert world.step()
    assert runner._head is not None
    context = runner._head._contexts._contexts[one.board - BOARD_SLOTS]
    assert (context.serial, context.base) == (one.serial, 100 - CONTEXT_TOKENS)
    while world.step():
        pass
    assert one.output == list(range(one.tokens[99] + 1, one.tokens[99] + 31))
    counters = world.proposers.by_source["head"]
    assert counters.num_accepted_tokens == counters.num_draft_tokens > 20


def test_more_sequences_than_slots_take_what_there_is(
    files: ModelFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step with more rows than a head drafts for drafts nothing, and what was known of the texts begins anew."""
    monkeypatch.setattr(head_contexts, "HEAD_SLOTS", 2)
    world = Drafting(counting(files, tmp_path / "head"))
    params = [SamplingParams(temperature=0.0, max_tokens=tokens) for tokens in (50, 50, 12)]
    sequences = [sequence_of(index, one, symbols=30) for index, one in enumerate(params)]
    found = world.run(sequences, lambda index: 6 * index)
    assert found == [
        list(range(one.tokens[4] + 1, one.tokens[4] + 1 + len(answer))) for one, answer in zip(sequences, found, strict=True)
    ]
    assert world.proposers.by_source["head"].num_accepted_tokens > 40


def test_a_worker_serves_on_without_a_head_that_does_not_fit(
    files: ModelFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its folder is damaged, or the GPU has no memory left for it."""
    runner: Any = device_runner(files)
    engine = Engine(runner, None, on_gpu=True, files=files)  # type: ignore[arg-type]
    folder = write_head(tmp_path / "head", files)
    edit_tensors(folder, d2t=None)
    attach_head(engine, str(folder), max_sequences=2)
    assert runner._head is None and not engine.head and engine.head_slots is None
    write_head(folder, files)

    def full(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError

    with monkeypatch.context() as patched:
        patched.setattr(runners, "DeviceHead", full)
        attach_head(engine, str(folder), max_sequences=2)
    assert runner._head is None and not engine.head and engine.head_slots is None
    attach_head(engine, str(folder), max_sequences=2)
    assert runner._head is not None and engine.head == "head" and engine.head_slots is not None


def test_logits_that_are_not_finite_are_no_proposal(files: ModelFiles, tmp_path: Path) -> None:
    runner = counting(files, tmp_path / "head")
    assert runner._head is not None
    vars(runner._head._model).update(logits=lambda x: torch.full((len(x), runner.vocab_size), torch.nan))
    world = Drafting(runner)
    (found,) = world.run([sequence_of(1, SamplingParams(temperature=0.0, max_tokens=20), symbols=30)])
    assert found == list(range(found[0], found[0] + 20))
    assert not world.proposers.by_source["head"].num_draft_tokens
    assert world.proposers.device_head is not None and world.proposers.device_head.num_invalid > 5
