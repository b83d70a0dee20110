"""Answers that the target wrote, as shards on disk and as batches for training.

A shard is an .npz file: `tokens` (uint32, all samples one after another), `offsets` (int64 [samples + 1]), and per sample
`prompt_lengths` (int32), `seeds` (int64) and `temperatures` (float32): what its answer was sampled with.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from zipfile import BadZipFile

import numpy as np
import torch
from numpy.typing import NDArray

from common.protocol.errors import ConfigError

_PER_SAMPLE = ("prompt_lengths", "seeds", "temperatures")
_SORTED_TOGETHER = 512
"""Samples that are sorted by length before they are cut into batches: little padding, and batches that still differ."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One conversation. tokens: uint32, the prompt and the answer, which begins at index `prompt_length`."""

    tokens: NDArray[np.uint32]
    prompt_length: int
    seed: int
    temperature: float


@dataclass(frozen=True, slots=True)
class Batch:
    """tokens: int64 [batch, tokens], padded with 0 on the right. answers: bool, same shape: the next token is the target's."""

    tokens: torch.Tensor
    answers: torch.Tensor

    def on(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return tokens, and rows and places of the answers, int64 [answers] each, on `device`; the batch is on the CPU.

        From pinned memory, so that the next step is prepared while the last one runs.
        """
        found = (self.tokens, *self.answers.nonzero(as_tuple=True))
        if device.type == "cuda":
            found = tuple(tensor.pin_memory().to(device, non_blocking=True) for tensor in found)
        tokens, rows, places = found
        return tokens, rows, places


def write_shard(path: Path, samples: Sequence[Sample]) -> None:
    """Write the file under another name first, so that a shard on disk is always whole."""
    lengths = [len(sample.tokens) for sample in samples]
    partial = path.with_suffix(".partial.npz")
    np.savez_compressed(
        partial,
        tokens=np.concatenate([sample.tokens for sample in samples]).astype(np.uint32),
        offsets=np.cumsum([0, *lengths], dtype=np.int64),
        prompt_lengths=np.array([sample.prompt_length for sample in samples], np.int32),
        seeds=np.array([sample.seed for sample in samples], np.int64),
        temperatures=np.array([sample.temperature for sample in samples], np.float32),
    )
    partial.replace(path)


def read_shard(path: Path) -> list[Sample]:
    """:raises ConfigError: if the file is damaged."""
    try:
        with path.open("rb") as file, np.load(file) as stored:
            tokens, offsets = stored["tokens"], stored["offsets"]
            prompts, seeds, temperatures = (stored[name] for name in _PER_SAMPLE)
    except (OSError, ValueError, KeyError, EOFError, BadZipFile) as error:
        raise ConfigError(f"{path} is not a shard of samples: {error}") from error
    if not len(offsets) - 1 == len(prompts) == len(seeds) == len(temperatures) or offsets[-1] != len(tokens):
        raise ConfigError(f"{path} is damaged: its arrays disagree about the number of samples")
    return [
        Sample(tokens[begin:end], int(prompt), int(seed), float(temperature))
        for begin, end, prompt, seed, temperature in zip(offsets[:-1], offsets[1:], prompts, seeds, temperatures, strict=True)
    ]


def read_samples(folder: Path, split: str) -> list[Sample]:
    """Return the samples of all shards of `split` ("train" or "held_out"), in order of their numbers.

    :raises ConfigError: if there are none.
    """
    samples = [sample for path in shards(folder, split) for sample in read_shard(path)]
    if not samples:
        raise ConfigError(f"{folder} holds no samples of {split}: run recipes.draft.generate first")
    return samples


def read_judged(folder: Path) -> list[Sample]:
    """Return the samples that a run is judged by as it goes: questions, or, if there are none, held-out ones.

    :raises ConfigError: if there are neither.
    """
    return read_samples(folder, "questions" if shards(folder, "questions") else "held_out")


def shards(folder: Path, split: str) -> list[Path]:
    return sorted(path for path in folder.glob(f"{split}-*.npz") if not path.name.endswith(".partial.npz"))


def shard_path(folder: Path, split: str, number: int) -> Path:
    return folder / f"{split}-{number:05d}.npz"


def batches(samples: Sequence[Sample], batch_tokens: int, max_length: int, seed: int, epoch: int) -> list[list[int]]:
    """Return the indices of each batch of one epoch: of at most `batch_tokens` tokens with padding, but at least one sample.

    A pure function of its arguments, so that a run that is continued sees the batches that it would have seen.
    """
    shuffled = random.Random(f"{seed}/{epoch}")
    order = list(range(len(samples)))
    shuffled.shuffle(order)
    found: list[list[int]] = []
    for begin in range(0, len(order), _SORTED_TOGETHER):
        batch: list[int] = []
        for index in sorted(order[begin : begin + _SORTED_TOGETHER], key=lambda i: (len(samples[i].tokens), i)):
            if batch and min(len(samples[index].tokens), max_length) * (len(batch) + 1) > batch_tokens:
                found.append(batch)
                batch = []
            batch.append(index)
        found.append(batch)
    shuffled.shuffle(found)
    return found


def collate(samples: Iterable[Sample], max_length: int) -> Batch:
    """Pad samples, cut at `max_length` tokens, to one batch."""
    cut = [(torch.from_numpy(sample.tokens[:max_length].astype(np.int64)), sample.prompt_length) for sample in samples]
    longest = max(len(tokens) for tokens, _ in cut)
    padded = torch.zeros(len(cut), longest, dtype=torch.int64)
    answers = torch.zeros(len(cut), longest, dtype=torch.bool)
    for row, (tokens, prompt_length) in enumerate(cut):
        padded[row, : len(tokens)] = tokens
        answers[row, prompt_length - 1 : len(tokens) - 1] = True
    return Batch(padded, answers)
