"""From files to a decoder: which weight format, which decoder."""

from __future__ import annotations

from collections.abc import Collection

import torch

from common.models.config import ModelConfig
from common.models.decoder import Decoder
from common.models.shapes import Numbers, numbers
from common.models.source import ModelFiles
from common.models.weights.base import LinearFormat, WeightLoader
from common.models.weights.dummy import DummyWeights
from common.models.weights.safetensors import SafetensorsWeights
from common.models.weights.source import Progress, WeightSource


def open_weights(files: ModelFiles, config: ModelConfig, *, dummy: bool = False) -> WeightSource:
    """With `dummy`, or for files without weights, random ones.

    :raises ConfigError: if the files are damaged.
    """
    if dummy or files.format == "dummy":
        return DummyWeights(config, numbers(files.name) if files.format == "dummy" else Numbers())
    if files.format == "safetensors":
        return SafetensorsWeights(files.path, integers=config.weight_format == "groups", drafting=config.drafting)
    from common.models.weights.gguf import GgufWeights  # a seventh of a second of every start

    return GgufWeights(files.path, config)


def load_decoder(
    files: ModelFiles,
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    on_progress: Progress | None = None,
    weights: LinearFormat = "none",
    plain: Collection[str] = (),
    fp8_head: bool = False,
    dummy: bool = False,
    batch_invariant: bool = False,
) -> Decoder:
    """Reads all weights. `plain`: modules that `weights` leaves alone. `fp8_head`: whether it takes the head, too.
    `batch_invariant`: whether a GPU computes a row in the same way whatever rows come with it, at a cost.

    `on_progress(done_bytes, total_bytes)` is called after each tensor.

    :raises WeightsError: if the weights don't fit `config`.
    """
    source = open_weights(files, config, dummy=dummy)
    threads = 0 if isinstance(source, DummyWeights) else -1
    with WeightLoader(
        source,
        dtype,
        on_progress,
        device=device,
        weights=weights,
        plain=plain,
        fp8_head=fp8_head,
        scheme=config.quantization,
        batch_invariant=batch_invariant,
        threads=threads,
    ) as loader:
        return Decoder(config, loader)
