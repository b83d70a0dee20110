"""The GPU's runner equals transformers too: the same kernels, interpreted on this CPU. Graphs and streams need the card."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from common.cache.block_table import BlockTable
from common.cache.retention import Retention
from common.cache.spec import LayerCache, attention_layout
from common.engine.gpu import prompt_plans
from common.engine.gpu.block_tables import BlockTables
from common.engine.gpu.graphs import ShapeTable, borrowed, exact_shape
from common.engine.gpu.layer_cost import LayerCost, layer_cost
from common.engine.gpu.runner import DeviceRunner
from common.engine.gpu.sampling import DeviceSampler
from common.engine.gpu.step_buffers import StepPacker, StepShape, device_rows, layout
from common.engine.history import History
from common.engine.layer_group import LayerGroup
from common.engine.outcomes import Outcome
from common.engine.plan import StepPlan, StepRow
from common.models.config import load_config
from common.models.registry import load_decoder
from common.models.source import ModelFiles
from common.models.weights.base import LinearFormat
from common.ops.attention.settings import DEFAULT_SETTINGS, AttentionSettings
from common.ops.kv.hadamard_reference import hadamard
from common.protocol.errors import InvalidParameter
from common.protocol.messages import SamplingParams
from tests.fixtures.slow import some_slow
from tests.models.driver import GREEDY, Request, Whims, open_runner, run
from tests.models.oracles import FAMILIES as EVERY
from tests.models.oracles import build, greedy_choices, oracle_prompt, save
from tests.models.test_weights_groups import Checkpoint

pytestmark = pytest.mark.usefixtures("kernels")


def device_runner(
    files: ModelFiles,
    *,
    dtype: torch.dtype = torch.float32,
    kv: torch.dtype | None = None,
    weights: LinearFormat = "none",
    attention: AttentionSettings = DEFAULT_SETTINGS,
) -> DeviceRunner:
    model = load_config(files)
    decoder = load_decoder(files, model, dtype=dtype, device=torch.device("cpu"), weights=weights)
    decoder.k_center = torch.randn(model.num_layers, model.num_kv_heads, model.head_dim)
    caches = [
        LayerCache(
            num_kv_heads=layer.mixer.num_kv_heads,
            head_dim=layer.mixer.head_dim,
            dtype_bytes=4,
            retention=Retention(layer.mixer.window, layer.mixer.chunk),
        )
        for layer in model.layers
    ]
    groups: list[LayerGroup] = []
    for group in attention_layout(caches, 16).groups:
        layers = [member.layer for member in group.members]
        shape = (64, len(layers), 2, 16, model.num_kv_heads, model.head_dim)
        groups.append(LayerGroup(torch.full(shape, torch.nan, dtype=torch.float32).to(kv or dtype), layers, group.retention))
    return DeviceRunner(decoder, groups, fingerprint="test", max_rows=16, token_budget=512, attention=attention)


@pytest.mark.parametrize(
    "name", some_slow(["llama-untied-biases", "llama-wide-heads", "qwen3-tied-groups-of-three"], quick=["llama-wide-heads"])
)
def test_a_ragged_batch_in_chunks_gives_the_text_of_transformers(name: str, tmp_path: Path) -> None:
    model = build(name)
    runner = device_runner(save(model, tmp_path))
    requests = [
        Request(oracle_prompt(seed=i, length=length), 2 + i % 2, chunk=(1 << 30, 12)[i % 2], begins=i % 2)
        for i, length in enumerate([1, 17, 15])
    ]
    for request, output in zip(requests, run(runner, requests), strict=True):
        assert output == greedy_choices(model, request.prompt, output), len(request.prompt)


VARIANTS = ("qwen3-moe-weights-as-they-are", "llama4-norms-of-q-and-k")
FAMILIES = [*(name for name in EVERY if name not in ("llama", "qwen3", "qwen2-windows-in-last-layers")), *VARIANTS]
"""Llama and Qwen3 have tests of their own; windows in some layers alone are those of Gemma 2."""


def test_windows_sinks_and_experts_give_the_text_of_transformers(tmp_path: Path) -> None:
    model = build("gpt-oss")
    (output,) = run(device_runner(save(model, tmp_path)), [request := Request(oracle_prompt(length=30), 2, chunk=24)])
    assert output == greedy_choices(model, request.prompt, output)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_gives_the_text_of_transformers(name: str, tmp_path: Path) -> None:
    """Prompts longer than windows and chunks, alone and together, in chunks; windows' blocks are given back meanwhile."""
    model = build(name)
    runner = device_runner(save(model, tmp_path))
    requests = [
        Request(oracle_prompt(seed=i, length=length), 3 - i, chunk=(1 << 30, 24)[i % 2], begins=i)
        for i, length in enumerate([61, 44])
    ]
    for request, output in zip(requests, run(runner, requests), strict=True):
        assert output == greedy_choices(model, request.prompt, output), len(request.prompt)


