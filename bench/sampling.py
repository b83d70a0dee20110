"""Sampling on this machine's GPU: are the tokens the CPU's, and what does it cost? `python -m bench.sampling [--quick]`

First thousands of draws of every kind are compared with `sample_tokens`, log-probabilities and penalties with theirs; then come
times by rows and by candidates (tokens of a program, warps). In a few minutes; nothing is written.
"""

from __future__ import annotations

import argparse
import itertools
import math
import random
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from common.ops.sampling.adjust_device import apply_adjustments
from common.ops.sampling.adjustments import Adjustment, Adjustments, pack_adjustments
from common.ops.sampling.logprobs import token_logprobs, top_logprobs
from common.ops.sampling.penalties import apply_penalties
from common.ops.sampling.sample import Draw, sample_tokens
from common.ops.sampling.sample_device import DrawBatch, HostDraws, pack_draws, sample_filtered, sample_plain

VOCABS = (128256, 151936, 49152, 32003)
DEVICE = torch.device("cuda")
KINDS = {
    "greedy": Draw(0.0, 0, 1.0, 0.0, 1, 0),
    "temperature": Draw(0.8, 0, 1.0, 0.0, 1, 0),
    "min-p": Draw(0.8, 0, 1.0, 0.05, 1, 0),
    "top-k 20": Draw(0.8, 20, 1.0, 0.0, 1, 0),
    "top-p 0.95": Draw(0.8, 0, 0.95, 0.0, 1, 0),
    "top-k 20, top-p 0.95": Draw(0.8, 20, 0.95, 0.0, 1, 0),
    "top-k 1000, top-p 0.999": Draw(0.8, 1000, 0.999, 0.0, 1, 0),
}

PLAIN_CANDIDATES = ((1024, 4), (2048, 4), (2048, 8), (4096, 8), (4096, 16), (8192, 16))
FILTER_CANDIDATES = tuple((*tile, *chunk) for tile in ((1024, 4), (2048, 8), (4096, 16)) for chunk in ((2048, 4), (2048, 8)))
"""See `common.ops.sampling.sample_triton.CHUNKS` and `common.ops.sampling.filters_triton`."""


def logits_of(rows: int, vocab: int, shape: str) -> torch.Tensor:
    """As models give them: a few likely tokens over a wide bulk; or all alike; or rounded to ties."""
    logits = torch.randn(rows, vocab) * 2.2
    if shape == "model":
        likely = torch.randint(0, vocab, (rows, 60))
        logits.scatter_(1, likely, 8 + torch.rand(rows, 60) * 10)
    elif shape == "flat":
        logits.fill_(25.3)
    elif shape == "tied":
        logits = logits.mul(2).round().div(2)
    return logits


def batch_of(draws: list[Draw]) -> tuple[DrawBatch, HostDraws]:
    host = HostDraws(len(draws))
    pack_draws(draws, host)
    batch = DrawBatch.create(host.rows, DEVICE)
    batch.load(host)
    return batch, host


def compare(rows: int, rounds: int) -> None:
    """:raises SystemExit: naming the first draw that differs."""
    rng = random.Random(time.time_ns())
    for turn, vocab, shape in itertools.product(range(rounds), VOCABS, ("model", "wide", "flat", "tied")):
        logits = logits_of(rows, vocab, shape)
        logits = logits.bfloat16() if turn % 2 else logits
        draws = [
            Draw(
                temperature=rng.choice([0.0, 1e-5, 0.3, 0.8, 1.0, 2.0]),
                top_k=rng.choice([0, 0, 1, 20, 1000]),
                top_p=rng.choice([1.0, 1.0, 0.999, 0.95, 0.5, 0.01]),
                min_p=rng.choice([0.0, 0.0, 0.05, 0.5]),
                seed=rng.randrange(1 << 64),
                position=rng.randrange(1 << 20),
            )
            for _ in range(rows)
        ]
        batch, host = batch_of(draws)
        out = torch.empty(rows, dtype=torch.int64, device=DEVICE)
        on_device = logits.to(DEVICE)
        sample_plain(on_device, batch, out)
        plain = out.tolist()
        sample_filtered(on_device, torch.from_numpy(host.filtered_rows(rows)).to(DEVICE), batch, out)
        for kind, found, asked in (
            ("plain", plain, [draw._replace(top_k=0, top_p=1.0) for draw in draws]),
            ("filtered", out.tolist(), draws),
        ):
            for row, (token, expected) in enumerate(zip(found, sample_tokens(logits.float(), asked), strict=True)):
                if token != expected:
                    raise SystemExit(f"{kind}, {shape}, vocabulary {vocab}: {token} is not {expected} for {asked[row]}")
    print(f"{rounds * len(VOCABS) * 4 * rows} draws: equal")


