"""Lookup on the device: texts grow there, and a row's proposal is what followed the last occurrence of its text's end.

settle_open_rows(…)                               the step's first tokens and positions
follow_rows(texts, words, num_rows, step)         each row: append what the host sent and what was sampled, search, write the
                                                  proposal into the step, and a report

Nothing is waited for: how many tokens a step gave is read from where settling left the row's position. The host says how many
tokens a row may verify, and reads the report with the step's samples.
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
    REPORT_HEADER,
    ROW_HEADER,
    DeviceTexts,
    FollowedStep,
    bucket_of,
)

NO_SEARCH = -1
"""The room of a row whose text grows, and is not searched."""


class FollowedRow(NamedTuple):
    """A row of the step that is about to run. first: the index of its first token; behind it are `room` tokens for a proposal.

    feed: the index in `sampled` of the first token that its text lacks; negative: the text lacks none. start: the position of
    the row's first token if the step ahead gives a single one.

    tokens: of the text, from its position `begin` on, as the host knows them; what the text has of them is skipped, and it has
    all before them. is_first: the slot held another text, which is forgotten; then `begin` is 0.
    """

    slot: int
    first: int
    start: int
    feed: int
    room: int
    tokens: Sequence[int] = ()
    begin: int = 0
    is_first: bool = False


def pack_rows(rows: Sequence[FollowedRow]) -> NDArray[np.int32]:
    """Return a header for each row, then the tokens that the host sends.

    :raises ValueError: for two rows of one text, for more room than `MAX_PROPOSAL` tokens, and for a text that begins elsewhere
        than at 0.
    """
    if len({row.slot for row in rows}) < len(rows):
        raise ValueError("two rows of one text in a step")
    words: list[int] = []
    tokens: list[int] = []
    place = len(rows) * ROW_HEADER
    for slot, first, start, feed, room, sent, begin, is_first in rows:
        if not NO_SEARCH <= room <= MAX_PROPOSAL:
            raise ValueError(f"a row proposes at most {MAX_PROPOSAL} tokens")
        if is_first and begin:
            raise ValueError("a text begins at 0")
        words += (slot, first, start, feed, room, place, len(sent), begin, is_first)
        tokens += sent
        place += len(sent)
    return np.array(words + tokens, np.int32)


def follow_rows(texts: DeviceTexts, words: torch.Tensor, num_rows: int, step: FollowedStep) -> None:
    """Append what is new of the rows' texts, write what may follow into the step, and report it.

    words: int32, of `pack_rows`, where `texts` are. A row that is not searched proposes nothing, and its report is not written.
    """
    if on_device(words):
        from common.ops.lookup.follow_triton import follow_rows_triton

        follow_rows_triton(texts, words, num_rows, step)
    else:
        follow_rows_reference(texts, words, num_rows, step)


def follow_rows_reference(texts: DeviceTexts, words: torch.Tensor, num_rows: int, step: FollowedStep) -> None:
    """As `follow_rows`."""
    given: list[int] = words.tolist()
    for index in range(num_rows):
        header = given[index * ROW_HEADER : (index + 1) * ROW_HEADER]
        slot, first, start, feed, room, place, count, begin, is_first = header
        if is_first:
            texts.heads[slot] = NONE
            texts.lengths[slot] = texts.lags[slot] = 0
        known = min(count, max(0, int(texts.lengths[slot]) - begin))
        _append(texts, slot, given[place + known : place + count])
        if feed >= 0:
            num_sampled = int(step.positions[first]) - start + 1
            _append(texts, slot, step.sampled[feed : feed + num_sampled].tolist())
        texts.num_proposed[slot] = 0
        if room == NO_SEARCH:
            continue
        found = _search(texts, slot)
        proposal = torch.zeros(MAX_PROPOSAL, dtype=torch.int32, device=texts.tokens.device)
        num_tokens = 0
        if found.length:
            num_tokens = room
            last = int(texts.lengths[slot]) - 1
            period = last - found.position
            places = found.position + 1 + torch.arange(MAX_PROPOSAL, device=proposal.device) % period
            proposal = texts.tokens[slot, places % texts.capacity]
            texts.lags[slot] = period
        step.tokens[first + 1 : first + 1 + room] = proposal[:room]
        texts.proposals[slot] = proposal
        texts.num_proposed[slot] = num_tokens
        report = step.report[index]
        report[:REPORT_HEADER] = torch.tensor([num_tokens, found.length, found.num_found, found.num_agreeing])
        report[REPORT_HEADER:] = proposal


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
        if not oldest <= chain < last:
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
