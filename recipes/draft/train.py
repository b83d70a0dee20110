"""Trains a draft model on a target's answers: KL to the target's distribution over the draft vocabulary, and cross-entropy to
the tokens that the target wrote.

    python -m recipes.draft.train build/draft --minutes 9

Writes FOLDER/checkpoint.pt as it goes and at the end, and goes on from it when called again; FOLDER/training_log.jsonl has a
line of JSON for each report. See `trainer` for the schedule.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch.nn import functional

from common.models.source import DEFAULT_MODEL, resolve
from common.protocol.errors import ConfigError
from recipes.draft.acceptance import by_temperature, draft_proposer, starts_of
from recipes.draft.draft_model import DraftModel, DraftSize, new_draft
from recipes.draft.export import load_folder
from recipes.draft.samples import Batch, Sample, read_judged, read_samples
from recipes.draft.target import Target, load_target
from recipes.draft.trainer import CHECKPOINT, BaseTrainer, Paths, RunSettings, add_arguments, device_of, dtype_of, train
from recipes.draft.vocabulary import read_ids

LOG = "training_log.jsonl"


class Settings(RunSettings, frozen=True, kw_only=True):
    """chosen_weight: of the cross-entropy to the tokens that the target wrote, beside KL with weight 1."""

    layers: int = 4
    intermediate_size: int = 0
    chosen_weight: float = 0.1


class Trainer(BaseTrainer):
    """A run of a draft model."""

    def __init__(self, target: Target, ids: torch.Tensor, samples: Sequence[Sample], settings: Settings) -> None:
        """:raises ConfigError: if a setting doesn't fit the target."""
        torch.manual_seed(settings.seed)
        self.settings = settings
        size = DraftSize(settings.layers, settings.intermediate_size)
        self.draft: DraftModel = new_draft(target, ids, size).to(target.embedding.device)
        super().__init__(target, self.draft.ids, samples, settings, self.draft.model)
        rows = torch.full((target.shape.vocab_size,), -1, device=self.device)
        self.rows_of = rows.index_copy_(0, self.draft.ids, torch.arange(len(ids), device=self.device))
        """Of the draft model's head, for each of the target's ids; -1: it has none."""

    def begin_with(self, draft: DraftModel) -> None:
        """Take the weights of a draft model that was trained before. :raises ConfigError: if it has another shape."""
        if draft.shape != self.draft.shape:
            raise ConfigError(f"the draft model to begin with has another shape: {draft.shape}")
        self.draft.model.load_state_dict(draft.model.state_dict())

    def losses(self, batch: Batch) -> dict[str, torch.Tensor]:
        """Return mean KL and mean cross-entropy of the answers' positions, float32 scalars."""
        tokens, rows, places = batch.on(self.device)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            with torch.no_grad():
                # only the rows of the target's head that the draft model has: its distribution over the draft vocabulary
                wanted = self.draft.logits(self.target.hidden(tokens)[rows, places].to(self.draft.head.dtype))
            found = self.draft.logits(self.draft.hidden(tokens)[rows, places])
        log_found = functional.log_softmax(found.float(), -1)
        log_wanted = functional.log_softmax(wanted.float(), -1)
        divergence = functional.kl_div(log_found, log_wanted, reduction="batchmean", log_target=True)
        chosen = tokens[rows, places + 1]
        index = self.rows_of[chosen]
        inside = index >= 0
        picked = log_found.gather(1, index.clamp(min=0)[:, None])[:, 0]
        cross_entropy = -(picked * inside).sum() / inside.sum().clamp(min=1)
        loss = divergence + self.settings.chosen_weight * cross_entropy
        return {"loss": loss, "kl": divergence, "cross_entropy": cross_entropy}


def main(argv: Sequence[str] | None = None) -> None:
    defaults = Settings()
    parser = argparse.ArgumentParser(prog="recipes.draft.train", description=__doc__)
    parser.add_argument("folder", type=Path, help="holds the shards and vocabulary.npy; the checkpoint is written there")
    parser.add_argument("--model", default=DEFAULT_MODEL)
    add_arguments(parser, defaults)
    arguments = parser.parse_args(argv)
    deadline_s = time.monotonic() + 60 * arguments.minutes
    folder: Path = arguments.folder
    settings = Settings(**{name: getattr(arguments, name) for name in Settings.__struct_fields__})
    try:
        ids = torch.from_numpy(read_ids(folder / "vocabulary.npy"))
        samples, judged = read_samples(folder, "train"), read_judged(folder)
        starts = by_temperature(starts_of(judged, arguments.places, settings.max_length))
        device = device_of(arguments.device)
        target = load_target(resolve(arguments.model), device, dtype_of(device))
        trainer = Trainer(target, ids, samples, settings)
        if arguments.start is not None:
            trainer.begin_with(load_folder(arguments.start, target))
        paths = Paths(folder / CHECKPOINT, folder / LOG)
        train(trainer, paths, starts, draft_proposer(trainer.draft), arguments, deadline_s)
    except ConfigError as error:
        raise SystemExit(str(error)) from error


if __name__ == "__main__":
    main()