def compare_the_rest() -> None:
    vocab = 128256
    logits = logits_of(5, vocab, "model").bfloat16()
    prompt, output = torch.randint(0, vocab, (5000,)).tolist(), torch.randint(0, 300, (900,)).tolist()
    one = Adjustment(3, prompt, [*output, -1], 0.3, 0.7, 1.2, {5: 2.5, 9: -1.0}, [7])
    previous = torch.tensor([42], device=DEVICE)
    found = apply_adjustments(logits.to(DEVICE), Adjustments.on(DEVICE, pack_adjustments([one])), previous)[0].cpu()
    values = logits[3].float()
    apply_penalties(values, prompt, [*output, 42], presence=0.3, frequency=0.7, repetition=1.2)
    values.numpy()[[5, 9]] += np.array([2.5, -1], np.float32)
    values[7] = -math.inf
    print(f"penalties: {'equal' if torch.equal(found, values) else 'DIFFERENT'}")
    tokens, rows = torch.randint(0, vocab, (5,)), torch.tensor([4, 1])
    chosen, ids, likely = token_logprobs(logits.to(DEVICE), tokens.to(DEVICE), rows.to(DEVICE), 20)
    for index, row in enumerate(rows.tolist()):
        expected = top_logprobs(logits[row].float(), int(tokens[row]), 20)
        away = max(abs(chosen[index].item() - expected[0]), *(abs(likely[index].cpu().numpy() - expected[2])))
        print(f"log-probabilities: ids {'equal' if ids[index].tolist() == expected[1] else 'DIFFERENT'}, {away:.1e} apart")


def microseconds(run: Callable[[], Any], launches: int = 20) -> float:
    """Of one run, in a CUDA graph of `launches`: the median of seven."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(launches):
            run()
    times: list[float] = []
    for _ in range(8):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / launches * 1000)
    return statistics.median(times[1:])


def measure(rows_list: tuple[int, ...]) -> None:
    from common.ops.sampling import filters_triton, sample_triton

    plain = (sample_triton, ("CHUNKS",), tuple((((1 << 30, *one),),) for one in PLAIN_CANDIDATES))
    filtered = (filters_triton, ("TILE", "NUM_WARPS", "CHUNK", "CHUNK_WARPS"), FILTER_CANDIDATES)
    print("\nµs at 128256 tokens, bf16 logits as of a model; in brackets the fastest of the candidates")
    for rows in rows_list:
        logits = logits_of(rows, 128256, "model").bfloat16().to(DEVICE)
        out = torch.empty(rows, dtype=torch.int64, device=DEVICE)
        everything = torch.arange(rows, dtype=torch.int32, device=DEVICE)
        for kind, draw in KINDS.items():
            batch, host = batch_of([draw._replace(seed=row * 7919) for row in range(rows)])
            if len(host.filtered_rows(rows)):
                (place, names, candidates), run = filtered, partial(sample_filtered, logits, everything, batch, out)
            else:
                (place, names, candidates), run = plain, partial(sample_plain, logits, batch, out)
            before = [getattr(place, name) for name in names]
            usual = microseconds(run)
            times: dict[Any, float] = {}
            for candidate in candidates:
                for name, value in zip(names, candidate, strict=True):
                    setattr(place, name, value)
                times[candidate] = microseconds(run)
            for name, value in zip(names, before, strict=True):
                setattr(place, name, value)
            best = min(times, key=lambda candidate: times[candidate])
            print(f"{rows:4d} rows, {kind:24s} {usual:8.1f}   [{best}: {times[best]:.1f}]")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer draws and row counts")
    quick = parser.parse_args().quick
    compare(16, 2 if quick else 6)
    compare_the_rest()
    measure((1, 256) if quick else (1, 8, 32, 64, 256))


if __name__ == "__main__":
    main()
