"""Trains an EAGLE-3-style head on a target's answers, by drafts that are unrolled from every position (training-time test).

    python -m recipes.draft.train_eagle build/draft --minutes 4 --export build/draft/eagle

The loss of each draft step is the cross-entropy to the target's distribution over the draft vocabulary, plus `greedy_weight` of
that to the likeliest of these ids, which is what acceptance at T = 0 is about; step j counts `step_decay`^j.

Writes FOLDER/eagle.pt as it goes and at the end, and goes on from it when called again; FOLDER/eagle_log.jsonl has a line of
JSON for each report. The folder given with --export is written after each evaluation that is the best so far at T = 0.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch.nn import functional

from common.models.source import DEFAULT_MODEL, resolve
from common.protocol.errors import ConfigError
from recipes.draft.acceptance import by_temperature, mean_accepted, starts_of
from recipes.draft.eagle import EagleHead, fit_features, new_head
from recipes.draft.eagle_acceptance import eagle_proposer
from recipes.draft.export_eagle import export_eagle, load_eagle
from recipes.draft.samples import Batch, Sample, collate, read_judged, read_samples
from recipes.draft.target import Target, load_target
from recipes.draft.trainer import BaseTrainer, Paths, RunSettings, add_arguments, device_of, dtype_of, train
from recipes.draft.vocabulary import read_ids

EAGLE_CHECKPOINT = "eagle.pt"
EAGLE_LOG = "eagle_log.jsonl"
JUDGED = 2
"""Positions whose acceptance decides which weights are the best."""


class EagleSettings(RunSettings, frozen=True, kw_only=True):
    """layers: of the head; intermediate_size: of their MLPs; layer_ids: of the target's residuals, "auto" or three numbers with
    commas; unroll: draft steps from every position."""

    layers: int = 2
    intermediate_size: int = 1344
    layer_ids: str = "auto"
    unroll: int = 4
    step_decay: float = 0.8
    greedy_weight: float = 0.1


class EagleTrainer(BaseTrainer):
    """A run of a head."""

    def __init__(self, target: Target, ids: torch.Tensor, samples: Sequence[Sample], settings: EagleSettings) -> None:
        """:raises ConfigError: if a setting doesn't fit the target."""
        torch.manual_seed(settings.seed)
        if settings.unroll < 1:
            raise ConfigError("unroll must be at least 1")
        self.settings = settings
        self.draft: EagleHead = new_head(
            target, ids, settings.intermediate_size, parsed_ids(settings.layer_ids), settings.layers
        )
        super().__init__(target, self.draft.ids, samples, settings, self.draft)
        some = collate(self.samples[:32], settings.max_length)
        residuals, _ = target.states(some.tokens.to(self.device), self.draft.layer_ids)
        inside = torch.arange(some.tokens.shape[1]) < torch.tensor([[len(one.tokens)] for one in self.samples[:32]])
        fit_features(self.draft, residuals[inside.to(self.device)])

    def begin_with(self, head: EagleHead) -> None:
        """Take the weights of a head that was trained before.

        :raises ConfigError: if it has another shape, or reads other layers.
        """
        draft = self.draft
        if (head.shape, head.layer_ids) != (draft.shape, draft.layer_ids):
            raise ConfigError(f"the head to begin with has another shape: {head.shape}, of layers {head.layer_ids}")
        scale = draft.feature_scale.clone()
        with torch.no_grad():
            draft.load_state_dict(head.state_dict())
            # its own scale is within its fc
            draft.fc.weight.mul_(scale / head.feature_scale)
            draft.feature_scale.copy_(scale)

    def losses(self, batch: Batch) -> dict[str, torch.Tensor]:
        """Return the loss, and of the first and the last draft step the cross-entropy and how often its likeliest id is the
        target's."""
        settings, draft = self.settings, self.draft
        # the target's distribution of position p + 1, behind the token whose embedding is read at p
        answers = batch.answers.clone()
        answers[:, 0] = False
        tokens, rows, places = Batch(batch.tokens, answers).on(self.device)
        with torch.no_grad():
            residuals, final = self.target.states(tokens, draft.layer_ids)
            wanted = (final[rows, places].float() @ draft.head.float().T).softmax(-1)
            likeliest = wanted.argmax(-1, keepdim=True)
            wanted = wanted.scatter_add(1, likeliest, torch.full_like(likeliest, settings.greedy_weight, dtype=wanted.dtype))
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            outputs = draft.unroll(residuals, tokens, settings.unroll)
        loss = torch.zeros((), device=self.device)
        figures: dict[str, torch.Tensor] = {}
        for step, output in enumerate(outputs):
            found = functional.log_softmax(draft.logits(output[rows, places - 1]), -1)
            # a draft of so many steps must have begun within the sequence
            counted = (places - 1 >= step).float()
            counted = counted / counted.sum().clamp(min=1)
            cross_entropy = -((wanted * found).sum(-1) * counted).sum()
            loss = loss + settings.step_decay**step * cross_entropy
            if step in (0, settings.unroll - 1):
                figures[f"cross_entropy_{step}"] = cross_entropy
                figures[f"agreed_{step}"] = ((found.argmax(-1) == likeliest[:, 0]) * counted).sum()
        return {"loss": loss, **figures}


def parsed_ids(text: str) -> tuple[int, ...]:
    """:raises ConfigError: if it is neither "auto" (no ids) nor numbers with commas."""
    try:
        return () if text == "auto" else tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise ConfigError(f"layer_ids must be auto or numbers with commas, not {text}") from error


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="recipes.draft.train_eagle", description=__doc__)
    parser.add_argument("folder", type=Path, help="holds the shards and vocabulary.npy; the checkpoint is written there")
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--export", type=Path, default=None, help="the head's folder; none: none is written")
    add_arguments(parser, EagleSettings())
    arguments = parser.parse_args(argv)
    deadline_s = time.monotonic() + 60 * arguments.minutes
    folder: Path = arguments.folder
    settings = EagleSettings(**{name: getattr(arguments, name) for name in EagleSettings.__struct_fields__})
    try:
        ids = torch.from_numpy(read_ids(folder / "vocabulary.npy"))
        samples, judged = read_samples(folder, "train"), read_judged(folder)
        starts = by_temperature(starts_of(judged, arguments.places, settings.max_length))
        device = device_of(arguments.device)
        torch.set_float32_matmul_precision("high")  # of the target's bf16 numbers, TF32 products are exact
        target = load_target(resolve(arguments.model), device, dtype_of(device))
        trainer = EagleTrainer(target, ids, samples, settings)
        if arguments.start is not None:
            trainer.begin_with(load_eagle(arguments.start, target))
        best = -1.0

        def evaluated(survived: Mapping[float, list[float]]) -> None:
            nonlocal best
            score = mean_accepted(next(iter(survived.values())), JUDGED)
            if score > best and trainer.progress.step:
                best = score
                if arguments.export is not None:
                    export_eagle(arguments.export, trainer.draft, target)

        paths = Paths(folder / EAGLE_CHECKPOINT, folder / EAGLE_LOG)
        train(trainer, paths, starts, eagle_proposer(trainer.draft, target), arguments, deadline_s, evaluated)
    except ConfigError as error:
        raise SystemExit(str(error)) from error


if __name__ == "__main__":
    main()
