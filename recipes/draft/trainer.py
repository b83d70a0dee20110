"""What every training run of this recipe shares: the optimiser, the schedule, checkpoints, and the loop that reports.

The learning rate warms up and then falls along a cosine over `steps`; with `steps` 0 their number is what fits into the time,
at the speed measured so far. With a given number of steps a run is a function of its settings, seed and data.
"""

from __future__ import annotations

import argparse
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from zipfile import is_zipfile

import msgspec
import torch
from torch import nn

from common.protocol.errors import ConfigError
from recipes.draft.acceptance import Proposer, Start, survival
from recipes.draft.samples import Batch, Sample, batches, collate
from recipes.draft.target import Target

CHECKPOINT = "checkpoint.pt"
"""The file of a draft model's run."""


class RunSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What a run is a function of, beside its data and what it trains.

    steps: 0 for as many as fit into `schedule_minutes` of training, over all calls (0: into this call); batch_tokens: of a
    step, with padding; max_length: of a sequence, in tokens; muon: matrices are trained with Muon (Jordan et al., 2024) instead
    of AdamW.
    """

    steps: int = 0
    schedule_minutes: float = 0.0
    warmup: int = 100
    batch_tokens: int = 16_384
    max_length: int = 832
    learning_rate: float = 0.012
    weight_decay: float = 0.01
    max_grad_norm: float = 1.0
    muon: int = 1
    seed: int = 0


class Progress(msgspec.Struct):
    """Where a run stands. total: steps of the schedule; 0 while it is not known. seconds: of training, over all calls."""

    step: int = 0
    epoch: int = 0
    batch: int = 0
    total: int = 0
    seconds: float = 0.0


class BaseTrainer(ABC):
    """One run: what is trained, its optimiser and where it stands."""

    def __init__(
        self, target: Target, ids: torch.Tensor, samples: Sequence[Sample], settings: RunSettings, trained: nn.Module
    ) -> None:
        """ids: int64, the draft vocabulary. :raises ConfigError: if a setting doesn't fit."""
        if settings.batch_tokens < 1 or settings.max_length < 2 or settings.warmup < 1 or settings.steps < 0:
            raise ConfigError("batch_tokens and warmup must be at least 1, max_length at least 2, steps at least 0")
        self.samples = [sample for sample in samples if sample.prompt_length < min(len(sample.tokens), settings.max_length)]
        if not self.samples:
            raise ConfigError(f"no sample has an answer within {settings.max_length} tokens")
        self.target, self.ids, self.trained, self._settings = target, ids, trained, settings
        self.device = target.embedding.device
        matrices = [parameter for parameter in trained.parameters() if parameter.ndim > 1]
        norms = [parameter for parameter in trained.parameters() if parameter.ndim <= 1]
        decay, rate = settings.weight_decay, settings.learning_rate
        groups = [{"params": norms, "weight_decay": 0.0}]
        if not settings.muon:
            groups.append({"params": matrices, "weight_decay": decay})
        self.optimisers: list[torch.optim.Optimizer] = [
            torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95), fused=self.device.type == "cuda")
        ]
        if settings.muon:
            muon = torch.optim.Muon(matrices, lr=rate, weight_decay=decay, adjust_lr_fn="match_rms_adamw")
            self.optimisers.append(muon)
        self.progress = Progress(total=settings.steps)

    @abstractmethod
    def losses(self, batch: Batch) -> dict[str, torch.Tensor]:
        """batch: on the CPU. Returns scalars; "loss" is what is minimised."""

    @property
    def done(self) -> bool:
        return bool(self.progress.total) and self.progress.step >= self.progress.total

    def learning_rate(self) -> float:
        """Of the next step: linear up to the end of warming up, then along a cosine to a twentieth."""
        settings, progress = self._settings, self.progress
        if progress.step < settings.warmup:
            return settings.learning_rate * (progress.step + 1) / settings.warmup
        share = (progress.step - settings.warmup) / max(1, progress.total - settings.warmup)
        return settings.learning_rate * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * min(1.0, share))))

    def train_batch(self, batch: Batch) -> dict[str, torch.Tensor | float]:
        """Take one step. Returns its losses, still on the device so that nothing waits for it, and its learning rate."""
        rate = self.learning_rate()
        for optimiser in self.optimisers:
            for group in optimiser.param_groups:
                group["lr"] = rate
        found = self.losses(batch)
        self.trained.zero_grad(set_to_none=True)
        found["loss"].backward()
        nn.utils.clip_grad_norm_(self.trained.parameters(), self._settings.max_grad_norm)
        for optimiser in self.optimisers:
            optimiser.step()
        return {**{name: value.detach() for name, value in found.items()}, "learning_rate": rate}

    def run(self, deadline_s: float) -> Iterator[dict[str, torch.Tensor | float]]:
        """Train until the schedule ends or `time.monotonic()` passes `deadline_s`; yields the losses of each step."""
        begun, before = time.monotonic(), self.progress.seconds
        progress, settings = self.progress, self._settings
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
                if not settings.steps and progress.step >= settings.warmup and progress.step > timed_from[0]:
                    # again at each step: what evaluating takes is in the time, and the schedule ends when the time does
                    seconds_per_step = (now - timed_from[1]) / (progress.step - timed_from[0])
                    whole_s = 60 * settings.schedule_minutes
                    left_s = min(deadline_s - now, whole_s - progress.seconds if whole_s else math.inf)
                    progress.total = progress.step + max(1, int(0.99 * left_s / seconds_per_step))
                yield found
            progress.epoch, progress.batch = progress.epoch + 1, 0

    def save(self, path: Path) -> None:
        """Write the checkpoint under another name first, so that the one on disk is always whole."""
        state = {
            "settings": msgspec.to_builtins(self._settings),
            "progress": msgspec.to_builtins(self.progress),
            "target": {"name": self.target.name, "revision": self.target.revision},
            "ids": self.ids.cpu(),
            "model": self.trained.state_dict(),
            "optimisers": [optimiser.state_dict() for optimiser in self.optimisers],
        }
        partial = path.with_suffix(".partial")
        torch.save(state, partial)
        partial.replace(path)

    def load(self, path: Path) -> None:
        """Go on from a checkpoint. :raises ConfigError: if it is of a run with other settings, ids or target."""
        state = read_checkpoint(path, self.device)
        if state["settings"] != msgspec.to_builtins(self._settings):
            raise ConfigError(f"{path} is of a run with other settings: {state['settings']}")
        if state["target"] != {"name": self.target.name, "revision": self.target.revision}:
            raise ConfigError(f"{path} is of another target: {state['target']}")
        if not torch.equal(state["ids"].to(self.device), self.ids):
            raise ConfigError(f"{path} is of another draft vocabulary")
        self.trained.load_state_dict(state["model"])
        for optimiser, of_optimiser in zip(self.optimisers, state["optimisers"], strict=True):
            optimiser.load_state_dict(of_optimiser)
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


