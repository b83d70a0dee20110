"""What a step reads of a model's weights and multiplies with, by its specification. Pure.

Of a mixture's experts a step reads those that its tokens were routed to. Of n experts, k for each token, r tokens touch
n · (1 - (1 - k / n)^r) on average, if all experts are as likely and tokens choose each by itself.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from common.engine.load.precision import Precision
from common.engine.load.stored_weights import StoredWeights
from common.models.spec import DenseSpec, ModelSpec


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


def step_weights(model: ModelSpec, precision: Precision, block_types: Mapping[str, str] | None = None) -> StepWeights:
    """Return what a step reads of `model` in `precision`. Norms and biases count as nothing.

    block_types: see `StoredWeights`.
    """
    stored, hidden, names = StoredWeights(model, precision, block_types), model.hidden_size, model.names.layer
    always, params = stored.head(), 0
    experts: dict[tuple[int, int], float] = {}
    for index, layer in enumerate(model.layers):
        mixer, mlp, prefix = layer.mixer, layer.mlp, f"{model.names.layers}.{index}"
        linears: list[_Linear] = [
            (names.qkv, (mixer.query_size, mixer.kv_size, mixer.kv_size), hidden),
            ((names.output,), (hidden,), mixer.query_size),
        ]
        if isinstance(mlp, DenseSpec):
            linears += _feed_forward(names.gate_up, names.down, mlp.intermediate_size, hidden)
        else:
            count, top_k = mlp.router.num_experts, mlp.router.top_k
            experts[count, top_k] = experts.get((count, top_k), 0.0) + stored.experts(prefix, mlp)
            always += stored.floats(count * hidden)
            params += count * hidden + top_k * 3 * hidden * mlp.intermediate_size
            if mlp.shared_size:
                linears += _feed_forward(names.shared_gate_up, names.shared_down, mlp.shared_size, hidden)
        always += sum(stored.linear(prefix, *linear) for linear in linears)
        params += sum(sum(outputs) * inputs for _, outputs, inputs in linears)
    stacked = tuple(Experts(count, top_k, size) for (count, top_k), size in experts.items())
    return StepWeights(always, stacked, params, model.head_size * hidden)


_Linear = tuple[tuple[str, ...], tuple[int, ...], int]
"""Names of the parts, their outputs, and the inputs."""


def _feed_forward(gate_up: tuple[str, ...], down: str, middle: int, hidden: int) -> list[_Linear]:
    return [(gate_up, (middle, middle), hidden), ((down,), (hidden,), middle)]
