"""Drafts for a target in one sitting at a GPU, in parts that can be run in separate calls.

    python -m recipes.draft.session prepare
    python -m recipes.draft.session OUT --parts smoke=25
    python -m recipes.draft.session OUT --parts write=100 vocabulary=10 train-eagle=240 evaluate-eagle=20 train=120 evaluate=30

`prepare` runs where the target is, and writes prompts and the target in pieces to build/recipe: carry that folder along. On
the GPU machine the target is put together again from the pieces. Each part gets the seconds behind its name; all run in one
process, so that torch is loaded once. Data and checkpoints stay in build/recipe/data, so a later call finds what an earlier one
left; after every part OUT has what there is so far, in at most eight files. `train-eagle` and `train` go on from their
checkpoints. `smoke` needs no target: it trains a head for a random one of the same shape.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import time
import traceback
import zipfile
from collections.abc import Sequence
from pathlib import Path

import torch

from bench.common.machine import ROOT
from common.models.source import DEFAULT_MODEL, default_cache_dir, resolve
from common.protocol.errors import ConfigError
from common.text.bundle import load_bundle
from recipes.draft import prompts
from recipes.draft.train import LOG
from recipes.draft.train_eagle import EAGLE_LOG
from recipes.draft.write import SPLITS, encode

WORK = ROOT / "build" / "recipe"
SECONDS = {
    "smoke": 25.0,
    "write": 100.0,
    "generate": 480.0,
    "vocabulary": 10.0,
    "train-eagle": 240.0,
    "evaluate-eagle": 20.0,
    "train": 120.0,
    "evaluate": 30.0,
}
"""Of each part, unless the command line says otherwise."""
DEFAULT_PARTS = [(name, SECONDS[name]) for name in ("write", "vocabulary", "train-eagle", "evaluate-eagle")]
PIECE_BYTES = 24 << 20
"""Of a file that is carried."""
ZIP_BYTES = 15_000_000
"""Of a file that is brought back."""
MAX_DATA_FILES = 4


def prepare(train: int, held_out: int) -> None:
    """Write prompts and the target's pieces to `WORK`."""
    data = WORK / "data"
    prompts.main([str(data), f"--train={train}", f"--held-out={held_out}"])
    files = resolve(DEFAULT_MODEL)
    bundle = load_bundle(files)
    for name in SPLITS:
        encode(data, bundle, name)
    split(files.path, WORK / "target" / files.path.parent.relative_to(default_cache_dir()))
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


def carried_target(folder: Path) -> str:
    """Put the carried target together, where `resolve` finds it by its name: an exported folder names its target.

    :raises ConfigError: if pieces are missing.
    """
    pieces = sorted(folder.rglob("*-of-[0-9][0-9]"))
    join(pieces[0].parent if pieces else folder)
    os.environ["PENSTOCK_HOME"] = str(folder)
    return DEFAULT_MODEL


