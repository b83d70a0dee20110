"""What computing with quantised weights costs, beside the weights they mean: `python -m bench.engine.format_accuracy`.

The linears of a real model are quantised to each format by published rules (`format_writers`), written as a checkpoint, and
read back as a server reads it. Real text of several kinds is forced through, and every token's distribution compared:

    format itself     float32, the weights that the format means, against the weights before: what choosing the format costs
    float32           the engine that `--dtype float32` starts on a CPU, against those weights: the reading is exact, or not
    8 bits            the CPU's 8-bit engine, which `auto` is, against those weights: what computing in 8 bits adds
    kernels           with --device cuda: bfloat16 activations and the kernels for the format, against those weights

KL is the mean divergence in nats a token; top-1 is how often the likeliest token is the same. Text is scored in float32, from
sequences' beginnings. Prints a table in Markdown, and writes format_accuracy.md to --out. Ends with 1 if float32 is not exact.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import torch.nn.functional as F
from gguf.constants import GGMLQuantizationType as Type
from gguf.quants import dequantize, quantize
from safetensors.torch import save_file

from bench.common.machine import describe
from bench.common.table import markdown
from bench.engine import format_writers as write
from bench.engine.format_writers import Written
from bench.engine.texts import real_text
from common.engine.load.runners import EngineConfig, load_runner
from common.engine.plan import StepRow
from common.models.blocks.attention import AttentionBlock
from common.models.config import ModelConfig, load_config
from common.models.decoder import Decoder, Inputs
from common.models.registry import load_decoder, open_weights
from common.models.source import DEFAULT_MODEL, ModelFiles, resolve
from common.models.weights.base import LinearFormat, WeightLoader
from common.models.weights.expected import decoder_shapes
from common.ops.kv.rope import apply_rope
from common.ops.norm.rms_norm import rms_norm
from common.protocol.messages import SamplingParams
from common.runtime import parent_death
from common.text.tokenizer import load_tokenizer

Writer = Callable[[torch.Tensor], Written]
MAX_KL = 1e-6
_INT4 = {"num_bits": 4, "type": "int", "strategy": "group"}


def _compressed(layout: str, **weights: Any) -> dict[str, Any]:
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return {"quant_method": "compressed-tensors", "format": layout, "ignore": ["lm_head"], "config_groups": groups}


def _packed(group: int, zeros: bool) -> tuple[dict[str, Any], Writer]:
    config = _compressed("pack-quantized", **_INT4, group_size=group, symmetric=not zeros)
    return config, lambda weight: write.write_packed(weight, group, zeros=zeros)


_FP8 = _compressed("float-quantized", num_bits=8, type="float", strategy="channel")
_BLOCKS = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
_NF4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
FORMATS: dict[str, tuple[dict[str, Any], Writer]] = {
    "FP8, per channel": (_FP8, write.write_fp8),
    "FP8, blocks": (_BLOCKS, write.write_fp8_blocks),
    "FP8, per tensor": ({"quant_method": "fp8"}, write.write_fp8_tensor),
    "INT8, per channel": (_compressed("int-quantized", num_bits=8, type="int", strategy="channel"), write.write_int8),
    "INT4 g32": _packed(32, zeros=False),
    "INT4 g64": _packed(64, zeros=False),
    "INT4 g128": _packed(128, zeros=False),
    "INT4 g32, zeros": _packed(32, zeros=True),
    "INT4 g64, zeros": _packed(64, zeros=True),
    "INT4 g128, zeros": _packed(128, zeros=True),
    "NF4": (_NF4, write.write_nf4),
    "MXFP4": (_compressed("mxfp4-pack-quantized", num_bits=4, type="float"), write.write_mxfp4),
    "NVFP4": (_compressed("nvfp4-pack-quantized", num_bits=4, type="float", group_size=16), write.write_nvfp4),
}
GGUF_TYPES: dict[str, tuple[Type, int]] = {
    "GGUF Q4_0": (Type.Q4_0, 2),
    "GGUF Q4_1": (Type.Q4_1, 3),
    "GGUF Q5_0": (Type.Q5_0, 8),
    "GGUF Q5_1": (Type.Q5_1, 9),
    "GGUF Q8_0": (Type.Q8_0, 7),
    "GGUF MXFP4": (Type.MXFP4, 38),
}
"""Type, and `general.file_type`. The package `gguf` writes no K types, and their blocks of 256 do not divide SmolLM2's 576."""


@dataclass(slots=True, frozen=True)
class Difference:
    """kl: nats a token. top1: share of tokens."""

    kl: float
    top1: float


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.engine.format_accuracy",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", default=DEFAULT_MODEL, help="a GGUF file of a llama")
    parser.add_argument("--device", default="cpu", help="cuda: the kernels that a GPU multiplies each format with")
    parser.add_argument("--formats", default="", help="names, with ; between them; all if empty")
    parser.add_argument("--rows", type=int, default=8, help="pieces of text")
    parser.add_argument("--row-tokens", type=int, default=128, help="tokens of each")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("build/bench-format-accuracy"))
    return parser.parse_args(argv)


