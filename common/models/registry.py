"""From files to a decoder: which weight format, which decoder."""

from __future__ import annotations

import torch

from common.models.config import ModelConfig
from common.models.decoder import Decoder
from common.models.source import ModelFiles
from common.models.weights.base import Progress, WeightLoader, WeightSource
from common.models.weights.gguf import GgufWeights
from common.models.weights.safetensors import SafetensorsWeights

_DECODERS = {"llama": Decoder, "qwen3": Decoder}


def open_weights(files: ModelFiles, config: ModelConfig) -> WeightSource:
    """:raises ConfigError: if the files are damaged."""
    return GgufWeights(files.path, config) if files.format == "gguf" else SafetensorsWeights(files.path)


def load_decoder(
    files: ModelFiles, config: ModelConfig, *, dtype: torch.dtype, device: torch.device, on_progress: Progress | None = None
) -> Decoder:
    """Reads all weights. `on_progress(done_bytes, total_bytes)` is called after each tensor.

    :raises WeightsError: if the weights don't fit `config`.
    """
    loader = WeightLoader(open_weights(files, config), dtype, on_progress)
    return _DECODERS[config.architecture](config, loader, device)
