"""What blocks take from a loader in the same way."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from common.models.blocks.border import Norms
from common.models.spec import ModelSpec
from common.models.weights.base import WeightLoader
from common.ops.linear.weight import LinearWeight


def take_norm(loader: WeightLoader, model: ModelSpec, name: str, size: int) -> torch.Tensor:
    """Return a norm's weight [size] as plain factors in the loader's dtype: added to 1 in float32 if the files hold it
    zero-centred."""
    if not model.zero_centred_norms:
        return loader.take(f"{name}.weight", size)
    return loader.take(f"{name}.weight", size, dtype=torch.float32).add(1).to(loader.dtype)


def take_norms(loader: WeightLoader, model: ModelSpec, prefix: str, names: tuple[str, str]) -> Norms:
    """names: before and behind the block, "" for none."""
    before, behind = (take_norm(loader, model, f"{prefix}.{name}", model.hidden_size) if name else None for name in names)
    return Norms(before, behind, model.rms_eps)


def take_fused(
    loader: WeightLoader, prefix: str, names: Sequence[str], outputs: Sequence[int], inputs: int, bias: bool
) -> LinearWeight:
    """Return one weight of the parts that `names` name, below each other. A single name is the whole, fused in the files."""
    sizes = [sum(outputs)] if len(names) == 1 else outputs
    named = {f"{prefix}.{name}": size for name, size in zip(names, sizes, strict=True)}
    return loader.take_linear(named, inputs, bias)
