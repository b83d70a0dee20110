"""Rows that were planned before the outcome of the step ahead of them was known, settled on the device that has it.

host = pack_open_rows([OpenRow(…), …])          numpy → one buffer of words settle_open_rows(words, num_rows, inputs)
writes first tokens, positions, lengths, slots and proposals where the step reads them

The step ahead verified tokens of the same sequences. A row begins behind those that equal what was sampled, with the sample
that came next; and verifies what was proposed for that outcome, if anything was. What was proposed for no outcome that came
true is zeros: those samples are dropped by whoever planned the row, who finds the same outcome in the same samples.

A row may take its proposal from the board instead (`engine/board.py`): of the lines that go on as the step ahead did, from the
one that has most tokens behind that. What it took is reported.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from common.ops.backend import on_device
from common.ops.sampling.board_layout import LINE_TOKENS, LINES
from common.ops.sampling.open_row_inputs import HEADER, MAX_VERIFIED, StepInputs


class OpenRow(NamedTuple):
    """row: its index in the step. first, length: of its tokens; sample: the index of the first one's draw. start: position of
    the first token if nothing is accepted. feed: index of the samples of the step ahead that its row there begins with.

    verified: what was proposed there. outcomes: (accepted, token, proposal), of which the first that came true counts. slot: if
    not negative, what was proposed there is in `StepInputs.proposals`, and `verified` is empty. posted: if not negative, the
    row's proposal is what is on the board there, in place of `outcomes`, and goes to slot `keep` for the next step.
    """

    row: int
    first: int
    length: int
    sample: int
    start: int
    feed: int
    verified: Sequence[int]
    outcomes: Sequence[tuple[int, int, Sequence[int]]]
    slot: int = -1
    posted: int = -1
    keep: int = 0


def pack_open_rows(rows: Sequence[OpenRow]) -> NDArray[np.int32]:
    """A header for each row, then their lists: what is verified; of each outcome what is accepted, the token and the length of
    its proposal; the proposals, each as long as the row has room for.

    :raises ValueError: for lists that are too long.
    """
    headers: list[int] = []
    lists: list[int] = []
    for one in rows:
        room = one.length - 1
        if max(len(one.verified), len(one.outcomes), one.length) > MAX_VERIFIED:
            raise ValueError(f"a row verifies at most {MAX_VERIFIED} tokens, and foresees so many outcomes")
        begin = HEADER * len(rows) + len(lists)
        numbers = len(one.verified), len(one.outcomes)
        headers += one.row, one.first, one.length, one.sample, one.start, one.feed, *numbers, begin, *one[-3:]
        lists += one.verified
        if not one.outcomes:
            continue
        if any(len(proposal) > room for _, _, proposal in one.outcomes):
            raise ValueError(f"a proposal has no place in a row of {one.length} tokens")
        lists += [accepted for accepted, _, _ in one.outcomes]
        lists += [token for _, token, _ in one.outcomes]
        lists += [len(proposal) for _, _, proposal in one.outcomes]
        for _, _, proposal in one.outcomes:
            lists += [*proposal, *[0] * (room - len(proposal))]
    return np.array(headers + lists, np.int32)


def settle_open_rows(words: torch.Tensor, num_rows: int, inputs: StepInputs) -> None:
    """words: int32, of `pack_open_rows`, where `inputs` are. Writes to `inputs`; waits for nothing."""
    if on_device(words):
        from common.ops.sampling.open_rows_triton import settle_open_rows_triton

        settle_open_rows_triton(words, num_rows, inputs)
    else:
        settle_open_rows_reference(words, num_rows, inputs)


def settle_open_rows_reference(words: torch.Tensor, num_rows: int, inputs: StepInputs) -> None:
    """As `settle_open_rows`."""
    given: list[int] = words.tolist()
    for index in range(num_rows):
        row, first, length, sample, start, feed, num_verified, num_outcomes, at, slot, posted, keep = given[
            index * (HEADER) : (index + 1) * (HEADER)
        ]
        verified = given[at : at + num_verified]
        at += num_verified
        if slot >= 0:
            verified = inputs.proposals[slot, : int(inputs.num_proposed[slot])].tolist()
            num_verified = len(verified)
        sampled = inputs.sampled[feed : feed + num_verified + 1].tolist()
        accepted = next((i for i, token in enumerate(verified) if token != sampled[i]), num_verified)
        outcomes = [given[at + part * num_outcomes : at + (part + 1) * num_outcomes] for part in range(3)]
        proposal = [0] * (length - 1)
        for outcome, (wanted, token, _) in enumerate(zip(*outcomes, strict=True)):
            if (wanted, token) == (accepted, sampled[accepted]):
                begin = at + 3 * num_outcomes + outcome * (length - 1)
                proposal = given[begin : begin + length - 1]
                break
        if posted >= 0:
            proposal = _take(inputs, posted, keep, start, sampled[: accepted + 1], length - 1)
        span, begin = slice(first, first + length), start + accepted
        place = torch.arange(begin, begin + length, device=inputs.positions.device)
        inputs.tokens[span] = torch.tensor([sampled[accepted], *proposal], device=inputs.tokens.device)
        inputs.feeds[first] = -1
        inputs.positions[span] = place
        inputs.draws[sample : sample + length] = place + 1
        inputs.context_lens[row] = begin + length
        for slots, starts in zip(inputs.slots, inputs.block_starts, strict=True):
            blocks = inputs.block_ids[int(starts[row]) + place // inputs.block_tokens].long()
            slots[span] = blocks * inputs.block_tokens + place % inputs.block_tokens


def _take(inputs: StepInputs, posted: int, keep: int, start: int, came: list[int], room: int) -> list[int]:
    """Return what a row verifies of what is on the board, with zeros behind it, and report it."""
    words: list[int] = inputs.board[posted].tolist()
    behind: list[int] = []
    is_cut = False
    for number, length in enumerate(words[1 : 1 + LINES]):
        begin = 1 + LINES + number * LINE_TOKENS
        line = words[begin : begin + abs(length)]
        if words[0] != start or line[: len(came)] != came:
            continue
        is_cut |= length < 0
        if len(line) - len(came) > len(behind):
            behind = line[len(came) :]
    taken = behind[:room]
    inputs.proposals[keep, : len(taken)] = torch.tensor(taken, dtype=torch.int32)
    inputs.num_proposed[keep] = len(taken)
    report = [len(taken), len(behind), int(is_cut), *behind]
    inputs.taken[posted, : len(report)] = torch.tensor(report, dtype=torch.int32)
    return [*taken, *[0] * (room - len(taken))]
