"""Prints how many tokens of a draft, and of the n-gram proposer beside it, the target's answers to other prompts accept.

    python -m recipes.draft.evaluate build/draft build/draft/model

Answers to held-out prompts, and to the questions that were written by hand. For each temperature: the share of places at which
the first k proposals are all accepted, for k = 1 to 8, and the mean number of accepted tokens for K proposals. With `--card`
the table goes into the folder's README.md, the model card.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import torch

from bench.common.table import markdown
from common.models.json_files import read_object_if_any
from common.models.source import DEFAULT_MODEL, resolve
from common.protocol.errors import ConfigError
from recipes.draft.acceptance import (
    MAX_PROPOSED,
    Proposer,
    Start,
    by_temperature,
    draft_proposer,
    mean_accepted,
    ngram_proposer,
    starts_of,
    survival,
)
from recipes.draft.card import write_card
from recipes.draft.eagle_acceptance import eagle_proposer
from recipes.draft.export import load_folder
from recipes.draft.export_eagle import ARCHITECTURE, load_eagle
from recipes.draft.samples import read_samples, shards
from recipes.draft.target import Target, load_target
from recipes.draft.train_eagle import EAGLE_CHECKPOINT
from recipes.draft.trainer import CHECKPOINT, device_of, dtype_of, read_checkpoint

PROPOSED = (2, 4, 8)
"""K of the mean accepted length."""
DRAFT_MODEL = "draft model"
UNSEEN = ("held_out", "questions")
"""Prompts that nothing was trained on."""


class Row(msgspec.Struct, frozen=True):
    """What one proposer reaches on one kind of prompts at one temperature; see `survival`."""

    prompts: str
    proposer: str
    temperature: float
    places: int
    survived: list[float]


def measure(prompts: str, starts: Mapping[float, Sequence[Start]], proposers: Mapping[str, Proposer]) -> list[Row]:
    return [
        Row(prompts, name, temperature, len(some), survival(some, propose))
        for temperature, some in starts.items()
        for name, propose in proposers.items()
    ]


def proposer_of(folder: Path, target: Target) -> tuple[str, Proposer]:
    """Return the kind of draft in an exported folder, and its proposer. :raises ConfigError: if it is damaged."""
    if ARCHITECTURE in read_object_if_any(folder / "config.json").get("architectures", ()):
        return "EAGLE-3 head", eagle_proposer(load_eagle(folder, target), target)
    return DRAFT_MODEL, draft_proposer(load_folder(folder, target))


def table_of(rows: Sequence[Row]) -> str:
    """Return a table in Markdown."""
    heads = ["prompts", "proposer", "T", "places"]
    heads += [f"k={position}" for position in range(1, MAX_PROPOSED + 1)] + [f"mean of K={count}" for count in PROPOSED]
    lines = [
        [row.prompts, row.proposer, f"{row.temperature:g}", str(row.places)]
        + [f"{share:.3f}" for share in row.survived]
        + [f"{mean_accepted(row.survived, count):.2f}" for count in PROPOSED]
        for row in rows
    ]
    return markdown(heads, lines)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="recipes.draft.evaluate", description=__doc__)
    parser.add_argument("folder", type=Path, help="holds the shards of held-out prompts and of questions")
    parser.add_argument("draft", type=Path, help="an exported draft model")
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--per-sample", type=int, default=8, help="places in each answer (default: %(default)s)")
    parser.add_argument(
        "--max-length", type=int, default=832, help="tokens of an answer with its prompt (default: %(default)s)"
    )
    parser.add_argument("--card", action="store_true", help="write the model card into the draft model's folder")
    arguments = parser.parse_args(argv)
    try:
        answers = {kind: read_samples(arguments.folder, kind) for kind in UNSEEN if shards(arguments.folder, kind)}
        if not answers:
            raise ConfigError(f"{arguments.folder} holds no answers to {' or '.join(UNSEEN)}: run recipes.draft.write first")
        device = device_of(arguments.device)
        target = load_target(resolve(arguments.model), device, dtype_of(device))
        name, propose = proposer_of(arguments.draft, target)
        rows: list[Row] = []
        for kind, samples in answers.items():
            starts = by_temperature(starts_of(samples, arguments.per_sample, arguments.max_length))
            rows += measure(kind.replace("_", " "), starts, {name: propose, "n-gram": ngram_proposer()})
        table = table_of(rows)
        print(table)
        (arguments.draft / "acceptance.json").write_bytes(msgspec.json.encode(rows))
        if arguments.card:
            checkpoint = CHECKPOINT if name == DRAFT_MODEL else EAGLE_CHECKPOINT
            state = read_checkpoint(arguments.folder / checkpoint, torch.device("cpu"))
            write_card(arguments.draft, arguments.folder, state, table)
    except ConfigError as error:
        raise SystemExit(str(error)) from error


if __name__ == "__main__":
    main()
