"""What a step reads of a model's weights and multiplies with, by its specification. Pure.

Of a mixture's experts a step reads those that its tokens were routed to. Of n experts, k for each token, r tokens touch
n · (1 - (1 - k / n)^r) on average, if all experts are as likely and tokens choose each by itself.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from common.engine.load.precision import Precision
from common.models.spec import DenseSpec, ExpertsSpec, LayerSpec, ModelSpec

_ITEM_BYTES = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0, "fp8": 1.0, "int8": 1.0}


class Experts(msgspec.Struct, frozen=True):
    """The experts of all layers that have so many, `top_k` of them for a token. bytes: of all."""

    count: int
    top_k: int
    bytes: float

    def touched(self, rows: int) -> float:
        """Return the share of them that `rows` tokens touch."""
        return 1.0 - (1.0 - self.top_k / self.count) ** rows


class StepWeights(msgspec.Struct, frozen=True):
    """always: bytes that any step reads, the output head included. layer_params: numbers in the layers' linears that a token
    goes through. head_params: in the output head."""

    always: float
    experts: tuple[Experts, ...]
    layer_params: int
    head_params: int

    def bytes_of(self, rows: int) -> float:
        """Return what a step of `rows` tokens reads."""
        return self.always + sum(one.bytes * one.touched(rows) for one in self.experts)


def step_weights(model: ModelSpec, precision: Precision) -> StepWeights:
    """Return what a step reads of `model` in `precision`. Norms and biases count as nothing."""
    item, hidden, names = _item_bytes(model, precision), model.hidden_size, model.names.layer
    always, params = model.vocab_size * hidden * _ITEM_BYTES[precision.compute], 0
    experts: dict[tuple[int, int], float] = {}
    for index, layer in enumerate(model.layers):
        mixer, mlp, prefix = layer.mixer, layer.mlp, f"{model.names.layers}.{index}"
        parts = {
            names.qkv[0]: hidden * (mixer.query_size + 2 * mixer.kv_size),
            names.output: mixer.query_size * hidden,
        }
        if isinstance(mlp, DenseSpec):
            parts[names.down] = 3 * hidden * mlp.intermediate_size
        else:
            parts[names.shared_down] = 3 * hidden * mlp.shared_size
            one = 3 * hidden * mlp.intermediate_size
            count, top_k = mlp.router.num_experts, mlp.router.top_k
            size = count * one * item(f"{prefix}.{names.experts}", layer)
            experts[count, top_k] = experts.get((count, top_k), 0.0) + size
            always += count * hidden * _ITEM_BYTES[precision.compute]
            params += count * hidden + top_k * one
        always += sum(numbers * item(f"{prefix}.{name}", layer) for name, numbers in parts.items())
        params += sum(parts.values())
    stacked = tuple(Experts(count, top_k, size) for (count, top_k), size in experts.items())
    return StepWeights(always, stacked, params, model.vocab_size * hidden)


def _item_bytes(model: ModelSpec, precision: Precision) -> Callable[[str, LayerSpec], float]:
    """Return what says how many bytes a number of a module takes."""
    scheme, compute = model.quantization, _ITEM_BYTES[precision.compute]

    def bytes_of(module: str, layer: LayerSpec) -> float:
        of_experts = isinstance(layer.mlp, ExpertsSpec) and module.endswith(model.names.layer.experts)
        if precision.weights == "none" or (precision.weights != "int8" and scheme.leaves_alone(module)):
            return compute
        if precision.weights == "groups":
            return scheme.weight_bytes
        if of_experts and scheme.kind not in ("fp8", "fp8_blocks"):  # quantisation at load leaves experts as they are
            return compute
        return _ITEM_BYTES[precision.weights]

    return bytes_of
