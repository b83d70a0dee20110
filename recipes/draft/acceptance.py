"""Acceptance by position: how many of the tokens that a proposer guesses in a row are those that the target wrote.

The target's answers are on disk with their seeds, and a proposal is accepted where it equals the answer's token
(docs/decisions/0002-a-token-is-a-pure-function.md), so no target is run. A draft model proposes
`argmax(logits / T + G(seed, position, id))` with the noise that the target's token was drawn with, and is fed its own
proposals.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from common.ops.sampling.gumbel_reference import MASK32, philox_reference
from common.protocol.errors import ConfigError
from recipes.draft.draft_model import DraftModel
from recipes.draft.samples import Sample
from services.draft.ngram import NgramIndex

MAX_PROPOSED = 8


@dataclass(frozen=True, slots=True)
class Start:
    """Where proposals begin: `context` tokens of the sample are known."""

    sample: Sample
    context: int


Proposer = Callable[[Sequence[Start], int], NDArray[np.int64]]
"""(starts, K) → the target's ids, [starts, K]; -1 where nothing is proposed."""


def starts_of(samples: Sequence[Sample], per_sample: int, max_length: int, seed: int = 0) -> list[Start]:
    """Return up to `per_sample` places in each answer, behind its first token, with `MAX_PROPOSED` tokens of the answer to
    come.

    :raises ConfigError: if no answer is long enough.
    """
    generator = random.Random(seed)
    found: list[Start] = []
    for sample in samples:
        places = range(sample.prompt_length + 1, min(len(sample.tokens), max_length) - MAX_PROPOSED + 1)
        found += [Start(sample, place) for place in sorted(generator.sample(places, min(per_sample, len(places))))]
    if not found:
        raise ConfigError(f"no held-out answer has {MAX_PROPOSED + 1} tokens")
    return found


def survival(starts: Sequence[Start], propose: Proposer, num_proposed: int = MAX_PROPOSED) -> list[float]:
    """Return for k = 1 to `num_proposed` the share of starts at which the first k proposals are all accepted."""
    proposed = propose(starts, num_proposed)
    written = np.stack([start.sample.tokens[start.context : start.context + num_proposed] for start in starts])
    return np.logical_and.accumulate(proposed == written, axis=1).mean(0).tolist()


def mean_accepted(survived: Sequence[float], num_proposed: int) -> float:
    """Return the mean number of accepted tokens of `num_proposed` proposals; the target's own token is not counted."""
    return float(sum(survived[:num_proposed]))


def by_temperature(starts: Sequence[Start]) -> dict[float, list[Start]]:
    found: dict[float, list[Start]] = {}
    for start in starts:
        found.setdefault(round(start.sample.temperature, 3), []).append(start)
    return dict(sorted(found.items()))


def draft_proposer(draft: DraftModel, batch_size: int = 64) -> Proposer:
    """Propose with a draft model; every step computes the whole sequence again, which needs no cache."""

    @torch.no_grad()
    def propose(starts: Sequence[Start], num_proposed: int) -> NDArray[np.int64]:
        # of similar length together
        order = sorted(range(len(starts)), key=lambda index: (starts[index].context, index))
        proposed = np.empty((len(starts), num_proposed), np.int64)
        for begin in range(0, len(order), batch_size):
            chosen = order[begin : begin + batch_size]
            proposed[chosen] = _roll_out(draft, [starts[index] for index in chosen], num_proposed)
        return proposed

    return propose


def _roll_out(draft: DraftModel, starts: Sequence[Start], num_proposed: int) -> NDArray[np.int64]:
    """Propose token by token; a sequence ends with its first proposal that is rejected, since later ones can't be accepted."""
    device = draft.ids.device
    proposed = np.full((len(starts), num_proposed), -1, np.int64)
    alive = list(range(len(starts)))
    for step in range(num_proposed):
        lengths = torch.tensor([starts[row].context + step for row in alive], device=device)
        known = torch.zeros(len(alive), int(lengths.max()), dtype=torch.int64)
        for index, row in enumerate(alive):
            # proposals up to here were accepted: they are the answer's tokens
            end = starts[row].context + step
            known[index, :end] = torch.from_numpy(starts[row].sample.tokens[:end].astype(np.int64))
        rows = torch.arange(len(alive), device=device)
        hidden = draft.hidden(known.to(device))[rows, lengths - 1]
        seeds = torch.tensor([starts[row].sample.seed for row in alive], device=device)
        temperatures = torch.tensor([starts[row].sample.temperature for row in alive], device=device)
        choice = coupled_choice(draft.logits(hidden).float(), draft.ids, seeds, lengths, temperatures)
        proposed[alive, step] = draft.ids[choice].cpu().numpy()
        alive = [row for row in alive if proposed[row, step] == starts[row].sample.tokens[starts[row].context + step]]
        if not alive:
            break
    return proposed


def coupled_choice(
    logits: torch.Tensor, ids: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor, temperatures: torch.Tensor
) -> torch.Tensor:
    """Return the draft id that each row proposes, int64 [rows]; rows with temperature 0 are greedy.

    logits: float32 [rows, draft_vocab]; ids: int64 [draft_vocab], the target's; seeds, positions: int64 [rows];
    temperatures: float32 [rows].
    """
    scores = logits.clone()
    sampled = temperatures > 0
    if bool(sampled.any()):
        noise = gumbel_rows(seeds[sampled], positions[sampled], ids)
        scores[sampled] = logits[sampled] / temperatures[sampled, None] + noise
    return scores.argmax(-1)


def gumbel_rows(seeds: torch.Tensor, positions: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Return `gumbel_noise` of each row: seeds, positions: int64 [rows]; tokens: int64 [n]; result: float32 [rows, n]."""
    zero = torch.zeros(len(seeds), len(tokens), dtype=torch.int64, device=tokens.device)
    counter = [zero + (tokens >> 2), zero + positions[:, None], zero, zero]
    key = (seeds[:, None] & MASK32, seeds[:, None] >> 32 & MASK32)
    # a key for each row: the integer arithmetic broadcasts
    lanes = philox_reference(counter, cast(Any, key))
    words = torch.stack(lanes).gather(0, (zero + (tokens & 3))[None])[0]
    uniform = (words.double() + 0.5) * 2.0**-32
    return (-torch.log(-torch.log(uniform))).float()


def ngram_proposer(min_match: int = 2, max_match: int = 8) -> Proposer:
    """Propose what followed the last tokens before, as Penstock's n-gram drafter does."""

    def propose(starts: Sequence[Start], num_proposed: int) -> NDArray[np.int64]:
        proposed = np.full((len(starts), num_proposed), -1, np.int64)
        for row, start in enumerate(starts):
            index = NgramIndex(min_match=min_match, max_match=max_match, max_tokens=1 << 20)
            index.extend(start.sample.tokens[: start.context].tolist())
            guess = index.propose(num_proposed)
            proposed[row, : len(guess)] = guess
        return proposed

    return propose
