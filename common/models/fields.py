"""Typed access to a model's configuration that remembers what was read: what nobody read must be known to be harmless."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

from common.protocol.errors import ConfigError

MAX_SIZE = 2**31
_MAX_ITEMS = 10_000
_COUNTS = frozenset({"num_hidden_layers", "block_count", "num_experts", "num_local_experts", "expert_count"})
"""Sizes that become lists: limited to `_MAX_ITEMS`. All others are limited to `MAX_SIZE`."""


class Fields:
    """A mapping of untrusted values. where: what error messages call it. reader: who they say reads it."""

    def __init__(self, data: Mapping[str, Any], where: str, reader: str = "this model's family") -> None:
        self.data = data
        self.where = where
        self._reader = reader
        self._read: set[str] = set()

    def get(self, name: str, default: Any = None) -> Any:
        """The value of `name` as it is; `default` if it is missing or null."""
        self._read.add(name)
        value = self.data.get(name)
        return default if value is None else value

    def size(self, name: str, default: int | None = None) -> int:
        """:raises ConfigError: if it is no positive whole number, far too large, or missing without a default."""
        value = self.get(name, default)
        if value is None:
            raise ConfigError(f"{self.where} has no {name}")
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            raise ConfigError(f"{name} in {self.where} must be a positive whole number, not {_shown(value)}")
        limit = _MAX_ITEMS if name in _COUNTS else MAX_SIZE
        if value > limit:
            raise ConfigError(f"{name} in {self.where} must be at most {limit:,}, not {_shown(value)}")
        return value

    def number(self, name: str, default: float) -> float:
        """:raises ConfigError: if it is no finite number."""
        value = self.get(name, default)
        if not _is_finite(value):
            raise ConfigError(f"{name} in {self.where} must be a number, not {_shown(value)}")
        return float(value)

    def positive(self, name: str, default: float) -> float:
        """:raises ConfigError: if it is no finite number above 0."""
        value = self.number(name, default)
        if value <= 0:
            raise ConfigError(f"{name} in {self.where} must be more than 0, not {value:g}")
        return value

    def not_negative(self, name: str, default: float) -> float:
        """:raises ConfigError: if it is no finite number of at least 0."""
        value = self.number(name, default)
        if value < 0:
            raise ConfigError(f"{name} in {self.where} must not be negative, and is {value:g}")
        return value

    def flag(self, name: str, default: bool = False) -> bool:
        """Numbers but 0 are true: early Llama 4 files say attn_temperature_tuning 4.

        :raises ConfigError: if it is something else: a text such as "false" would count as true.
        """
        value = self.get(name, default)
        if not isinstance(value, int):
            raise ConfigError(f"{name} in {self.where} must be true or false, not {_shown(value)}")
        return bool(value)

    def numbers(self, name: str) -> tuple[float, ...]:
        """:raises ConfigError: if it is no list of finite numbers; missing is an empty one."""
        values = self.get(name, [])
        if not isinstance(values, list) or not all(_is_finite(one) for one in values):
            raise ConfigError(f"{name} in {self.where} must be a list of numbers, not {_shown(values)}")
        return tuple(float(one) for one in values)

    def per_layer(self, name: str, layers: int, default: list[Any]) -> list[Any]:
        """:raises ConfigError: if it is no list with a value for each of the layers."""
        values = self.get(name) or default
        if not isinstance(values, list) or len(values) < layers:
            raise ConfigError(f"{name} in {self.where} must have a value for each of {layers} layers, not {_shown(values)}")
        return values[:layers]

    def layers(self, name: str, default: list[int]) -> list[int]:
        """:raises ConfigError: if it is no list of layers' numbers."""
        values = self.get(name, default)
        if not isinstance(values, list) or not all(isinstance(one, int) for one in values):
            raise ConfigError(f"{name} in {self.where} must be a list of layers' numbers, not {_shown(values)}")
        return values

    def same_as(self, name: str, other: str, value: object) -> None:
        """:raises ConfigError: if `name` is there and is not `value`, the value of the key `other`."""
        found = self.get(name, value)
        if found != value:
            raise ConfigError(f"{name} in {self.where} is {_shown(found)}, but {other} is {value!r}: they must be equal")

    def only(self, name: str, supported: object) -> None:
        """:raises ConfigError: if `name` is there and has another value than the one that is supported."""
        value = self.get(name, supported)
        if value != supported:
            raise ConfigError(f"{name} {value!r} is not supported; {self.where} may have {supported!r}")

    def check_read(self, harmless: Collection[str], defaults: Mapping[str, object]) -> None:
        """harmless: keys that change nothing that is computed here. defaults: values that others of them may have.

        :raises ConfigError: naming a key that has a value and that nobody read.
        """
        for name, value in self.data.items():
            # an empty value switches nothing on: null, false, 0, "", [] and {}
            if name in self._read or name in harmless or not value or (name in defaults and defaults[name] == value):
                continue
            raise ConfigError(
                f"{self.where} sets {name} to {str(value)[:80]!r}, which {self._reader} does not read: "
                "it might compute something else than was trained"
            )


def _is_finite(value: object) -> bool:
    """Whether it is a number that a float can hold."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number of hundreds of digits
        return False


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]} …"
