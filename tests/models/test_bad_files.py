"""Files that no model can be loaded from are refused by their headers and scales, before memory is taken, in one clear line."""

from __future__ import annotations

import json
import math
import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf.constants import GGML_QUANT_SIZES
from gguf.constants import GGMLQuantizationType as Type
from gguf.quants import dequantize
from safetensors.numpy import load_file, save_file

from common.models.config import load_config
from common.models.registry import load_decoder
from common.models.source import ModelFiles
from common.models.weights.base import WeightsError
from common.models.weights.gguf import GgufWeights
from common.models.weights.gguf_values import _any_wrong, _has_scales
from common.models.weights.inventory import take_inventory
from common.protocol.errors import ConfigError
from tests.fixtures.tiny_model import edit_config, write_tiny_model
from tests.models.gguf_writer import write_model
from tests.models.oracles import build, save
from tests.models.test_weights_experts import CASES as EXPERTS
from tests.models.test_weights_experts import Checkpoint as ExpertsCheckpoint
from tests.models.test_weights_groups import FORMATS, UP
from tests.models.test_weights_groups import Checkpoint as GroupsCheckpoint

STATE = "weight.quant_state.bitsandbytes__nf4"


def inspect(files: ModelFiles) -> None:
    take_inventory(files, load_config(files))


@pytest.mark.parametrize("name", FORMATS)
def test_whole_files_of_each_format_pass(tmp_path: Path, name: str) -> None:
    inspect(GroupsCheckpoint(tmp_path, name).files)


@pytest.mark.parametrize("name", ["gpt-oss-mxfp4", "qwen3-moe-fp8-blocks", "qwen3-moe-fp8", "mixtral-awq", "llama4-packed"])
def test_whole_files_with_experts_pass(tmp_path: Path, name: str) -> None:
    assert name in EXPERTS
    inspect(ExpertsCheckpoint(tmp_path, name).files)


def _nan(x: torch.Tensor) -> torch.Tensor:
    return x.float().fill_(float("nan")).to(x.dtype)


@pytest.mark.parametrize(
    ("name", "last", "change", "message"),
    [
        ("awq", "qweight", None, "lack .*qweight"),
        ("awq", "qzeros", None, "lack .*qzeros"),
        ("awq", "scales", lambda x: x[:1], r"scales has shape \[1, 128\], the configuration asks for \[2, 128\]"),
        ("awq", "scales", _nan, "NaN or infinite"),
        ("gptq", "scales", lambda x: x * torch.inf, "NaN or infinite"),
        ("gptq-act-order", "g_idx", lambda x: x + 1, "does not divide 64 inputs into groups of 32"),
        ("gptq-act-order", "g_idx", lambda x: x * 0 + 1_000_000, "does not divide 64 inputs into groups of 32"),
        ("gptq-act-order", "g_idx", lambda x: x[:5], r"g_idx has shape \[5\]"),
        ("packed", "weight_scale", _nan, "NaN or infinite"),
        ("packed", "weight_packed", lambda x: x[:, :3], r"weight_packed has shape \[128, 3\]"),
        ("packed-order", "weight_g_idx", lambda x: x * 0, "does not divide"),
        ("int8", "weight_scale", lambda x: x[:3], "weight_scale has shape"),
        ("nvfp4", "weight_scale", lambda x: x[:, :1], "weight_scale has shape"),
        ("nvfp4", "weight_scale", _nan, "NaN or infinite"),
        ("nvfp4", "weight_global_scale", None, "lack .*weight_global_scale"),
        ("modelopt", "weight_scale_2", _nan, "NaN or infinite"),
        ("mxfp4", "weight_scale", lambda x: x | 255, "holds a scale that is NaN"),
        ("nf4", "weight.absmax", None, "lack .*absmax"),
        ("nf4", "weight.absmax", _nan, "NaN or infinite"),
        ("nf4", "weight.absmax", lambda x: x[:3], r"absmax holds 3 numbers, \d+ are expected"),
        ("nf4", "weight.quant_map", _nan, "holds a value that is NaN"),
        ("nf4", STATE, lambda x: x[:5], "is damaged: JSONDecodeError"),
        ("nf4", STATE, lambda x: torch.tensor(list(b'{"blocksize": 48}'), dtype=torch.uint8), "blocks of 48 do not divide"),
        ("nf4", "weight", lambda x: x.flatten().view(torch.bfloat16), "weight is BF16, and the format has U8"),
        ("int8", "weight_scale", None, r"up_proj\.weight is I8, and floats are expected: its scale is missing"),
        ("int8", "weight_scale", lambda x: -x, "holds a negative scale"),
        ("awq", "qweight", lambda x: x.float(), "qweight is F32, and the format has I32"),
        ("awq", "scales", lambda x: x.int(), "scales is I32, and floats are expected"),
        ("packed", "weight_scale", lambda x: -x, "holds a negative scale"),
        ("packed", "weight_shape", lambda x: x + 1, r"weight_shape is \[129, 65\], the configuration asks for \[128, 64\]"),
        ("packed-zeros", "weight_zero_point", lambda x: x[:3], "weight_zero_point has shape"),
    ],
)
def test_damage_shows_before_anything_is_loaded(tmp_path: Path, name: str, last: str, change: Any, message: str) -> None:
    checkpoint = GroupsCheckpoint(tmp_path, name)
    tensor = checkpoint.tensors.pop(f"{UP}.{last}")
    if change is not None:
        checkpoint.tensors[f"{UP}.{last}"] = change(tensor).contiguous()
    checkpoint.write()
    with pytest.raises(WeightsError, match=message):
        inspect(checkpoint.files)


