"""Lookup on the device: texts grow there, and a row's proposal is what followed the last occurrence of its text's end.

extend_texts(texts, words, num_parts)             prompts, in parts, and tokens that the host knows
settle_open_rows(…)                               the step's first tokens and positions
follow_rows(texts, words, num_rows, step)         each row: append what was sampled, search, write the proposal

Nothing is waited for: how many tokens a step gave is read from where settling left the row's position. The host says how many
tokens a match is worth (`depths`), and reads `texts.proposals` and `texts.found` with the step's samples.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from common.ops.backend import on_device
from common.ops.lookup.device_texts import (
    CANDIDATES,
    MAX_MATCH,
    MAX_PROPOSAL,
    MIN_MATCH,
    NONE,
    PART_HEADER,
    ROW_HEADER,
    DeviceTexts,
    FollowedStep,
    bucket_of,
)

DEPTHS = 3 * (MAX_MATCH + 1)
"""Words of a table of depths: for one occurrence, for several before one token, and for several before several; in each by the
length of the match."""


class FollowedRow(NamedTuple):
    """A row of the step that is about to run. first: the index of its first token; behind it are `room` tokens for a proposal.

    feed: the index in `sampled` of the first token that its text lacks; negative: the text lacks none. start: the position of
    the row's first token if the step ahead gives a single one. depths: which table says how much is proposed.
    """

    slot: int
    first: int
    start: int
    feed: int
    room: int
    depths: int = 0


def pack_rows(rows: Sequence[FollowedRow], depths: Sequence[Sequence[int]]) -> NDArray[np.int32]:
    """Return a header for each row, then the tables of depths, `DEPTHS` words each.

    :raises ValueError: for two rows of one text, for more room than `MAX_PROPOSAL` tokens, and for another size of table.
    """
    if len({row.slot for row in rows}) < len(rows):
        raise ValueError("two rows of one text in a step")
    if any(not 0 <= row.room <= MAX_PROPOSAL for row in rows):
        raise ValueError(f"a row proposes at most {MAX_PROPOSAL} tokens")
    if any(len(table) != DEPTHS for table in depths):
        raise ValueError(f"a table of depths has {DEPTHS} words")
    begin = len(rows) * ROW_HEADER
    words: list[int] = []
    for row in rows:
        words += (row.slot, row.first, row.start, row.feed, row.room, begin + row.depths * DEPTHS)
    for table in depths:
        words += table
    return np.array(words, np.int32)


def extend_texts(texts: DeviceTexts, words: torch.Tensor, num_parts: int) -> None:
    """Append tokens to texts. words: int32, of `pack_parts`, where `texts` are."""
    if on_device(words):
        from common.ops.lookup.follow_triton import extend_texts_triton

        extend_texts_triton(texts, words, num_parts)
    else:
        extend_texts_reference(texts, words, num_parts)


def follow_rows(texts: DeviceTexts, words: torch.Tensor, num_rows: int, step: FollowedStep) -> None:
    """Append what was sampled to the rows' texts, and write what may follow into the step. words: int32, of `pack_rows`."""
    if on_device(words):
        from common.ops.lookup.follow_triton import follow_rows_triton

        follow_rows_triton(texts, words, num_rows, step)
    else:
        follow_rows_reference(texts, words, num_rows, step)


def extend_texts_reference(texts: DeviceTexts, words: torch.Tensor, num_parts: int) -> None:
    """As `extend_texts`."""
    given: list[int] = words.tolist()
    for index in range(num_parts):
        slot, is_first, count, begin = given[index * PART_HEADER : (index + 1) * PART_HEADER]
        if is_first:
            texts.heads[slot] = NONE
            texts.lengths[slot] = texts.lags[slot] = 0
        _append(texts, slot, given[begin : begin + count])


def follow_rows_reference(texts: DeviceTexts, words: torch.Tensor, num_rows: int, step: FollowedStep) -> None:
    """As `follow_rows`."""
    given: list[int] = words.tolist()
    for index in range(num_rows):
        slot, first, start, feed, room, depths = given[index * ROW_HEADER : (index + 1) * ROW_HEADER]
        if feed >= 0:
            count = int(step.positions[first]) - start + 1
            _append(texts, slot, step.sampled[feed : feed + count].tolist())
        found = _search(texts, slot)
        proposal = torch.zeros(MAX_PROPOSAL, dtype=torch.int32, device=texts.tokens.device)
        num_tokens = 0
        if found.length:
            kind = 0 if found.num_found == 1 else 1 if found.num_agreeing == found.num_found else 2
            num_tokens = min(given[depths + kind * (MAX_MATCH + 1) + found.length], room)
            last = int(texts.lengths[slot]) - 1
            period = last - found.position
            places = found.position + 1 + torch.arange(MAX_PROPOSAL, device=proposal.device) % period
            proposal = texts.tokens[slot, places % texts.capacity]
            proposal[num_tokens:] = 0
            texts.lags[slot] = period
        step.tokens[first + 1 : first + 1 + room] = proposal[:room]
        texts.proposals[slot] = proposal
        texts.found[slot] = torch.tensor([num_tokens, found.length, found.num_found, found.num_agreeing])


class _Found(NamedTuple):
    position: int = NONE
    length: int = 0
    num_found: int = 0
    num_agreeing: int = 0


def _append(texts: DeviceTexts, slot: int, new: Sequence[int]) -> None:
    capacity, length = texts.capacity, int(texts.lengths[slot])
    before = int(texts.tokens[slot, (length - 1) % capacity])
    for position, token in enumerate(new, length):
        place = position % capacity
        texts.tokens[slot, place] = token
        if position:
            bucket = bucket_of(before, token, capacity)
            texts.links[slot, place] = texts.heads[slot, bucket]
            texts.heads[slot, bucket] = position
        else:
            texts.links[slot, place] = NONE
        before = token
    texts.lengths[slot] = length + len(new)


def _search(texts: DeviceTexts, slot: int) -> _Found:
    """Of the longest matches the most frequent continuation; of equally frequent ones that of the last copy, or the latest."""
    tokens: list[int] = texts.tokens[slot].tolist()
    capacity, length = texts.capacity, int(texts.lengths[slot])
    last, oldest = length - 1, max(0, length - capacity)
    places: list[int] = []
    lag = int(texts.lags[slot])
    hint = last - lag if lag and last - lag >= oldest else NONE
    if hint != NONE:
        places.append(hint)
    chain = int(texts.links[slot, last % capacity]) if last > 0 else NONE
    for _ in range(CANDIDATES - 1):
        if chain < oldest:
            break
        if chain != hint:
            places.append(chain)
        chain = int(texts.links[slot, chain % capacity])
    longest, found = MIN_MATCH, list[int]()
    for place in places:
        same = 0
        while (
            same < min(MAX_MATCH, place - oldest + 1) and tokens[(place - same) % capacity] == tokens[(last - same) % capacity]
        ):
            same += 1
        if same >= longest:
            found = [*found, place] if same == longest else [place]
            longest = same
    if not found:
        return _Found()
    behind = [tokens[(place + 1) % capacity] for place in found]
    token, votes = Counter(behind).most_common(1)[0]  # of equals the first met
    return _Found(found[behind.index(token)], longest, len(found), votes)
