"""A head beside an engine: what it drafts is what its reference drafts, with a cache, in any company, and after rejections."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from common.engine.cpu import head as head_module
from common.engine.cpu.head import Head
from common.engine.outcomes import accept
from common.engine.plan import Drafted, RowSamples, StepPlan, StepRow
from common.models.head_folder import open_head, own_head
from common.models.head_model import head_model
from common.models.head_weights import HeadTensors, lm_head_rows, load_head
from common.models.source import ModelFiles, resolve
from common.ops.cpu_int8.head_reference import HeadWeightsReference, head_reference
from common.protocol.messages import SamplingParams
from tests.fixtures.head import edit_tensors, write_head
from tests.fixtures.tiny_model import write_tiny_model
from tests.models.driver import GREEDY, open_runner
from tests.models.oracles import oracle_prompt

SEEDED = SamplingParams(temperature=0.8, seed=5, top_p=0.9)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    return resolve(str(write_tiny_model(tmp_path_factory.mktemp("model") / "tiny")))


class Site:
    """A runner with a head of random weights, and one sequence. folder: None: the head is the model's MTP layer. changes: of a
    head's config.json. shuffles: a head of all tokens lists them in another order."""

    def __init__(
        self,
        files: ModelFiles,
        folder: Path | None,
        *,
        context_tokens: int = 1024,
        normed: bool = False,
        layers: int = 1,
        changes: dict[str, Any] | None = None,
        shuffles: bool = False,
        **settings: Any,
    ) -> None:
        self.runner: Any = open_runner(files, **settings)
        form = {"norm_before_residual": normed, "num_hidden_layers": layers, **(changes or {})}
        head = own_head(files) if folder is None else open_head(write_head(folder, files, **form))
        assert head is not None
        if folder is not None and shuffles:
            ids = torch.randperm(head.spec.draft_vocab_size, generator=torch.Generator().manual_seed(1))
            edit_tensors(folder, d2t=ids - torch.arange(len(ids)))
        self.tensors = load_head(head, self.runner.decoder, files.name)
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

    def read(self, prompt: list[int], chunk: int, blocks: list[int]) -> tuple[Any, torch.Tensor]:
        """Compute a prompt in parts; return the samples behind its last one, and the states of all of it."""
        states: list[torch.Tensor] = []
        samples: Any = None
        for start in range(0, len(prompt), chunk):
            part = prompt[start : start + chunk]
            last = start + len(part) == len(prompt)
            row = StepRow(part, start, blocks, int(last), GREEDY, len(prompt), serial=7, drafts=4)
            (samples,) = self.step(row)
            states += self.states
        return samples, torch.cat(states)


NEARLY = 0.15
"""Of a logit: 8-bit weights of a random head."""


def is_right(tensors: HeadTensors, states: torch.Tensor, tokens: list[int], drafted: list[int], first: int = 0) -> bool:
    """Whether the reference would draft these, or others that it finds as likely. See `reference_drafts`."""
    ids = tensors.ids.tolist()
    best = reference_logits(tensors, states, tokens, drafted, first)
    return all(logits.max() - logits[ids.index(token)] < NEARLY for logits, token in zip(best, drafted, strict=True))


def reference_drafts(tensors: HeadTensors, states: torch.Tensor, tokens: list[int], count: int, first: int = 0) -> list[int]:
    """Greedy drafts behind `tokens`, at positions first + 1 …; `states` are those of the positions before each."""
    drafted: list[int] = []
    for _ in range(count):
        logits = reference_logits(tensors, states, tokens, [*drafted, 0], first)[-1]
        drafted.append(int(tensors.ids[logits.argmax()]))
    return drafted