SAMPLED = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.9, seed=3),
    SamplingParams(temperature=1.2, seed=4, top_k=7),
    SamplingParams(temperature=0.8, seed=5, top_p=0.7, min_p=0.01),
    SamplingParams(temperature=0.7, seed=6, presence_penalty=0.5, frequency_penalty=0.2, repetition_penalty=1.3),
    SamplingParams(temperature=0.0, logit_bias={3: 8.0}, min_tokens=3, stop_token_ids=[3, 118]),
]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["awq", "gptq-act-order", "nvfp4"])
def test_weights_in_groups_give_the_text_of_the_dequantised_model(name: str, tmp_path: Path) -> None:
    checkpoint = Checkpoint(tmp_path, name)
    prompts = [oracle_prompt(seed=i, length=length) for i, length in enumerate([1, 17])]

    def tokens(runner: DeviceRunner) -> list[list[int]]:
        return run(runner, [Request(prompt, 3, chunk=12) for prompt in prompts])

    quantised = device_runner(checkpoint.files, weights="groups")
    assert {weight.format for role, weight in quantised.decoder.linears if role != "head"} == {"grouped"}
    assert tokens(quantised) == tokens(device_runner(checkpoint.meant_files))


@pytest.mark.slow
def test_every_way_of_sampling_draws_what_the_cpu_draws(llama: tuple[Any, ModelFiles]) -> None:
    def requests() -> list[Request]:
        return [Request(oracle_prompt(seed=i, length=9 + i), 4, params) for i, params in enumerate(SAMPLED)]

    expected = run(open_runner(llama[1]), requests())
    assert run(device_runner(llama[1]), requests()) == expected


