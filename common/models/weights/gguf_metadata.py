"""The key-value header of a GGUF file, read without touching its tensors.

The `gguf` library's `GGUFReader` makes a NumPy view per array element: 1.8 s for the two 49,000-string arrays of SmolLM2's
vocabulary, and a gateway needs nothing but that header. This parser walks the same bytes in ~0.05 s. Every count and length
is checked against the bytes that are left before anything is allocated, so a hostile file costs an error, not memory.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (versions 2 and 3, little-endian).
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path
from typing import Any

from common.models.lfs import pointer_hint
from common.protocol.errors import ConfigError

_MAGIC = b"GGUF"
_MAX_KEYS = 65_536
_MAX_KEY_BYTES = 65_535
_MAX_ARRAY = 4_194_304  # sixteen times the largest vocabulary in use

_BOOL, _STRING, _ARRAY = 7, 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", _BOOL: "?", 10: "Q", 11: "q", 12: "d"}
_LENGTH = struct.Struct("<Q")
_TYPE = struct.Struct("<I")
_ARRAY_HEAD = struct.Struct("<IQ")
_FILE_HEAD = struct.Struct("<4sIQQ")


class InvalidGguf(ConfigError):
    """The file is not GGUF, is cut short, or says something that can't be true."""


def read_metadata(path: Path) -> dict[str, Any]:
    """All key-value pairs of `path`: scalars as int, float, bool or str, arrays as lists of those.

    :raises InvalidGguf: if the file is missing, truncated, or not a little-endian GGUF file of version 2 or 3.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Header(data).read()
    except (OSError, ValueError, struct.error) as error:
        raise InvalidGguf(f"{path} can't be read as a GGUF file: {error}") from error
    except InvalidGguf as error:
        raise InvalidGguf(f"{path} is not a usable GGUF file: {error}{pointer_hint(path)}") from error


class _Header:
    """A cursor over the mapped file. `struct.error` (a read past the end) is the caller's sign of truncation."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._size = len(data)
        self._at = 0

    def read(self) -> dict[str, Any]:
        if self._data[: len(_MAGIC)] != _MAGIC:
            raise InvalidGguf(f"it begins with {self._data[: len(_MAGIC)]!r}, not {_MAGIC!r}")
        _, version, _, num_keys = _FILE_HEAD.unpack_from(self._data, 0)
        self._at = _FILE_HEAD.size
        if version not in (2, 3):
            kind = "big-endian" if version & 0xFFFF == 0 else f"version {version}"
            raise InvalidGguf(f"it is {kind}; versions 2 and 3, little-endian, are supported")
        if num_keys > _MAX_KEYS:
            raise InvalidGguf(f"it claims {num_keys} metadata keys")
        return dict(self._pair() for _ in range(num_keys))

    def _pair(self) -> tuple[str, Any]:
        key = self._string(_MAX_KEY_BYTES)
        (kind,) = _TYPE.unpack_from(self._data, self._at)
        self._at += _TYPE.size
        if kind == _ARRAY:
            return key, self._array()
        if kind == _STRING:
            return key, self._string(self._size)
        return key, self._scalars(kind, 1)[0]

    def _array(self) -> list[Any]:
        kind, count = _ARRAY_HEAD.unpack_from(self._data, self._at)
        self._at += _ARRAY_HEAD.size
        if count > _MAX_ARRAY:
            raise InvalidGguf(f"it claims an array of {count} elements")
        if kind == _STRING:
            return self._strings(count)
        return list(self._scalars(kind, count))

    def _scalars(self, kind: int, count: int) -> tuple[Any, ...]:
        code = _SCALARS.get(kind)
        if code is None:
            raise InvalidGguf(f"it holds a value of unsupported type {kind}")
        need = struct.calcsize(code) * count
        if need > self._size - self._at:
            raise InvalidGguf(f"it is cut short: {need} bytes expected at {self._at}, {self._size - self._at} left")
        values = struct.unpack_from(f"<{count}{code}", self._data, self._at)
        self._at += need
        return values

    def _string(self, limit: int) -> str:
        (length,) = _LENGTH.unpack_from(self._data, self._at)
        begin = self._at + _LENGTH.size
        if length > limit or length > self._size - begin:
            raise InvalidGguf(f"it is cut short or damaged: a string of {length} bytes at {begin}, file of {self._size}")
        self._at = begin + length
        return self._data[begin : self._at].decode()

    def _strings(self, count: int) -> list[str]:
        """`_string` unrolled: a vocabulary is 100,000 of them, and this loop is what a gateway's start waits for."""
        data, size, at, unpack = self._data, self._size, self._at, _LENGTH.unpack_from
        if count * _LENGTH.size > size - at:
            raise InvalidGguf(f"it is cut short: {count} strings expected at {at}, {size - at} bytes left")
        strings: list[str] = []
        for _ in range(count):
            begin = at + 8
            at = begin + unpack(data, at)[0]
            if at > size:
                raise InvalidGguf(f"it is cut short or damaged: a string ends at {at}, the file at {size}")
            strings.append(data[begin:at].decode())
        self._at = at
        return strings
