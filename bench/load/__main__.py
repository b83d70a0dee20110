"""How fast weights reach the device: `python -m bench.load`.

    python -m bench.load                        4 GiB of bf16 through threads and staging buffers of several sizes
    python -m bench.load --device cpu --gib 1   to see what it prints

Files are in the page cache: what is measured is the way from there. Then GGUF types, dequantised on the device, and random
weights, as `--load-format dummy` makes them.
"""

from __future__ import annotations

import argparse
import math
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from safetensors.torch import save_file

from bench.common.machine import describe
from bench.common.table import markdown
from common.models.config import config_from_json
from common.models.shapes import SHAPES
from common.models.weights import upload
from common.models.weights.base import LinearFormat, WeightLoader
from common.models.weights.dummy import DummyWeights
from common.models.weights.gguf import dequantize
from common.models.weights.safetensors import SafetensorsWeights

THREADS = (1, 2, 4, 8, 16)
STAGING_MIB = (0, 4, 16, 64)
KINDS = ("Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q5_K", "Q6_K", "Q2_K")
SHAPE = (4096, 14_336)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.load", formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=4.0)
    parser.add_argument("--device", default="cuda:0" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    device = torch.device(options.device)
    print(describe(), end="\n\n")
    with tempfile.TemporaryDirectory() as folder:
        count = write(Path(folder), options.gib)
        print(
            markdown(
                ["threads", *(f"{size} MiB" if size else "pageable" for size in STAGING_MIB)],
                from_files(Path(folder), count, device),
            )
        )
    print()
    print(markdown(["GGUF type", "values/s, 10⁹"], from_gguf(device)))
    print()
    print(markdown(["random weights of a layer", "parameters/s, 10⁹"], from_nothing(device)))


def write(folder: Path, gib: float) -> int:
    """Files of four tensors each; returns the number of tensors."""
    count = max(1, int(gib * 2**30 / (2 * math.prod(SHAPE))))
    tensor = torch.zeros(SHAPE, dtype=torch.bfloat16)
    for first in range(0, count, 4):
        names = {name(index): tensor.clone() for index in range(first, min(first + 4, count))}
        save_file(names, folder / f"{first}.safetensors")
    return count


def name(index: int) -> str:
    return f"model.layers.{index}.mlp.down_proj.weight"


def from_files(folder: Path, count: int, device: torch.device) -> list[list[str]]:
    rows: list[list[str]] = []
    for threads in [one for one in THREADS if one <= len(os.sched_getaffinity(0))]:
        rates: list[str] = []
        for size in STAGING_MIB:
            upload.STAGING_BYTES = size << 20

            def load(threads: int = threads) -> None:
                with WeightLoader(SafetensorsWeights(folder), torch.bfloat16, device=device, threads=threads) as loader:
                    for index in range(count):
                        loader.take(name(index), *SHAPE)

            rates.append(f"{count * 2 * math.prod(SHAPE) / seconds(load, device) / 2**30:.1f} GiB/s")
        rows.append([str(threads), *rates])
    return rows


def from_gguf(device: torch.device) -> list[list[str]]:
    rows: list[list[str]] = []
    to = upload.Upload(device, torch.bfloat16)
    for kind in KINDS:
        size, num_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
        data = torch.zeros(math.prod(SHAPE) // size * num_bytes, dtype=torch.uint8)

        def load(kind: str = kind, data: torch.Tensor = data) -> None:
            dequantize(data, GGMLQuantizationType[kind], SHAPE, to)

        rows.append([kind, f"{math.prod(SHAPE) / seconds(load, device) / 1e9:.2f}"])
    return rows


def from_nothing(device: torch.device) -> list[list[str]]:
    config = config_from_json(SHAPES["llama-3.1-8b"])
    prefix, middle, hidden = "model.layers.0.mlp", config.intermediate_size, config.hidden_size
    rows: list[list[str]] = []
    formats: list[LinearFormat] = ["none", "fp8"]
    for weights in formats:

        def load(weights: LinearFormat = weights) -> None:
            with WeightLoader(DummyWeights(config), torch.bfloat16, device=device, weights=weights, threads=0) as loader:
                loader.take_linear({f"{prefix}.gate_proj": middle, f"{prefix}.up_proj": middle}, hidden, bias=False)

        rows.append(["fp8" if weights == "fp8" else "bf16", f"{2 * middle * hidden / seconds(load, device) / 1e9:.2f}"])
    return rows


def seconds(load: Callable[[], None], device: torch.device) -> float:
    """The better of two runs: the first one also fills the page cache and compiles."""
    best = math.inf
    for _ in range(2):
        begun = time.perf_counter()
        load()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - begun)
    return best


if __name__ == "__main__":
    main()