@dataclass(slots=True)
class Causal:
    """An `Attention` without a pool: one row from its beginning."""

    decoder: Decoder

    def __call__(self, qkv: torch.Tensor, block: AttentionBlock, layer: int) -> torch.Tensor:
        config, dtype = self.decoder.config, self.decoder.dtype
        heads, kv_heads = config.num_heads, config.num_kv_heads
        summed = qkv if qkv.ndim == 2 else qkv.sum(0)
        query, key, value = summed.to(dtype).view(len(summed), -1, config.head_dim).split((heads, kv_heads, kv_heads), dim=1)
        if block.q_norm is not None and block.k_norm is not None:
            query, key = rms_norm(query, block.q_norm, config.rms_eps), rms_norm(key, block.k_norm, config.rms_eps)
        cos, sin = self.decoder.rope.rows(torch.arange(len(summed), device=query.device), len(summed) - 1)
        query, key = apply_rope(query, cos, sin), apply_rope(key, cos, sin)
        query, key, value = (x.transpose(0, 1)[None] for x in (query, key, value))
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=heads != kv_heads)
        return attended[0].transpose(0, 1).reshape(len(summed), -1)


Scorer = Callable[[list[int]], torch.Tensor]
"""From a text's tokens to log-probabilities, float32 [tokens, vocab_size]."""


def decoder_scorer(decoder: Decoder) -> Scorer:
    def logprobs(row: list[int]) -> torch.Tensor:
        inputs = Inputs(torch.tensor(row, device=decoder.device), None, Causal(decoder))
        return decoder.forward(inputs).float().log_softmax(-1).cpu()

    return logprobs


