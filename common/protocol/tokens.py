"""Token ids on the wire: little-endian uint32, four bytes each."""

from __future__ import annotations

import array
import sys
from collections.abc import Iterable

import numpy as np

from common.protocol.errors import ProtocolError


def pack(tokens: Iterable[int]) -> bytes:
    packed = array.array("I", tokens)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def largest(data: bytes) -> int:
    """Return the largest of the ids, 0 if there are none.

    :raises ProtocolError: if the length is not a multiple of four.
    """
    _check(data)
    return int(np.frombuffer(data, "<u4").max(initial=0))


def unpack(data: bytes) -> list[int]:
    """:raises ProtocolError: if the length is not a multiple of four."""
    _check(data)
    packed = array.array("I")
    packed.frombytes(data)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tolist()


def _check(data: bytes) -> None:
    if len(data) % 4:
        raise ProtocolError(f"{len(data)} bytes are not a whole number of token ids")
