"""How the linears of a checkpoint are multiplied, from its config.json: see `common/models/formats/detect.py`. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from common.models.formats.detect import FP8_BLOCK, detect
from common.models.formats.scheme import WeightFormat as WeightFormat

BLOCK = FP8_BLOCK


def weight_format(config: Mapping[str, Any]) -> WeightFormat:
    """`config` is config.json.

    :raises ConfigError: for a format that is not supported.
    """
    return detect(config).kind
