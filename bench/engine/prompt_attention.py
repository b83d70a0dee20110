"""Causal attention of whole prompts, as prefill has it: our ways beside what libraries have for ragged batches.

    python -m bench.engine.prompt_attention                              on a GPU, heads of Llama-3.1-8B
    python -m bench.engine.prompt_attention --cells 1x8192,18x~900 --ways hopper,flash

    hopper     our kernel for Hopper, all prompts in one launch
    libraries  what is served on other cards: long prompts to cuDNN, each by itself and padded to one of few lengths; short
               ones to FlashAttention-2, neighbours in one call
    kernel     all of them to the kernel that reads pages
    flash      FlashAttention-2 of torch, all prompts in one call
    cudnn      cuDNN's attention of torch, all prompts in one call, which plans every number and longest length of prompts
    cute       FlashAttention in CuTe DSL (PyPI's flash-attn-4), all prompts in one call

Cells are ROWSxTOKENS, with ~ for lengths between 1/4 and 7/4. A way that is not there, or fails, says why. Each result is
compared with the first way's; ways are timed in turns, each for --hold-s without a pause, as prefill keeps a card busy: its
clock falls when it does. "of all products": FLOP/s of what is not masked.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch

from bench.common.machine import describe
from bench.common.table import markdown
from bench.engine.cells import Cell
from common.ops.attention.form import AttentionForm
from common.ops.attention.paged_device import attend_device
from common.ops.attention.parts import attend_part_reference
from common.ops.attention.prefix_kv import StepKv
from common.ops.attention.settings import DEFAULT_SETTINGS, AttentionSettings
from common.ops.attention.work import AttentionWorkspace, plan_device_attention
from common.ops.attention.work_list import DeviceBatch, DeviceRow

HEADS, KV_HEADS, HEAD_DIM, BLOCK_TOKENS = 32, 8, 128, 16
CELLS = "1x2048,1x8192,1x16384,4x4096,16x1024,32x512,18x~900,5x~3000,3x~6000"


class Prompts(NamedTuple):
    """query: [tokens, heads, head_dim]; key, value: [tokens, kv_heads, head_dim]; starts: int32 [prompts + 1]."""

    lengths: list[int]
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    starts: torch.Tensor

    @classmethod
    def of(cls, lengths: list[int], device: torch.device) -> Prompts:
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        made = [torch.randn(sum(lengths), heads, HEAD_DIM, device=device).to(dtype) for heads in (HEADS, KV_HEADS, KV_HEADS)]
        starts = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
        return cls(lengths, made[0], made[1], made[2], starts)

    @property
    def flops(self) -> float:
        return sum(2.0 * length * (length + 1) * HEADS * HEAD_DIM for length in self.lengths)


Way = Callable[[Prompts], Callable[[], torch.Tensor]]
"""Prepares a call for prompts: what a step does once is not what a layer costs."""


def by_plan(settings: AttentionSettings) -> Way:
    def prepare(prompts: Prompts) -> Callable[[], torch.Tensor]:
        device, lengths = prompts.query.device, prompts.lengths
        blocks = [-(-length // BLOCK_TOKENS) for length in lengths]
        pool = torch.zeros(sum(blocks), 1, 2, BLOCK_TOKENS, KV_HEADS, HEAD_DIM, dtype=prompts.query.dtype, device=device)
        block_starts = list(accumulate(blocks[:-1], initial=0))
        firsts = list(accumulate(lengths[:-1], initial=0))
        _fill(pool, prompts, block_starts, firsts)
        batch = DeviceBatch(
            query_starts=prompts.starts,
            context_lens=torch.tensor(lengths, dtype=torch.int32, device=device),
            block_ids=torch.arange(sum(blocks), dtype=torch.int32, device=device),
            block_starts=torch.tensor(block_starts, dtype=torch.int32, device=device),
            max_queries=max(lengths),
            num_tokens=sum(lengths),
            rows=[
                DeviceRow(first, length, 0, block) for first, length, block in zip(firsts, lengths, block_starts, strict=True)
            ],
        )
        plan = plan_device_attention(batch, pool, HEADS, AttentionWorkspace(device), settings=settings)
        form = AttentionForm(HEAD_DIM**-0.5)
        kv = StepKv(prompts.key, prompts.value, pool, 0, batch.block_ids, None) if plan.takes_kv else None
        return lambda: attend_device(prompts.query, kv, pool, 0, plan, form, None)

    return prepare


def _fill(pool: torch.Tensor, prompts: Prompts, block_starts: list[int], firsts: list[int]) -> None:
    for which, numbers in enumerate((prompts.key, prompts.value)):
        entries = pool[:, 0, which].flatten(0, 1)
        for block, first, length in zip(block_starts, firsts, prompts.lengths, strict=True):
            begin = block * BLOCK_TOKENS
            entries[begin : begin + length] = numbers[first : first + length]
        pool[:, 0, which] = entries.view(len(pool), BLOCK_TOKENS, KV_HEADS, HEAD_DIM)


def flash(prompts: Prompts) -> Callable[[], torch.Tensor]:
    longest, starts, scale = max(prompts.lengths), prompts.starts, HEAD_DIM**-0.5
    attend: Any = torch.ops.aten._flash_attention_forward
    heads = (prompts.query, prompts.key, prompts.value)
    return lambda: attend(*heads, starts, starts, longest, longest, 0.0, True, False, scale=scale)[0]


def cudnn(prompts: Prompts) -> Callable[[], torch.Tensor]:
    longest, starts, scale = max(prompts.lengths), prompts.starts, HEAD_DIM**-0.5
    attend: Any = torch.ops.aten._cudnn_attention_forward
    heads = (prompts.query, prompts.key, prompts.value)
    return lambda: attend(*heads, None, starts, starts, longest, longest, False, 0.0, True, False, scale=scale)[0]


def cute(prompts: Prompts) -> Callable[[], torch.Tensor]:
    from flash_attn.cute import flash_attn_varlen_func  # pyright: ignore

    longest, starts, scale = max(prompts.lengths), prompts.starts, HEAD_DIM**-0.5
    attend: Any = flash_attn_varlen_func
    named = {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "max_seqlen_q": longest, "max_seqlen_k": longest}

    def call() -> torch.Tensor:
        found = attend(prompts.query, prompts.key, prompts.value, softmax_scale=scale, causal=True, **named)
        return found[0] if isinstance(found, tuple) else found

    return call


def reference(prompts: Prompts) -> Callable[[], torch.Tensor]:
    def call() -> torch.Tensor:
        sizes = prompts.lengths
        parts = zip(prompts.query.split(sizes), prompts.key.split(sizes), prompts.value.split(sizes), strict=True)
        return torch.cat([attend_part_reference(*part, HEAD_DIM**-0.5, causal=True)[0] for part in parts])

    return call


WAYS: dict[str, Way] = {
    "hopper": by_plan(AttentionSettings(prefill_backend="hopper")),
    "libraries": by_plan(DEFAULT_SETTINGS),
    "kernel": by_plan(AttentionSettings(prefill_backend="kernel")),
    "flash": flash,
    "cudnn": cudnn,
    "cute": cute,
    "reference": reference,
}


def seconds(call: Callable[[], object], hold_s: float, device: torch.device) -> float:
    """Of one call, when as many as `hold_s` takes follow each other."""
    if device.type != "cuda":
        begun = time.perf_counter()
        call()
        return time.perf_counter() - begun

    def timed(count: int) -> float:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(count):
            call()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3 / count

    return timed(max(3, round(hold_s / timed(3))))


def compare(prompts: Prompts, ways: Sequence[str], turns: int, hold_s: float) -> dict[str, str]:
    """What each way took, in words."""
    device = prompts.query.device
    calls: dict[str, Callable[[], torch.Tensor]] = {}
    found: dict[str, str] = {}
    expected = None
    for way in ways:
        try:
            call = WAYS[way](prompts)
            given = call().view(prompts.query.shape).float()
            if expected is None:
                expected = given
            error = float((given - expected).norm() / expected.norm())
            if not error < 0.02:
                found[way] = f"off by {error:.2g}"
                continue
            calls[way] = call
        except Exception as error:  # whatever a library raises is what there is to say of it
            found[way] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:60]
    times: dict[str, list[float]] = {way: [] for way in calls}
    for _ in range(turns):
        for way, call in calls.items():
            times[way].append(seconds(call, hold_s, device))
    for way, taken in times.items():
        one = statistics.median(taken)
        found[way] = f"{one * 1e6:,.0f} ({prompts.flops / one / 1e12:.0f})"
    return found


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", default=CELLS)
    parser.add_argument("--ways", default="", help="between commas; the first is what others are compared with")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--hold-s", type=float, default=0.15)
    options = parser.parse_args(argv)
    device = torch.device("cuda")
    ways = options.ways.split(",") if options.ways else ["libraries", "hopper", "kernel", "flash", "cudnn", "cute"]
    print(describe())
    rows: list[list[str]] = []
    with torch.inference_mode():
        for text in options.cells.split(","):
            torch.manual_seed(0)
            found = compare(Prompts.of(Cell.parse(text).lengths(), device), ways, options.turns, options.hold_s)
            rows.append([text, *(found[way] for way in ways)])
            print(rows[-1], flush=True)
    print(markdown(["µs a layer (TFLOP/s of all products)", *ways], rows))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