def add_arguments(parser: argparse.ArgumentParser, defaults: RunSettings) -> None:
    """Add the flags that `train` reads, and one for each setting."""
    parser.add_argument("--device", default="auto")
    parser.add_argument("--minutes", type=float, default=9.0, help="of this call, loading included (default: %(default)s)")
    parser.add_argument(
        "--start", type=Path, default=None, help="an exported folder to begin with instead of the target's layers"
    )
    parser.add_argument("--report-every", type=int, default=100, help="steps (default: %(default)s)")
    parser.add_argument("--evaluate-every-s", type=float, default=30.0, help="seconds (default: %(default)s)")
    parser.add_argument("--places", type=int, default=4, help="of each held-out answer, when evaluating (default: %(default)s)")
    parser.add_argument("--save-every-s", type=float, default=60.0, help="seconds (default: %(default)s)")
    for name in defaults.__struct_fields__:
        value = getattr(defaults, name)
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value, help="(default: %(default)s)")


class Paths(msgspec.Struct, frozen=True):
    """Where a run's checkpoint and log are."""

    checkpoint: Path
    log: Path


def train(
    trainer: BaseTrainer,
    paths: Paths,
    starts: Mapping[float, Sequence[Start]],
    propose: Proposer,
    arguments: argparse.Namespace,
    deadline_s: float,
    evaluated: Callable[[Mapping[float, list[float]]], None] = lambda survived: None,
) -> None:
    """Go on from the checkpoint, if there is one, until `deadline_s`; log and print losses and held-out acceptance.

    evaluated: is called with what `survival` says for each temperature, at the beginning, now and then, and at the end.
    """
    if paths.checkpoint.exists():
        trainer.load(paths.checkpoint)
    with paths.log.open("a") as log:

        def report(**values: object) -> None:
            line = {**msgspec.to_builtins(trainer.progress), **values}
            log.write(msgspec.json.encode(line).decode() + "\n")
            log.flush()
            print(line, flush=True)

        def evaluate() -> float:
            survived = {temperature: survival(some, propose, 4) for temperature, some in starts.items()}
            report(survival={str(temperature): [round(x, 4) for x in values] for temperature, values in survived.items()})
            evaluated(survived)
            return time.monotonic()

        evaluated_s = saved_s = evaluate()
        for losses in trainer.run(deadline_s):
            if trainer.progress.step % arguments.report_every == 0:
                report(**{name: float(value) for name, value in losses.items()})
            if time.monotonic() - saved_s > arguments.save_every_s:
                trainer.save(paths.checkpoint)
                saved_s = time.monotonic()
            if time.monotonic() - evaluated_s > arguments.evaluate_every_s:
                evaluated_s = evaluate()
        trainer.save(paths.checkpoint)
        evaluate()
