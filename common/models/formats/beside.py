"""What quantisers wrote beside config.json before it had a `quantization_config`, or instead of one. Torch-free.

hf_quant_config.json   modelopt
quantize_config.json   AutoGPTQ, GPTQModel
quant_config.json      AutoAWQ
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common.models.formats.detect import detect
from common.models.json_files import read_object
from common.protocol.errors import ConfigError

_METHODS = {"hf_quant_config.json": "modelopt", "quantize_config.json": "gptq", "quant_config.json": "awq"}


def quantization_beside(folder: Path) -> dict[str, Any]:
    """Return the first of these files of `folder` as {"quantization_config": …}; empty if there is none.

    :raises ConfigError: naming the file, if it can't be read or says what is not supported.
    """
    for name, method in _METHODS.items():
        if (folder / name).is_file():
            return _read(folder / name, method)
    return {}


def _read(path: Path, method: str) -> dict[str, Any]:
    found = read_object(path)
    if method == "modelopt":
        quantization = found.get("quantization")
        if not isinstance(quantization, Mapping):
            raise ConfigError(f"{path} has no quantization")
        if quantization.get("quant_algo") is None:  # the KV cache alone is quantised
            return {}
        found = dict(quantization)
    config = {"quantization_config": {"quant_method": method, **found}}
    try:
        detect(config)
    except ConfigError as error:
        raise ConfigError(f"{path}, which stands for a quantization_config: {error}") from error
    return config