@pytest.mark.parametrize(
    ("added", "message"),
    [
        ({"model.norm.weight": torch.ones(64, dtype=torch.int8)}, r"model\.norm\.weight is I8, and floats are expected"),
        ({"model.layers.9.mlp.up_proj.weight": torch.ones(128, 64)}, r"does not have: model\.layers\.9\.mlp\.up_proj\.weight"),
        ({f"{UP}.bias": torch.ones(128)}, r"up_proj\.bias is not 0"),
        ({f"{UP}.output_scale": torch.ones(1)}, r"does not have: .*output_scale"),
        ({f"{UP}.weight_zero_point": torch.ones(128, 1, dtype=torch.int8)}, "INT8 weights with zero points"),
        ({"model.layers.0.self_attn.k_scale": torch.tensor(float("nan"))}, "k_scale holds a scale that is NaN"),
    ],
)
def test_tensors_that_are_too_much_or_of_another_type_show_before_anything_is_loaded(
    tmp_path: Path, added: dict[str, torch.Tensor], message: str
) -> None:
    checkpoint = GroupsCheckpoint(tmp_path, "int8")
    checkpoint.tensors |= added
    checkpoint.write()
    with pytest.raises(WeightsError, match=message):
        inspect(checkpoint.files)


def test_a_module_that_is_left_alone_and_quantised_all_the_same_is_an_error(tmp_path: Path) -> None:
    checkpoint = GroupsCheckpoint(tmp_path, "int8", ignore=["re:.*up_proj"])
    with pytest.raises(WeightsError, match="is I8, and floats are expected"):
        inspect(checkpoint.files)
    with pytest.raises(WeightsError, match="is int8, and floats are expected"):
        load_decoder(checkpoint.files, load_config(checkpoint.files), dtype=torch.float32, device=torch.device("cpu"))


@pytest.mark.parametrize("name", ["awq", "packed", "int8", "nf4", "mxfp4"])
def test_a_format_that_no_tensor_has_is_an_error(tmp_path: Path, name: str) -> None:
    checkpoint = GroupsCheckpoint(tmp_path, name)
    checkpoint.tensors = checkpoint.meant
    checkpoint.write()
    with pytest.raises(WeightsError, match=f"says {name}, and no weight is in that format"):
        inspect(checkpoint.files)


def test_copies_and_adapters_beside_the_weights_are_not_theirs(tmp_path: Path) -> None:
    files = save(build("mistral"), tmp_path / "whole")
    shards = save(build("mistral"), tmp_path / "shards", shard_bytes=60_000)
    counted = take_inventory(files, load_config(files)), load_config(files).identity
    for one in (files, shards):
        before = take_inventory(one, load_config(one))
        for name in ("consolidated.safetensors", "adapter_model.safetensors"):
            save_file({"layers.0.attention.wq.weight": np.zeros((64, 64), np.int64)}, one.path / name)
        assert take_inventory(one, load_config(one)) == before
        load_decoder(one, load_config(one), dtype=torch.float32, device=torch.device("cpu"))
    assert counted == (take_inventory(files, load_config(files)), load_config(files).identity)


