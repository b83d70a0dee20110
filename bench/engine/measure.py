"""One model in one precision, in a process of its own: opens the engine, measures cells, prints a JSON line per result.

`python -m bench.engine.measure --model dummy:llama-3.1-8b --precision bf16 --cells decode,prefill`; started by
`bench.engine`. What libraries print goes to stderr.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
import traceback
from collections.abc import Sequence
from typing import Any

import msgspec

from bench.common.lengths import Lengths
from bench.common.stats import Percentiles
from bench.engine.cells import (
    CeilingsLine,
    Cell,
    Failed,
    FirstToken,
    Line,
    Measured,
    Opened,
    Steady,
    encode_line,
    parse_cells,
)
from bench.engine.driver import Driver, Request, Run
from bench.engine.limits import Limits
from bench.engine.opening import PRECISIONS, Opening, open_runner
from common.protocol.errors import PenstockError
from common.runtime import parent_death

FIRST_TOKEN_PROMPT = 128
FIRST_TOKEN_COUNT = 15
STEADY_ROUNDS = 4


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.engine.measure", description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--precision", choices=list(PRECISIONS), default="auto")
    parser.add_argument("--cells", type=parse_cells, default=[])
    parser.add_argument("--steady", default="", metavar="ROWS:PROMPT:OUTPUT", help="a closed loop: 256:512:~256")
    parser.add_argument("--steady-after-s", type=float, default=0.0, help="what it does before then does not count")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--token-budget", type=int, default=16384)
    parser.add_argument("--repeat", type=int, default=2, help="the least of so many times counts")
    parser.add_argument("--max-rows", type=int, default=512)
    parser.add_argument("--begun-at", type=float, default=0.0, help="when the process was started, seconds since 1970")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a setting of the engine's")
    parser.add_argument("--no-ceilings", action="store_true")
    return parser.parse_args(argv)


def settings_of(pairs: Sequence[str]) -> dict[str, Any]:
    """`name=value` each, the value as JSON where it is JSON."""
    settings: dict[str, Any] = {}
    for name, _, value in (pair.partition("=") for pair in pairs):
        try:
            settings[name] = msgspec.json.decode(value)
        except msgspec.DecodeError:
            settings[name] = value
    return settings


class Measurement:
    """Requests of random tokens through one engine. `generate` is timed from the first plan to the last result."""

    def __init__(self, opening: Opening, *, token_budget: int, max_rows: int) -> None:
        self.opening = opening
        self._limits = (token_budget, max_rows)
        self.restart()
        self._random = random.Random(0)

    def restart(self) -> None:
        """After an error: what was under way is forgotten."""
        token_budget, max_rows = self._limits
        self.driver = Driver(self.opening.runner, token_budget=token_budget, max_rows=max_rows)

    def generate(self, lengths: Sequence[int], out: int) -> Run:
        high = self.opening.model.vocab_size - 1
        low = min(10, high)
        return self.driver.generate(
            [Request([self._random.randint(low, high) for _ in range(length)], out) for length in lengths]
        )

    def cell(self, cell: Cell, limits: Limits | None, repeat: int) -> Measured:
        """:raises ConfigError: if it does not fit the engine."""
        lengths = cell.lengths()
        self.generate(lengths, min(cell.out, 8))  # shapes that this cell is the first to need
        first_s = min(self.generate(lengths, 1).seconds for _ in range(repeat))
        if cell.out == 1:
            limit = limits.prefill(lengths) if limits else None
            tokens, measured_s, total_s, gaps = sum(lengths), first_s, first_s, []
        else:
            runs = [self.generate(lengths, cell.out) for _ in range(repeat)]
            best = min(runs, key=lambda run: run.seconds)
            limit = limits.decode(lengths, cell.out) if limits else None
            tokens, total_s, gaps = cell.rows * (cell.out - 1), best.seconds, best.decode_gaps_s()
            measured_s = total_s - first_s
        return Measured(
            cell=str(cell),
            first_s=first_s,
            total_s=total_s,
            tok_s=tokens / measured_s if measured_s > 0 else 0.0,
            step_ms=Percentiles.of_seconds(gaps),
            limit_tok_s=tokens / limit.seconds if limit and limit.seconds else 0.0,
            limit_by=limit.by if limit else "",
            bytes=limit.bytes if limit else 0.0,
            flops=limit.flops if limit else 0.0,
        )

    def first_token(self, prompt: int, count: int) -> FirstToken:
        times = [self.generate([prompt], 1).seconds for _ in range(count)]
        return FirstToken(prompt=prompt, ms=Percentiles.of_seconds(times), count=count)

    def steady(self, rows: int, prompt: Lengths, output: Lengths, after_s: float) -> Steady:
        """:raises ConfigError: if it does not fit the engine."""
        generator, high = self._random, self.opening.model.vocab_size - 1
        requests = [
            Request([generator.randint(min(10, high), high) for _ in range(prompt.draw(generator))], output.draw(generator))
            for _ in range(STEADY_ROUNDS * rows)
        ]
        driver = Driver(self.opening.runner, token_budget=self.driver.token_budget, max_rows=rows)
        tok_s, seconds = driver.generate(requests).steady(after_s)
        return Steady(rows=rows, prompt=str(prompt), output=str(output), seconds=seconds, tok_s=tok_s)


def run(options: argparse.Namespace, say: Any) -> None:
    """`say(line)`: called with each result."""
    begun_at = options.begun_at or time.time()
    os.environ.setdefault(
        "OMP_WAIT_POLICY", "PASSIVE"
    )  # as the services do (common/engine/load/runners.py), before torch is there
    import torch

    from common.ops import backend

    settings: dict[str, Any] = {"device": options.device, "max_running": options.max_rows, "token_budget": options.token_budget}
    settings |= settings_of(options.set)
    imported_at = time.time()
    if "num_blocks" not in settings and options.device == "cpu":
        size = settings.get("block_tokens", 16)
        wanted = [sum(-(-(n + cell.out) // size) for n in cell.lengths()) for cell in options.cells]
        if options.steady:
            rows, prompt, output = options.steady.split(":")
            wanted.append(int(rows) * -(-(Lengths.parse(prompt).high + Lengths.parse(output).high) // size))
        settings["num_blocks"] = max([*wanted, 64])
    opening = open_runner(options.model, options.precision, **settings)
    measurement = Measurement(opening, token_budget=options.token_budget, max_rows=options.max_rows)
    measurement.generate([FIRST_TOKEN_PROMPT], 2)
    runner = opening.runner
    device = torch.device(opening.device)
    say(
        Opened(
            name=f"{options.model} {opening.precision.name}",
            device=torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
            import_s=imported_at - begun_at,
            load_s=opening.load_s,
            first_token_s=time.time() - begun_at,
            kv_tokens=runner.num_blocks * runner.block_tokens,
            ahead=measurement.driver.ahead,
        )
    )
    if options.steady:
        rows, prompt, output = options.steady.split(":")
        say(measurement.steady(int(rows), Lengths.parse(prompt), Lengths.parse(output), options.steady_after_s))
    if not options.cells:
        return
    limits = None
    if not options.no_ceilings:
        from bench.engine.timing import measure_ceilings

        ceilings = measure_ceilings(device, fp8=device.type == "cuda" and opening.precision.weights == "fp8")
        limits = Limits(opening.model, opening.precision, ceilings)
        say(CeilingsLine(ceilings=msgspec.to_builtins(ceilings), text=str(ceilings)))
    measurement.first_token(FIRST_TOKEN_PROMPT, 3)
    say(measurement.first_token(FIRST_TOKEN_PROMPT, FIRST_TOKEN_COUNT))
    for cell in options.cells:
        try:
            say(measurement.cell(cell, limits, options.repeat))
        except PenstockError as error:
            say(Failed(cell=str(cell), error=str(error)))
        except Exception as error:  # too little memory, say: the others still count
            if not backend.gpu_answers():
                raise
            say(Failed(cell=str(cell), error=f"{type(error).__name__}: {str(error)[:300]}"))
            traceback.print_exc()
            measurement.restart()


def main(argv: Sequence[str]) -> int:
    options = parse(argv)
    # results alone go to stdout, whatever libraries print
    results = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def say(line: Line) -> None:
        results.write(encode_line(line) + "\n")

    try:
        run(options, say)
    except PenstockError as error:
        say(Failed(cell="", error=str(error)))
        return 1
    except Exception as error:
        say(Failed(cell="", error=f"{type(error).__name__}: {str(error)[:300]}"))
        raise
    return 0


if __name__ == "__main__":
    parent_death.guard()
    sys.exit(main(sys.argv[1:]))
