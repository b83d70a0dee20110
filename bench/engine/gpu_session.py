"""All there is to find out in one sitting at a GPU, in parts with time limits: `python -m bench.engine.gpu_session OUT PARTS`.

    python -m bench.engine.gpu_session build/session check tune kernels     some parts, in this order
    python -m bench.engine.gpu_session build/session --list                 what there is, and how long each may take
    python -m bench.engine.gpu_session build/session engine --peer /tmp/vllm --budget-s 570

A part is a command of its own, ended at its limit; what it printed goes to OUT/PART.log as it comes, what it wrote to OUT/PART.
A part that fails does not stop the others; one that the budget has no time left for is left out. OUT/session.md has the tables
that they wrote, and a table of the parts; `--pack FILE` is all of OUT in one archive. Both are written after each part, and
when the session is told to end (SIGTERM), so that what was measured is not lost with what came next.
"""

from __future__ import annotations

import argparse
import shlex
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from bench.common.machine import describe
from bench.common.table import markdown
from bench.engine.child import run_child

SHAPES = ("qwen3-8b", "llama-3.2-1b", "qwen3-32b")
PROMPTS = "1x2048,1x8192,16x4096,1x32768,200x~900,48x~4096"
LEAST_S = 15.0
HALF = "HALF"
"""In a command: half of the seconds that the part may take, less what it needs for itself."""
TAIL_LINES = 60


@dataclass(slots=True, frozen=True)
class Part:
    """`command`: after the interpreter. `limit_s`: it is ended then."""

    about: str
    command: list[str]
    limit_s: float


@dataclass(slots=True)
class Done:
    name: str
    status: str
    seconds: float


def parts(out: str, peer: str = "") -> dict[str, Part]:
    """By name, in the order in which they make sense. peer: as `bench.engine --peer`, for those that measure it."""

    def module(name: str, *flags: str) -> list[str]:
        return ["-m", f"bench.engine{name}", *flags]

    def into(name: str) -> str:
        return f"--out={out}/{name}"

    beside = [f"--peer={peer}"] if peer else []

    def engine(name: str, about: str, *flags: str) -> Part:
        """Ours and the peer's each get half of the time, so that there are tables in any case."""
        return Part(about, module("", *flags, f"--limit-s={HALF}", into(name), *beside), 570)

    return {
        "check": Part("every kernel beside its reference on the card", module(".check"), 400),
        "tests": Part("tests marked gpu, side by side", module(".gpu_tests", "--limit-s=290"), 300),
        "sanitizer": Part("the kernels under compute-sanitizer, in small", module(".check", "--sanitizer"), 540),
        "tune": Part("choose the linears of the 8B shape", module(".kernels", "--tune", "--loads=1x512", into("tune")), 240),
        "tune-fp8": Part(
            "the same in FP8", module(".kernels", "--tune", "--precision=fp8", "--loads=1x512", into("tune-fp8")), 300
        ),
        "kernels": Part("time of every op, bf16", module(".kernels", into("kernels")), 180),
        "kernels-fp8": Part("time of every op, FP8", module(".kernels", "--precision=fp8", into("kernels-fp8")), 180),
        "sweep": Part(
            "candidates of attention",
            module(".kernels", "--sweep=attention", "--loads=1x512,1x32768,32x512,256x512,1x2048+8192", into("sweep")),
            300,
        ),
        "sweep-fp8": Part(
            "candidates of attention over an FP8 pool",
            module(".kernels", "--sweep=attention", "--precision=fp8-kv", "--loads=1x512,32x512,256x512", into("sweep-fp8")),
            300,
        ),
        "sampling": Part("draws beside the CPU's, and their times", ["-m", "bench.sampling", "--quick"], 240),
        "small": Part("candidates of the small kernels", module(".small_kernels"), 180),
        "starts": Part(
            "starts without and with compiled kernels",
            module(
                "", "--precision=bf16", "--cells=1x128x64", "--starts=cold,warm", "--repeat=1", "--limit-s=150", into("starts")
            ),
            470,
        ),
        "quick": Part(
            "a few cells of the engine", module("", "--cells=quick", "--repeat=1", "--limit-s=140", into("quick")), 290
        ),
        "engine": engine("engine", "the engine over batch sizes, bf16", "--precision=bf16"),
        "engine-fp8": engine("engine-fp8", "the same in FP8", "--precision=fp8"),
        "long": engine("long", "long contexts, bf16", "--precision=bf16", "--cells=long", "--repeat=1"),
        "ragged": engine("ragged", "ragged batches, bf16", "--precision=bf16", "--cells=ragged", "--repeat=1"),
        **{
            shape: engine(shape, f"{shape}, bf16", f"--model=dummy:{shape}", "--precision=bf16", "--cells=quick", "--repeat=1")
            for shape in SHAPES
        },
        "prompts": Part("attention of whole prompts: our way and what libraries have", module(".prompt_attention"), 180),
        "prefill": engine("prefill", "prompts, bf16", "--precision=bf16", f"--cells={PROMPTS}"),
        "prefill-uniform": engine(
            "prefill-uniform",
            "prompts, bf16, with numbers as the peer makes them up",
            *("--model=dummy:llama-3.1-8b-uniform", "--precision=bf16", f"--cells={PROMPTS}"),
        ),
        "verification": Part(
            "what verification gives, and costs where it gives nothing",
            module(".speculation", "--model=dummy:llama-3.1-8b-counting", "--precision=bf16", "--rows=1,8,64", "--turns=2"),
            300,
        ),
        "drafting": Part(
            "draft workers with a model on the target's GPU, through the whole stack",
            ["-m", "bench.drafting", "--gpus=0", "--turns=3"],
            420,
        ),
        "drafting-apart": Part("the same, and on a GPU of their own", ["-m", "bench.drafting", "--gpus=0,1", "--turns=3"], 540),
        "accuracy": Part("greedy answers, text, invariance and its cost", module(".accuracy", into("accuracy")), 420),
        "serve": Part(
            "the whole stack beside the engine alone, 256 streams; first token on an idle card",
            [
                *("-m", "bench.serve", "--device=cuda", "--model=dummy:llama-3.1-8b", "--streams=1,64,256"),
                *("--prompt=512", "--output=~256", "--ttft-probe=30", "--engine-throughput=measure", "--precision=bf16"),
                *("--ready-timeout-s=150", f"--out={out}/serve"),
            ],
            420,
        ),
        "poisson": Part(
            "Poisson arrivals at the whole stack, prefill and decode apart",
            [
                *("-m", "bench.serve", "--device=cuda", "--model=dummy:llama-3.1-8b", "--rate=4,16,32", "--prefill=1"),
                *("--prompt=~1024", "--output=~128", "--ready-timeout-s=150", f"--out={out}/poisson"),
            ],
            300,
        ),
    }


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.engine.gpu_session", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("parts", nargs="*", metavar="PART")
    parser.add_argument("--list", action="store_true", help="say what there is, and do nothing")
    parser.add_argument("--peer", default="", help="as bench.engine --peer")
    parser.add_argument("--budget-s", type=float, default=0.0, help="for all parts together; 0: as long as it takes")
    parser.add_argument("--pack", type=Path, metavar="FILE", help="put everything into this .tar.gz, too")
    options = parser.parse_args(argv)
    options.out = options.out.absolute()  # parts run in the project's folder
    known = parts(str(options.out), options.peer)
    if unknown := [name for name in options.parts if name not in known]:
        parser.error(f"no part {unknown[0]!r}; there are {', '.join(known)}")
    if not options.list and not options.parts:
        parser.error("name the parts to run, or say --list")
    options.known = known
    return options


