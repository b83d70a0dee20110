"""Time, bandwidth and FLOP/s of every op of a step, and its share of the step: `python -m bench.engine.kernels`.

    python -m bench.engine.kernels                                      the 8B shape in bf16, decoding and prefill
    python -m bench.engine.kernels --model dummy:qwen3-8b --precision fp8 --loads 1x4096,256x512,1x8192+0
    python -m bench.engine.kernels --sweep attention,linear             every candidate instead: which should be chosen
    python -m bench.engine.kernels --tune                               first measure what the table of linears lacks

Loads: ROWSxCONTEXT decodes; ROWSxTOKENS+CONTEXT prefills TOKENS after CONTEXT. Each op is timed in a CUDA graph of many calls
over weights and KV that together are larger than the cache; the median counts. Ceilings (copy, read, matrix products) are
measured in the same run. "In sequence" is a step of all ops in one graph, which shows what overlaps or waits between them.
"""

from __future__ import annotations

import argparse
import re
import shlex
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

import msgspec
import torch

from bench.common.machine import Machine, describe
from bench.common.table import markdown, number, percent, write_json
from bench.engine.kernel_cases import Bench, Load, Op, layers_needed
from bench.engine.limits import Ceilings
from bench.engine.opening import PRECISIONS
from bench.engine.sweeps import Swept, attention_sweep, linear_sweep, short
from bench.engine.timing import measure_ceilings, seconds_per_call
from common.engine.load.runners import EngineConfig, resolve_device, resolve_engine_precision, tuned_shapes
from common.models.config import load_config
from common.models.decoder import Decoder
from common.models.registry import load_decoder
from common.models.source import resolve
from common.ops import backend
from common.ops.linear.linear_tuning import tune_linears
from common.runtime import parent_death

LOADS = "1x512,8x512,32x512,128x512,256x512,1x32768,1x2048+0,1x8192+0,1x2048+8192"
SMALL_LOADS = "2x20,1x24+0,1x8+16"
_LOAD = re.compile(r"(?P<rows>\d+)x(?P<length>\d+)(\+(?P<context>\d+))?")


class Timed(msgspec.Struct, kw_only=True):
    """`seconds` of a call; `step_s` of all its calls in a step; `bound`: share of what the ceilings allow."""

    op: str
    calls: int
    seconds: float
    step_s: float
    bytes: float
    flops: float
    bound: float


class Table(msgspec.Struct, kw_only=True):
    """`sequence_s`: the whole step in one graph, extrapolated from fewer layers; `layer_s`: a layer in it."""

    load: str
    ops: list[Timed]
    sum_s: float
    failed: dict[str, str] = {}
    sequence_s: float = 0.0
    layer_s: float = 0.0


class Report(msgspec.Struct, kw_only=True):
    machine: Machine
    command: str
    model: str
    precision: str
    layers: int
    ceilings: Ceilings
    tables: list[Table] = []
    sweeps: list[Swept] = []


def parse_load(text: str) -> Load:
    """:raises ValueError: for anything but ROWSxCONTEXT and ROWSxTOKENS+CONTEXT."""
    found = _LOAD.fullmatch(text)
    if found is None:
        raise ValueError(f"no load {text!r}: write 256x512 or 1x8192+0")
    rows, length, context = int(found["rows"]), int(found["length"]), found["context"]
    return Load(rows, length) if context is None else Load(rows, int(context), length)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.engine.kernels", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="")
    parser.add_argument("--precision", choices=["bf16", "fp8", "fp8-weights", "fp8-kv", "fp32"], default="bf16")
    parser.add_argument("--loads", default="")
    parser.add_argument("--sweep", default="", help="attention, linear; between commas")
    parser.add_argument("--tune", action="store_true", help="measure linears that this GPU's table does not know, and keep it")
    parser.add_argument("--device", default="cuda", help="cpu: in Triton's interpreter, in small, for tests")
    parser.add_argument("--out", type=Path, default=Path("build/bench-kernels"))
    options = parser.parse_args(argv)
    small = options.device == "cpu"
    options.model = options.model or ("dummy:tiny" if small else "dummy:llama-3.1-8b")
    options.precision = "fp32" if small and options.precision == "bf16" else options.precision
    options.loads = [parse_load(text) for text in (options.loads or (SMALL_LOADS if small else LOADS)).split(",")]
    return options


def time_op(op: Op, device: torch.device, bandwidth: float) -> Timed:
    seconds = seconds_per_call(op.calls, device, min_s=0.005)
    least = max(op.size / bandwidth if bandwidth else 0.0, op.flops / op.peak if op.peak else 0.0)
    return Timed(
        op=op.name,
        calls=op.per_step,
        seconds=seconds,
        step_s=seconds * op.per_step,
        bytes=op.size,
        flops=op.flops,
        bound=least / seconds,
    )