def test_logprobs_are_those_of_the_cpu(llama: tuple[Any, ModelFiles]) -> None:
    def samples(runner: Any) -> Any:
        rows = [
            StepRow(oracle_prompt(length=9), 0, [1], 1, SamplingParams(temperature=0.0, logprobs=count), 9)
            for count in (3, -1, 0)
        ]
        for block, row in enumerate(rows):
            row.blocks = [block]
        return [row.logprobs for row in runner.execute(StepPlan(0, rows)).rows]

    expected, found = samples(open_runner(llama[1])), samples(device_runner(llama[1]))
    assert found[1] is None
    for one, other in ((expected[0][0], found[0][0]), (expected[2][0], found[2][0])):
        assert other.top_tokens == one.top_tokens
        assert other.logprob == pytest.approx(one.logprob, abs=1e-4)
        assert other.top_logprobs == pytest.approx(one.top_logprobs, abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("kept", [False, True])
def test_rows_are_fed_on_the_device_while_nobody_has_seen_their_tokens(llama: tuple[Any, ModelFiles], kept: bool) -> None:
    """Four steps of three rows, each submitted before the result of the one before it is taken. kept: counts for penalties."""
    prompts = [oracle_prompt(seed=i, length=5 + 7 * i) for i in range(3)]
    params = [SAMPLED[0], SAMPLED[2], SAMPLED[4]]
    expected = run(open_runner(llama[1]), [Request(p, 4, s) for p, s in zip(prompts, params, strict=True)])
    runner = device_runner(llama[1])
    blocks = [[4 * i, 4 * i + 1, 4 * i + 2] for i in range(3)]
    outputs: list[list[int]] = [[] for _ in prompts]
    pending: deque[Any] = deque()
    for step in range(4):
        rows = []
        for index, prompt in enumerate(prompts):
            known = prompt + outputs[index]
            fed = [] if step == 0 else [-1]
            tokens = prompt if step == 0 else fed
            start = 0 if step == 0 else len(prompt) + step - 1
            seen = known[: len(prompt) + max(0, step - 1)]
            history = History(index, seen, len(seen), fed) if kept else [*seen, *fed]
            rows.append(
                StepRow(tokens, start, blocks[index], 1, params[index], len(prompt), history, feed=index if step else -1)
            )
        pending.append(runner.submit(StepPlan(step, rows)))
        if len(pending) == 2 or step == 3:
            while len(pending) > (step < 3):
                for output, row in zip(outputs, pending.popleft().result().rows, strict=True):
                    output += row.tokens
    assert outputs == expected


@pytest.mark.slow
def test_constrained_rows_draw_what_the_cpu_draws_before_anyone_has_seen_their_tokens(llama: tuple[Any, ModelFiles]) -> None:
    """Beside free rows; each step is submitted before the result of the one before it is taken."""
    prompts = [oracle_prompt(seed=i, length=6 + i) for i in range(4)]
    params = [GREEDY, SAMPLED[0], SAMPLED[4], GREEDY]
    constraints = [Whims(), Whims(), Whims(), None]
    cases = list(zip(prompts, params, constraints, strict=True))
    expected = run(open_runner(llama[1]), [Request(p, 4, s, constraint=c) for p, s, c in cases])
    free = run(open_runner(llama[1]), [Request(p, 4, s) for p, s, _ in cases])
    assert [one == other for one, other in zip(expected, free, strict=True)] == [False, False, False, True]
    runner = device_runner(llama[1])
    outputs: list[list[int]] = [[] for _ in prompts]
    before: Any = None
    for step in range(4):
        rows = []
        for index, (prompt, sampling, constraint) in enumerate(cases):
            fed = [-1] if step else []
            known = [*outputs[index], *fed]
            row = StepRow(
                fed or prompt, len(prompt) + step - 1 if step else 0, [2 * index, 2 * index + 1], 1, sampling, len(prompt)
            )
            row.history, row.feed = [*prompt, *known], index if step else -1
            row.constraint, row.output = constraint, known
            rows.append(row)
        submitted = runner.submit(StepPlan(step, rows))
        for done in (before, submitted if step == 3 else None):
            if done is not None:
                for output, row in zip(outputs, done.result().rows, strict=True):
                    output += row.tokens
        before = submitted
    assert outputs == expected


def test_constrained_proposals_are_verified_under_the_masks_behind_them(llama: tuple[Any, ModelFiles]) -> None:
    prompt = oracle_prompt(length=14)
    [expected] = run(open_runner(llama[1]), [Request(prompt, 5, constraint=Whims())])
    for runner in (open_runner(llama[1]), device_runner(llama[1])):
        runner.execute(StepPlan(0, [StepRow(prompt[:-1], 0, [5], 0, GREEDY, 14)]))
        row = StepRow([prompt[-1], *expected[:2], 0], 13, [5, 3], 4, GREEDY, 14, constraint=Whims())
        assert runner.execute(StepPlan(1, [row])).rows[0].tokens[:3] == expected[:3]


def test_verified_proposals_give_the_same_text(llama: tuple[Any, ModelFiles]) -> None:
    prompt = oracle_prompt(length=20)
    expected = run(open_runner(llama[1]), [Request(prompt, 3)])[0]
    runner = device_runner(llama[1])
    runner.execute(StepPlan(0, [StepRow(prompt[:-1], 0, [5, 3], 0, GREEDY, 20)]))
    row = StepRow([prompt[-1], *expected[:2], 0, 1], 19, [5, 3], 5, GREEDY, 20)
    assert runner.execute(StepPlan(1, [row])).rows[0].tokens[:3] == expected[:3]


@pytest.mark.parametrize("graph", some_slow([False, True], quick=[True]))
def test_rows_behind_a_verification_find_their_places_on_the_device(llama: tuple[Any, ModelFiles], graph: bool) -> None:
    """Three steps, each submitted before the result of the one before it is taken: all, some or none of what the first verifies
    is accepted, and the third verifies what was foreseen behind that, or nothing. Noise is drawn for the right positions."""
    prompts = [oracle_prompt(seed=i, length=12 + 3 * i) for i in range(4)]
    params = [SAMPLED[1], SAMPLED[3], SAMPLED[0], SAMPLED[1]]
    expected = run(open_runner(llama[1]), [Request(p, 8, s) for p, s in zip(prompts, params, strict=True)])
    runner = device_runner(llama[1])
    blocks = [[4 * i + 1, 4 * i, 4 * i + 2] for i in range(4)]
    begin = [StepRow(p[:-1], 0, b, 0, s, len(p)) for p, b, s in zip(prompts, blocks, params, strict=True)]
    runner.execute(StepPlan(0, begin))
    runner._shapes.verify = [StepShape(20, 20, 8, 20)]
    graphs = with_graphs(runner, *(runner._shapes.verify if graph else ()))
    proposed = [2, 2, 1, 3]
    right = [2, 1, 0, 3]
    plans: list[StepPlan] = [StepPlan(1, []), StepPlan(2, []), StepPlan(3, [])]
    for index, (prompt, text) in enumerate(zip(prompts, expected, strict=True)):
        start, hits, table = len(prompt) - 1, right[index], blocks[index]
        verified = [token if i < hits else (token + 1) % 256 for i, token in enumerate(text[: proposed[index]])]

        def row(step: int, tokens: list[int], start: int, index: int = index, table: list[int] = table) -> StepRow:
            feed = sum(len(row.tokens) for row in plans[step - 1].rows[:index]) if step else -1
            made = StepRow(tokens, start, table, len(tokens), params[index], len(prompts[index]), feed=feed)
            plans[step].rows.append(made)
            return made

        row(0, [prompt[-1], *verified], start)
        second = row(1, [-1, 0, 0], start + 1)
        second.verified = verified
        behind = [(text[hits + 1] + 1) % 256] if index == 3 else text[hits + 1 : hits + 3]
        second.outcomes = [Outcome(hits, (text[hits] + 1) % 256, [9, 9]), Outcome(hits, text[hits], behind)]
        third = row(2, [-1, 0], start + 1 + hits + 1)
        third.verified = behind
        after = hits + 1 + (0 if index == 3 else 2)
        third.outcomes = [Outcome(after - hits - 1, text[after], text[after + 1 : after + 2])]
    steps = [runner.submit(plan) for plan in plans]
    results = [step.result().rows for step in steps]
    for index, text in enumerate(expected):
        hits, rows = right[index], [result[index].tokens for result in results]
        accepted = 0 if index == 3 else 2
        got = rows[0][: hits + 1] + rows[1][: accepted + 1] + rows[2][:2]
        assert got == text[: len(got)], index
    assert [graph.count for graph in graphs.values()] == ([3] if graph else [])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kv", "weights"),
    [
        (None, "none"),
        (torch.float8_e4m3fn, "none"),
        (torch.float8_e4m3fn, "fp8"),
    ],
)
def test_reduced_precision_stays_close(llama: tuple[Any, ModelFiles], kv: torch.dtype | None, weights: LinearFormat) -> None:
    prompt = oracle_prompt()
    runner = device_runner(llama[1], dtype=torch.bfloat16, kv=kv, weights=weights)
    output = run(runner, [Request(prompt[:40], 6), Request(prompt[:20], 2, chunk=12)])[0]
    agreed = sum(a == b for a, b in zip(output, greedy_choices(llama[0], prompt[:40], output), strict=True))
    assert agreed >= 4


