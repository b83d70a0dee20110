"""Trains a draft model on a target's answers: KL to the target's distribution over the draft vocabulary, and cross-entropy to
the tokens that the target wrote.

    python -m recipes.draft.train build/draft --minutes 9

Writes FOLDER/checkpoint.pt as it goes and at the end, and goes on from it when called again; FOLDER/training_log.jsonl has a
line of JSON for each report. The learning rate warms up and then falls along a cosine over `--steps`; with `--steps 0` the
number of steps is what fits into `--schedule-minutes`, at the speed measured while warming up. A run is a function of its
settings, seed and data.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from zipfile import is_zipfile

import msgspec
import torch
from torch.nn import functional

from common.models.source import DEFAULT_MODEL, resolve
from common.protocol.errors import ConfigError
from recipes.draft.acceptance import by_temperature, draft_proposer, starts_of, survival
from recipes.draft.draft_model import DraftModel, DraftSize, new_draft
from recipes.draft.samples import Batch, Sample, batches, collate, read_samples
from recipes.draft.target import Target, load_target
from recipes.draft.vocabulary import read_ids

CHECKPOINT = "checkpoint.pt"
LOG = "training_log.jsonl"


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """What a run is a function of, beside its data.

    steps: 0 for as many as fit into `schedule_minutes` of training, over all calls (0: into this call); batch_tokens: of a
    step, with padding; max_length: of a sequence, in tokens; chosen_weight: of the cross-entropy to the tokens that the target
    wrote, beside KL with weight 1.
    """

    layers: int = 2
    intermediate_size: int = 0
    steps: int = 0
    schedule_minutes: float = 0.0
    warmup: int = 100
    batch_tokens: int = 16_384
    max_length: int = 832
    learning_rate: float = 1e-3
    weight_decay: float = 0.01
    chosen_weight: float = 0.1
    max_grad_norm: float = 1.0
    seed: int = 0


class Progress(msgspec.Struct):
    """Where a run stands. total: steps of the schedule; 0 while it is not known. seconds: of training, over all calls."""

    step: int = 0
    epoch: int = 0
    batch: int = 0
    total: int = 0
    seconds: float = 0.0


class Trainer:
    """One run: the draft model, its optimiser and where it stands."""

    def __init__(self, target: Target, ids: torch.Tensor, samples: Sequence[Sample], settings: Settings) -> None:
        """:raises ConfigError: if a setting doesn't fit the target."""
        if settings.batch_tokens < 1 or settings.max_length < 2 or settings.warmup < 1 or settings.steps < 0:
            raise ConfigError("batch_tokens and warmup must be at least 1, max_length at least 2, steps at least 0")
        self.samples = [sample for sample in samples if sample.prompt_length < min(len(sample.tokens), settings.max_length)]
        if not self.samples:
            raise ConfigError(f"no sample has an answer within {settings.max_length} tokens")
        self.target, self.settings = target, settings
        self.device = target.embedding.device
        torch.manual_seed(settings.seed)
        self.draft: DraftModel = new_draft(target, ids, DraftSize(settings.layers, settings.intermediate_size)).to(self.device)
        matrices = [parameter for parameter in self.draft.parameters() if parameter.ndim > 1]
        norms = [parameter for parameter in self.draft.parameters() if parameter.ndim <= 1]
        groups = [{"params": matrices, "weight_decay": settings.weight_decay}, {"params": norms, "weight_decay": 0.0}]
        self.optimiser = torch.optim.AdamW(groups, lr=settings.learning_rate, betas=(0.9, 0.95))
        self.progress = Progress(total=settings.steps)

    @property
    def done(self) -> bool:
        return bool(self.progress.total) and self.progress.step >= self.progress.total

    def learning_rate(self) -> float:
        """Of the next step: linear up to the end of warming up, then along a cosine to a tenth."""
        settings, progress = self.settings, self.progress
        if progress.step < settings.warmup:
            return settings.learning_rate * (progress.step + 1) / settings.warmup
        share = (progress.step - settings.warmup) / max(1, progress.total - settings.warmup)
        return settings.learning_rate * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * min(1.0, share))))

    def losses(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return mean KL and mean cross-entropy of the answers' positions, float32 scalars."""
        on_gpu = self.device.type == "cuda"
        with torch.autocast(self.device.type, torch.bfloat16, enabled=on_gpu):
            with torch.no_grad():
                # only the rows of the target's head that the draft model has: its distribution over the draft vocabulary
                wanted = self.draft.logits(self.target.hidden(batch.tokens)[batch.answers].to(self.draft.head.dtype))
            found = self.draft.logits(self.draft.hidden(batch.tokens)[batch.answers])
        log_found = functional.log_softmax(found.float(), -1)
        log_wanted = functional.log_softmax(wanted.float(), -1)
        divergence = functional.kl_div(log_found, log_wanted, reduction="batchmean", log_target=True)
        chosen = batch.tokens.roll(-1, 1)[batch.answers]
        index = torch.searchsorted(self.draft.ids, chosen).clamp(max=len(self.draft.ids) - 1)
        inside = self.draft.ids[index] == chosen
        picked = log_found.gather(1, index[:, None])[:, 0]
        return divergence, -(picked * inside).sum() / inside.sum().clamp(min=1)

    def train_batch(self, batch: Batch) -> dict[str, float]:
        """Take one step. Returns its losses and learning rate."""
        rate = self.learning_rate()
        for group in self.optimiser.param_groups:
            group["lr"] = rate
        divergence, chosen = self.losses(batch.to(self.device))
        self.optimiser.zero_grad(set_to_none=True)
        (divergence + self.settings.chosen_weight * chosen).backward()
        torch.nn.utils.clip_grad_norm_(self.draft.parameters(), self.settings.max_grad_norm)
        self.optimiser.step()
        return {"kl": float(divergence.detach()), "cross_entropy": float(chosen.detach()), "learning_rate": rate}

    def run(self, deadline_s: float) -> Iterator[dict[str, float]]:
        """Train until the schedule ends or `time.monotonic()` passes `deadline_s`; yields the losses of each step."""
        begun, before = time.monotonic(), self.progress.seconds
        progress, settings = self.progress, self.settings
        timed_from: tuple[int, float] | None = None
        while not self.done:
            order = batches(self.samples, settings.batch_tokens, settings.max_length, settings.seed, progress.epoch)
            while progress.batch < len(order):
                if self.done or time.monotonic() >= deadline_s:
                    return
                chosen = [self.samples[index] for index in order[progress.batch]]
                found = self.train_batch(collate(chosen, settings.max_length))
                progress.step += 1
                progress.batch += 1
                now = time.monotonic()
                progress.seconds = before + now - begun
                # the first steps of a process are slower than the others
                timed_from = timed_from or (progress.step, now)
                if not progress.total and progress.step >= settings.warmup and progress.step > timed_from[0]:
                    seconds_per_step = (now - timed_from[1]) / (progress.step - timed_from[0])
                    whole_s = 60 * settings.schedule_minutes
                    left_s = whole_s - progress.seconds if whole_s else deadline_s - now
                    progress.total = progress.step + max(1, int(0.97 * left_s / seconds_per_step))
                yield found
            progress.epoch, progress.batch = progress.epoch + 1, 0

    def save(self, path: Path) -> None:
        """Write the checkpoint under another name first, so that the one on disk is always whole."""
        state = {
            "settings": msgspec.to_builtins(self.settings),
            "progress": msgspec.to_builtins(self.progress),
            "target": {"name": self.target.name, "revision": self.target.revision},
            "ids": self.draft.ids.cpu(),
            "model": self.draft.model.state_dict(),
            "optimiser": self.optimiser.state_dict(),
        }
        partial = path.with_suffix(".partial")
        torch.save(state, partial)
        partial.replace(path)

    def load(self, path: Path) -> None:
        """Go on from a checkpoint. :raises ConfigError: if it is of a run with other settings, ids or target."""
        state = read_checkpoint(path, self.device)
        if state["settings"] != msgspec.to_builtins(self.settings):
            raise ConfigError(f"{path} is of a run with other settings: {state['settings']}")
        if state["target"] != {"name": self.target.name, "revision": self.target.revision}:
            raise ConfigError(f"{path} is of another target: {state['target']}")
        if not torch.equal(state["ids"].to(self.device), self.draft.ids):
            raise ConfigError(f"{path} is of another draft vocabulary")
        self.draft.model.load_state_dict(state["model"])
        self.optimiser.load_state_dict(state["optimiser"])
        self.progress = msgspec.convert(state["progress"], Progress)


def read_checkpoint(path: Path, device: torch.device) -> dict[str, Any]:
    """:raises ConfigError: if there is none, or it is damaged."""
    if not is_zipfile(path):
        raise ConfigError(f"{path} is not a checkpoint: it is missing or damaged")
    try:
        return torch.load(path, map_location=device, weights_only=True)
    except (OSError, RuntimeError, ValueError) as error:
        raise ConfigError(f"{path} is not a checkpoint: {error}") from error


def device_of(name: str) -> torch.device:
    return torch.device("cuda" if name == "auto" and torch.cuda.is_available() else "cpu" if name == "auto" else name)


def dtype_of(device: torch.device) -> torch.dtype:
    """What the target computes in: bf16 on a GPU, fp32 on a CPU."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def main() -> None:
    defaults = Settings()
    parser = argparse.ArgumentParser(prog="recipes.draft.train", description=__doc__)
    parser.add_argument("folder", type=Path, help="holds the shards and vocabulary.npy; the checkpoint is written there")
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--minutes", type=float, default=9.0, help="of this call, loading included (default: %(default)s)")
    parser.add_argument("--report-every", type=int, default=100, help="steps (default: %(default)s)")
    parser.add_argument("--evaluate-every", type=int, default=1000, help="steps (default: %(default)s)")
    parser.add_argument("--places", type=int, default=4, help="of each held-out answer, when evaluating (default: %(default)s)")
    parser.add_argument("--save-every-s", type=float, default=60.0, help="seconds (default: %(default)s)")
    for name in Settings.__struct_fields__:
        value = getattr(defaults, name)
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value, help="(default: %(default)s)")
    arguments = parser.parse_args()
    try:
        train(arguments)
    except ConfigError as error:
        raise SystemExit(str(error)) from error


def train(arguments: argparse.Namespace) -> None:
    deadline_s = time.monotonic() + 60 * arguments.minutes
    folder: Path = arguments.folder
    settings = Settings(**{name: getattr(arguments, name) for name in Settings.__struct_fields__})
    ids = torch.from_numpy(read_ids(folder / "vocabulary.npy"))
    samples, held_out = read_samples(folder, "train"), read_samples(folder, "held_out")
    starts = by_temperature(starts_of(held_out, arguments.places, settings.max_length))
    device = device_of(arguments.device)
    trainer = Trainer(load_target(resolve(arguments.model), device, dtype_of(device)), ids, samples, settings)
    if (folder / CHECKPOINT).exists():
        trainer.load(folder / CHECKPOINT)
    with (folder / LOG).open("a") as log:

        def report(**values: object) -> None:
            line = {**msgspec.to_builtins(trainer.progress), **values}
            log.write(msgspec.json.encode(line).decode() + "\n")
            log.flush()
            print(line, flush=True)

        def evaluate() -> None:
            propose = draft_proposer(trainer.draft)
            report(survival={str(temperature): survival(some, propose) for temperature, some in starts.items()})

        evaluate()
        saved_s = time.monotonic()
        for losses in trainer.run(deadline_s):
            if trainer.progress.step % arguments.report_every == 0:
                report(**losses)
            if time.monotonic() - saved_s > arguments.save_every_s:
                trainer.save(folder / CHECKPOINT)
                saved_s = time.monotonic()
            if trainer.progress.step % arguments.evaluate_every == 0:
                evaluate()
        trainer.save(folder / CHECKPOINT)
        evaluate()


if __name__ == "__main__":
    main()
