"""Shard rules: what 2 and 4 ranks compute with their parts is, put together, what one computes with the whole.

By family: each rank has its part of each weight of a layer, by the rule that its block writes down. By format: parts of a
quantised weight stay quantised, in the same codes. What does not divide is one error that says what.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from bench.engine.format_writers import write_fp8, write_fp8_blocks, write_fp8_tensor
from common.models import decoder
from common.models.blocks import attention, mlp, moe
from common.models.blocks.shards import ShardRule, check_shards, columns_of, has_bias, rows_of, share
from common.models.config import config_from_json, load_config
from common.models.formats.gguf import groups_of_blocks
from common.models.formats.groups import Groups
from common.models.formats.registry import format_of, shard_units
from common.models.formats.scheme import WeightScheme
from common.models.registry import open_weights
from common.models.spec import AttentionSpec, DenseSpec, ExpertsSpec, ModelSpec
from common.models.weights.base import WeightLoader
from common.models.weights.expert_stack import Stored, plain
from common.models.weights.fp8 import Fp8Weight
from common.models.weights.shards import cut_stored
from common.ops.linear.linear import linear
from common.ops.linear.weight import LinearWeight, linear_from_fp8, linear_from_grouped
from common.ops.norm.rms_norm import rms_norm
from common.ops.quant.grouped import dequantise_grouped
from common.protocol.errors import ConfigError
from tests.models.oracles import ORACLES, build, save
from tests.models.test_weights_experts import FP8_BLOCKS
from tests.models.test_weights_groups import AWQ, FORMATS, GPTQ, compressed

RANKS = (1, 2, 4)
FAMILIES = [name for name in ORACLES if "-" not in name or name in ("qwen3-moe", "gpt-oss")]
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4}
TOLERANCE: dict[str, Any] = {"atol": 2e-5, "rtol": 1e-4}


class Fused(NamedTuple):
    """A linear of a block: its name there, those of its parts in the files, and its sizes."""

    what: str
    names: Sequence[str]
    parts: Sequence[int]
    inputs: int
    bias: bool


class Layer:
    """A layer's weights as files hold them, by what blocks call them, and what a rank has of them."""

    def __init__(self, loader: WeightLoader, model: ModelSpec, index: int) -> None:
        self.model, self.spec, self.loader = model, model.layers[index], loader
        self.prefix = f"{model.names.layers}.{index}"
        self.rules: dict[str, ShardRule] = attention.shards(self.spec.mixer) | (
            mlp.SHARDS if isinstance(self.spec.mlp, DenseSpec) else moe.SHARDS
        )

    def linear(self, one: Fused, rank: int, ranks: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The rank's weight, and its bias."""
        rule, parts = self.rules[one.what], one.parts
        named = [(one.names[0], sum(parts))] if len(one.names) == 1 else list(zip(one.names, parts, strict=True))
        whole = torch.cat([self._stored(f"{name}.weight", size, one.inputs) for name, size in named])
        weight = cut_stored(whole, rows_of(rule, parts, rank, ranks), columns_of(rule, one.inputs, rank, ranks))
        assert isinstance(weight, torch.Tensor)
        if not one.bias or not has_bias(rule, rank):
            return weight, None
        biases = torch.cat([self._stored(f"{name}.bias", size) for name, size in named])
        return weight, torch.cat([biases[mine.start : mine.stop] for mine in rows_of(rule, parts, rank, ranks)])

    def vector(self, what: str, name: str, size: int, rank: int, ranks: int) -> torch.Tensor:
        (mine,) = rows_of(self.rules[what], [size], rank, ranks)
        return self._stored(name, size)[mine.start : mine.stop]

    def _stored(self, name: str, *shape: int) -> torch.Tensor:
        """Read again for each rank."""
        assert self.loader.source.shapes[f"{self.prefix}.{name}"] == shape
        return self.loader.read_stored(f"{self.prefix}.{name}", shape).float()


def attended(layer: Layer, x: torch.Tensor, ranks: int) -> torch.Tensor:
    """Attention without positions, as `ranks` compute it."""
    spec, names, hidden = layer.spec.mixer, layer.model.names.layer, layer.model.hidden_size
    heads, kv_heads = spec.num_heads // ranks, spec.num_kv_heads // ranks
    made = []
    for rank in range(ranks):
        sizes = (spec.query_size, spec.kv_size, spec.kv_size)
        weight, bias = layer.linear(Fused("qkv", names.qkv, sizes, hidden, spec.qkv_bias), rank, ranks)
        made.append(F.linear(x, weight, bias).split([size // ranks for size in sizes], 1))
    squares = [torch.cat([parts[i] for parts in made], 1).square().sum(1, keepdim=True) for i in (0, 1)]  # of all ranks
    total = torch.zeros(len(x), hidden)
    for rank, (q, k, v) in enumerate(made):
        if spec.qk_norm in ("head", "projection"):
            whole = spec.head_dim if spec.qk_norm == "head" else 0
            q_norm = layer.vector("q_norm", f"{names.q_norm}.weight", whole or spec.query_size, rank, ranks)
            k_norm = layer.vector("k_norm", f"{names.k_norm}.weight", whole or spec.kv_size, rank, ranks)
            if whole:
                q = rms_norm(q.unflatten(1, (-1, whole)), q_norm, 1e-6).flatten(1)
                k = rms_norm(k.unflatten(1, (-1, whole)), k_norm, 1e-6).flatten(1)
            else:
                q = q * (squares[0] / spec.query_size + 1e-6).rsqrt() * q_norm
                k = k * (squares[1] / spec.kv_size + 1e-6).rsqrt() * k_norm
        q, k, v = (part.unflatten(1, (-1, spec.head_dim)).transpose(0, 1) for part in (q, k, v))
        k, v = (part.repeat_interleave(heads // kv_heads, 0) for part in (k, v))
        scores = q @ k.mT * spec.scale
        if spec.sinks:
            sinks = layer.vector("sinks", names.sinks, spec.num_heads, rank, ranks)
            scores = torch.cat((scores, sinks[:, None, None].expand(-1, len(x), 1)), 2).softmax(2)[..., :-1]
        else:
            scores = scores.softmax(2)
        one = Fused("output", (names.output,), (hidden,), spec.query_size, spec.output_bias)
        weight, bias = layer.linear(one, rank, ranks)
        total += F.linear((scores @ v).transpose(0, 1).flatten(1), weight, bias)
    return total


def fed_forward(layer: Layer, x: torch.Tensor, ranks: int) -> torch.Tensor:
    """The dense MLP, or the expert that all tokens visit."""
    names, hidden = layer.model.names.layer, layer.model.hidden_size
    if isinstance(spec := layer.spec.mlp, DenseSpec):
        into, back, size, bias = "gate_up", "down", spec.intermediate_size, spec.bias
    else:
        into, back, size, bias = "shared_gate_up", "shared_down", spec.shared_size, False
    total = torch.zeros(len(x), hidden)
    for rank in range(ranks):
        gate_up = layer.linear(Fused(into, getattr(names, into), (size, size), hidden, bias), rank, ranks)
        gate, up = F.linear(x, *gate_up).chunk(2, 1)
        down = layer.linear(Fused(back, (getattr(names, back),), (hidden,), size, bias), rank, ranks)
        total += F.linear(F.silu(gate) * up, *down)
    return total


@pytest.mark.parametrize("name", FAMILIES)
def test_ranks_of_a_family_make_what_one_makes(tmp_path: Path, name: str) -> None:
    files = save(build(name, **HEADS), tmp_path)
    model = load_config(files)
    seen: set[str] = set()
    with WeightLoader(open_weights(files, model), torch.float32) as loader:
        for index in range(model.num_layers):
            layer, x = Layer(loader, model, index), torch.randn(7, model.hidden_size)
            for ranks in RANKS:
                check_shards(model, ranks, shard_units(model.quantization))
                torch.testing.assert_close(attended(layer, x, ranks), attended(layer, x, 1), **TOLERANCE)
                if isinstance(layer.spec.mlp, DenseSpec) or layer.spec.mlp.shared_size:
                    seen.add("dense" if isinstance(layer.spec.mlp, DenseSpec) else "shared")
                    torch.testing.assert_close(fed_forward(layer, x, ranks), fed_forward(layer, x, 1), **TOLERANCE)
                if isinstance(layer.spec.mlp, ExpertsSpec):
                    seen.add("experts")
                    count = layer.spec.mlp.router.num_experts
                    assert layer.rules["weights"] == "experts"
                    assert [expert for rank in range(ranks) for expert in share(count, rank, ranks)] == list(range(count))
        head = loader.read_stored(f"{model.names.embedding}.weight", (model.vocab_size, model.hidden_size)).float()
        for ranks in RANKS:
            rows = [rows_of(decoder.SHARDS["head"], [len(head)], rank, ranks) for rank in range(ranks)]
            parts = [plain(cut_stored(head, mine, range(model.hidden_size)), torch.float32) for mine in rows]
            assert torch.equal(torch.cat(parts), head)
    shared = {"llama4", "ernie4.5-moe", "glm4-moe"}
    experts = {"mixtral", "qwen3-moe", "gpt-oss", "olmoe", *shared}
    assert ("experts" in seen) == (name in experts)
    assert ("shared" in seen) == (name in shared)


def test_every_weight_of_a_block_has_a_rule() -> None:
    """What a block loads is what it writes rules for."""
    spec = AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=8, scale=1.0)
    fields = {field for field in attention.AttentionBlock.__dataclass_fields__ if field not in ("spec", "form", "heads")}
    assert attention.shards(spec).keys() == fields | {"sinks"}
    assert mlp.SHARDS.keys() == {field for field in mlp.DenseBlock.__dataclass_fields__ if field != "spec"}
    fields = {field for field in moe.ExpertsBlock.__dataclass_fields__ if field not in ("spec", "shared")}
    assert moe.SHARDS.keys() == fields | {"shared_gate_up", "shared_down"}


# ── formats ──────────────────────────────────────────────────────────────────────────────────────────────────────────


class Held:
    """The `Tensors` of one module."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.tensors = {f"m.{name}": tensor for name, tensor in tensors.items()}
        self.shapes = {name: tuple(tensor.shape) for name, tensor in self.tensors.items()}

    def __call__(self, name: str, *shape: int) -> torch.Tensor:
        assert not shape or self.shapes[name] == shape
        return self.tensors[name]


def json_scheme(quantization: dict[str, Any]) -> WeightScheme:
    sizes = {"vocab_size": 256, "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 1, "num_attention_heads": 4}
    return config_from_json({"model_type": "llama", **sizes, "quantization_config": quantization}).quantization


KINDS = [*FORMATS, "fp8", "fp8-tensor", "fp8-blocks", "Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q6_K", "plain"]
OUTPUTS, INPUTS = 512, 512
_FP8 = {"fp8": write_fp8, "fp8-tensor": write_fp8_tensor, "fp8-blocks": write_fp8_blocks}


def stored(kind: str) -> tuple[Stored, WeightScheme]:
    weight = torch.randn(OUTPUTS, INPUTS)
    if kind == "plain":
        return weight, WeightScheme()
    if kind in _FP8:
        tensors, _ = _FP8[kind](weight)
        blocks = kind == "fp8-blocks"
        scale = tensors["weight_scale_inv"] if blocks else tensors["weight_scale"].float().reshape(-1).expand(OUTPUTS)
        return Fp8Weight(tensors["weight"], scale, torch.float32), WeightScheme(name="fp8_blocks" if blocks else "fp8", bits=8)
    if kind in FORMATS:
        quantization, write = FORMATS[kind]
        scheme, held = json_scheme(quantization), Held(write(weight)[0])
        found = format_of(scheme, held.shapes)
        assert found is not None
        return found.load(held, "m", OUTPUTS, INPUTS, scheme), scheme
    found_type = GGMLQuantizationType[kind]
    size, num_bytes = GGML_QUANT_SIZES[found_type]
    raw = np.random.default_rng(4).integers(0, 256, (OUTPUTS * INPUTS // size, num_bytes), np.uint8)
    for at in {"Q4_1": (0, 2), "Q4_K": (0, 2), "Q6_K": (208,)}.get(kind, (0,)):
        raw[:, at : at + 2] = np.full((len(raw), 1), 1e-3, np.float16).view(np.uint8)
    groups = groups_of_blocks(torch.from_numpy(raw.reshape(-1)), found_type, (OUTPUTS, INPUTS))
    return groups, WeightScheme(name="gguf", bits=4, group=32)


def packed(part: Stored) -> LinearWeight:
    """As the kernels take it; plain weights as they are."""
    if isinstance(part, Groups):
        grouped = part.pack()
        assert grouped is not None, "a rank's part has no kernel"
        torch.testing.assert_close(dequantise_grouped(grouped), part.dequantise(), atol=1e-3, rtol=2e-3)
        return linear_from_grouped(grouped, dtype=torch.float32)
    if isinstance(part, Fp8Weight):
        return linear_from_fp8(part.data, part.scale, dtype=torch.float32)
    return LinearWeight(part, None, part.shape[1], part.shape[0], "plain", dtype=torch.float32)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_parts_of_a_weight_give_what_the_whole_gives(kind: str, ranks: int) -> None:
    torch.manual_seed(7)
    whole, scheme = stored(kind)
    x, units = torch.randn(3, INPUTS), shard_units(scheme)
    expected = linear(x, packed(whole))
    size = float(expected.abs().max())
    parts = (OUTPUTS // 2, OUTPUTS // 2)  # as gate and up are fused
    assert OUTPUTS // 2 // ranks % units.outputs == 0 or kind == "fp8-blocks"
    if OUTPUTS // 2 // ranks % units.outputs == 0:
        mine = [cut_stored(whole, rows_of("outputs", parts, rank, ranks), range(INPUTS)) for rank in range(ranks)]
        halves = [linear(x, packed(part)).chunk(2, 1) for part in mine]
        found = torch.cat([torch.cat([half[i] for half in halves], 1) for i in (0, 1)], 1)
        torch.testing.assert_close(found, expected, atol=2e-3 * size, rtol=0)
        exact = torch.cat([plain(part, torch.float32).chunk(2)[i] for i in (0, 1) for part in mine])
        assert torch.equal(exact, plain(whole, torch.float32))
    if units.inputs:
        assert INPUTS // ranks % units.inputs == 0
        mine = [cut_stored(whole, [range(OUTPUTS)], columns_of("inputs", INPUTS, rank, ranks)) for rank in range(ranks)]
        found = torch.stack([linear(x[:, share(INPUTS, rank, ranks)], packed(part)) for rank, part in enumerate(mine)]).sum(0)
        torch.testing.assert_close(found, expected, atol=2e-3 * size, rtol=0)
        assert torch.equal(torch.cat([plain(part, torch.float32) for part in mine], 1), plain(whole, torch.float32))
    assert bool(units.inputs) == ("order" not in kind)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "plain"])
def test_what_a_format_does_not_allow_is_refused(kind: str) -> None:
    whole, scheme = stored(kind)
    units = shard_units(scheme)
    if not units.inputs:
        with pytest.raises(ValueError, match="sorted by group"):
            cut_stored(whole, [range(OUTPUTS)], range(INPUTS // 2))
    elif isinstance(whole, Groups) and whole.scales.shape[1] > 1:
        with pytest.raises(ValueError, match="no whole groups"):
            cut_stored(whole, [range(OUTPUTS)], range(whole.group // 2, INPUTS))
    if kind == "fp8-blocks":
        for rows, columns in (([range(64, 128)], range(INPUTS)), ([range(OUTPUTS)], range(64, INPUTS))):
            with pytest.raises(ValueError, match="no whole blocks of 128"):
                cut_stored(whole, rows, columns)


LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "num_hidden_layers": 2,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
}
MOE = LLAMA | {"model_type": "qwen3_moe", "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 64}


@pytest.mark.parametrize(
    ("changes", "ranks", "message"),
    [
        ({"vocab_size": 255}, 2, r"vocabulary: 255 can't be shared equally by 2 GPUs$"),
        ({"num_key_value_heads": 2}, 4, "layer 0: KV heads: 2 can't be shared equally by 4 GPUs"),
        ({"intermediate_size": 2050}, 4, "layer 0: intermediate size: 2050 can't be shared equally by 4 GPUs"),
        (MOE, 4, "layer 0: experts: 6 can't be shared equally by 4 GPUs"),
        (
            {"quantization_config": AWQ | {"group_size": 128}, "intermediate_size": 1792},
            4,
            "intermediate size: 1792 .*4 GPUs in multiples of 128, as the weights' format asks for",
        ),
        ({"quantization_config": FP8_BLOCKS, "num_key_value_heads": 4}, 4, "heads' channels: 256 .* in multiples of 128"),
        ({"quantization_config": GPTQ | {"desc_act": True}}, 2, r"layer 0: heads' channels: .*\(act-order\) .* by 2 GPUs"),
        ({"quantization_config": compressed("pack-quantized", actorder="group")}, 2, r"\(act-order\)"),
    ],
)
def test_what_does_not_divide_is_one_error(changes: dict[str, Any], ranks: int, message: str) -> None:
    """From config.json alone: nothing is read, and no memory taken."""
    model = config_from_json(json.loads(json.dumps(LLAMA | changes)))
    check_shards(model, 1, shard_units(model.quantization))
    with pytest.raises(ConfigError, match=message):
        check_shards(model, ranks, shard_units(model.quantization))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"quantization_config": AWQ | {"group_size": 128}},
        {"quantization_config": GPTQ | {"desc_act": True, "group_size": -1}},  # one group has no order
        {"quantization_config": compressed("pack-quantized", actorder="static")},
        # what the format leaves alone can be cut anywhere
        {"quantization_config": GPTQ | {"desc_act": True, "ignore": ["o_proj", "down_proj"]}},
    ],
)
def test_what_divides_passes(changes: dict[str, Any]) -> None:
    model = config_from_json(LLAMA | changes)
    for ranks in (1, 2, 4, 8):
        check_shards(model, ranks, shard_units(model.quantization))