def reference_logits(
    tensors: HeadTensors, states: torch.Tensor, tokens: list[int], drafted: list[int], first: int
) -> list[torch.Tensor]:
    """The logits that each of `drafted` is drawn from, behind `tokens` and those drafted before it."""
    given = replace(tensors, lm_head=lm_head_rows(tensors))
    weights = HeadWeightsReference(*(getattr(given, name) for name in HeadWeightsReference._fields))
    spec, features, found = tensors.spec, torch.empty(0, tensors.spec.hidden_size), list[torch.Tensor]()
    for count in range(len(drafted)):
        embedded = tensors.embedding[torch.tensor([*tokens, *drafted[:count]])].float()
        x, logits = head_reference(
            weights,
            states,
            features,
            embedded,
            head_dim=spec.head_dim,
            num_kv_heads=spec.num_kv_heads,
            rope_theta=spec.rope.theta,
            eps=spec.rms_eps,
            first=first,
            norm_before_residual=spec.norm_before_residual,
            is_mtp=spec.kind == "mtp",
        )
        features = torch.cat((features, x[-1:]))
        found.append(logits[-1])
    return found


@pytest.mark.parametrize("num_first", [16, 64])
def test_where_no_first_token_stands_out_the_others_are_read(
    tiny: ModelFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_first: int
) -> None:
    monkeypatch.setattr(head_module, "FIRST_IDS", num_first)
    monkeypatch.setattr(head_module, "_STANDS_OUT", 1.1)
    site = Site(tiny, tmp_path / "head")
    prompt = oracle_prompt(length=37)
    samples, states = site.read(prompt, 100, list(range(10)))
    tokens = [*prompt[1:], samples.tokens[0]]
    assert samples.drafted.tokens == reference_drafts(site.tensors, states, tokens, 4)
    assert any(site.tensors.ids.tolist().index(token) >= num_first for token in samples.drafted.tokens)


def test_a_token_that_stands_out_among_the_first_is_drafted_without_the_others(
    tiny: ModelFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head_module, "FIRST_IDS", 16)
    monkeypatch.setattr(head_module, "_STANDS_OUT", 0.0)
    site = Site(tiny, tmp_path / "head")
    prompt = oracle_prompt(length=37)
    samples, states = site.read(prompt, 100, list(range(10)))
    logits = reference_logits(site.tensors, states, [*prompt[1:], samples.tokens[0]], samples.drafted.tokens, 0)
    assert samples.drafted.tokens == [int(site.tensors.ids[one[:16].argmax()]) for one in logits]


@pytest.mark.parametrize("dtype", ["float32", "auto"])
@pytest.mark.parametrize(
    ("chunk", "normed", "layers"),
    [(100, False, 1), (7, False, 1), (1, False, 1), (7, True, 1), (100, False, 2), (7, True, 3), (1, False, 2)],
)
def test_drafts_are_those_of_the_reference(
    tiny: ModelFiles, tmp_path: Path, dtype: str, chunk: int, normed: bool, layers: int
) -> None:
    site = Site(tiny, tmp_path / "head", dtype=dtype, normed=normed, layers=layers)
    prompt, blocks = oracle_prompt(length=37), list(range(10))
    samples, states = site.read(prompt, chunk, blocks)
    expected = reference_drafts(site.tensors, states, [*prompt[1:], samples.tokens[0]], 4)
    assert samples.drafted.tokens == expected
    assert all(0 < chance <= 1 for chance in samples.drafted.chances)


def test_the_embedding_may_be_bfloat16(tiny: ModelFiles, tmp_path: Path) -> None:
    site = Site(tiny, tmp_path / "head", dtype="bfloat16")
    prompt = oracle_prompt(length=37)
    samples, states = site.read(prompt, 7, list(range(10)))
    assert site.tensors.embedding.dtype == torch.bfloat16
    assert samples.drafted.tokens == reference_drafts(site.tensors, states, [*prompt[1:], samples.tokens[0]], 4)


