"""Proposals of an EAGLE-3-style head for `acceptance.survival`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from recipes.draft.acceptance import Proposer, Start, coupled_choice
from recipes.draft.eagle import EagleHead
from recipes.draft.target import Target


def eagle_proposer(head: EagleHead, target: Target, batch_tokens: int = 16_384) -> Proposer:
    """Propose with a head. Drafts of all starts of an answer are unrolled together along the answer's own tokens: a draft
    counts only up to its first token that differs from them, so up to there these are the tokens that it would have read."""

    @torch.no_grad()
    def propose(starts: Sequence[Start], num_proposed: int) -> NDArray[np.int64]:
        proposed = np.full((len(starts), num_proposed), -1, np.int64)
        # places of one sample together, and samples of similar length
        order = sorted(range(len(starts)), key=lambda i: (len(starts[i].sample.tokens), starts[i].sample.seed, i))
        for group in _groups(starts, order, num_proposed, batch_tokens):
            proposed[group] = _unrolled(head, target, [starts[index] for index in group], num_proposed)
        return proposed

    return propose


def _groups(starts: Sequence[Start], order: Sequence[int], num_proposed: int, batch_tokens: int) -> list[list[int]]:
    """Cut `order` where the tokens of the samples, padded, or the scores of the starts would exceed a batch."""
    groups: list[list[int]] = []
    group: list[int] = []
    samples: set[int] = set()
    for index in order:
        samples.add(id(starts[index].sample))
        if group and (len(samples) * len(starts[index].sample.tokens) > batch_tokens or len(group) >= 1024):
            groups.append(group)
            group, samples = [], {id(starts[index].sample)}
        group.append(index)
    return [*groups, group] if group else groups


def _unrolled(head: EagleHead, target: Target, starts: Sequence[Start], num_proposed: int) -> NDArray[np.int64]:
    device = head.ids.device
    ends: dict[int, int] = {}
    for start in starts:
        key = id(start.sample)
        ends[key] = max(ends.get(key, 0), min(start.context + num_proposed, len(start.sample.tokens)))
    row_of = {key: row for row, key in enumerate(ends)}
    tokens = torch.zeros(len(ends), max(ends.values()), dtype=torch.int64)
    for start in starts:
        key = id(start.sample)
        tokens[row_of[key], : ends[key]] = torch.from_numpy(start.sample.tokens[: ends[key]].astype(np.int64))
    tokens = tokens.to(device)
    residuals, _ = target.states(tokens, head.layer_ids)
    outputs = head.unroll(residuals, tokens, num_proposed)
    rows = torch.tensor([row_of[id(start.sample)] for start in starts], device=device)
    contexts = torch.tensor([start.context for start in starts], device=device)
    seeds = torch.tensor([start.sample.seed for start in starts], device=device)
    temperatures = torch.tensor([start.sample.temperature for start in starts], device=device)
    proposed = np.full((len(starts), num_proposed), -1, np.int64)
    alive = np.ones(len(starts), bool)
    for step, output in enumerate(outputs):
        # a draft behind `context` known tokens begins with the features up to position context - 2
        logits = head.logits(output[rows, contexts - 2 + step])
        choice = coupled_choice(logits, head.ids, seeds, contexts + step, temperatures)
        proposed[alive, step] = head.ids[choice].cpu().numpy()[alive]
        written = np.array([start.sample.tokens[start.context + step] for start in starts])
        alive &= proposed[:, step] == written
    return proposed
