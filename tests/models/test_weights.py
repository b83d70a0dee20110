"""Weight files: every supported GGUF type, and clear errors for what does not fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import msgspec
import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType as Type
from gguf.quants import dequantize as gguf_dequantize
from gguf.quants import quantize
from safetensors.torch import load_file, save_file

from common.models.config import load_config
from common.models.registry import load_decoder
from common.models.source import ModelFiles
from common.models.weights.base import WeightsError
from common.models.weights.gguf import GgufWeights, dequantize
from common.models.weights.gguf_metadata import InvalidGguf
from common.models.weights.upload import Upload
from tests.models.driver import Request, open_runner, run
from tests.models.oracles import GREEDY, build, oracle_prompt, save

CPU = Upload(torch.device("cpu"), torch.float32)

LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def gguf_name(name: str) -> str:
    stem, kind = name.rsplit(".", 1)
    if stem in NAMES:
        return f"{NAMES[stem]}.{kind}"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{LAYER_NAMES[part]}.{kind}"


def permuted(rows: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's order of Q and K rows (`LlamaModel.permute` of its converter)."""
    return rows.reshape(heads, 2, -1, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)


def write_gguf(path: Path, architecture: str, model: Any, kind: Type = Type.F32) -> ModelFiles:
    """`model` as llama.cpp's converter would write it, two-dimensional tensors as `kind`."""
    config = model.config
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_custom_alignment(64)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = tensor.numpy()
        if architecture == "llama" and ".q_proj." in name:
            values = permuted(values, config.num_attention_heads)
        if architecture == "llama" and ".k_proj." in name:
            values = permuted(values, config.num_key_value_heads)
        if values.ndim == 2:
            writer.add_tensor(gguf_name(name), quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(gguf_name(name), values)
    if config.rope_parameters["rope_type"] == "llama3":  # GGUF carries the scaling as a tensor
        plain = config.rope_parameters["rope_theta"] ** -(np.arange(0, config.head_dim, 2) / config.head_dim)
        scaled = model.model.rotary_emb.inv_freq.numpy()
        writer.add_tensor("rope_freqs.weight", (plain / scaled).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return ModelFiles(name=path.stem, format="gguf", path=path)


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_a_gguf_file_gives_the_text_of_its_model(tmp_path: Path, name: str) -> None:
    files = write_gguf(tmp_path / f"{name}.gguf", name, build(name))
    assert run(open_runner(files), [Request(oracle_prompt(), 4)])[0] == GREEDY[name]


@pytest.mark.parametrize("kind", [Type.F16, Type.BF16, Type.Q8_0, Type.Q4_0, Type.Q4_1])
def test_a_quantised_gguf_file_loads(tmp_path: Path, kind: Type) -> None:
    files = write_gguf(tmp_path / "model.gguf", "llama", build("llama"), kind)
    assert len(run(open_runner(files), [Request(oracle_prompt(), 4)])[0]) == 4


@pytest.mark.parametrize("kind", [Type.F32, Type.F16, Type.BF16, Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1, Type.Q8_0])
def test_values_are_those_of_the_gguf_package(kind: Type) -> None:
    raw = quantize(np.random.default_rng(1).standard_normal((6, 256), np.float32), kind)
    found = dequantize(torch.from_numpy(raw.reshape(-1).view(np.uint8)), kind, (6, 256), CPU).float().numpy()
    assert np.array_equal(found, gguf_dequantize(raw, kind).reshape(6, 256))


@pytest.mark.parametrize(
    ("kind", "block_bytes", "halves"),
    [(Type.Q4_K, 144, (0, 2)), (Type.Q5_K, 176, (0, 2)), (Type.Q6_K, 210, (208,)), (Type.Q2_K, 84, (80, 82))],
)
def test_k_quants_are_those_of_the_gguf_package(kind: Type, block_bytes: int, halves: tuple[int, ...]) -> None:
    random = np.random.default_rng(2)
    blocks = random.integers(0, 256, (10, block_bytes), np.uint8)
    for at in halves:  # any byte but these may be anything; a scale is a number
        blocks[:, at : at + 2] = random.standard_normal((10, 1)).astype(np.float16).view(np.uint8)
    found = dequantize(torch.from_numpy(blocks.reshape(-1)), kind, (5, 512), CPU).numpy()
    assert np.array_equal(found, gguf_dequantize(blocks.reshape(5, -1), kind).reshape(5, 512))


def test_a_type_that_nobody_dequantises_is_an_error() -> None:
    with pytest.raises(WeightsError, match="I8"):
        dequantize(torch.zeros(64, dtype=torch.uint8), Type.I8, (1, 64), CPU)


def test_a_damaged_gguf_file_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    files = write_gguf(path, "llama", build("llama"))
    config = load_config(files)
    whole = path.read_bytes()
    for cut in (10, 300, len(whole) // 2, len(whole) - 64):
        path.write_bytes(whole[:cut])
        with pytest.raises(InvalidGguf, match=r"model\.gguf"):
            GgufWeights(path, config)


@pytest.fixture
def folder(tmp_path: Path) -> ModelFiles:
    return save(build("llama"), tmp_path)


def load(files: ModelFiles) -> None:
    load_decoder(files, load_config(files), dtype=torch.float32, device=torch.device("cpu"))


def change(files: ModelFiles, **changes: torch.Tensor | None) -> None:
    path = files.path / "model.safetensors"
    tensors = {**load_file(path), **changes}
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, path)


def test_a_missing_tensor_is_named(folder: ModelFiles) -> None:
    change(folder, **{"model.layers.1.mlp.up_proj.weight": None})
    with pytest.raises(WeightsError, match=r"lack model\.layers\.1\.mlp\.up_proj\.weight"):
        load(folder)


def test_a_tensor_of_another_shape_is_named(folder: ModelFiles) -> None:
    change(folder, **{"model.norm.weight": torch.ones(65)})
    with pytest.raises(WeightsError, match=r"model\.norm\.weight has shape \[65\].*\[64\]"):
        load(folder)


def test_a_tensor_too_many_is_named(folder: ModelFiles) -> None:
    change(folder, **{"model.layers.2.mlp.up_proj.weight": torch.ones(128, 64)})
    with pytest.raises(WeightsError, match=r"does not have: model\.layers\.2\.mlp"):
        load(folder)


def test_a_copy_of_tied_embeddings_is_no_error(folder: ModelFiles) -> None:
    change(folder, **{"lm_head.weight": load_file(folder.path / "model.safetensors")["model.embed_tokens.weight"].clone()})
    assert load_config(folder).tie_embeddings
    load(folder)


def test_integer_weights_are_an_error(folder: ModelFiles) -> None:
    change(folder, **{"model.norm.weight": torch.ones(64, dtype=torch.int8)})
    with pytest.raises(WeightsError, match="I8"):
        load(folder)


def test_damaged_safetensors_files_are_errors(folder: ModelFiles) -> None:
    path = folder.path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-50])
    with pytest.raises(WeightsError, match=r"model\.safetensors can't be read"):
        load(folder)
    path.unlink()
    with pytest.raises(WeightsError, match=r"no \.safetensors"):
        load(folder)


def test_an_index_that_promises_too_much_is_an_error(folder: ModelFiles) -> None:
    index = folder.path / "model.safetensors.index.json"
    names = [*load_file(folder.path / "model.safetensors"), "model.layers.9.mlp.up_proj.weight"]
    index.write_text(json.dumps({"weight_map": dict.fromkeys(names, "model.safetensors")}))
    with pytest.raises(WeightsError, match=r"names model\.layers\.9"):
        load(folder)
    index.write_text("{}")
    with pytest.raises(WeightsError, match="damaged"):
        load(folder)


def test_a_configuration_of_another_model_is_an_error(folder: ModelFiles) -> None:
    config = load_config(folder)
    config = msgspec.structs.replace(config, layers=config.layers[:1])
    with pytest.raises(WeightsError, match="does not have"):
        load_decoder(folder, config, dtype=torch.float32, device=torch.device("cpu"))
