"""From logits and `SamplingParams` to tokens: what `ops.sampling.sample` draws, after penalties, biases and minimum lengths.

The order is penalties, logit bias, `min_tokens`, the constraint's mask; then temperature, min-p, top-k, top-p (see
`ops.sampling.sample`). Log-probabilities are those of the untouched logits. A token depends on its logits, its
request's parameters and its position, and on nothing else: not on the batch, and not on whether it was guessed before.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from common.engine.masks import allowed_tokens, fill_masks
from common.engine.plan import NO_TOKEN, RowSamples, StepRow
from common.ops.sampling.logprobs import top_logprobs
from common.ops.sampling.penalties import apply_penalties
from common.ops.sampling.sample import Draw, sample_tokens
from common.protocol.messages import SamplingParams, TokenLogprobs


def sample_rows(logits: torch.Tensor, rows: Sequence[StepRow]) -> list[RowSamples]:
    """logits: float32 [samples, vocab] on the CPU, the samples of all rows one after the other; left as they are. Samples whose
    logits are not all finite are `NO_TOKEN`.

    Rows that are `penalised` bring their history, constrained ones their output.
    """
    draws: list[Draw] = []
    broken = np.flatnonzero(~np.isfinite(logits.numpy()).all(1)).tolist()  # torch's threads would take half a millisecond
    if broken:
        logits = logits.clone()
        logits[broken] = 0.0
    masks = fill_masks(rows, logits.shape[1])
    changed = logits if masks is None else logits.clone()
    for row in rows:
        params = row.sampling
        for sample in range(row.num_samples):
            end = row.start + len(row.tokens) - row.num_samples + sample + 1  # position of the token to be drawn
            if _adjusts(row, end - row.prompt_tokens):
                changed = logits.clone() if changed is logits else changed
                _adjust(changed[len(draws)], row, end)
            draws.append(Draw(params.temperature, params.top_k, params.top_p, params.min_p, params.seed, end))
    if masks is not None:
        for sample, words in zip(masks.samples.tolist(), masks.words, strict=True):
            changed[sample].numpy()[~allowed_tokens(words, logits.shape[1])] = -np.inf
    tokens = sample_tokens(changed, draws)
    for sample in broken:
        tokens[sample] = NO_TOKEN
    results: list[RowSamples] = []
    at = 0
    for row in rows:
        span = range(at, at + row.num_samples)
        logprobs = None
        if row.sampling.logprobs >= 0:
            logprobs = [_scores(logits[i], max(0, tokens[i]), row.sampling.logprobs) for i in span]
        results.append(RowSamples(tokens=[tokens[i] for i in span], logprobs=logprobs))
        at += row.num_samples
    return results


def _scores(logits: torch.Tensor, token: int, num_top: int) -> TokenLogprobs:
    logprob, top_tokens, top = top_logprobs(logits, token, num_top)
    return TokenLogprobs(logprob, tuple(top_tokens), tuple(top))


def _adjusts(row: StepRow, output_index: int) -> bool:
    return bool(row.sampling.logit_bias) or penalised(row.sampling) or bool(forbidden_tokens(row, output_index))


def forbidden_tokens(row: StepRow, output_index: int) -> Sequence[int]:
    """What `min_tokens` forbids at that place of the output; nothing where a constraint says when it ends."""
    params = row.sampling
    return params.stop_token_ids if output_index < params.min_tokens and row.constraint is None else []


def penalised(params: SamplingParams) -> bool:
    """Whether a row's `history` is needed."""
    return params.presence_penalty != 0 or params.frequency_penalty != 0 or params.repetition_penalty != 1


def asks_alike(params: SamplingParams) -> bool:
    """Return whether a row asks for the same in every step, whatever comes of the steps before."""
    return not params.logit_bias and params.min_tokens <= 0 and not penalised(params)


def _adjust(logits: torch.Tensor, row: StepRow, end: int) -> None:
    """Changes `logits` [vocab] for the token at position `end`; proposed tokens before it count as output."""
    params = row.sampling
    if penalised(params):
        apply_penalties(
            logits,
            row.history[: row.prompt_tokens],
            row.history[row.prompt_tokens : end],
            presence=params.presence_penalty,
            frequency=params.frequency_penalty,
            repetition=params.repetition_penalty,
        )
    values = logits.numpy()
    biases = {token: bias for token, bias in params.logit_bias.items() if 0 <= token < len(values)}
    if biases:
        values[list(biases)] += np.array(list(biases.values()), np.float32)
    values[[token for token in forbidden_tokens(row, end - row.prompt_tokens) if 0 <= token < len(values)]] = -np.inf
