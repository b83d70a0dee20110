"""Texts of running sequences in device memory, with an index of their token pairs: what lookup on a GPU reads.

Each sequence has a slot. A slot keeps the last `capacity` tokens of its text: position p is at p % capacity, so nothing is ever
moved. Each position is linked to the one before it whose last two tokens have the same hash (the chains of LZ77), and `heads`
has the latest position of each hash. Links lead backwards; one that leads before the oldest token kept is the end of its chain.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

MIN_MATCH = 2
MAX_MATCH = 32
"""Tokens of a text's end that are compared."""
CANDIDATES = 8
"""Occurrences that one search compares."""
MAX_PROPOSAL = 32
NONE = -1
"""No position."""
BLOCK = 32
"""Tokens that are linked at once."""
TOKEN_BYTES = 12
"""A token, its link and a head."""
ROW_HEADER = 9
"""Words of a row: slot, first, start, feed, room; of the host's tokens where they are, how many, and for which position of the
text; and whether the slot begins anew."""
REPORT_HEADER = 4
REPORT_WORDS = REPORT_HEADER + MAX_PROPOSAL
"""Words of a row's report: how many tokens are verified, the length of the match, how many occurrences have it, how many of
these have the same token behind them; then the tokens behind it."""

_FIRST_FACTOR, _SECOND_FACTOR, _SHIFT = 0x2545F491, 0x1B873593, 15


class DeviceTexts(NamedTuple):
    """int32, contiguous, on one device.

    tokens, links: [slots, capacity], by position % capacity. heads: [slots, capacity], by hash of a pair. lengths: [slots],
    tokens of each text so far. lags: [slots], how far behind the end the last proposal was copied from; 0: nowhere.
    proposals: [slots, MAX_PROPOSAL], what the last search of each slot proposed; num_proposed: [slots], how many of these the
    row of that search verifies; there may be more of both, behind the texts', for proposals that come from elsewhere.
    """

    tokens: torch.Tensor
    links: torch.Tensor
    heads: torch.Tensor
    lengths: torch.Tensor
    lags: torch.Tensor
    proposals: torch.Tensor
    num_proposed: torch.Tensor

    @property
    def capacity(self) -> int:
        return self.tokens.shape[1]


class FollowedStep(NamedTuple):
    """sampled: int64, the tokens of the step ahead. tokens: int64 [tokens], written; positions: int64 [tokens], read: both as
    settled. report: int32 [rows, REPORT_WORDS], written: what was found for each row."""

    sampled: torch.Tensor
    tokens: torch.Tensor
    positions: torch.Tensor
    report: torch.Tensor


def capacity_within(max_bytes: int, num_slots: int) -> int:
    """Return the tokens that each slot can keep in `max_bytes` together: a power of two.

    :raises ValueError: if that is less than two blocks.
    """
    per_slot = max_bytes // num_slots - 4 * (MAX_PROPOSAL + 3)
    capacity = 1 << max(0, (per_slot // TOKEN_BYTES).bit_length() - 1)
    if per_slot <= 0 or capacity < 2 * BLOCK:
        raise ValueError(f"{max_bytes} bytes hold no {2 * BLOCK} tokens of each of {num_slots} texts")
    return capacity


def new_texts(num_slots: int, capacity: int, device: torch.device | str, *, more_proposals: int = 0) -> DeviceTexts:
    """Return empty texts, with room for the proposals of `more_proposals` rows without one.

    :raises ValueError: if `capacity` is no power of two of at least two blocks.
    """
    if capacity < 2 * BLOCK or capacity & (capacity - 1):
        raise ValueError(f"a text keeps a power of two of tokens, at least {2 * BLOCK}, not {capacity}")

    def make(*shape: int, value: int = 0) -> torch.Tensor:
        return torch.full(shape, value, dtype=torch.int32, device=device)

    return DeviceTexts(
        tokens=make(num_slots, capacity),
        links=make(num_slots, capacity, value=NONE),
        heads=make(num_slots, capacity, value=NONE),
        lengths=make(num_slots),
        lags=make(num_slots),
        proposals=make(num_slots + more_proposals, MAX_PROPOSAL),
        num_proposed=make(num_slots + more_proposals),
    )


def bucket_of(first: int, second: int, capacity: int) -> int:
    """Return the hash of a pair of tokens, an index of `DeviceTexts.heads`."""
    return (first * _FIRST_FACTOR + second * _SECOND_FACTOR) >> _SHIFT & (capacity - 1)
