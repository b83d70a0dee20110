"""What bitsandbytes writes beside an NF4 weight: JSON, as bytes. Torch-free."""

from __future__ import annotations

import json
from typing import Any

from common.models.weights.errors import WeightsError


def parse_state(name: str, data: bytes, shape: tuple[int, ...]) -> dict[str, Any]:
    """Return the description in tensor `name` of a weight of `shape` [out, in].

    :raises WeightsError: if it is damaged, of another shape, or its blocks do not divide the inputs.
    """
    module = name.partition(".weight.")[0]
    try:
        state = json.loads(data)
        sizes = [state["blocksize"], *([state["nested_blocksize"]] if "nested_blocksize" in state else [])]
        if not all(isinstance(size, int) and size > 0 for size in sizes):
            raise ValueError(f"blocks of {sizes}")
        found = tuple(state.get("shape", shape))
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise WeightsError(f"{name} is damaged: {error!r}"[:300]) from error
    if shape[1] % state["blocksize"]:
        raise WeightsError(f"{module}: blocks of {state['blocksize']} do not divide {shape[1]} inputs")
    if found != shape:
        raise WeightsError(f"{module} has shape {list(found)}, the configuration asks for {list(shape)}")
    return state
