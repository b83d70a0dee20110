"""Check the tensor `d2t` of a reduced vocabulary (`common.models.reduced_vocabulary`). Torch-free."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.models.weights.errors import WeightsError
from common.models.weights.expected import TARGET_OFFSETS


def check_offsets(offsets: NDArray[np.int64], vocab_size: int) -> None:
    """offsets: the target's token id less the row, of each row of the head; at least one.

    :raises WeightsError: if ids are outside the target's vocabulary, or one is named twice.
    """
    ids: Any = offsets.astype(object) + np.arange(len(offsets))  # Python's integers don't overflow
    if ids.min() < 0 or ids.max() >= vocab_size or len(set(ids)) < len(ids):
        raise WeightsError(f"{TARGET_OFFSETS} does not name tokens of the target, each once at most")
