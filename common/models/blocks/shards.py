"""How tensor parallelism cuts a model: the rule that each block writes down for each of its weights, and what must divide.

A rank computes with its own heads, columns of the MLP and experts, and gets the same residual stream as all others: what blocks
give back is summed over ranks. So of two linears in a row the first is cut by outputs and the second by the same inputs. How
finely a quantised weight can be cut is its format's to say (`formats/scheme.py`: `ShardUnits`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from common.models.formats.scheme import ShardUnits
from common.models.spec import DenseSpec, LayerSpec, ModelSpec
from common.protocol.errors import ConfigError

ShardRule = Literal["replicated", "heads", "outputs", "inputs", "experts"]
"""replicated: every rank has all of it.
heads: output rows (or numbers of a vector) by KV head, with the query heads that share it.
outputs: output rows, of each fused part alike.
inputs: input columns; ranks' results are summed, and a bias is the first rank's.
experts: whole experts."""


def share(size: int, rank: int, ranks: int) -> range:
    """Return what of `size` is the rank's. `check_shards` knows whether it divides."""
    each = size // ranks
    return range(rank * each, (rank + 1) * each)


def rows_of(rule: ShardRule, parts: Sequence[int], rank: int, ranks: int) -> list[range]:
    """Return the output rows of a rank, of a weight whose parts lie below each other. parts: outputs of each."""
    rows: list[range] = []
    first = 0
    for size in parts:
        mine = share(size, rank, ranks) if rule in ("heads", "outputs") else range(size)
        rows.append(range(first + mine.start, first + mine.stop))
        first += size
    return rows


def columns_of(rule: ShardRule, inputs: int, rank: int, ranks: int) -> range:
    """Return the input columns of a rank."""
    return share(inputs, rank, ranks) if rule == "inputs" else range(inputs)


def has_bias(rule: ShardRule, rank: int) -> bool:
    """Whether the rank adds the linear's bias."""
    return rule != "inputs" or rank == 0


def check_shards(model: ModelSpec, ranks: int, units: ShardUnits) -> None:
    """Check that `model` can be cut for so many ranks: by its configuration alone, before any weight is read.

    units: of the model's format (`formats.registry.shard_units`); modules that it leaves alone can be cut anywhere.

    :raises ConfigError: naming the first thing that does not divide.
    """
    if ranks == 1:
        return
    _check("vocabulary", model.vocab_size, ranks)
    for index, layer in enumerate(model.layers):
        _check_layer(model, layer, f"layer {index}", f"{model.names.layers}.{index}", ranks, units)


def _check_layer(model: ModelSpec, layer: LayerSpec, where: str, prefix: str, ranks: int, units: ShardUnits) -> None:
    mixer, mlp, names = layer.mixer, layer.mlp, model.names.layer

    def cut(module: str) -> ShardUnits:
        return ShardUnits() if model.quantization.leaves_alone(f"{prefix}.{module}") else units

    def check_feed_forward(what: str, size: int, into: Sequence[str], down: str) -> None:
        _check(what, size, ranks)
        for name in into:
            _check(what, size, ranks, cut(name).outputs)
        _check_inputs(what, size, ranks, cut(down))

    _check(f"{where}: KV heads", mixer.num_kv_heads, ranks)
    for name in names.qkv:
        for size in (mixer.query_size, mixer.kv_size):
            _check(f"{where}: heads' channels", size, ranks, cut(name).outputs)
    _check_inputs(f"{where}: heads' channels", mixer.query_size, ranks, cut(names.output))
    if isinstance(mlp, DenseSpec):
        check_feed_forward(f"{where}: intermediate size", mlp.intermediate_size, names.gate_up, names.down)
        return
    _check(f"{where}: experts", mlp.router.num_experts, ranks)
    if mlp.shared_size:
        check_feed_forward(f"{where}: shared expert's size", mlp.shared_size, names.shared_gate_up, names.shared_down)


def _check_inputs(what: str, size: int, ranks: int, units: ShardUnits) -> None:
    if not units.inputs:
        raise ConfigError(f"{what}: weights whose inputs are sorted by group (act-order) can't be shared by {ranks} GPUs")
    _check(what, size, ranks, units.inputs)


def _check(what: str, size: int, ranks: int, unit: int = 1) -> None:
    if size % (ranks * unit):
        multiples = f" in multiples of {unit}, as the weights' format asks for" if unit > 1 else ""
        raise ConfigError(f"{what}: {size} can't be shared equally by {ranks} GPUs{multiples}")