def test_one_whole_file_counts_and_a_tensor_in_two_shards_is_an_error(tmp_path: Path) -> None:
    files = save(build("llama"), tmp_path)
    whole, shard = tmp_path / "model.safetensors", tmp_path / "model-00001-of-00002.safetensors"
    counted = take_inventory(files, load_config(files))
    tensors = load_file(whole)
    save_file({name: 2 * tensor for name, tensor in tensors.items()}, tmp_path / "other.safetensors")
    (tmp_path / "pipe.safetensors").mkdir()
    assert take_inventory(files, load_config(files)) == counted
    loaded = load_decoder(files, load_config(files), dtype=torch.float32, device=torch.device("cpu"))
    assert np.array_equal(loaded.norm.numpy(), tensors["model.norm.weight"])
    whole.rename(shard)
    with pytest.raises(WeightsError, match=r"is in model-00001-of-00002\.safetensors and in other\.safetensors"):
        take_inventory(files, load_config(files))
    with pytest.raises(WeightsError, match=r"no model\.safetensors\.index\.json says which counts"):
        load_decoder(files, load_config(files), dtype=torch.float32, device=torch.device("cpu"))


@pytest.mark.parametrize(
    ("name", "key", "change", "message"),
    [
        ("gpt-oss-mxfp4", "experts.down_proj_scales", None, "lack .*down_proj_scales"),
        ("gpt-oss-mxfp4", "experts.down_proj_blocks", lambda x: x[:7], r"down_proj_blocks has shape \[7, "),
        ("gpt-oss-mxfp4", "experts.gate_up_proj_scales", lambda x: x | 255, "gate_up_proj_scales holds a scale that is NaN"),
        ("qwen3-moe-fp8-blocks", "3.up_proj.weight_scale_inv", None, "up_proj.weight is float8 and has no scale"),
        ("qwen3-moe-fp8-blocks", "3.up_proj.weight_scale_inv", lambda x: x.repeat(3, 1), "weight_scale_inv has shape"),
        ("qwen3-moe-fp8-blocks", "3.up_proj.weight_scale_inv", _nan, "NaN or infinite"),
        ("mixtral-awq", "experts.3.w1.qweight", None, "lack .*experts.3.w1"),
        ("llama4-packed", "experts.5.down_proj.weight_scale", None, "lack .*5.down_proj.weight_scale"),
    ],
)
def test_damage_of_experts_shows_before_anything_is_loaded(
    tmp_path: Path, name: str, key: str, change: Any, message: str
) -> None:
    checkpoint = ExpertsCheckpoint(tmp_path, name)
    key = next(one for one in checkpoint.tensors if one.endswith(key))
    tensor = checkpoint.tensors.pop(key)
    if change is not None:
        checkpoint.tensors[key] = change(tensor).contiguous()
    checkpoint.save()
    with pytest.raises(WeightsError, match=message):
        inspect(checkpoint.files)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": ["linear_attention", "full_attention", "full_attention"]}, "layer type 'linear_attention'"),
        ({"num_experts_per_tok": 9}, "can't visit 9 of 8 experts"),
        ({"n_group": 3}, "sets n_group to '3'"),
        ({"num_local_experts": 6}, r"experts|gate"),
        ({"quantization_config": {"quant_method": "quip"}}, "quant_method 'quip' is not supported"),
        ({"quantization_config": {"quant_method": "awq", "group_size": 48}}, "groups of 48"),
        ({"quantization_config": "awq"}, "must be an object"),
    ],
)
def test_configurations_that_do_not_fit(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    files = save(build("qwen3-moe"), tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_bytes()) | changes))
    with pytest.raises(ConfigError, match=message):
        inspect(files)


@pytest.mark.parametrize(("group", "message"), [(128, "AWQ packs multiples of 128 inputs"), (64, "asks for")])
def test_a_group_size_that_does_not_fit(tmp_path: Path, group: int, message: str) -> None:
    checkpoint = GroupsCheckpoint(tmp_path, "awq")
    path = checkpoint.files.path / "config.json"
    config = json.loads(path.read_bytes())
    config["quantization_config"]["group_size"] = group
    path.write_text(json.dumps(config))
    with pytest.raises(WeightsError, match=message):
        inspect(checkpoint.files)


