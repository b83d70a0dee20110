"""Attention by the device's work list equals the reference, whatever rows come together and however keys are split."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import triton.language as tl
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime import interpreter

from common.ops import backend
from common.ops.attention import configs as attention_configs
from common.ops.attention import work_triton
from common.ops.attention.configs import AttentionConfig, attention_candidates, choose_config, default_config
from common.ops.attention.form import AttentionForm
from common.ops.attention.paged_attention import AttentionRow, paged_attention
from common.ops.attention.paged_reference import paged_attention_reference
from common.ops.attention.prefill import planned_lengths, ragged_is_right
from common.ops.attention.settings import DEFAULT_SETTINGS, AttentionSettings
from common.ops.attention.work import AttentionWorkspace, DevicePlan, plan_device_attention
from common.ops.attention.work_list import DeviceBatch, DeviceRow
from tests.fixtures.slow import some_slow

LAYERS, LAYER = 2, 1
CPU = torch.device("cpu")
FP8 = torch.float8_e4m3fn
Spans = list[tuple[int, int]]  # (start, count) by row


@pytest.fixture(autouse=True)
def _on_the_interpreter(request: pytest.FixtureRequest) -> Iterator[None]:
    if request.node.get_closest_marker("gpu"):
        yield
        return
    with backend.interpreted():
        yield


def make_pool(num_blocks: int, kv_heads: int, head_dim: int, block_tokens: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(num_blocks, LAYERS, 2, block_tokens, kv_heads, head_dim).to(dtype)


def make_rows(pool: torch.Tensor, spans: Spans) -> list[AttentionRow]:
    free = torch.randperm(pool.shape[0]).tolist()
    rows: list[AttentionRow] = []
    first = 0
    for start, count in spans:
        rows.append(AttentionRow(first, count, start, [free.pop() for _ in range(-(-(start + count) // pool.shape[3]))]))
        first += count
    return rows


def poison_unused(pool: torch.Tensor, rows: list[AttentionRow], spare: int | None = None) -> None:
    """NaN wherever no row has a key, and in block `spare`."""
    used = torch.zeros(pool.shape[0], pool.shape[3], dtype=torch.bool)
    for row in rows:
        for position in range(row.start + row.length):
            used[row.blocks[position // pool.shape[3]], position % pool.shape[3]] = True
    if spare is not None:
        used[spare] = False
    if pool.dtype == FP8:
        bytes_ = pool.view(torch.uint8)
        bytes_.masked_fill_(~used[:, None, None, :, None, None], 0x7F)
    else:
        pool.masked_fill_(~used[:, None, None, :, None, None], torch.nan)


def make_batch(
    rows: list[AttentionRow], num_tokens: int, *, capacity: int = 0, max_queries: int = 0, known: bool = False
) -> DeviceBatch:
    """With `capacity`, more rows than are used. The last row's blocks come first, and there is a gap before each row's."""
    num_rows = max(capacity, len(rows))
    empty = num_rows - len(rows)
    end = rows[-1].first + rows[-1].length if rows else 0
    gap = [1 << 30] * 3  # must not be followed
    ids = list(gap)
    starts = [0] * num_rows
    for index, row in reversed(list(enumerate(rows))):
        starts[index] = len(ids)
        ids += [*row.blocks, *gap]
    return DeviceBatch(
        query_starts=torch.tensor([row.first for row in rows] + [end] * (empty + 1), dtype=torch.int32),
        context_lens=torch.tensor([row.start + row.length for row in rows] + [0] * empty, dtype=torch.int32),
        block_ids=torch.tensor(ids, dtype=torch.int32),
        block_starts=torch.tensor(starts, dtype=torch.int32),
        max_queries=max_queries or max((row.length for row in rows), default=1),
        num_tokens=num_tokens,
        rows=[DeviceRow(*row[:3], first) for row, first in zip(rows, starts, strict=False)] if known else None,
    )


def make_plan(
    batch: DeviceBatch,
    pool: torch.Tensor,
    heads: int,
    config: AttentionConfig | None = None,
    workspace: AttentionWorkspace | None = None,
    settings: AttentionSettings = DEFAULT_SETTINGS,
    form: AttentionForm | None = None,
    dtype: torch.dtype | None = None,
) -> DevicePlan:
    workspace = workspace or AttentionWorkspace(CPU)
    plan = plan_device_attention(batch, pool, heads, workspace, settings=settings, config=config, form=form, dtype=dtype)
    for work in plan.lists:
        work.partials.fill_(torch.nan)
        work.sums.fill_(torch.nan)
    return plan


def close(out: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = 2e-5 if out.dtype == torch.float32 else 2e-2
    torch.testing.assert_close(out, expected, atol=tolerance, rtol=tolerance)


def run(
    spans: Spans,
    *,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 32,
    block_tokens: int = 16,
    dtype: torch.dtype = torch.float32,
    config: AttentionConfig | None = None,
    capacity: int = 0,
    max_queries: int = 0,
    form: AttentionForm | None = None,
) -> DevicePlan:
    """Attention over a pool that is NaN outside the rows, and in blocks that no query sees; compared with the reference."""
    form = form or AttentionForm(head_dim**-0.5)
    pool = make_pool(
        4 + sum(-(-(start + count) // block_tokens) for start, count in spans), kv_heads, head_dim, block_tokens, dtype
    )
    spare = len(pool) - 1
    rows = make_rows(pool[:spare], spans)
    num_tokens = sum(count for _, count in spans) + 2
    compute = torch.bfloat16 if dtype == FP8 else dtype
    query = torch.randn(num_tokens, heads, head_dim).to(compute)
    kv_scale = torch.rand(LAYERS, 2, kv_heads) + 0.5 if dtype == FP8 else None
    plain = pool.float()
    if kv_scale is not None:
        plain *= kv_scale[None, :, :, None, :, None]
    expected = paged_attention_reference(query.float(), plain, LAYER, rows, form).to(compute)
    gone = [form.first_key(row.start) // block_tokens for row in rows]
    rows = [row._replace(blocks=[spare] * n + list(row.blocks[n:])) for n, row in zip(gone, rows, strict=True)]
    poison_unused(pool, rows, spare)
    batch = make_batch(rows, num_tokens, capacity=capacity, max_queries=max_queries)
    plan = make_plan(batch, pool, heads, config, form=form)
    out = paged_attention(query, pool, LAYER, plan, form, kv_scale=kv_scale)
    close(out, expected)
    assert not out[-2:].any()
    return plan


def splits_of(plan: DevicePlan) -> int:
    return int(plan.lists[0].counts[1])


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "block_tokens"),
    [(9, 3, 64, 16), (4, 2, 32, 8), (5, 1, 80, 16), (6, 1, 96, 32), (8, 1, 128, 16), (2, 2, 256, 8), (14, 2, 64, 64)],
)
def test_decode_equals_the_reference(heads: int, kv_heads: int, head_dim: int, block_tokens: int) -> None:
    torch.manual_seed(1)
    run(
        [(299, 1), (0, 1), (127, 1), (15, 1), (64, 1)],
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        block_tokens=block_tokens,
    )


@pytest.mark.parametrize("head_dim", [64, 80])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, FP8], ids=str)
@pytest.mark.parametrize("spans", [[(280, 1), (7, 1), (130, 1)], [(140, 5), (0, 3), (31, 1)], [(30, 40), (0, 33), (200, 1)]])
def test_half_precision_and_8_bit_kv_are_close(head_dim: int, dtype: torch.dtype, spans: Spans) -> None:
    torch.manual_seed(2)
    run(spans, heads=6, kv_heads=2, head_dim=head_dim, dtype=dtype)


@pytest.mark.parametrize(
    "spans",
    [
        [(0, 5), (250, 2), (17, 3), (0, 1)],  # verification
        [(0, 60)],  # a prompt
        [(90, 70)],  # its second chunk
        [(200, 1), (0, 37), (40, 50), (3, 1), (129, 5)],  # all of them
    ],
)
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 1), (6, 2)])
def test_rows_of_any_length_share_a_step(spans: Spans, heads: int, kv_heads: int) -> None:
    torch.manual_seed(3)
    run(spans, heads=heads, kv_heads=kv_heads, capacity=9)


def test_rows_may_be_shorter_than_their_bucket() -> None:
    torch.manual_seed(10)
    run([(30, 2), (100, 1), (7, 5)], capacity=6, max_queries=8)
    run([(30, 2), (100, 1), (7, 5)], capacity=6, max_queries=100)


@pytest.mark.parametrize("fused", [False, True])
def test_a_long_row_is_split_and_merged(fused: bool) -> None:
    torch.manual_seed(4)
    config = AttentionConfig(16, 32, 4, 2, programs=4, min_split_keys=32, fused=fused)
    plan = run([(700, 1), (3, 1), (40, 1)], kv_heads=1, heads=4, config=config)
    assert splits_of(plan) == 1
    assert plan.lists[0].merges[0, 3] > 10
    plan = run([(600, 16), (500, 2), (3, 1)], kv_heads=1, heads=8, config=config)
    assert splits_of(plan) == 5  # sixteen queries of eight heads are four products of 32 rows
    assert not plan.lists[0].arrivals.any()


FORMS = {
    "window": AttentionForm(0.2, window=37),
    "window-of-one": AttentionForm(0.2, window=1),
    "chunk": AttentionForm(0.2, chunk=150),
    "cap": AttentionForm(0.4, soft_cap=2.0),
    "sinks": AttentionForm(0.2, sinks=torch.linspace(-60, 8, 6)),
    "all": AttentionForm(0.4, window=130, chunk=333, soft_cap=5.0, sinks=torch.linspace(4, -3, 6)),
}


@pytest.mark.parametrize("name", some_slow(list(FORMS), quick=["window", "all"]))
@pytest.mark.parametrize(
    "spans",
    [[(299, 1), (0, 1), (127, 1)], [(0, 5), (250, 2), (140, 3)], [(200, 1), (0, 22), (140, 25)]],
    ids=["decode", "verification", "mixed"],
)
def test_every_form_equals_the_reference(name: str, spans: Spans) -> None:
    torch.manual_seed(11)
    run(spans, heads=6, form=FORMS[name])


@pytest.mark.parametrize("name", some_slow(list(FORMS), quick=["all"]))
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("swap", [False, True])
def test_every_form_may_be_split(name: str, fused: bool, swap: bool) -> None:
    torch.manual_seed(12)
    config = AttentionConfig(16, 32, 4, 2, programs=4, min_split_keys=32, fused=fused, swap=swap)
    dtype = torch.bfloat16 if swap else torch.float32
    plan = run([(700, 1), (3, 1), (40, 1)], heads=6, dtype=dtype, config=config, form=FORMS[name])
    assert splits_of(plan) > 0 or name == "window-of-one"


@pytest.mark.parametrize("head_dim", [80, 96, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, FP8], ids=str)
def test_forms_of_wide_and_odd_heads(head_dim: int, dtype: torch.dtype) -> None:
    torch.manual_seed(13)
    form = AttentionForm(head_dim**-0.5, window=60, soft_cap=5.0, sinks=torch.linspace(-1, 1, 4))
    run([(150, 1), (70, 20)], head_dim=head_dim, dtype=dtype, form=form)


def test_a_list_has_only_keys_that_are_seen() -> None:
    pool = make_pool(1, 2, 32, 16, torch.float32)
    rows = [AttentionRow(i, 1, n, [0] * 4000) for i, n in enumerate((60_000, 50, 1000))]
    config = AttentionConfig(16, 64, 4, 2, programs=16)
    plan = make_plan(make_batch(rows, 3), pool, 4, config, form=AttentionForm(1.0, window=128))
    items = plan.lists[0].items[: int(plan.lists[0].counts[0])].tolist()
    seen: dict[int, set[int]] = {row.first: set() for row in rows}
    for token, _, _, _, first, tiles, _, _ in items:
        seen[token] |= set(range(first, first + tiles))
    for row in rows:
        assert seen[row.first] == set(range(max(row.start - 127, 0) // 64, row.start // 64 + 1))
    with pytest.raises(ValueError, match="the plan is for"):
        paged_attention(torch.randn(3, 4, 32), pool, LAYER, plan, AttentionForm(1.0, window=64))


def test_a_plan_ends_with_a_launch_that_waits_for_the_list(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention reads the list before it waits for the kernel before it: that one must begin after the list is written."""
    launched: list[str] = []

    class Recorded(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            launched.append(str(func))
            return func(*args, **(kwargs or {}))

    listing = work_triton.list_work
    monkeypatch.setattr(work_triton, "list_work", lambda *given: (listing(*given), launched.append("list")))
    pool = make_pool(8, 2, 32, 16, torch.float32)
    batch = make_batch(make_rows(pool, [(4, 1), (0, 40)]), 41)
    workspace = AttentionWorkspace(CPU)
    with Recorded():
        plan_device_attention(batch, pool, 4, workspace)
    assert launched.count("list") == 2
    assert launched[-1] == "aten.zero_.default"  # torch launches nothing with programmatic dependence


def test_all_items_run_at_once_and_the_longest_is_as_short_as_that_allows() -> None:
    torch.manual_seed(5)
    contexts = torch.randint(1, 5000, (37,))
    contexts[5] = 60_000
    rows = [AttentionRow(i, 1, int(n) - 1, [0] * -(-int(n) // 16)) for i, n in enumerate(contexts)]
    pool = make_pool(1, 2, 32, 16, torch.float32)
    config = AttentionConfig(16, 64, 4, 2, programs=64)
    plan = make_plan(make_batch(rows, len(rows), capacity=64), pool, 4, config)
    work = plan.lists[0]
    count, merges = work.counts.tolist()
    tiles = [-(-int(n) // 64) for n in contexts]
    places = 64 * 4 // 2
    share = next(share for share in range(1, max(tiles) + 1) if sum(-(-n // share) for n in tiles) <= places)
    items = work.items[:count].tolist()
    assert count <= places
    assert max(item[5] for item in items) <= share
    whole = [item[5] for item in items if item[6] < 0]
    assert whole == sorted(whole, key=lambda tiles: 2 * tiles <= share)  # the long ones first
    seen: dict[int, list[tuple[int, int]]] = {}
    for token, queries, start, _, first, tiles, _, _ in items:
        assert (queries, start) == (1, int(contexts[token]) - 1)
        seen.setdefault(token, []).append((first, first + tiles))
    for token, spans in seen.items():
        ends = [0, *(end for _, end in sorted(spans))]
        assert [begin for begin, _ in sorted(spans)] == ends[:-1]
        assert ends[-1] == -(-int(contexts[token]) // 64)
    assert len(seen) == 37
    for token, _, slot, slots in work.merges[:merges].tolist():
        assert [items[slot + i][0] for i in range(slots)] == [token] * slots
        assert [items[slot + i][6:] for i in range(slots)] == [[slot, i + slots * 65536] for i in range(slots)]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["decode", "prefill"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, FP8], ids=str)
def test_every_way_to_cut_gives_the_same(kind: attention_configs.Kind, dtype: torch.dtype) -> None:
    torch.manual_seed(6)
    spans = [(150, 1), (60, 1)] if kind == "decode" else [(70, 20)]
    seen: set[tuple[int, bool]] = set()
    for config in attention_candidates(64, 2, dtype, kind):
        if (config.tile, config.swap) not in seen:  # the rest is the compiler's
            seen.add((config.tile, config.swap))
            run(spans, heads=4, head_dim=64, dtype=dtype, config=replace(config, min_split_keys=64))
    assert len(seen) >= 2


def test_a_plan_follows_its_batch() -> None:
    """As a CUDA graph does: the same tensors, other contents."""
    torch.manual_seed(7)
    pool = make_pool(60, 2, 32, 16, torch.float32)
    workspace = AttentionWorkspace(CPU)
    kept: DeviceBatch | None = None
    for spans in ([(300, 1), (20, 1), (5, 1)], [(4, 1)], [], [(100, 1), (400, 1)]):
        rows = make_rows(pool, spans)
        query = torch.randn(4, 4, 32)
        batch = make_batch(rows, 4, capacity=4, max_queries=1)
        batch.block_ids = torch.cat([batch.block_ids, torch.zeros(80, dtype=torch.int32)])[:80]
        if kept is None:
            kept = batch
        for name in ("query_starts", "context_lens", "block_ids", "block_starts"):
            getattr(kept, name).copy_(getattr(batch, name))
        plan = make_plan(kept, pool, 4, workspace=workspace)
        out = paged_attention(query, pool, LAYER, plan, AttentionForm(0.2))
        close(out, paged_attention_reference(query, pool, LAYER, rows, AttentionForm(0.2)))


def test_short_prompts_of_different_lengths_side_by_side_are_one_call() -> None:
    """Rows that decode, equal lengths, prefixes, long prompts and padding stand between them."""
    torch.manual_seed(8)
    settings = AttentionSettings(fresh_prefill_min=20, long_prompt_min=40, ragged_max=39)
    for spans, padding, expected in (
        ([(0, 24), (0, 24), (0, 30)], 3, [(0, 78, 30)]),
        ([(100, 1), (0, 24), (0, 33), (16, 40), (0, 5), (0, 21), (0, 20), (0, 39)], 3, [(1, 57, 33), (103, 80, 39)]),
        ([(0, 24), (0, 20)], 0, [(0, 44, 24)]),
        ([(0, 24), (0, 40), (0, 20)], 0, []),
        ([(0, 24), (0, 24), (0, 40)], 0, []),
    ):
        pool = make_pool(40, 2, 32, 16, torch.bfloat16)
        rows = make_rows(pool, spans)
        num_tokens = sum(count for _, count in spans) + padding
        query = torch.randn(num_tokens, 6, 32).bfloat16()
        key, value = torch.full((2, num_tokens, 2, 32), torch.nan, dtype=torch.bfloat16)
        for row in rows:
            for which, tensor in enumerate((key, value)):
                held = pool[list(row.blocks), LAYER, which].reshape(-1, 2, 32)
                tensor[row.first : row.first + row.length] = held[row.start : row.start + row.length]
        plan = make_plan(make_batch(rows, num_tokens, known=True), pool, 6, settings=settings)
        assert [(run.first, run.tokens, run.longest) for run in plan.ragged] == expected
        out = paged_attention(query, pool, LAYER, plan, AttentionForm(0.2), key=key, value=value)
        wanted = paged_attention_reference(query, pool, LAYER, rows, AttentionForm(0.2))
        torch.testing.assert_close(
            out[: num_tokens - padding].float(), wanted[: num_tokens - padding].float(), atol=0.02, rtol=0.02
        )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(32, 8, 128), (8, 8, 64), (14, 2, 64), (8, 4, 256)])
def test_a_gpu_attends_to_ragged_prompts_in_one_call(heads: int, kv_heads: int, head_dim: int) -> None:
    assert ragged_is_right(heads, kv_heads, head_dim, torch.bfloat16, torch.device("cuda"))


@pytest.mark.parametrize("long", [False, True])
def test_prompts_without_a_prefix_may_go_another_way(long: bool) -> None:
    """`long`: one prompt a call, padded: 30 tokens to 32, 22 to 24."""
    torch.manual_seed(8)
    settings = AttentionSettings(fresh_prefill_min=20, long_prompt_min=21 if long else 1024)
    for spans, padding in (
        ([(0, 24), (0, 24), (0, 30)], 3),
        ([(100, 1), (0, 24), (0, 24), (16, 40), (0, 5)], 3),
        ([(0, 24)] * 2, 0),
        ([(0, 22)], 0),
    ):
        pool = make_pool(40, 2, 32, 16, torch.float32)
        rows = make_rows(pool, spans)
        num_tokens = sum(count for _, count in spans) + padding
        query = torch.randn(num_tokens, 6, 32)
        key, value = torch.full((2, num_tokens, 2, 32), torch.nan)
        for row in rows:
            for which, tensor in enumerate((key, value)):
                held = pool[list(row.blocks), LAYER, which].reshape(-1, 2, 32)
                tensor[row.first : row.first + row.length] = held[row.start : row.start + row.length]
        plan = make_plan(make_batch(rows, num_tokens, known=True), pool, 6, settings=settings)
        fresh = [length for start, length in spans if start == 0 and length >= 20]
        together = [fresh.count(length) for length in sorted(set(fresh))]
        assert [run.count for run in plan.fresh] == ([1] * len(fresh) if long else together)
        out = paged_attention(query, pool, LAYER, plan, AttentionForm(0.2), key=key, value=value)
        close(out, paged_attention_reference(query, pool, LAYER, rows, AttentionForm(0.2)))
        with pytest.raises(ValueError, match="key and value"):
            paged_attention(query, pool, LAYER, plan, AttentionForm(0.2))


@pytest.mark.parametrize(
    "form", [AttentionForm(0.1), AttentionForm(0.1, window=70, soft_cap=3.0, sinks=torch.ones(3))], ids=["plain", "all"]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, FP8], ids=str)
def test_a_query_gets_the_same_bits_in_every_batch(
    dtype: torch.dtype, form: AttentionForm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone, in a chunk of its prompt, in a verification, beside others: where the settings are batch-invariant.

    The interpreter's matrix products are numpy's, whose rounding depends on a row's place; a GPU's does not. float64 hides it.
    """
    torch.manual_seed(9)
    products = interpreter.InterpreterBuilder.create_dot

    def exact(builder: Any, a: Any, b: Any, d: Any, precision: Any, imprecise: Any) -> Any:
        a, b, d = (builder.cast_impl(x, tl.float64) for x in (a, b, d))
        return builder.cast_impl(products(builder, a, b, d, precision, imprecise), tl.float32)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", exact)
    chosen = choose_config
    monkeypatch.setattr(
        "common.ops.attention.work.choose_config",
        lambda *given, **named: replace(chosen(*given, **named), segment_keys=64, tile=32),
    )
    length, compute = 150, torch.bfloat16 if dtype == FP8 else dtype
    pool = make_pool(30, 1, 32, 16, dtype)
    blocks = torch.randperm(30).tolist()
    query = torch.randn(length, 3, 32).to(compute)
    kv_scale = torch.rand(LAYERS, 2, 1) + 0.5

    def attend(spans: Spans, strangers: int = 0) -> torch.Tensor:
        rows = [AttentionRow(i, 1, 70 * i, blocks[15:]) for i in range(strangers)]
        for start, count in spans:
            rows.append(AttentionRow(rows[-1].first + rows[-1].length if rows else 0, count, start, blocks[:15]))
        parts = [query[start : start + count] for start, count in spans]
        flat = torch.cat([torch.randn(strangers, 3, 32).to(compute), *parts])
        plan = make_plan(make_batch(rows, len(flat)), pool, 3, form=form, settings=AttentionSettings(batch_invariant=True))
        return paged_attention(flat, pool, LAYER, plan, form, kv_scale=kv_scale)[strangers:]

    whole = attend([(0, length)])
    plain = pool.float() * kv_scale[None, :, :, None, :, None]
    reference = paged_attention_reference(query.float(), plain, LAYER, [AttentionRow(0, length, 0, blocks[:15])], form)
    close(whole, reference.to(compute))
    for spans in ([(149, 1)], [(63, 1), (64, 1)], [(125, 5), (3, 2)], [(50, 90), (17, 1)]):
        together = torch.cat([whole[start : start + count] for start, count in spans])
        assert torch.equal(attend(spans, strangers=len(spans) - 1), together), spans


def test_what_does_not_fit_is_refused() -> None:
    pool = make_pool(4, 2, 32, 16, torch.float32)
    batch = make_batch(make_rows(pool, [(4, 1)]), 3)
    with pytest.raises(ValueError, match="can't share"):
        make_plan(batch, pool, 3)
    with pytest.raises(ValueError, match="int32"):
        make_plan(replace(batch, context_lens=batch.context_lens.long()), pool, 4)
    with pytest.raises(ValueError, match="starts of queries"):
        make_plan(replace(batch, query_starts=batch.query_starts[1:]), pool, 4)
    with pytest.raises(ValueError, match="power of two"):
        make_plan(batch, make_pool(4, 2, 32, 12, torch.float32), 4)
    plan = make_plan(batch, pool, 4)
    with pytest.raises(ValueError, match="the plan is for"):
        paged_attention(torch.randn(2, 4, 32), pool, LAYER, plan, AttentionForm(0.1))
    with pytest.raises(ValueError, match="does not go with"):
        paged_attention(torch.randn(3, 4, 32).half(), pool, LAYER, plan, AttentionForm(0.1))
    with pytest.raises(ValueError, match="kv_scale"):
        paged_attention(torch.randn(3, 4, 32), pool, LAYER, plan, AttentionForm(0.1), kv_scale=torch.ones(2, 2))


def test_cudnn_meets_few_lengths() -> None:
    lengths = range(1, 9000)
    planned = [attention_configs.planned_length(length) for length in lengths]
    assert all(length <= padded <= 1.125 * length + 1 for length, padded in zip(lengths, planned, strict=True))
    assert len({length for length in planned if length >= DEFAULT_SETTINGS.long_prompt_min}) <= 27
    assert attention_configs.planned_length(8192) == 8192
    for longest in (1023, 1024, 1100, 2048, 8999):
        met = {planned[length - 1] for length in range(DEFAULT_SETTINGS.long_prompt_min, longest + 1)}
        assert set(planned_lengths(longest, DEFAULT_SETTINGS)) == met


def test_defaults_fit_a_multiprocessor() -> None:
    for head_dim in (32, 64, 80, 96, 128, 256):
        for dtype in (torch.bfloat16, FP8, torch.float32):
            for kind in ("decode", "prefill"):
                config = default_config(head_dim, 4, dtype, kind)
                row_bytes = (1 << (head_dim - 1).bit_length()) * dtype.itemsize
                assert 2 * (config.stages - 1) * config.tile * row_bytes < attention_configs.SHARED_BYTES


def test_verification_is_cut_into_what_runs_at_once() -> None:
    """What is cut further is merged query by query. Rows of few queries each are cut as those of one."""
    for head_dim in (64, 128, 256):
        for dtype in (torch.bfloat16, FP8, torch.float32):
            for rows_per_sm, queries in ((0.06, 8), (0.5, 8), (0.5, 16), (1.0, 4), (2.0, 3), (4.0, 2), (16.0, 2)):
                config = choose_config(head_dim, 4, dtype, queries, rows_per_sm=rows_per_sm, invariant=False)
                row_bytes = (1 << (head_dim - 1).bit_length()) * dtype.itemsize
                at_once = attention_configs.SHARED_BYTES // ((2 * config.stages * config.tile + config.block_m) * row_bytes)
                assert 1 <= config.programs <= max(1, at_once), (head_dim, dtype, rows_per_sm, queries)
    one, few = (choose_config(128, 4, torch.bfloat16, queries, rows_per_sm=0.5, invariant=False) for queries in (1, 3))
    assert one == few
