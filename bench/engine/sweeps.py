"""Every candidate of a kernel that is chosen by measurement, timed for a model's shapes: what the tables should hold.

`attention_sweep`: `attention_candidates` and the prefill backends; the best go into the rules of `attention_configs`.
`linear_sweep`: the candidates of each matrix and bucket of rows, beside what would be chosen now.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar

import msgspec
import torch

from bench.common.table import markdown, number, percent
from bench.engine.kernel_cases import Bench, Load
from bench.engine.timing import seconds_per_call
from common.ops import backend
from common.ops.attention.configs import SHORT_QUERIES, AttentionConfig, Kind, attention_candidates, choose_config
from common.ops.linear import device as linear_device
from common.ops.linear.candidates import Op, bucket
from common.ops.linear.weight import LinearWeight
from common.ops.quant.quantise import quantise_rows

SHOWN = 6
MIN_S = 0.003
MAX_HEAD_ROWS = 512  # of a prompt, only the last token's logits are wanted
C = TypeVar("C")


class Swept(msgspec.Struct, kw_only=True):
    """Candidates of one case with their seconds, the fastest first; `now`: what is chosen today. `least_s`: at the ceilings."""

    what: str
    case: str
    now: str
    seconds: dict[str, float]
    least_s: float = 0.0
    failed: dict[str, str] = {}

    def __str__(self) -> str:
        names = list(self.seconds)
        shown = names[:SHOWN] + [name for name in names[SHOWN:] if name == self.now]
        rows = [
            (
                ("*" if name == self.now else "") + name,
                number(self.seconds[name] * 1e6, 2),
                percent(self.least_s, self.seconds[name]),
            )
            for name in shown
        ]
        text = f"### {self.what}, {self.case}: {len(names)} candidates\n\n" + markdown(("candidate", "µs", "of ceiling"), rows)
        if self.now not in self.seconds:
            text += f"\n\nchosen now, not timed: {self.now}"
        return text + "".join(f"\n\nfailed: {name}: {error[:160]}" for name, error in list(self.failed.items())[:3])


def attention_sweep(bench: Bench, loads: Sequence[Load]) -> Iterator[Swept]:
    model = bench.model
    group = model.num_heads // model.num_kv_heads
    for load in loads:
        kind: Kind = "decode" if load.queries <= SHORT_QUERIES else "prefill"
        seconds: dict[str, float] = {}
        failed: dict[str, str] = {}
        candidates = {short(one): one for one in attention_candidates(model.head_dim, group, bench.kv_dtype, kind)}
        per_sm = load.rows * model.num_kv_heads / backend.num_sms(bench.device.index or 0)
        now = choose_config(model.head_dim, group, bench.kv_dtype, load.queries, rows_per_sm=per_sm, invariant=False)
        candidates.setdefault(short(now), now)

        def run_once(config: AttentionConfig, load: Load = load) -> None:
            batch = bench.batch(load, config=config)
            bench.attend_calls(load, [batch])[0]()

        compile_all(bench, list(candidates.values()), run_once)
        for name, config in candidates.items():
            try:
                batch = bench.batch(load, config=config)
                seconds[name] = seconds_per_call(bench.attend_calls(load, [batch]), bench.device, min_s=MIN_S)
            except Exception as error:  # one that does not fit this card is no candidate there
                failed[name] = f"{type(error).__name__}: {error}"
        batch = bench.batch(load)
        if batch.plan.takes_kv:
            name = f"SDPA, {batch.plan.prefill_backend}"
            seconds[name] = seconds_per_call(bench.attend_calls(load, [batch]), bench.device, min_s=MIN_S)
        peak = bench.ceilings.matmul.get(str(bench.dtype)[6:], 0.0)
        least = max(bench.attend_bytes(load) / bench.ceilings.bandwidth, bench.attend_flops(load) / peak if peak else 0.0)
        yield Swept(
            what=f"attention, head_dim {model.head_dim}, group {group}, pool {str(bench.kv_dtype)[6:]}",
            case=str(load),
            now=short(now),
            seconds=_ranked(seconds),
            least_s=least,
            failed=failed,
        )


def linear_sweep(bench: Bench, loads: Sequence[Load]) -> Iterator[Swept]:
    layers = bench.decoder.layers
    cases: list[tuple[str, Op, list[LinearWeight]]] = [
        ("qkv", "split", [layer.qkv for layer in layers]),
        ("output", "split", [layer.output for layer in layers]),
        ("gate_up", "gated", [layer.gate_up for layer in layers]),
        ("down", "split", [layer.down for layer in layers]),
        ("head", "wide", [bench.decoder.head]),
    ]
    for rows in sorted({bucket(load.tokens) for load in loads}):
        for name, op, weights in cases:
            if name == "head" and rows > MAX_HEAD_ROWS:
                continue
            for quantised in (False, True) if weights[0].format == "fp8" else (False,):
                yield _linear(bench, name, op, weights, rows, quantised=quantised)


def _linear(bench: Bench, name: str, op: Op, weights: list[LinearWeight], rows: int, *, quantised: bool) -> Swept:
    weight = weights[0]
    x = bench._random(rows, weight.in_features)
    given = quantise_rows(x) if quantised else x
    seconds: dict[str, float] = {}
    failed: dict[str, str] = {}
    options = linear_device.options(op, weight, rows, quantised)
    compile_all(bench, options, lambda candidate: linear_device.run(op, given, weight, candidate))
    for candidate in options:
        try:
            calls = [lambda one=one, chosen=candidate: linear_device.run(op, given, one, chosen) for one in weights]
            seconds[short(candidate)] = seconds_per_call(calls, bench.device, min_s=MIN_S)
        except Exception as error:  # as above
            failed[short(candidate)] = f"{type(error).__name__}: {error}"
    peak = bench.ceilings.matmul.get("fp8" if quantised else str(bench.dtype)[6:], 0.0)
    size = weight.data.nbytes + rows * (weight.in_features + weight.out_features) * bench.dtype.itemsize
    flops = 2.0 * rows * weight.parameters
    return Swept(
        what=f"{name}, {weight.out_features} x {weight.in_features} {weight.format}",
        case=f"{rows} rows{', fp8 activations' if quantised else ''}",
        now=short(linear_device.choose(op, weight, rows, quantised)),
        seconds=_ranked(seconds),
        least_s=max(size / bench.ceilings.bandwidth, flops / peak if peak else 0.0),
        failed=failed,
    )


def short(candidate: Any) -> str:
    """A dataclass by what is not its default: "gemv n2 m2 k256 warps 8"."""
    fields = dataclasses.fields(candidate)
    values = {field.name: getattr(candidate, field.name) for field in fields}
    shown = [
        str(value) if isinstance(value, str) else name if value is True else f"{name} {value}"
        for (name, value), field in zip(values.items(), fields, strict=True)
        if value != field.default and value is not False
    ]
    return ", ".join(shown)


def compile_all(bench: Bench, candidates: Sequence[C], run_once: Callable[[C], object]) -> None:
    """On a GPU, runs each once, many at a time: a compiler spends most of its time outside the interpreter's lock."""
    if bench.device.type != "cuda":
        return

    def attempt(candidate: C) -> None:
        with suppress(Exception), torch.cuda.device(bench.device), torch.inference_mode():  # said when it is timed
            run_once(candidate)

    backend.ready_for_threads()
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(attempt, candidates))
    torch.cuda.synchronize()


def _ranked(seconds: dict[str, float]) -> dict[str, float]:
    return dict(sorted(seconds.items(), key=lambda item: item[1]))