def table(bench: Bench, load: Load) -> Table:
    device, layers = bench.device, bench.num_layers
    timed: list[Timed] = []
    failed: dict[str, str] = {}
    for op in bench.ops(load):
        try:
            timed.append(time_op(op, device, bench.ceilings.bandwidth))
        except Exception as error:  # the others still count
            failed[op.name] = f"{type(error).__name__}: {str(error)[:300]}"
    whole = one = 0.0
    try:
        whole, one = (seconds_per_call([bench.step(load, count)], device) for count in (layers, 1))
    except Exception as error:
        failed["in sequence"] = f"{type(error).__name__}: {str(error)[:300]}"
    layer_s = (whole - one) / (layers - 1) if layers > 1 else 0.0
    return Table(
        load=str(load),
        ops=timed,
        sum_s=sum(op.step_s for op in timed),
        failed=failed,
        sequence_s=one + (bench.model.num_layers - 1) * layer_s,
        layer_s=layer_s,
    )


def tune(decoder: Decoder) -> None:
    """Says what was chosen, and what did not run."""
    begun = time.perf_counter()
    tuned = tune_linears(tuned_shapes(decoder), dtype=decoder.dtype, device=decoder.device)
    rows = [
        (key, short(min(times, key=lambda one: times[one])), number(min(times.values()) * 1e6, 2), str(len(times)))
        for key, times in tuned.seconds.items()
    ]
    if rows:
        print(markdown(("linear", "fastest", "µs", "candidates"), rows))
    for name, error in tuned.failed.items():
        print(f"failed: {name}: {error[:200]}")
    print(f"tuned in {time.perf_counter() - begun:.1f} s\n", flush=True)


def render(report: Report) -> str:
    head = f"# Kernels\n\n{report.machine}\n\n    {report.command}"
    about = f"{report.model}, {report.precision}; timed with {report.layers} layers. Ceilings: {report.ceilings}."
    return "\n\n".join([head, about, *map(render_table, report.tables), *map(str, report.sweeps)])


def render_table(table: Table) -> str:
    rows = [
        (
            op.op,
            str(op.calls),
            number(op.seconds * 1e6, 2),
            number(op.step_s * 1e3, 3),
            percent(op.step_s, table.sum_s),
            number(op.bytes / op.seconds / 1e12, 2) if op.bytes else "—",
            number(op.flops / op.seconds / 1e12, 1) if op.flops else "—",
            percent(op.bound, 1.0),
        )
        for op in table.ops
    ]
    titles = ("op", "calls a step", "µs a call", "ms a step", "share", "TB/s", "TFLOP/s", "of ceiling")
    return (
        f"## {table.load}\n\n{markdown(titles, rows)}\n\n"
        f"Sum of the ops {table.sum_s * 1e3:,.3f} ms; in sequence {table.sequence_s * 1e3:,.3f} ms"
        f" ({table.layer_s * 1e6:,.1f} µs a layer)."
        + "".join(f"\n\nfailed: {name}: {error}" for name, error in table.failed.items())
    )


def write(report: Report, out: Path) -> None:
    write_json(out / "kernels.json", report)
    (out / "kernels.md").write_text(render(report) + "\n")


def main(argv: Sequence[str]) -> int:
    options = parse(argv)
    engine = EngineConfig(device=options.device, **PRECISIONS[options.precision])
    files = resolve(options.model)
    model = load_config(files)
    name = resolve_device(engine)
    device = torch.device(name)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    precision = resolve_engine_precision(model, engine, name)
    ceilings = measure_ceilings(device, fp8=device.type == "cuda" and precision.weights == "fp8")
    fewer = msgspec.structs.replace(model, layers=model.layers[: layers_needed(model, precision, device)])
    report = Report(
        machine=describe(),
        command=shlex.join(["python", "-m", "bench.engine.kernels", *argv]),
        model=options.model,
        precision=precision.name,
        layers=fewer.num_layers,
        ceilings=ceilings,
    )
    with backend.interpreted() if device.type == "cpu" else nullcontext(), torch.inference_mode():
        dtype = getattr(torch, precision.compute)
        decoder = load_decoder(files, fewer, dtype=dtype, device=device, weights=precision.weights, dummy=True)
        if options.tune:
            tune(decoder)
        keys = max(load.rows * (load.context + load.queries) for load in options.loads)
        bench = Bench(model, decoder, precision, ceilings, keys)
        sweeps = {"attention": attention_sweep, "linear": linear_sweep}
        for sweep in filter(None, options.sweep.split(",")):
            for swept in sweeps[sweep](bench, options.loads):
                print(swept, end="\n\n", flush=True)
                report.sweeps.append(swept)
                write(report, options.out)
        for load in options.loads if not options.sweep else []:
            report.tables.append(table(bench, load))
            print(render_table(report.tables[-1]), end="\n\n", flush=True)
            write(report, options.out)
    write(report, options.out)
    print(f"{report.machine}\nCeilings: {ceilings}\nwritten to {options.out}: kernels.md, kernels.json")
    return 0


if __name__ == "__main__":
    parent_death.guard()
    sys.exit(main(sys.argv[1:]))
