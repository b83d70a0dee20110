"""A draft model in one sitting at a GPU, in parts that can be run in separate calls.

    python -m recipes.draft.session prepare
    python -m recipes.draft.session OUT --budget-s 590 --parts generate
    python -m recipes.draft.session OUT --budget-s 590 --parts vocabulary train evaluate
    python -m recipes.draft.session OUT --budget-s 590 --parts train evaluate

`prepare` runs where the target is, and writes prompts and the target in pieces to build/recipe: carry that folder along. On
the GPU machine the target is put together again from the pieces. Data and checkpoint stay in build/recipe/data, so a later
call finds what an earlier one left; after every part OUT has what there is so far: the logs, the folder of the draft model,
the checkpoint's weights. `train` goes on from the checkpoint. `--data DIR` starts from what came back from a machine that is
gone.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from bench.common.machine import ROOT
from common.models.source import DEFAULT_MODEL, resolve
from common.protocol.errors import ConfigError
from recipes.draft.train import CHECKPOINT, LOG
from recipes.draft.trainer import read_checkpoint

WORK = ROOT / "build" / "recipe"
PARTS = ("generate", "vocabulary", "train", "evaluate")
PIECE_BYTES = 24 << 20
"""Of a file that is carried."""
OVERHEAD_S = 45.0
"""Kept free in a call for what ends a part: its last shard or checkpoint, and packing."""


def prepare(train: int, held_out: int) -> None:
    """Write prompts and the target's pieces to `WORK`."""
    data = WORK / "data"
    counts = [f"--train={train}", f"--held-out={held_out}"]
    subprocess.run([sys.executable, "-m", "recipes.draft.prompts", str(data), *counts], check=True, cwd=ROOT)
    split(resolve(DEFAULT_MODEL).path, WORK / "target")
    print(f"{WORK}: {sum(path.stat().st_size for path in WORK.rglob('*') if path.is_file()) / 1e6:.0f} MB")


def split(file: Path, folder: Path) -> None:
    """Cut `file` into numbered pieces of `PIECE_BYTES` in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    total = -(-file.stat().st_size // PIECE_BYTES)
    with file.open("rb") as source:
        for number, piece in enumerate(iter(lambda: source.read(PIECE_BYTES), b"")):
            (folder / f"{file.name}.{number:02d}-of-{total:02d}").write_bytes(piece)


def join(folder: Path) -> Path:
    """Put the pieces in `folder` together again, once. :raises ConfigError: if some are missing."""
    pieces = sorted(path for path in folder.glob("*-of-[0-9][0-9]"))
    if not pieces:
        raise ConfigError(f"{folder} has no pieces of a target: run `prepare` where the target is")
    total = int(pieces[0].name[-2:])
    if len(pieces) != total:
        raise ConfigError(f"{folder} has {len(pieces)} of {total} pieces of the target: carry the others, too")
    file = folder / pieces[0].stem
    if not file.exists():
        partial = folder / "joined.partial"
        with partial.open("wb") as whole:
            for piece in pieces:
                whole.write(piece.read_bytes())
        partial.replace(file)
    return file


def commands(part: str, model: str, data: Path, seconds: float, train_minutes: float, layers: int) -> list[list[str]]:
    """Return the modules with their flags that make up a part which has so many seconds."""
    minutes = f"--minutes={max(0.2, (seconds - OVERHEAD_S) / 60):.2f}"
    target = f"--model={model}"
    if part == "generate":
        return [["recipes.draft.generate", str(data), target, minutes]]
    if part == "vocabulary":
        return [["recipes.draft.vocabulary", str(data), target]]
    if part == "train":
        schedule = f"--schedule-minutes={train_minutes}"
        return [["recipes.draft.train", str(data), target, minutes, schedule, f"--layers={layers}"]]
    return [
        ["recipes.draft.export", str(data), str(data / "model"), target],
        ["recipes.draft.evaluate", str(data), str(data / "model"), target, "--card"],
    ]


def pack(data: Path, out: Path) -> None:
    """Copy what is worth keeping, below 60 MB: shards until there is a checkpoint, then that and the draft model.

    The checkpoint's optimiser state is rounded to bf16, which halves the file; a run that is continued from it is close to,
    but not equal to, one without a break.
    """
    out.mkdir(parents=True, exist_ok=True)
    small = [data / LOG, data / "vocabulary.npy", *data.glob("held_out*")]
    trained = (data / CHECKPOINT).exists()
    for path in small if trained else [*small, *data.glob("train-*.npz")]:
        if path.exists() and not path.name.endswith(".partial.npz"):
            shutil.copy2(path, out / path.name)
    if trained:
        for path in out.glob("train-*.npz"):
            path.unlink()
        state = read_checkpoint(data / CHECKPOINT, torch.device("cpu"))
        for moments in state["optimiser"]["state"].values():
            for name in ("exp_avg", "exp_avg_sq"):
                moments[name] = moments[name].to(torch.bfloat16)
        torch.save(state, out / CHECKPOINT)
    if (data / "model").is_dir():
        shutil.copytree(data / "model", out / "model", dirs_exist_ok=True)


def run(parts: Sequence[str], out: Path, data: Path, model: str, budget_s: float, train_minutes: float, layers: int) -> int:
    """Run the parts in order within `budget_s`; returns the first exit status that is not 0. `pack` runs after every part."""
    deadline_s = time.monotonic() + budget_s
    for part in parts:
        # the parts behind it are short unless they are named so
        left_s = deadline_s - time.monotonic() - (60 if "evaluate" in parts and part == "train" else 0)
        for module, *flags in commands(part, model, data, left_s, train_minutes, layers):
            begun = time.monotonic()
            try:
                ended = subprocess.run(
                    [sys.executable, "-m", module, *flags], cwd=ROOT, timeout=max(10.0, deadline_s - begun), check=False
                )
                status = ended.returncode
            except subprocess.TimeoutExpired:
                status = 124
            print(f"{module}: status {status} after {time.monotonic() - begun:.0f} s", flush=True)
            pack(data, out)
            if status:
                return status
    return 0


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="recipes.draft.session", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", help="where results go, or `prepare`")
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS)
    parser.add_argument("--budget-s", type=float, default=590.0, help="of this call (default: %(default)s)")
    parser.add_argument("--train-minutes", type=float, default=8.0, help="of training, over all calls (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=2, help="of the draft model (default: %(default)s)")
    parser.add_argument("--data", type=Path, default=WORK / "data", help="prompts, shards, checkpoint (default: %(default)s)")
    parser.add_argument("--model", default="", help="the target (default: the one that was carried)")
    parser.add_argument("--train", type=int, default=24_000, help="prompts to prepare (default: %(default)s)")
    parser.add_argument("--held-out", type=int, default=400, help="prompts to prepare (default: %(default)s)")
    arguments = parser.parse_args()
    try:
        if arguments.out == "prepare":
            prepare(arguments.train, arguments.held_out)
            return
        model = arguments.model or str(join(WORK / "target"))
    except ConfigError as error:
        raise SystemExit(str(error)) from error
    status = run(
        arguments.parts,
        Path(arguments.out),
        arguments.data,
        model,
        arguments.budget_s,
        arguments.train_minutes,
        arguments.layers,
    )
    raise SystemExit(status)


if __name__ == "__main__":
    main()
