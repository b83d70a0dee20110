"""Typed access to a model's configuration that remembers what was read: what nobody read must be known to be harmless."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

from common.protocol.errors import ConfigError


class Fields:
    """A mapping of untrusted values. where: what error messages call it."""

    def __init__(self, data: Mapping[str, Any], where: str) -> None:
        self.data = data
        self.where = where
        self._read: set[str] = set()

    def get(self, name: str, default: Any = None) -> Any:
        """The value of `name` as it is; `default` if it is missing or null."""
        self._read.add(name)
        value = self.data.get(name)
        return default if value is None else value

    def size(self, name: str, default: int | None = None) -> int:
        """:raises ConfigError: if it is no positive whole number, or missing without a default."""
        value = self.get(name, default)
        if value is None:
            raise ConfigError(f"{self.where} has no {name}")
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            raise ConfigError(f"{name} in {self.where} must be a positive whole number, not {value!r}")
        return value

    def number(self, name: str, default: float) -> float:
        """:raises ConfigError: if it is no finite number."""
        value = self.get(name, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
            raise ConfigError(f"{name} in {self.where} must be a number, not {value!r}")
        return float(value)

    def flag(self, name: str, default: bool = False) -> bool:
        return bool(self.get(name, default))

    def numbers(self, name: str) -> tuple[float, ...]:
        """:raises ConfigError: if it is no list of finite numbers; missing is an empty one."""
        values = self.get(name, [])
        if not isinstance(values, list) or any(
            not isinstance(one, int | float) or isinstance(one, bool) or not math.isfinite(one) for one in values
        ):
            raise ConfigError(f"{name} in {self.where} must be a list of numbers, not {values!r}")
        return tuple(float(one) for one in values)

    def per_layer(self, name: str, layers: int, default: list[Any]) -> list[Any]:
        """:raises ConfigError: if it is no list with a value for each of the layers."""
        values = self.get(name) or default
        if not isinstance(values, list) or len(values) < layers:
            raise ConfigError(f"{name} in {self.where} must have a value for each of {layers} layers, not {values!r}")
        return values[:layers]

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
                f"{self.where} sets {name} to {str(value)[:80]!r}, which this model's family does not read: "
                "it might compute something else than was trained"
            )