def test_safetensors_cut_anywhere_are_refused(tmp_path: Path) -> None:
    checkpoint = ExpertsCheckpoint(tmp_path, "mixtral-awq")
    path = checkpoint.files.path / "model.safetensors"
    whole = path.read_bytes()
    header = struct.unpack("<Q", whole[:8])[0]
    for cut in (0, 4, 8, 8 + header // 2, 8 + header, (8 + header + len(whole)) // 2, len(whole) - 1):
        path.write_bytes(whole[:cut])
        with pytest.raises(ConfigError):
            inspect(checkpoint.files)


def test_gguf_cut_in_any_section_is_refused(tmp_path: Path) -> None:
    files = write_model(tmp_path / "model.gguf", build("gpt-oss"), experts=Type.MXFP4)
    whole = files.path.read_bytes()
    reader = gguf.GGUFReader(files.path)
    metadata = max(field.offset for field in reader.fields.values())
    table, data = min(tensor.field.offset for tensor in reader.tensors), reader.data_offset
    for cut in (0, 3, 10, 24, metadata, table, (table + data) // 2, data, data + 100, len(whole) // 2, len(whole) - 64):
        files.path.write_bytes(whole[:cut])
        with pytest.raises(ConfigError, match=r"model\.gguf"):
            inspect(files)


def test_parts_of_a_gguf_file_that_were_renamed_are_refused(tmp_path: Path) -> None:
    files = write_model(tmp_path / "model.gguf", build("qwen3"), tensors_of_a_part=9)
    inspect(files)
    second, third = (tmp_path / f"model-0000{number}-of-00003.gguf" for number in (2, 3))
    second.rename(tmp_path / "other")
    third.rename(second)
    (tmp_path / "other").rename(third)
    with pytest.raises(WeightsError, match=r"model-00002-of-00003\.gguf is part 3 of 3 by its metadata"):
        inspect(files)
    alone = files.path.rename(tmp_path / "alone.gguf")
    with pytest.raises(WeightsError, match=r"is part 1 of 3 by its metadata: parts are named …-00001-of-00003\.gguf"):
        inspect(ModelFiles(name="alone", format="gguf", path=alone))
    (tmp_path / "model-00001-of-00002.gguf").write_bytes(alone.read_bytes())
    (tmp_path / "model-00002-of-00002.gguf").write_bytes(alone.read_bytes())
    with pytest.raises(WeightsError, match=r"part 1 of 3"):
        inspect(ModelFiles(name="twice", format="gguf", path=tmp_path / "model-00001-of-00002.gguf"))
    with pytest.raises(ConfigError, match="which a part before it has, too"):
        GgufWeights(tmp_path / "model-00001-of-00002.gguf", load_config(write_model(tmp_path / "whole.gguf", build("qwen3"))))


def test_gguf_without_a_tensor_or_with_another_shape_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"lack model\.layers\.2\.input_layernorm"):
        inspect(write_model(tmp_path / "a.gguf", build("qwen3"), extra={"block_count": 3}))
    with pytest.raises(WeightsError, match=r"has shape \[256, 64\], the configuration asks for \[255, 64\]"):
        inspect(write_model(tmp_path / "b.gguf", build("qwen3"), extra={"vocab_size": 255}))


SCALES = {"Q4_0": (0,), "Q4_1": (0, 2), "Q8_0": (0,), "Q4_K": (0, 2), "Q6_K": (208,)}
"""Where a block of each type has its scale, and its minimum if there is one."""


def write_quantised(path: Path, kind: Type) -> ModelFiles:
    """A Llama whose K projections are of `kind`, of random codes; its scales are numbers."""
    files = write_model(path, build("llama", head_dim=64, hidden_size=256, num_hidden_layers=2))
    size, num_bytes = GGML_QUANT_SIZES[kind]
    reader, rng = gguf.GGUFReader(path), np.random.default_rng(5)
    writer = gguf.GGUFWriter(path.with_suffix(".new"), "llama")
    for key, field in reader.fields.items():
        if key.startswith("llama."):
            writer.add_key_value(key, field.contents(), field.types[0])
    for tensor in reader.tensors:
        if not tensor.name.endswith("attn_k.weight"):
            writer.add_tensor(tensor.name, np.array(tensor.data))
            continue
        blocks = rng.integers(0, 256, (math.prod(tensor.data.shape) // size, num_bytes), np.uint8)
        for at in SCALES[kind.name]:
            blocks[:, at : at + 2] = rng.uniform(1e-3, 1e-2, (len(blocks), 1)).astype(np.float16).view(np.uint8)
        writer.add_tensor(tensor.name, blocks.reshape(len(tensor.data), -1), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    path.with_suffix(".new").rename(path)
    return files


@pytest.mark.parametrize(("kind", "at"), [(kind, at) for kind, places in SCALES.items() for at in places])
@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_a_scale_of_gguf_blocks_that_is_no_number_shows_before_anything_is_loaded(
    tmp_path: Path, kind: str, at: int, value: float
) -> None:
    files = write_quantised(tmp_path / "model.gguf", Type[kind])
    inspect(files)
    tensor = next(one for one in gguf.GGUFReader(files.path).tensors if one.name == "blk.1.attn_k.weight")
    block_bytes = GGML_QUANT_SIZES[Type[kind]][1]
    with files.path.open("r+b") as file:
        file.seek(tensor.data_offset + (tensor.n_bytes // block_bytes - 1) * block_bytes + at)  # the last block
        file.write(np.float16(value).tobytes())
    with pytest.raises(WeightsError, match=r"model\.gguf: model.layers.1.self_attn.k_proj.weight holds a scale"):
        inspect(files)


def test_scales_of_gguf_experts_that_are_not_numbers_are_refused(tmp_path: Path) -> None:
    files = write_model(tmp_path / "model.gguf", build("mixtral"), experts=Type.Q8_0)
    tensor = next(one for one in gguf.GGUFReader(files.path).tensors if "ffn_up_exps" in one.name)
    with files.path.open("r+b") as file:
        file.seek(tensor.data_offset)
        file.write(np.float16(np.nan).tobytes())
    with pytest.raises(WeightsError, match=r"experts\.0\.up_proj\.weight holds a scale that is NaN"):
        inspect(files)
    with pytest.raises(WeightsError, match=r"experts\.0\.up_proj\.weight holds a scale that is NaN"):
        load_decoder(files, load_config(files), dtype=torch.float32, device=torch.device("cpu"))


@pytest.mark.parametrize("kind", [kind for kind in Type if _has_scales(kind)])
def test_what_the_check_looks_at_is_what_the_package_multiplies_with(kind: Type) -> None:
    """Blocks of random bytes: it finds those, and only those, that dequantise to what is no number."""
    rng = np.random.default_rng(6)
    blocks = rng.integers(0, 256, (400, GGML_QUANT_SIZES[kind][1]), np.uint8)
    with np.errstate(all="ignore"):
        values = dequantize(blocks, kind)
    wrong = ~np.isfinite(values).all(1)
    if kind is Type.MXFP4:  # whose NaN the package reads as 2^127
        wrong = blocks[:, 0] == 255
    assert wrong.any()
    assert [_any_wrong(blocks[index : index + 1], kind) for index in range(len(blocks))] == wrong.tolist()


def test_up_ends_with_one_line(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "Tiny")
    edit_config(model, quantization_config={"quant_method": "awq", "bits": 4, "group_size": 128})
    weights = load_file(model / "model.safetensors")
    name = "model.layers.0.self_attn.q_proj"
    size, inputs = weights.pop(f"{name}.weight").shape
    weights |= {f"{name}.qweight": np.zeros((inputs, size // 8), np.int32)}
    save_file(weights, model / "model.safetensors")
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PENSTOCK_")}
    words = ["up", "--model", str(model), "--http-port", "0", "--nats-port", "0", "--log-dir", str(tmp_path / "logs")]
    ended = subprocess.run(
        [sys.executable, "-m", "common.cli", *words], capture_output=True, text=True, timeout=60, env=environment, check=False
    )
    said = (ended.stdout + ended.stderr).strip()
    assert (ended.returncode, "Traceback" in said) == (1, False)
    assert "AWQ packs multiples of 128 inputs" in " ".join(said.split())
    assert not (tmp_path / "logs").exists()
