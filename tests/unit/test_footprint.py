"""What `penstock doctor --model` says of a model on a card."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import msgspec
import pytest

from common.cache.spec import CacheLayout, Component, GroupSpec, Member, gqa_layout
from common.cli import doctor
from common.cli.footprint import ACHIEVED, CARDS, Footprint, describe_cards, describe_kv, describe_weights, footprint
from common.engine.load.precision import Precision
from common.engine.load.step_weights import step_weights
from common.models.config import ModelConfig, config_from_json
from common.models.formats.scheme import WeightScheme
from common.models.shapes import SHAPES
from common.models.weights.expected import decoder_shapes

H200 = CARDS[1]
BF16 = Precision(compute="bfloat16", weights="none", kv="bfloat16")
GROUPS = Precision(compute="bfloat16", weights="groups", kv="bfloat16")
GIB = 1 << 30
LLAMA_LAYER = 2 * 4096 * (4096 + 1024) + 3 * 4096 * 14_336
"""Numbers in the linears of a layer of Llama 3.1 8B."""
QWEN_EXPERTS = 48 * 128 * 3 * 2048 * 768
"""Numbers in the experts of Qwen3-30B-A3B."""
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}
NF4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
NVFP4 = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}
Q4 = WeightScheme(name="gguf", bits=4, group=32)
FP8_BLOCKS = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}


def compressed(layout: str, **weights: Any) -> dict[str, Any]:
    return {"quant_method": "compressed-tensors", "format": layout, "config_groups": {"group_0": {"weights": weights}}}


W8A8 = compressed("int-quantized", num_bits=8, type="int", strategy="channel")
W4A16 = compressed("pack-quantized", num_bits=4, type="int", strategy="group", group_size=128)
MXFP4 = compressed("mxfp4-pack-quantized", num_bits=4, type="float", strategy="group", group_size=32)


def quantised(shape: str, quantization: dict[str, Any]) -> ModelConfig:
    return config_from_json(SHAPES[shape] | {"quantization_config": quantization})


def size(model: ModelConfig, precision: Precision = GROUPS, block_types: dict[str, str] | None = None) -> Footprint:
    return footprint(model, precision, gqa_layout(1, 1, 1, 2, 16), block_types)


def llama_8b(precision: Precision = BF16) -> Footprint:
    return footprint(config_from_json(SHAPES["llama-3.1-8b"]), precision, gqa_layout(32, 8, 128, precision.kv_bytes, 16))


def test_a_decode_step_reads_every_weight_but_the_input_embedding() -> None:
    found = llama_8b()
    assert found.step_bytes == pytest.approx(15.0e9, rel=0.01)
    assert found.weight_bytes - found.step_bytes == 2 * 128_256 * 4096
    alone = ACHIEVED * 4.8e12 / (found.step_bytes + 1024 * 131_072)
    assert found.tokens_per_s(H200, 1) == pytest.approx(alone) == pytest.approx(279, abs=1)
    assert 31 * alone > found.tokens_per_s(H200, 32) > 20 * alone  # KV is read for each row, weights once


def test_fp8_halves_the_linears_and_the_kv() -> None:
    plain, fp8 = llama_8b(), llama_8b(Precision(compute="bfloat16", weights="fp8", kv="fp8"))
    outputs = 3 * 4096 + 2 * 1024 + 2 * 14_336  # each has a scale, a float32
    assert plain.weight_bytes - fp8.weight_bytes == 32 * (LLAMA_LAYER - 4 * outputs)
    assert fp8.kv_bytes(1000) * 2 == plain.kv_bytes(1000) == 131_072_000


@pytest.mark.parametrize(
    ("quantization", "expert_bits"),
    [
        pytest.param(NVFP4, 16, id="nvfp4"),
        pytest.param(W8A8, 16, id="int8"),
        pytest.param(NF4, 16, id="nf4"),
        pytest.param(GPTQ | {"desc_act": True}, 16, id="gptq act-order"),
        pytest.param(GPTQ | {"bits": 8}, 16, id="gptq 8 bits"),
        pytest.param(AWQ | {"group_size": 16}, 16, id="awq in groups of 16"),
        pytest.param(AWQ, 4.25, id="awq"),
        pytest.param(GPTQ, 4.125, id="gptq"),
        pytest.param(GPTQ | {"desc_act": True, "group_size": -1}, 4.125, id="gptq act-order per channel"),
        pytest.param(W4A16, 4.125, id="packed"),
        pytest.param(MXFP4, 4.25, id="mxfp4"),
    ],
)
def test_experts_count_as_what_a_gpu_keeps_of_them(quantization: dict[str, Any], expert_bits: float) -> None:
    model = quantised("qwen3-30b-a3b", quantization)
    (experts,) = step_weights(model, GROUPS).experts
    assert experts.bytes == pytest.approx(QWEN_EXPERTS * expert_bits / 8, rel=0.01)
    assert (size(model).weight_bytes > 55 * GIB) == (expert_bits == 16)
    assert size(model).weight_bytes < (57.5 if expert_bits == 16 else 17) * GIB
    assert size(model, BF16).weight_bytes == pytest.approx(61.06e9, rel=0.001)  # 30.53e9 parameters


def test_experts_that_stay_quantised_do_so_beside_linears_quantised_at_load() -> None:
    fp8 = Precision(compute="bfloat16", weights="fp8", kv="bfloat16")
    for quantization, expert_bits in ((AWQ, 4.25), (NF4, 16), (FP8_BLOCKS, 8)):
        (experts,) = step_weights(quantised("qwen3-30b-a3b", quantization), fp8).experts
        assert experts.bytes == pytest.approx(QWEN_EXPERTS * expert_bits / 8, rel=0.01)


def test_fp8_experts_of_parts_that_are_no_whole_blocks_are_dequantised() -> None:
    """Gate and up have 704 rows each, which are no blocks of 128; down has 2048."""
    fp8 = Precision(compute="bfloat16", weights="fp8", kv="bfloat16")
    shape = SHAPES["qwen3-30b-a3b"] | {"moe_intermediate_size": 704, "quantization_config": FP8_BLOCKS}
    (experts,) = step_weights(config_from_json(shape), fp8).experts
    assert experts.bytes == pytest.approx(48 * 128 * 2048 * 704 * (2 * 2 + 1), rel=0.001)


@pytest.mark.parametrize("name", ["experts", "experts.0.down_proj", "experts.127"])
def test_experts_are_quantised_where_all_of_them_are(name: str) -> None:
    whole = quantised("qwen3-30b-a3b", W4A16)
    some = quantised("qwen3-30b-a3b", W4A16 | {"ignore": [f"model.layers.7.mlp.{name}"]})
    linears = 1 if name.endswith("down_proj") else 3
    more = size(some).weight_bytes - size(whole).weight_bytes
    assert more == pytest.approx(128 * linears * 2048 * 768 * (2 - 4.125 / 8), rel=0.01)


def test_modules_that_a_format_leaves_alone_count_as_they_are() -> None:
    ignored = [f"model.layers.{layer}.self_attn" for layer in range(16)] + ["re:.*layers\\.31\\..*down_proj", "lm_head"]
    whole, some = (quantised("llama-3.1-8b", W4A16 | {"ignore": names}) for names in ([], ignored))
    numbers = 16 * 2 * 4096 * (4096 + 1024) + 4096 * 14_336
    more = numbers * (2 - 4.125 / 8)
    assert size(some).weight_bytes - size(whole).weight_bytes == pytest.approx(more, rel=0.01)
    assert step_weights(some, GROUPS).always - step_weights(whole, GROUPS).always == pytest.approx(more, rel=0.01)


def test_a_linear_is_quantised_where_all_of_its_parts_are() -> None:
    """Q, K and V are one linear: if V is left alone, so are the others."""
    whole = quantised("llama-3.1-8b", W4A16)
    some = quantised("llama-3.1-8b", W4A16 | {"ignore": ["model.layers.0.self_attn.v_proj"]})
    more = 4096 * (4096 + 2 * 1024) * (2 - 4.125 / 8)
    assert size(some).weight_bytes - size(whole).weight_bytes == pytest.approx(more, rel=0.01)


def test_of_gpt_oss_the_experts_alone_are_quantised() -> None:
    ignored = [f"model.layers.{layer}.{name}" for layer in range(24) for name in ("self_attn", "mlp.router")]
    experts = 24 * 32 * 3 * 2880 * 2880
    others = 24 * (2 * 2880 * 64 * (64 + 8) + 32 * 2880) + 2 * 201_088 * 2880
    for names in (ignored, []):  # as published, and where the configuration does not say so
        found = quantised("gpt-oss-20b", {"quant_method": "mxfp4", "modules_to_not_convert": [*names, "lm_head"]})
        assert size(found).weight_bytes == pytest.approx(experts * 4.25 / 8 + others * 2, rel=0.005)
        assert size(found).weight_bytes == pytest.approx(12.82 * GIB, rel=0.005)


def test_what_tensors_of_a_gguf_file_are_is_said_by_their_types() -> None:
    """As Q4_K_M has them: a mixture of Q4_K and Q6_K. Q, K and V, if not of one width, are no one linear of codes."""
    gguf = msgspec.structs.replace(config_from_json(SHAPES["llama-3.1-8b"]), quantization=Q4)
    names = [name.removesuffix(".weight") for name in decoder_shapes(gguf) if name.endswith("_proj.weight")]
    types = {f"{name}.weight": "Q4_K" for name in names} | {"model.layers.0.self_attn.v_proj.weight": "Q6_K"}
    all_q4 = {f"{name}.weight": "Q4_K" for name in names}
    assert size(gguf, block_types=all_q4).weight_bytes == pytest.approx(32 * LLAMA_LAYER * 5 / 8 + 4 * 128_256 * 4096, rel=0.01)
    more = size(gguf, block_types=types).weight_bytes - size(gguf, block_types=all_q4).weight_bytes
    assert more == pytest.approx(4096 * (4096 + 2 * 1024) * (2 - 5 / 8), rel=0.01)


@pytest.mark.parametrize(("kind", "expert_bits"), [("Q4_0", 4.5), ("Q4_K", 16), ("Q8_0", 16), ("MXFP4", 4.25), ("Q5_K", 16)])
def test_experts_of_gguf_files(kind: str, expert_bits: float) -> None:
    model = msgspec.structs.replace(config_from_json(SHAPES["qwen3-30b-a3b"]), quantization=Q4)
    (experts,) = step_weights(model, GROUPS, dict.fromkeys(decoder_shapes(model), kind)).experts
    assert experts.bytes == pytest.approx(QWEN_EXPERTS * expert_bits / 8, rel=0.01)


def test_a_gguf_experts_type_that_differs_makes_its_layer_plain() -> None:
    model = msgspec.structs.replace(config_from_json(SHAPES["qwen3-30b-a3b"]), quantization=Q4)
    types = dict.fromkeys(decoder_shapes(model), "Q4_0")
    (whole,) = step_weights(model, GROUPS, types).experts
    (some,) = step_weights(model, GROUPS, types | {"model.layers.3.mlp.experts.77.down_proj.weight": "Q8_0"}).experts
    assert some.bytes - whole.bytes == pytest.approx(128 * 2048 * 768 * (2 - 4.5 / 8), rel=0.01)


def test_what_a_model_takes_is_known_without_torch() -> None:
    program = "import sys, common.cli.footprint, common.models.weights.gguf_tensors; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], timeout=60, check=False).returncode == 0


def test_experts_that_do_not_stay_quantised_are_named() -> None:
    nvfp4, awq = quantised("qwen3-30b-a3b", NVFP4), quantised("qwen3-30b-a3b", AWQ)
    assert describe_weights(nvfp4, GROUPS, size(nvfp4)) == "nvfp4 weights, experts in bfloat16"
    assert describe_weights(awq, GROUPS, size(awq)) == "awq weights"
    assert describe_weights(nvfp4, BF16, size(nvfp4, BF16)) == "bfloat16 weights"


def test_what_does_not_fit_says_so_and_promises_no_speed() -> None:
    large = msgspec.structs.replace(llama_8b(), weight_bytes=140e9)
    lines = describe_cards(large).splitlines()
    assert [line.partition(":")[2][:13] == " does not fit" for line in lines[1:]] == [True, True, False]
    assert "at 256" not in lines[3]  # the B200 holds fewer beside them


def test_each_group_of_layers_is_counted_by_what_it_keeps() -> None:
    def component(window: int) -> Component:
        return Component(name="kv", kind="window" if window else "paged", entry_bytes=256, layout="kv", window=window)

    groups = [
        GroupSpec(name=name, members=tuple(Member(layer, component(window)) for layer in layers), block_tokens=16)
        for name, layers, window in (("full", (1, 3), 0), ("window", (0, 2, 4), 128))
    ]
    found = footprint(config_from_json(SHAPES["tiny"]), BF16, CacheLayout(groups=tuple(groups), num_blocks=1))
    assert found.kv_bytes(1000) == 2 * 256 * 1000 + 3 * 256 * 128
    assert "window: 3 layers, 768 bytes a token for the last 128" in describe_kv(found, 1000)


def test_doctor_says_it_of_a_model_that_is_here_and_nothing_of_one_that_is_not() -> None:
    kv, cards = doctor.check_footprint("dummy:llama-3.1-8b", {})
    assert "131,072 bytes a token" in kv.found and "H200: 279 tok/s at 1" in cards.found
    assert doctor.check_footprint("no-such-model", {}) == []