def company(*, threads: int, tensors: HeadTensors) -> list[Drafted | None]:
    """What is drafted for rows of every kind at once."""
    head = Head(tensors, max_sequences=16, threads=threads)
    generator = torch.Generator().manual_seed(2)
    rows, results = list[StepRow](), list[RowSamples]()
    for number, drafts in enumerate((4, 0, 1, 7, 3, 5)):
        prompt = oracle_prompt(seed=number, length=5 + number)
        sampling = SEEDED if number % 2 else GREEDY
        row = StepRow(prompt, 0, [0], int(number != 4), sampling, len(prompt), serial=number, drafts=drafts)
        row.least_chance = 0.02 if number == 3 else 0.0
        rows.append(row)
        results.append(RowSamples([7]))
    counts = [len(row.tokens) for row in rows]
    states = torch.randn(sum(counts), tensors.spec.hidden_size * len(tensors.spec.layers), generator=generator)
    firsts = [sum(counts[:index]) for index in range(len(counts))]
    passes = head.draft(rows, results, states.numpy(), firsts)
    most = max(len(result.drafted.tokens) for result in results if result.drafted is not None)
    num_pairs = sum(counts) - counts[1] - 1  # none wanted for number 1; of number 4, the token behind the last is not known
    assert passes[0].num_tokens == num_pairs and len(passes) == most
    assert all(one.seconds > 0 for one in passes)
    return [result.drafted for result in results]


@pytest.mark.parametrize("least", [0.3, 1.1], ids=["some read all ids", "all read all ids"])
def test_rows_of_every_kind_are_drafted_for_together_by_any_number_of_threads(
    tiny: ModelFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, least: float
) -> None:
    monkeypatch.setattr(head_module, "FIRST_IDS", 32)
    monkeypatch.setattr(head_module, "_STANDS_OUT", least)
    tensors = Site(tiny, tmp_path / "head", layers=2).tensors
    expected = company(threads=1, tensors=tensors)
    assert [None if drafted is None else len(drafted.tokens) for drafted in expected][:3] == [4, None, 1]
    assert company(threads=2, tensors=tensors) == company(threads=5, tensors=tensors) == expected


def test_a_thread_that_comes_late_finds_nothing_to_do(
    tiny: ModelFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = Site(tiny, tmp_path / "head").tensors
    expected = company(threads=2, tensors=tensors)
    late: list[Any] = []

    def alone(threads: int, work: Any, *arguments: Any) -> None:
        work(*arguments)
        drafted = arguments[-1]
        kept = [array.copy() for array in drafted]
        work(*arguments)
        late.append(all(np.array_equal(before, after) for before, after in zip(kept, drafted, strict=True)))

    monkeypatch.setattr(head_module, "together", alone)
    assert company(threads=2, tensors=tensors) == expected
    assert late == [True]


@pytest.mark.parametrize("dtype", ["float32", "auto"])
def test_a_head_of_all_tokens_may_list_them_in_any_order(tiny: ModelFiles, tmp_path: Path, dtype: str) -> None:
    drafts: list[list[int]] = []
    prompt = oracle_prompt(length=37)
    for name in ("in order", "shuffled"):
        site = Site(tiny, tmp_path / name, dtype=dtype, changes={"draft_vocab_size": None}, shuffles=name == "shuffled")
        drafts.append(site.read(prompt, 100, list(range(10)))[0].drafted.tokens)
        model = head_model(site.tensors, dtype=torch.float32, device=torch.device("cpu"))
        assert (model.ids is None) == (name == "in order")
    assert drafts[0] == drafts[1]


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


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "sampled"])
@pytest.mark.parametrize(("dtype", "layers"), [("float32", 1), ("auto", 1), ("auto", 2)])
def test_verified_and_rejected_drafts_leave_the_head_where_it_would_be_without(
    tiny: ModelFiles, tmp_path: Path, dtype: str, layers: int, sampling: SamplingParams
) -> None:
    """Right, wrong and half-right proposals, verified beside another row: tokens, and what is drafted next, do not change."""
    site = Site(tiny, tmp_path / "head", dtype=dtype, layers=layers)
    prompt, blocks = oracle_prompt(length=21), list(range(10))

    def go(serial: int, proposals: list[int]) -> tuple[list[int], dict[int, list[int]]]:
        """proposals[i]: right tokens among the four of a step, or -1 for none; the answer to come is known from `plain`."""
        tokens, drafted, start = list(prompt), dict[int, list[int]](), 0
        for right in proposals:
            made = len(tokens) - len(prompt)
            guess = [] if right < 0 else [*plain[made : made + right], *[250] * 4][:4]
            row = StepRow(
                [*tokens[start:], *guess], start, blocks, 1 + len(guess), sampling, len(prompt), serial=serial, drafts=3
            )
            other = StepRow(prompt[:5], 0, list(range(20, 23)), 1, GREEDY, 5, serial=1000, drafts=2)
            samples = site.step(row, other)[0] if right % 2 else site.step(other, row)[1]
            accepted = accept(guess, samples.tokens)
            start = len(tokens) + accepted
            tokens += samples.tokens[: accepted + 1]
            drafted[len(tokens)] = samples.drafted.tokens
        return tokens[len(prompt) :], drafted

    plain: list[int] = []
    plain, expected = go(1, [-1] * 12)
    found, drafted = go(2, [-1, 0, 2, 4, 1])
    assert found == plain[: len(found)] and len(found) > 8
    assert all(drafted[length] == expected[length] for length in drafted.keys() & expected.keys())


