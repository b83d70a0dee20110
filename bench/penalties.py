"""Host time and bytes of a step whose rows have penalties: histories sent whole, and counts kept on the device.

`python -m bench.penalties [--rows 256] [--history 8192]`. It times what a step makes the host do behind its graph, and counts
the bytes that it would copy; no kernel runs, so no GPU is needed. Each step has one new token a row, fed by the step before.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch

from common.engine.gpu.counts import PenaltyCounts
from common.engine.gpu.sampling import _extras
from common.engine.history import History
from common.engine.plan import UNKNOWN, StepRow
from common.ops.sampling.sample import Draw
from common.ops.sampling.sample_device import HostDraws, pack_draws
from common.protocol.messages import SamplingParams

VOCAB = 128256
PENALISED = SamplingParams(temperature=0.8, frequency_penalty=0.3, repetition_penalty=1.1)


def measure(rows: int, history: int, steps: int, *, kept: bool) -> tuple[float, int]:
    """Return the median seconds and the bytes of a step. kept: whether counts stay on the device."""
    tokens = np.random.default_rng(1).integers(0, VOCAB, (rows, history)).tolist()
    prompt = history // 2
    host = HostDraws(rows)
    pack_draws([Draw(0.8, 0, 1.0, 0.0, 1, history)] * rows, host)
    counts = PenaltyCounts(rows if kept else 0, torch.device("meta"))

    def row(index: int, step: int) -> StepRow:
        mine, known = tokens[index], history - steps - 1 + step
        seen: list[int] | History = History(index, mine, known, [UNKNOWN]) if kept else [*mine[:known], UNKNOWN]
        return StepRow([UNKNOWN], known, [], 1, PENALISED, prompt, seen, feed=index)

    times: list[float] = []
    size = 0
    for step in range(steps):
        begun = time.perf_counter()
        step_rows = [row(index, step) for index in range(rows)]
        planned = counts.plan(step_rows, VOCAB)
        extras = _extras(step_rows, host, planned, torch.device("cpu"))
        times.append(time.perf_counter() - begun)
        for key, end in planned.counted.items():
            counts._slots[key].counted = end  # as `count` does once it has launched its kernels
        assert extras.adjustments is not None
        size = extras.adjustments.buffer.nbytes + (planned.update.buffer.nbytes if planned.update else 0)
    return statistics.median(times[1:]), size  # the first step of kept counts takes the histories


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--history", type=int, default=8192, help="tokens of each row, half of them the prompt")
    parser.add_argument("--steps", type=int, default=7)
    given = parser.parse_args()
    names: dict[str, Callable[[], tuple[float, int]]] = {
        "histories": lambda: measure(given.rows, given.history, given.steps, kept=False),
        "counts kept": lambda: measure(given.rows, given.history, given.steps, kept=True),
    }
    print(f"{given.rows} rows of {given.history} tokens")
    for name, run in names.items():
        seconds, size = run()
        print(f"{name:12s} {seconds * 1e3:9.2f} ms   {size:11,d} bytes a step")


if __name__ == "__main__":
    main()