def test_keys_are_centred_and_mixed_where_they_are_stored_in_8_bits(llama: tuple[Any, ModelFiles]) -> None:
    """And nowhere else: these are the first layer's keys of one prompt, in two pools."""
    prompt = oracle_prompt(length=16)
    plain, moved = (device_runner(llama[1], dtype=torch.bfloat16, kv=kv) for kv in (None, torch.float8_e4m3fn))
    for runner in (plain, moved):
        runner.execute(StepPlan(0, [StepRow(prompt, 0, [3], 1, GREEDY, 16)]))
    (key, value), (moved_key, moved_value) = (runner.groups[0].pool[3, 0].float() for runner in (plain, moved))
    assert moved.decoder.k_center is not None
    unmoved = moved_key @ hadamard(key.shape[-1]) + moved.decoder.k_center[0]
    for one, other in ((unmoved, key), (moved_value, value)):
        torch.testing.assert_close(one, other, atol=0.07 * moved_key.abs().max().item(), rtol=0.07)


def test_a_row_that_cannot_be_run_is_refused_and_harms_nobody(llama: tuple[Any, ModelFiles]) -> None:
    runner = device_runner(llama[1])
    good = StepRow([5, 6], 0, [1], 1, GREEDY, 2)
    bad = [
        StepRow([5], 16, [1], 1, GREEDY, 2),
        StepRow([256], 0, [1], 1, GREEDY, 1),
        StepRow([-1], 0, [1], 1, GREEDY, 1),
        StepRow([5], 0, [64], 1, GREEDY, 1),
        StepRow([5], 0, [-1], 1, GREEDY, 1),
        StepRow([], 0, [1], 0, GREEDY, 1),
        StepRow([5], 0, [1], 2, GREEDY, 1),
        StepRow([5] * 700, 0, list(range(50)), 1, GREEDY, 1),
        StepRow([5], 0, [1], 1, SAMPLED[4], 1),
    ]
    before = runner.execute(StepPlan(0, [good])).rows[0].tokens
    for row in bad:
        with pytest.raises(InvalidParameter):
            runner.execute(StepPlan(0, [good, row]))
    assert runner.execute(StepPlan(0, [good])).rows[0].tokens == before
    assert runner.execute(StepPlan(0, [])).rows == []