def int8_scorer(files: ModelFiles, row_tokens: int, threads: int) -> Scorer:
    settings = {"quantization": "int8", "dtype": "auto", "max_model_len": 2 * row_tokens, "threads": threads}
    runner: Any = load_runner(files, EngineConfig(num_blocks=-(-2 * row_tokens // 16) + 2, **settings))
    blocks = list(range(-(-row_tokens // runner.block_tokens)))

    def logprobs(row: list[int]) -> torch.Tensor:
        return runner.logits([StepRow(row, 0, blocks, len(row), SamplingParams(temperature=0.0), len(row))]).log_softmax(-1)

    return logprobs


def difference(wanted: Sequence[torch.Tensor], found: Sequence[torch.Tensor]) -> Difference:
    """wanted, found: log-probabilities of each row."""
    kl = same = tokens = 0.0
    for expected, given in zip(wanted, found, strict=True):
        kl += F.kl_div(given, expected, reduction="sum", log_target=True).item()
        same += int((expected.argmax(-1) == given.argmax(-1)).sum())
        tokens += len(expected)
    return Difference(kl / tokens, same / tokens)


# ── checkpoints ──────────────────────────────────────────────────────────────────────────────────────────────────────


def plain_tensors(files: ModelFiles, config: ModelConfig) -> dict[str, torch.Tensor]:
    """The weights in float32, by their names."""
    loader = WeightLoader(open_weights(files, config), torch.float32)
    return {name: loader.take(name, *shape) for name, shape in decoder_shapes(config).items() if loader.has(name)}


def is_linear(name: str) -> bool:
    return name.endswith("_proj.weight")


def write_folder(folder: Path, config: ModelConfig, tensors: dict[str, torch.Tensor], quantization: Any = None) -> ModelFiles:
    mixer, rope = config.layers[0].mixer, config.rope
    fields = {
        "model_type": "llama",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": mixer.num_heads,
        "head_dim": mixer.head_dim,
        "num_key_value_heads": mixer.num_kv_heads,
        "vocab_size": config.vocab_size,
        "rms_norm_eps": config.rms_eps,
        "rope_theta": rope.theta,
        "max_position_embeddings": config.max_context,
        "tie_word_embeddings": False,
        **({"quantization_config": quantization} if quantization else {}),
    }
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(fields))
    # tied weights are one tensor, which a file can't hold twice
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return ModelFiles(name=folder.name, format="safetensors", path=folder)


def quantised_folder(
    folder: Path, config: ModelConfig, tensors: dict[str, torch.Tensor], name: str
) -> tuple[ModelFiles, dict[str, torch.Tensor]]:
    """Return the checkpoint in that format, and the tensors that it means."""
    quantization, writer = FORMATS[name]
    stored, meant = {}, dict(tensors)
    for key, tensor in tensors.items():
        if not is_linear(key):
            stored[key] = tensor
            continue
        written, meant[key] = writer(tensor)
        stored |= {f"{key.removesuffix('.weight')}.{last}": part.contiguous() for last, part in written.items()}
    return write_folder(folder, config, stored, quantization), meant


def quantised_gguf(
    path: Path, source: Path, config: ModelConfig, tensors: dict[str, torch.Tensor], name: str
) -> tuple[ModelFiles, dict[str, torch.Tensor]]:
    """As `quantised_folder`: `source` with its linears in another type."""
    kind, file_type = GGUF_TYPES[name]
    reader, meant = gguf.GGUFReader(source), dict(tensors)
    writer = gguf.GGUFWriter(path, "llama")
    for field in reader.fields.values():
        if field.name.startswith("llama.") or field.name == "tokenizer.ggml.tokens":
            last = field.types[-1] if len(field.types) > 1 else None
            writer.add_key_value(field.name, field.contents(), field.types[0], last)
    writer.add_file_type(file_type)
    for tensor in reader.tensors:
        shape = tuple(int(size) for size in reversed(tensor.shape.tolist()))
        values = dequantize(tensor.data, tensor.tensor_type).reshape(shape).astype(np.float32)
        is_matrix = tensor.name.startswith("blk.") and values.ndim == 2
        writer.add_tensor(tensor.name, quantize(values, kind) if is_matrix else values, raw_dtype=kind if is_matrix else None)
    for finish in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        finish()
    files = ModelFiles(name=path.stem, format="gguf", path=path)
    for key, tensor in tensors.items():
        if is_linear(key):  # by the package, not by the reader that is looked at
            meant[key] = torch.from_numpy(dequantize(quantize(tensor.numpy(), kind), kind)).reshape(tensor.shape)
    return files, meant


def measure(options: argparse.Namespace, work: Path, rows: list[list[int]]) -> list[tuple[str, ...]]:
    files = resolve(options.model)
    config, cpu, device = load_config(files), torch.device("cpu"), torch.device(options.device)
    tensors = plain_tensors(files, config)
    head = f"{config.names.head}.weight"
    tensors.setdefault(head, tensors[f"{config.names.embedding}.weight"])

    def opened(some: ModelFiles, weights: LinearFormat = "none", *, dtype: torch.dtype = torch.float32) -> Decoder:
        return load_decoder(
            some, load_config(some), dtype=dtype, device=cpu if dtype == torch.float32 else device, weights=weights
        )

    before_files = write_folder(work / "before", config, tensors)

    def scored(scorer: Scorer) -> list[torch.Tensor]:
        return [scorer(row) for row in rows]

    before = scored(decoder_scorer(opened(before_files)))
    names = options.formats.split(";") if options.formats else ["none", *FORMATS, *GGUF_TYPES]
    found: list[tuple[str, ...]] = []
    for number, name in enumerate(names):
        begun = time.perf_counter()
        if name == "none":
            stored, meant = before_files, tensors
        elif name in FORMATS:
            stored, meant = quantised_folder(work / f"stored-{number}", config, tensors, name)
        else:
            stored, meant = quantised_gguf(work / f"stored-{number}.gguf", files.path, config, tensors, name)
        reference = before
        cells: list[Difference] = []
        if name != "none":
            reference = scored(decoder_scorer(opened(write_folder(work / f"meant-{number}", config, meant))))
            cells = [difference(before, reference)]
        if device.type == "cuda":
            kind = load_config(stored).weight_format
            weights: LinearFormat = "none" if kind == "plain" else "groups" if kind == "groups" else "fp8"
            cells.append(difference(reference, scored(decoder_scorer(opened(stored, weights, dtype=torch.bfloat16)))))
        else:
            cells.append(difference(reference, scored(decoder_scorer(opened(stored)))))
            cells.append(difference(reference, scored(int8_scorer(stored, options.row_tokens, options.threads))))
        for folder in (f"stored-{number}", f"meant-{number}"):
            shutil.rmtree(work / folder, ignore_errors=True)
        shown = [text for cell in cells for text in (f"{max(0.0, cell.kl):.2g}", f"{cell.top1:.1%}")]
        found.append((name, *([""] * 2 if name == "none" else []), *shown))
        print(f"  {name}: {time.perf_counter() - begun:.0f} s: {' '.join(shown)}", file=sys.stderr, flush=True)
    return found


def main(argv: Sequence[str]) -> int:
    parent_death.guard()
    options = parse(argv)
    torch.set_num_threads(options.threads)
    rows = real_text(load_tokenizer(resolve(options.model)), options.rows, options.row_tokens)
    with tempfile.TemporaryDirectory() as folder:
        found = measure(options, Path(folder), rows)
    engines = ["kernels"] if options.device.startswith("cuda") else ["float32", "8 bits"]
    titles = ["format"] + [f"{what}: {unit}" for what in ("format itself", *engines) for unit in ("KL", "top-1")]
    tokens = sum(map(len, rows))
    report = f"{options.model}, {tokens:,} tokens; {describe()}\n\n{markdown(titles, found)}"
    print(report)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "format_accuracy.md").write_text(report + "\n")
    wrong = [] if engines == ["kernels"] else [row[0] for row in found if float(row[3]) > MAX_KL]
    if wrong:
        print(f"not exact in float32: {', '.join(wrong)}", file=sys.stderr)
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