def run_part(name: str, part: Part, out: Path, limit_s: float) -> Done:
    print(f"── {name}: {part.about} (at most {limit_s:.0f} s)", flush=True)
    begun = time.monotonic()
    with (out / f"{name}.log").open("wb") as log:

        def take(line: bytes) -> None:
            log.write(line)
            log.flush()

        arguments = [word.replace(HALF, f"{limit_s / 2 - 5:.0f}") for word in part.command]
        log.write(f"$ python {shlex.join(arguments)}\n".encode())
        command = [sys.executable, *arguments]
        error = run_child(command, take, limit_s=limit_s, stderr=subprocess.STDOUT)
    return Done(name, error or "well", time.monotonic() - begun)


def tables_of(name: str, out: Path) -> str:
    """What a part wrote as Markdown; or else the end of what it printed."""
    written = sorted((out / name).glob("*.md"))
    if written:
        return "\n\n".join(path.read_text() for path in written)
    lines = (out / f"{name}.log").read_text(errors="replace").splitlines()
    return "\n".join(lines[-TAIL_LINES:])


def write(out: Path, done: Sequence[Done], archive: Path | None) -> str:
    """Everything so far, as OUT/session.md and in the archive. Returns the table of the parts."""
    summary = markdown(("part", "ended", "s", "log"), [(d.name, d.status, f"{d.seconds:.0f}", f"{d.name}.log") for d in done])
    tables = [f"# {d.name}\n\n{tables_of(d.name, out)}" for d in done if d.seconds]
    (out / "session.md").write_text("\n\n".join([f"# {describe()}", summary, *tables]) + "\n")
    if archive is not None:
        pack(out, archive)
    return summary


def pack(out: Path, archive: Path) -> None:
    """Appears by rename: what was packed before stays until then."""
    archive.parent.mkdir(parents=True, exist_ok=True)
    unfinished = archive.with_name(f".{archive.name}")
    with tarfile.open(unfinished, "w:gz") as packed:
        for path in sorted(out.rglob("*")):
            if path.is_file() and path not in (archive, unfinished):
                packed.add(path, path.relative_to(out))
    unfinished.replace(archive)


def _end(*_: object) -> NoReturn:
    sys.exit(143)


def main(argv: Sequence[str]) -> int:
    options = parse(argv)
    known: dict[str, Part] = options.known
    if options.list:
        print(markdown(("part", "limit, s", "about"), [(n, f"{p.limit_s:.0f}", p.about) for n, p in known.items()]))
        return 0
    out: Path = options.out
    out.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, _end)
    begun = time.monotonic()
    done: list[Done] = []
    for name in options.parts:
        left = options.budget_s - (time.monotonic() - begun) if options.budget_s else known[name].limit_s
        limit_s = min(left, known[name].limit_s)
        if limit_s <= LEAST_S:
            done.append(Done(name, "no time left", 0.0))
            continue
        started = time.monotonic()
        try:
            done.append(run_part(name, known[name], out, limit_s))
        except SystemExit:
            write(out, [*done, Done(name, "told to end", time.monotonic() - started)], options.pack)
            raise
        print(f"\n══ {name}\n{tables_of(name, out)}", flush=True)
        write(out, done, options.pack)
    summary = write(out, done, options.pack)
    print(f"\n{summary}\n\n{describe()}\nwritten to {options.pack or out}", flush=True)
    return 1 if any(d.status != "well" for d in done) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
