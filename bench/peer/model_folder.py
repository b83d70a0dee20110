"""Writes a dummy model's random weights as a folder that any server loads: `python -m bench.peer.model_folder`.

    python -m bench.peer.model_folder dummy:llama-3.1-8b-counting /tmp/target
    python -m bench.peer.model_folder dummy:llama-3.2-1b-counting-80 /tmp/draft
    python -m bench.peer.model_folder --config-only dummy:llama-3.1-8b /tmp/llama    for a peer with --load-format dummy

Safetensors in bf16, a file for each layer, made on a GPU if there is one; config.json and the tokenizer beside them. For peers
that would make up weights of their own, of which a draft model guesses nothing.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from bench.peer.model_config import hugging_face_config
from common.models.config import load_config
from common.models.registry import open_weights
from common.models.source import ModelFiles, resolve
from common.models.weights.upload import Upload


def write_config(files: ModelFiles, folder: Path) -> None:
    """Write config.json and the tokenizer.

    :raises OSError: if they can't be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(hugging_face_config(files), indent=1))
    shutil.copy(files.path / "tokenizer.json", folder)


def write(name: str, folder: Path, device: torch.device) -> int:
    """Return the bytes of its weights.

    :raises UnknownModel: if there is no such model. :raises OSError: if it can't be written.
    """
    from safetensors.torch import save_file

    files = resolve(name)
    config = load_config(files)
    source = open_weights(files, config)
    write_config(files, folder)
    parts: dict[str, list[str]] = {}
    for tensor in source.shapes:
        layer = tensor.removeprefix(f"{config.names.layers}.").partition(".")[0]
        parts.setdefault(layer if layer.isdigit() else "rest", []).append(tensor)
    where: dict[str, str] = {}
    total = 0
    for part, names in parts.items():
        file = f"model-{part}.safetensors"
        tensors = {one: source.read(one, Upload(device, torch.bfloat16)).cpu() for one in names}
        save_file(tensors, folder / file, {"format": "pt"})
        where |= dict.fromkeys(names, file)
        total += sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return total


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.peer.model_folder", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="a dummy model of a plain format")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--config-only", action="store_true", help="no weights: config.json and the tokenizer")
    options = parser.parse_args(argv)
    if options.config_only:
        write_config(resolve(options.model, weights=False), options.folder)
        return 0
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    print(f"{write(options.model, options.folder, device) / 1e9:.2f} GB in {options.folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
