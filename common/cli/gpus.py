"""Which GPUs of this machine `penstock up` may use. No driver and no torch is loaded for it."""

from __future__ import annotations

import importlib.metadata
import os
import re
from pathlib import Path

from common.protocol.errors import ConfigError
from common.runtime.gpu_claim import count_gpus


def visible_gpus(device: str, *, devices: Path = Path("/dev")) -> list[int]:
    """Indices, as torch counts them, of the GPUs that `device` (auto, cpu, cuda, cuda:N) names.

    :raises ConfigError: if it names none that is here, or something else.
    """
    match = re.fullmatch(r"(auto|cpu|cuda)(?:(?<=cuda):(\d{1,3}))?", device)
    if match is None:
        raise ConfigError(f"device {device!r} is not known; use auto, cpu, cuda or cuda:N", param="device")
    if device == "cpu" or (device == "auto" and torch_is_for_cpus()):
        return []
    found = os.environ.get("CUDA_VISIBLE_DEVICES")
    count = count_gpus(devices) if found is None else len([entry for entry in found.split(",") if entry.strip()])
    if match[2] is not None:
        if int(match[2]) >= count:
            raise ConfigError(f"device {device}: this machine shows {count} GPUs", param="device")
        return [int(match[2])]
    if device == "cuda" and not count:
        raise ConfigError("device cuda: this machine shows no GPU; use auto or cpu", param="device")
    return list(range(count))


def torch_is_for_cpus() -> bool:
    """Was torch built without CUDA? Its version says so."""
    try:
        return "+cpu" in importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return True