def test_a_context_that_begins_in_the_middle_or_runs_over_drafts_on(tiny: ModelFiles, tmp_path: Path) -> None:
    """A cached prefix has no states; a text longer than the head's cache gives up its beginning."""
    site = Site(tiny, tmp_path / "head", context_tokens=32)
    prompt, blocks = oracle_prompt(length=200), list(range(20))
    site.step(StepRow(prompt[:100], 0, blocks, 0, GREEDY, 200))
    states: list[torch.Tensor] = []
    (samples,) = site.step(StepRow(prompt[100:110], 100, blocks, 1, GREEDY, 110, serial=1, drafts=2))
    states, text = list(site.states), [*prompt[:110], *samples.tokens]
    assert is_right(site.tensors, states[0], text[101:], samples.drafted.tokens, first=100)
    context = site.runner.head._contexts.of(1)
    while len(text) < 200:
        (samples,) = site.step(StepRow(text[-1:], len(text) - 1, blocks, 1, GREEDY, 110, serial=1, drafts=4))
        text += samples.tokens
        states += site.states
        assert len(samples.drafted.tokens) == 4
        seen = torch.cat(states)[context.first - 100 :]
        assert is_right(site.tensors, seen, text[context.first + 1 :], samples.drafted.tokens, context.first)
    assert context.first > 160


def test_it_stops_where_it_is_not_sure_and_for_whom_nothing_is_asked(tiny: ModelFiles, tmp_path: Path) -> None:
    site = Site(tiny, tmp_path / "head")
    prompt, blocks = oracle_prompt(length=9), list(range(4))
    rows = [
        StepRow(prompt, 0, blocks, 1, GREEDY, 9, serial=1, drafts=4, least_chance=1.0),
        StepRow(prompt, 0, blocks, 1, GREEDY, 9, serial=2),
        StepRow(prompt, 0, blocks, 1, GREEDY, 9),
        StepRow(prompt, 0, blocks, 0, GREEDY, 9, num_read=2),
        StepRow(prompt, 0, blocks, 1, SEEDED, 9, serial=3, drafts=4),
    ]
    unsure, noted, unknown, read, all_four = site.step(*rows)
    assert len(unsure.drafted.tokens) == 1 and len(all_four.drafted.tokens) == 4
    assert noted.drafted is unknown.drafted is read.drafted is None
    first = site.step(StepRow([unsure.tokens[0]], 9, blocks, 1, GREEDY, 9, serial=2, drafts=4))[0]
    second = site.step(StepRow([unsure.tokens[0]], 9, blocks, 1, GREEDY, 9, serial=1, drafts=4))[0]
    assert first.drafted.tokens == second.drafted.tokens, "what was noted is computed when it is wanted"