def commands(part: str, model: str, data: Path, seconds: float, extra: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Return the modules with their flags that make up a part which has so many seconds. extra: further flags."""
    minutes = f"--minutes={max(1.0, seconds) / 60:.3f}"
    target = f"--model={model}"
    eagle, draft = data / "eagle", data / "model"
    return {
        "smoke": [("smoke", [f"--seconds={seconds:.0f}"])],
        "write": [("write", [str(data), target, minutes, *extra])],
        "generate": [("generate", [str(data), target, minutes])],
        "vocabulary": [("vocabulary", [str(data), target])],
        "train-eagle": [("train_eagle", [str(data), target, minutes, f"--export={eagle}", *extra])],
        "evaluate-eagle": [("evaluate", [str(data), str(eagle), target, "--card", "--per-sample=12"])],
        "train": [("train", [str(data), target, minutes, *extra])],
        "evaluate": [
            ("export", [str(data), str(draft), target]),
            ("evaluate", [str(data), str(draft), target, "--card", "--per-sample=2"]),
        ],
    }[part]


def run_module(name: str, flags: Sequence[str]) -> int:
    """Run `main` of a module of this recipe; returns an exit status, and prints why it is not 0."""
    try:
        importlib.import_module(f"recipes.draft.{name}").main(list(flags))
    except SystemExit as ended:
        if ended.code not in (None, 0):
            print(ended.code, file=sys.stderr, flush=True)
            return ended.code if isinstance(ended.code, int) else 1
    except Exception:
        # the parts behind it may still be worth their seconds
        traceback.print_exc()
        return 1
    return 0


def pack(data: Path, out: Path) -> None:
    """Copy what is worth keeping: the exported folders, logs, held-out answers and, as far as they fit, the training shards.

    eagle.zip, model.zip, rest.zip, and data-N.zip, each a little above `ZIP_BYTES` at most.
    """
    out.mkdir(parents=True, exist_ok=True)
    for name in ("eagle", "model"):
        if (data / name).is_dir():
            _zip(out / f"{name}.zip", sorted((data / name).iterdir()), data)
    rest = [data / name for name in (LOG, EAGLE_LOG, "vocabulary.npy")]
    _zip(out / "rest.zip", [*rest, *data.glob("held_out-*.npz"), *data.glob("questions-*.npz")], data)
    groups: list[list[Path]] = [[]]
    for path in sorted(data.glob("train-*.npz")):
        if sum(one.stat().st_size for one in [*groups[-1], path]) > ZIP_BYTES and groups[-1]:
            groups.append([])
        groups[-1].append(path)
    for number, group in enumerate(groups[:MAX_DATA_FILES]):
        if group and not (out / f"data-{number}.zip").exists():
            _zip(out / f"data-{number}.zip", group, data)


def _zip(path: Path, files: Sequence[Path], root: Path) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for file in files:
            if file.exists() and not file.name.endswith((".partial.npz", ".partial")):
                archive.write(file, file.relative_to(root))


def run(parts: Sequence[tuple[str, float]], out: Path, data: Path, model: str, flags: dict[str, list[str]]) -> int:
    """Run the parts in order, each with its seconds; returns the first exit status that is not 0. `pack` runs after each part.

    A part that fails does not stop those that don't need it.
    """
    status = 0
    failed: set[str] = set()
    for part, seconds in parts:
        if failed & set(NEEDS.get(part, ())):
            print(f"{part}: left out", flush=True)
            failed.add(part)
            continue
        for module, arguments in commands(part, model, data, seconds, flags.get(part, [])):
            begun = time.monotonic()
            ended = run_module(module, arguments)
            print(f"== {module}: status {ended} after {time.monotonic() - begun:.0f} s", flush=True)
            if ended:
                failed.add(part)
                status = status or ended
                break
        pack(data, out)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return status


NEEDS = {
    "vocabulary": ("write", "generate"),
    "train-eagle": ("vocabulary",),
    "evaluate-eagle": ("vocabulary",),
    "train": ("vocabulary",),
    "evaluate": ("vocabulary", "train"),
}
"""Parts whose failure leaves nothing for another."""


def parsed_part(text: str) -> tuple[str, float]:
    """:raises argparse.ArgumentTypeError: if it is not a part, or PART=SECONDS."""
    name, _, seconds = text.partition("=")
    if name not in SECONDS:
        raise argparse.ArgumentTypeError(f"no part {name!r}: {', '.join(SECONDS)}")
    try:
        return name, float(seconds) if seconds else SECONDS[name]
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text}: PART=SECONDS") from error


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="recipes.draft.session", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", help="where results go, or `prepare`")
    parser.add_argument("--parts", nargs="+", type=parsed_part, default=DEFAULT_PARTS, metavar="PART[=SECONDS]")
    parser.add_argument("--eagle", default="", help="further flags for train_eagle, in one string")
    parser.add_argument("--draft", default="", help="further flags for train, in one string")
    parser.add_argument("--write", default="", help="further flags for write, in one string")
    parser.add_argument("--data", type=Path, default=WORK / "data", help="prompts, shards, checkpoint (default: %(default)s)")
    parser.add_argument("--model", default="", help="the target (default: the one that was carried)")
    parser.add_argument("--train", type=int, default=36_000, help="prompts to prepare (default: %(default)s)")
    parser.add_argument("--held-out", type=int, default=400, help="prompts to prepare (default: %(default)s)")
    arguments = parser.parse_args()
    try:
        if arguments.out == "prepare":
            prepare(arguments.train, arguments.held_out)
            return
        only_smoke = all(name == "smoke" for name, _ in arguments.parts)
        model = arguments.model or ("" if only_smoke else carried_target(WORK / "target"))
    except ConfigError as error:
        raise SystemExit(str(error)) from error
    flags = {"train-eagle": arguments.eagle.split(), "train": arguments.draft.split(), "write": arguments.write.split()}
    raise SystemExit(run(arguments.parts, Path(arguments.out), arguments.data, model, flags))


if __name__ == "__main__":
    main()
