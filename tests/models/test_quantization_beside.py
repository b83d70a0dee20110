"""Folders whose config.json says nothing of quantisation, because the quantiser wrote a file of its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from common.models.config import check_config_file, load_config
from common.models.formats.scheme import WeightScheme
from common.models.source import ModelFiles
from common.models.weights.inventory import take_inventory
from common.protocol.errors import ConfigError
from tests.models.driver import Request, open_runner, run
from tests.models.oracles import oracle_prompt
from tests.models.test_weights_groups import Checkpoint

NVFP4 = {"quant_algo": "NVFP4", "kv_cache_quant_algo": None, "group_size": 16, "exclude_modules": ["lm_head"]}
BESIDE: dict[str, tuple[str, str, dict[str, Any]]] = {
    "modelopt": ("modelopt", "hf_quant_config.json", {"producer": {"name": "modelopt"}, "quantization": NVFP4}),
    "AutoGPTQ": (
        "gptq",
        "quantize_config.json",
        {"bits": 4, "group_size": 32, "desc_act": False, "sym": True, "damp_percent": 0.1},
    ),
    "AutoAWQ": ("awq", "quant_config.json", {"zero_point": True, "q_group_size": 32, "w_bit": 4, "version": "GEMM"}),
}


def move_beside(files: ModelFiles, name: str, content: dict[str, Any]) -> None:
    path = files.path / "config.json"
    config = json.loads(path.read_bytes())
    config.pop("quantization_config")
    path.write_text(json.dumps(config))
    (files.path / name).write_text(json.dumps(content))


@pytest.mark.parametrize("quantiser", BESIDE)
def test_a_file_beside_config_json_says_the_same(tmp_path: Path, quantiser: str) -> None:
    form, name, content = BESIDE[quantiser]
    files = Checkpoint(tmp_path, form).files
    prompts = [Request(oracle_prompt()[:20], 4)]
    inventory, tokens = take_inventory(files, load_config(files)), run(open_runner(files), prompts)
    move_beside(files, name, content)
    assert take_inventory(files, load_config(files)) == inventory
    assert run(open_runner(files), [Request(oracle_prompt()[:20], 4)]) == tokens


def test_config_json_counts_where_both_speak(tmp_path: Path) -> None:
    files = Checkpoint(tmp_path, "gptq").files
    (files.path / "quantize_config.json").write_text(json.dumps({"bits": 3, "odd": True}))
    (files.path / "hf_quant_config.json").write_text("{")
    assert (load_config(files).quantization.bits, load_config(files).quantization.group) == (4, 32)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "hf_quant_config.json",
            {"quantization": {"quant_algo": "W4A8_AWQ"}},
            r"hf_quant_config\.json, .*quant_algo 'W4A8_AWQ'",
        ),
        ("hf_quant_config.json", {"producer": {}}, r"hf_quant_config\.json has no quantization"),
        ("quantize_config.json", {"bits": 3}, r"quantize_config\.json, .*GPTQ weights of 3 bits"),
        ("quantize_config.json", {"bits": 4, "rotation": "hadamard"}, r"quantize_config\.json, .*sets rotation"),
        ("quant_config.json", {"w_bit": 4, "version": "GEMV"}, r"quant_config\.json, .*version 'gemv'"),
    ],
)
def test_what_it_says_and_is_not_supported_is_named(tmp_path: Path, name: str, content: dict[str, Any], message: str) -> None:
    files = Checkpoint(tmp_path, "gptq").files
    move_beside(files, name, content)
    for check in (lambda: load_config(files), lambda: check_config_file(files.path / "config.json")):
        with pytest.raises(ConfigError, match=message):
            check()


def test_a_kv_cache_alone_is_no_format_of_weights(tmp_path: Path) -> None:
    files = Checkpoint(tmp_path, "gptq").meant_files
    content = {"quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}}
    (files.path / "hf_quant_config.json").write_text(json.dumps(content))
    assert load_config(files).quantization == WeightScheme()
