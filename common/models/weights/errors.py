"""The error of weights. Torch-free, so that what only looks at files can raise it."""

from __future__ import annotations

from common.protocol.errors import ConfigError


class WeightsError(ConfigError):
    """The weights don't fit the model's configuration, or can't be read."""
