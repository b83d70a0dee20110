"""From logits and `SamplingParams` to tokens: what `ops.sampling.sample` draws, after penalties, biases and minimum lengths.

The order is penalties, logit bias, `min_tokens`, the constraint's mask; then temperature, min-p, top-k, top-p (see
`ops.sampling.sample`). Log-probabilities are those of the untouched logits. A token depends on its logits, its
request's parameters and its position, and on nothing else: not on the batch, and not on whether it was guessed before.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from common.engine.masks import allowed_tokens, fill_masks
from common.engine.plan import NO_TOKEN, RowSamples, StepRow
from common.ops.sampling.host_loops import Floats
from common.ops.sampling.logprobs import top_logprobs
from common.ops.sampling.penalties import apply_penalties
from common.ops.sampling.sample import Draw, sample_token
from common.protocol.messages import SamplingParams, TokenLogprobs


def sample_rows(logits: torch.Tensor, rows: Sequence[StepRow]) -> list[RowSamples]:
    """logits: float32 [samples, vocab] on the CPU, the samples of all rows one after the other; left as they are. Samples whose
    logits are not all finite are `NO_TOKEN`.

    Rows that are `penalised` bring their history, constrained ones their output. Samples of a row behind the first that differs
    from the proposed token are not drawn, since verification drops them.
    """
    values, masks = logits.numpy(), fill_masks(rows, logits.shape[1])
    words = {} if masks is None else dict(zip(masks.samples.tolist(), masks.words, strict=True))
    results: list[RowSamples] = []
    at = 0
    for row in rows:
        guessed = [*row.tokens[len(row.tokens) - row.num_samples + 1 :], NO_TOKEN]
        tokens: list[int] = []
        for place, guess in zip(range(row.num_samples), guessed, strict=False):
            tokens.append(_sampled(values[at + place], row, place, words.get(at + place)))
            if tokens[-1] != guess:
                break
        logprobs = None
        if row.sampling.logprobs >= 0:
            logprobs = [_scores(logits[at + place], token, row.sampling.logprobs) for place, token in enumerate(tokens)]
        results.append(RowSamples(tokens=tokens + [NO_TOKEN] * (row.num_samples - len(tokens)), logprobs=logprobs))
        at += row.num_samples
    return results


def _sampled(values: Floats, row: StepRow, place: int, words: NDArray[np.int32] | None) -> int:
    """Return the sample of a row with index `place` among its samples. values: float32 [vocab], its logits; words: its mask, if
    the row is constrained."""
    if not np.isfinite(values).all():
        return NO_TOKEN
    params = row.sampling
    end = row.start + len(row.tokens) - row.num_samples + place + 1  # position of the token to be drawn
    adjusts = _adjusts(row, end - row.prompt_tokens)
    if adjusts or words is not None:
        values = values.copy()
    if adjusts:
        _adjust(values, row, end)
    if words is not None:
        values[~allowed_tokens(words, len(values))] = -np.inf
    return sample_token(values, Draw(params.temperature, params.top_k, params.top_p, params.min_p, params.seed, end))


def _scores(logits: torch.Tensor, token: int, num_top: int) -> TokenLogprobs:
    if token == NO_TOKEN:  # logits that are not finite have no log-probabilities; these are never read
        logits, token = torch.zeros_like(logits), 0
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


def _adjust(values: Floats, row: StepRow, end: int) -> None:
    """Change the logits for the token at position `end`; proposed tokens before it count as output."""
    params = row.sampling
    if penalised(params):
        apply_penalties(
            torch.from_numpy(values),
            row.history[: row.prompt_tokens],
            row.history[row.prompt_tokens : end],
            presence=params.presence_penalty,
            frequency=params.frequency_penalty,
            repetition=params.repetition_penalty,
        )
    biases = {token: bias for token, bias in params.logit_bias.items() if 0 <= token < len(values)}
    if biases:
        values[list(biases)] += np.array(list(biases.values()), np.float32)
    values[[token for token in forbidden_tokens(row, end - row.prompt_tokens) if 0 <= token < len(values)]] = -np.inf