@pytest.mark.slow
def test_block_lists_that_grow_or_are_replaced_are_noticed(llama: tuple[Any, ModelFiles]) -> None:
    """The device keeps the tables of the rows from step to step."""

    def request() -> Request:
        return Request(oracle_prompt(length=14), 4)

    expected = run(open_runner(llama[1]), [request()])[0]
    runner = device_runner(llama[1])
    for seed in range(2):
        assert run(runner, [request()], seed=seed)[0] == expected
    tables = runner._tables
    assert torch.equal(tables.ids, torch.from_numpy(tables.slots.ids).clamp(min=0))


def test_no_graph_is_larger_than_the_buffers_of_a_step() -> None:
    table = ShapeTable(4, 324)
    assert max(shape.tokens for shape in table) == 256
    rows = [StepRow([1] * 260, 0, list(range(17)), 1, GREEDY, 260)]
    assert table.choose(rows) is None
    assert ShapeTable(4, 512).choose(rows) == StepShape(384, 16, 384, 16)
    assert [shape.tokens for shape in ShapeTable(1, 65)] == [1, 2, 4, 8, 32, 64]


def test_a_card_that_refuses_what_libraries_compute_does_without(
    llama: tuple[Any, ModelFiles], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("cuDNN: no such plan")

    monkeypatch.setattr(prompt_plans, "attend_run", lambda *_: None)
    monkeypatch.setattr(prompt_plans, "attend_part", refuse)
    runner = device_runner(llama[1], dtype=torch.bfloat16)
    assert runner._attention.settings.suits_parts(2048, 4096)
    runner._attention.plan_prompts(2048, 8192)
    assert not runner._attention.settings.suits_parts(2048, 4096)
    assert runner._attention.settings.ragged_max, "what works stays"
    monkeypatch.setattr("common.ops.attention.prefill.attend_ragged", lambda query, *_: query)
    runner._attention.plan_prompts(2048, 8192)
    assert not runner._attention.settings.ragged_max


def test_a_plan_has_the_blocks_that_were_packed() -> None:
    """While a step is planned on one thread, another one may give its rows more blocks, whose ids were not packed."""
    blocks = BlockTable([3, 4, 5])
    rows = [StepRow([1], 40, blocks, 1, GREEDY, 40), StepRow([1] * 24, 32, BlockTable([7, 8, 9, 10]), 1, GREEDY, 56)]
    shape = exact_shape(rows)
    tables = BlockTables(num_blocks=[64], max_ids=100, max_tables=4, device=torch.device("cpu"))
    upload = np.zeros(1 << 16, np.uint8)
    packed = StepPacker(tables, block_tokens=16, vocab_size=100).pack(rows, upload, shape)
    blocks.append(11)
    (planned,) = device_rows(packed)
    tables.apply(torch.from_numpy(upload)[packed.changes])
    assert [row[:3] for row in planned] == [(0, 1, 40), (1, 24, 32)]
    held = [tables.ids[row.first_block : row.first_block + 4].tolist() for row in planned]
    assert held == [[3, 4, 5, 0], [7, 8, 9, 10]]
    assert layout(upload, shape).block_starts[0].tolist() == [row.first_block for row in planned]


def chosen(table: ShapeTable, num_rows: int, prompt: int) -> tuple[int, int] | None:
    rows = [StepRow([1], 9, [0], 1, GREEDY, 9) for _ in range(num_rows - 1)]
    shape = table.choose([*rows, StepRow([1] * prompt, 0, list(range(256)), 1, GREEDY, prompt)])
    return None if shape is None else (shape.tokens, shape.rows)


def test_a_prompt_among_decoding_rows_takes_the_smallest_graph_that_holds_both() -> None:
    table = ShapeTable(256, 2112)
    assert chosen(table, 16, 40) == (64, 16)
    assert chosen(table, 17, 40) == (128, 64)
    assert chosen(table, 64, 200) == (384, 64)
    assert chosen(table, 65, 20) == (384, 256)
    assert chosen(table, 200, 300) == (512, 256)
    assert chosen(table, 200, 1600) == (1920, 256)
    assert chosen(table, 200, 1900) is chosen(table, 257, 10) is None


@pytest.mark.parametrize(("linears", "longest"), [(1.6e-6, 1024), (0.7e-6, 1664), (0.4e-6, 2048)])
def test_a_long_prompt_has_a_graph_where_launching_takes_longer_than_computing(linears: float, longest: int) -> None:
    table = ShapeTable(256, 2112, cost=LayerCost(linears, 0.0))
    for rows in (1, 17, 64):
        assert chosen(table, rows, longest - rows + 1) is not None
        assert chosen(table, rows, longest - rows + 60) is None  # not that of 256 rows either


def test_a_part_behind_a_long_prefix_is_launched_since_its_attention_takes_longer() -> None:
    table = ShapeTable(256, 2304, cost=LayerCost(0.4e-6, 2.7e-11))

    def shape(start: int, tokens: int) -> StepShape | None:
        return table.choose([StepRow([1] * tokens, start, list(range(4096)), 1, GREEDY, start + tokens)])

    assert shape(0, 2048) == StepShape(2048, 16, 2048, 16)
    assert shape(4096, 2048) is not None
    assert shape(16384, 2048) is None
    assert shape(16384, 1024) is not None, "as ever where few tokens read a prefix"


def test_the_cost_of_a_layer_is_that_of_its_weights_and_of_attention_to_all_keys(llama: tuple[Any, ModelFiles]) -> None:
    decoder = device_runner(llama[1]).decoder
    spec, cost = decoder.layers[0].mixer.spec, layer_cost(decoder)
    parameters = sum(weight.parameters for weight in decoder.layers[0].linears.values())
    assert cost == pytest.approx(LayerCost(2 * parameters / 6e14, 4 * spec.num_heads * spec.head_dim / 6e14))
    rows = [StepRow([1] * 10, 30, [0], 1, GREEDY, 40), StepRow([1], 7, [0], 1, GREEDY, 8)]
    assert cost.seconds(rows) == pytest.approx(11 * cost.linears + (10 * 35 + 7.5) * cost.attention)


def test_draws_that_cannot_be_packed_leave_nothing_for_the_next_step() -> None:
    sampler = DeviceSampler(8, torch.device("cpu"), 3)
    params = SamplingParams(temperature=0.5, seed=7)

    def row(start: int, sampling: SamplingParams) -> StepRow:
        return StepRow([1], start, [0], 1, sampling, 1)

    sampler.load([row(3, params)])
    with pytest.raises(ValueError, match="positions"):
        sampler.load([row(1 << 32, SamplingParams(temperature=2.0, seed=1))])
    sampler.load([row(4, params)])
    assert (sampler.draws.temperature[0], sampler.draws.seed[0], sampler.draws.position[0]) == (0.5, 7, 5)


@pytest.mark.slow
def test_warming_up_leaves_no_trace(llama: tuple[Any, ModelFiles]) -> None:
    requests = [Request(oracle_prompt(length=20), 3), Request(oracle_prompt(seed=1, length=9), 3, SAMPLED[2])]
    expected = run(open_runner(llama[1]), [Request(r.prompt, r.num_tokens, r.sampling) for r in requests])
    runner = device_runner(llama[1])
    pool = runner.groups[0].pool.clone()
    runner.warm_up(16, 64)
    assert torch.equal(runner.groups[0].pool.view(torch.uint8), pool.view(torch.uint8))
    assert run(runner, requests) == expected


def test_a_borrowed_tensor_is_the_same_memory() -> None:
    owner = torch.randn(3, 5).to(torch.bfloat16)
    found = borrowed(owner)
    owner.mul_(2)
    assert torch.equal(found, owner)
    assert found.data_ptr() == owner.data_ptr()


class Replayed:
    """Stands in for a captured graph: the same launches over the same buffers, and logits that the next one overwrites."""

    def __init__(self, runner: DeviceRunner, shape: StepShape) -> None:
        self._runner, self._shape = runner, shape
        self.count = 0
        self.logits = torch.full((shape.samples, runner.vocab_size), torch.nan)

    def replay(self) -> torch.Tensor:
        self.count += 1
        return self.logits.copy_(self._runner._forward(self._shape))


def with_graphs(runner: DeviceRunner, *shapes: StepShape) -> dict[StepShape, Replayed]:
    graphs = {shape: Replayed(runner, shape) for shape in shapes}
    runner._graphs = graphs  # pyright: ignore[reportAttributeAccessIssue]
    for buffer in (runner._buffer, *runner._staging):
        buffer.fill_(0x7F)  # what steps before left behind
    return graphs


@pytest.mark.slow
def test_padded_steps_give_the_same_text(llama: tuple[Any, ModelFiles]) -> None:
    """Prompts and decoding rows in the shapes of graphs: unused rows and tokens change nothing."""

    def requests() -> list[Request]:
        lengths, chunks, begins = (20, 3, 9), (1 << 30, 2, 8), (0, 0, 2)
        return [
            Request(oracle_prompt(seed=i, length=lengths[i]), 4, SAMPLED[(0, 2, 4)[i]], chunk=chunks[i], begins=begins[i])
            for i in range(3)
        ]

    expected = run(open_runner(llama[1]), requests())
    runner = device_runner(llama[1])
    graphs = with_graphs(runner, StepShape(4, 4, 1, 4), StepShape(32, 16, 32, 16))
    runner._shapes.decode = [StepShape(4, 4, 1, 4)]
    assert run(runner, requests()) == expected
    assert all(graph.count for graph in graphs.values())


@pytest.mark.slow
def test_padded_verification_gives_the_same_text(llama: tuple[Any, ModelFiles]) -> None:
    prompts = [oracle_prompt(seed=i, length=20 - 3 * i) for i in range(2)]
    expected = run(open_runner(llama[1]), [Request(prompt, 3) for prompt in prompts])
    runner = device_runner(llama[1])
    blocks = [[5, 3], [9, 2]]
    first = [StepRow(p[:-1], 0, b, 0, GREEDY, len(p)) for p, b in zip(prompts, blocks, strict=True)]
    runner.execute(StepPlan(0, first))
    graphs = with_graphs(runner, StepShape(12, 12, 8, 12))
    rows = [
        StepRow([p[-1], *e[:2], *[7] * i], len(p) - 1, b, 3 + i, GREEDY, len(p))
        for i, (p, e, b) in enumerate(zip(prompts, expected, blocks, strict=True))
    ]
    runner._shapes.verify = [StepShape(12, 12, 8, 12)]
    found = runner.execute(StepPlan(1, rows)).rows
    assert [row.tokens[:3] for row in found] == expected
    assert next(iter(graphs.values())).count == 1
