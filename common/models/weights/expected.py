"""Name and shape of every tensor that a decoder takes. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from common.models.spec import AttentionSpec, DenseSpec, ExpertsSpec, LayerNames, ModelSpec

Shapes = dict[str, tuple[int, ...]]

TARGET_OFFSETS = "d2t"
"""The tensor of a reduced vocabulary (`common.models.reduced_vocabulary`); int64, whatever the weights are."""

ROPE_FACTORS = "rope_freqs.weight"
"""The tensor in which GGUF files have Llama 3's scaling: of each pair of dimensions, what its frequency is divided by."""


def decoder_shapes(model: ModelSpec) -> Shapes:
    """Return the tensors of a decoder of `model`, in the order in which it takes them."""
    names, hidden = model.names, model.hidden_size
    shapes: Shapes = {f"{names.embedding}.weight": (model.vocab_size, hidden)}
    for index, layer in enumerate(model.layers):
        found = {f"{norm}.weight": (hidden,) for norm in (*names.layer.mixer_norms, *names.layer.mlp_norms) if norm}
        found |= _attention(layer.mixer, names.layer, hidden)
        if isinstance(layer.mlp, DenseSpec):
            found |= _dense(layer.mlp, names.layer.gate_up, names.layer.down, hidden)
        else:
            found |= _experts(layer.mlp, names.layer, hidden)
        shapes |= {f"{names.layers}.{index}.{name}": shape for name, shape in found.items()}
    shapes[f"{names.norm}.weight"] = (hidden,)
    if not model.tie_embeddings:
        shapes[f"{names.head}.weight"] = (model.head_size, hidden)
    if model.draft_vocab_size:
        shapes[TARGET_OFFSETS] = (model.draft_vocab_size,)
    return shapes


def _attention(spec: AttentionSpec, names: LayerNames, hidden: int) -> Shapes:
    shapes = dict(_linears(names.qkv, (spec.query_size, spec.kv_size, spec.kv_size), hidden, spec.qkv_bias))
    shapes |= dict(_linears((names.output,), (hidden,), spec.query_size, spec.output_bias))
    if spec.qk_norm in ("head", "projection"):
        per_head = spec.qk_norm == "head"
        shapes[f"{names.q_norm}.weight"] = (spec.head_dim if per_head else spec.query_size,)
        shapes[f"{names.k_norm}.weight"] = (spec.head_dim if per_head else spec.kv_size,)
    if spec.sinks:
        shapes[names.sinks] = (spec.num_heads,)
    return shapes


def _dense(spec: DenseSpec, gate_up: Sequence[str], down: str, hidden: int) -> Shapes:
    middle = spec.intermediate_size
    return dict(_linears(gate_up, (middle, middle), hidden, spec.bias)) | dict(_linears((down,), (hidden,), middle, spec.bias))


def _experts(spec: ExpertsSpec, names: LayerNames, hidden: int) -> Shapes:
    count, middle = spec.router.num_experts, spec.intermediate_size
    shapes = dict(_linears((names.router,), (count,), hidden, spec.router.bias))
    if spec.router.choice_bias:
        shapes[names.choice_bias] = (1, count) if names.choice_bias_in_rows else (count,)
    if names.each_expert:
        gate, up, down = names.each_expert
        for expert in range(count):
            each = DenseSpec(intermediate_size=middle, bias=spec.bias)
            prefix = f"{names.experts}.{expert}"
            shapes |= _dense(each, (f"{prefix}.{gate}", f"{prefix}.{up}"), f"{prefix}.{down}", hidden)
    else:
        shapes[f"{names.experts}.gate_up_proj"] = (count, hidden, 2 * middle)
        shapes[f"{names.experts}.down_proj"] = (count, middle, hidden)
        if spec.bias:
            shapes[f"{names.experts}.gate_up_proj_bias"] = (count, 2 * middle)
            shapes[f"{names.experts}.down_proj_bias"] = (count, hidden)
    if spec.shared_size:
        shapes |= _dense(DenseSpec(intermediate_size=spec.shared_size), names.shared_gate_up, names.shared_down, hidden)
    return shapes


def _linears(names: Sequence[str], outputs: Sequence[int], inputs: int, bias: bool) -> Iterator[tuple[str, tuple[int, ...]]]:
    """One name is the whole, fused in the files."""
    for name, size in zip(names, [sum(outputs)] if len(names) == 1 else outputs, strict=True):
        yield f"{name}.weight", (size, inputs)
        if bias:
            yield f"{name}.bias", (size,)
