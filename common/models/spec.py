"""What a decoder computes, as pure data: a list of layers, each with a mixer, an MLP and the place of its norms. Torch-free.

`families` makes a `ModelSpec` of config.json or of GGUF metadata; `blocks` computes it. Every difference between models is a
field here. Norm weights are always plain factors: a family whose files hold them zero-centred says so (`zero_centred_norms`).
"""

from __future__ import annotations

import math
from typing import Literal

import msgspec

from common.models.formats.scheme import WeightFormat, WeightScheme

RopeType = Literal["default", "linear", "llama3", "yarn", "longrope"]
QkNorm = Literal["none", "head", "projection", "l2"]
NormPlacement = Literal["pre", "sandwich", "post"]
Activation = Literal["silu", "gelu_tanh", "clamped_swiglu"]
Scoring = Literal["softmax", "sigmoid", "softmax_selected"]
Retention = Literal["full", "window", "chunk"]


class RopeSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Rotary positions.

    interleaved: neighbouring dimensions turn against each other, instead of the halves (`rotate_half`).
    dims: leading dimensions of a head that are rotated; 0 for all.
    factor and the fields after it: read by the scaled types only.
    original_max_context: context (tokens) that the model was first trained for.
    attention_factor: scales sines and cosines of `yarn` and `longrope`; 0 for YaRN's own (arXiv 2309.00071).
    short_factors, long_factors: of `longrope`, one for each rotated pair; which of them is used depends on the context served.
    """

    type: RopeType = "default"
    theta: float = 10_000.0
    dims: int = 0
    interleaved: bool = False
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_context: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 0.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    truncate: bool = True
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()

    @property
    def yarn_attention(self) -> float:
        """What scales sines and cosines of `yarn`: given, or as the paper has it."""
        if self.attention_factor:
            return self.attention_factor

        def mscale(weight: float) -> float:
            return 0.1 * weight * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0

        if self.mscale and self.mscale_all_dim:
            return mscale(self.mscale) / mscale(self.mscale_all_dim)
        return mscale(1.0)

    def is_long(self, context: int) -> bool:
        """Whether `longrope` uses its long factors for a context of so many tokens."""
        return self.type == "longrope" and context > self.original_max_context


class QueryTemperature(msgspec.Struct, frozen=True, kw_only=True):
    """Queries at position p are multiplied by 1 + scale · ln(1 + ⌊(p + shift) / floor⌋) (arXiv 2501.19399)."""

    scale: float
    floor: float
    shift: int


class AttentionSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Grouped-query attention.

    scale: factor of the scores.
    window: keys that a query sees, its own included; 0 for all.
    chunk: positions of a chunk, beyond which a query sees nothing; 0 for none.
    rope: None for a layer without positions (NoPE).
    qk_norm: RMS norm of Q and K before rotation, over each head or the whole projection; "l2" is after it and has no weights.
    soft_cap: scores become soft_cap · tanh(score / soft_cap); 0 for no cap.
    sinks: whether each head has a learned logit that joins the softmax without a value.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int = 0
    chunk: int = 0
    rope: RopeSpec | None = RopeSpec()
    qk_norm: QkNorm = "none"
    soft_cap: float = 0.0
    sinks: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    temperature: QueryTemperature | None = None

    @property
    def retention(self) -> tuple[Retention, int]:
        """Which past tokens the layer needs, and how many: ("full", 0), ("window", tokens) or ("chunk", tokens)."""
        return ("chunk", self.chunk) if self.chunk else ("window", self.window) if self.window else ("full", 0)

    @property
    def query_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim


class DenseSpec(msgspec.Struct, frozen=True, kw_only=True, tag="dense"):
    """A gated feed-forward: down(activation(gate(x)) · up(x))."""

    intermediate_size: int
    activation: Activation = "silu"
    bias: bool = False


class RouterSpec(msgspec.Struct, frozen=True, kw_only=True):
    """How a token's experts are chosen and weighed; see `ops.moe`.

    bias: whether the logits have a learned bias.
    choice_bias: whether scores have one by which experts are chosen, and which is no part of their weights.
    weight_scale: factor of the weights.
    weigh_inputs: the weights scale the experts' input, not their output.
    """

    num_experts: int
    top_k: int
    scoring: Scoring = "softmax"
    renormalise: bool = False
    bias: bool = False
    choice_bias: bool = False
    weight_scale: float = 1.0
    weigh_inputs: bool = False


class ExpertsSpec(msgspec.Struct, frozen=True, kw_only=True, tag="experts"):
    """A mixture of gated feed-forwards.

    intermediate_size: of one expert.
    alpha, limit: of the clamped SwiGLU.
    shared_size: intermediate size of the expert that every token visits; 0 for none.
    """

    router: RouterSpec
    intermediate_size: int
    activation: Activation = "silu"
    alpha: float = 0.0
    limit: float = 0.0
    bias: bool = False
    shared_size: int = 0


class LayerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """norms: "pre" before mixer and MLP, "post" behind each, before the residual is added, or "sandwich": both."""

    mixer: AttentionSpec
    mlp: DenseSpec | ExpertsSpec
    norms: NormPlacement = "pre"


EACH_EXPERT = ("gate_proj", "up_proj", "down_proj")


class LayerNames(msgspec.Struct, frozen=True, kw_only=True):
    """What the files call a layer's modules, below the layer's own prefix.

    qkv, gate_up: in the order in which they are fused; one name where the files hold them fused.
    mixer_norms, mlp_norms: before and behind the block; "" where there is none.
    experts: each expert's (gate, up, down) below `experts.N`; empty where the files hold them stacked, as `gate_up_proj` and
    `down_proj`, [experts, inputs, outputs].
    choice_bias_in_rows: it is [1, experts] in the files.
    interleaved_gate_up: gate and up alternate in the stacked tensor.
    """

    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    q_norm: str = "self_attn.q_norm"
    k_norm: str = "self_attn.k_norm"
    sinks: str = "self_attn.sinks"
    output: str = "self_attn.o_proj"
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    down: str = "mlp.down_proj"
    mixer_norms: tuple[str, str] = ("input_layernorm", "")
    mlp_norms: tuple[str, str] = ("post_attention_layernorm", "")
    router: str = "mlp.gate"
    choice_bias: str = "mlp.gate.e_score_correction_bias"
    choice_bias_in_rows: bool = False
    experts: str = "mlp.experts"
    each_expert: tuple[str, ...] = EACH_EXPERT
    interleaved_gate_up: bool = False
    shared_gate_up: tuple[str, ...] = ()
    shared_down: str = ""


class WeightNames(msgspec.Struct, frozen=True, kw_only=True):
    """What the files call the weights.

    layers: prefix of a layer, before its number.
    paired_rows: Q's and K's rows are in llama.cpp's order, for rotating neighbours.
    """

    embedding: str = "model.embed_tokens"
    layers: str = "model.layers"
    norm: str = "model.norm"
    head: str = "lm_head"
    paired_rows: bool = False
    layer: LayerNames = LayerNames()


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A decoder.

    architecture: the family (`families.registry`).
    max_context: tokens.
    embedding_scale: factor of the embedded tokens. exact_embedding_scale: it is not rounded to the model's dtype first.
    logit_scale: factor of the logits.
    logit_soft_cap: logits become cap · tanh(logit / cap); 0 for no cap.
    zero_centred_norms: the files hold norm weights w that mean 1 + w.
    eos_ids: all ids that end a text.
    quantization: how the files hold the linears.
    identity: names the weights' content (a digest over sizes, edges and pieces of files, not over whole files).
    draft_layers: layers in the files behind the last one, which only draft and are not read.
    draft_vocab_size: rows of the head of a draft model that writes only some of the tokens (`reduced_vocabulary`); 0: all.

    Properties that speak of "the" heads or sizes are those of the layer that has most.
    """

    architecture: str
    layers: tuple[LayerSpec, ...]
    hidden_size: int
    vocab_size: int
    max_context: int
    rms_eps: float = 1e-6
    tie_embeddings: bool = False
    embedding_scale: float = 1.0
    exact_embedding_scale: bool = False
    logit_scale: float = 1.0
    logit_soft_cap: float = 0.0
    zero_centred_norms: bool = False
    names: WeightNames = WeightNames()
    bos_id: int | None = None
    eos_ids: list[int] = []
    quantization: WeightScheme = WeightScheme()
    identity: str = ""
    draft_layers: int = 0
    draft_vocab_size: int = 0

    @property
    def head_size(self) -> int:
        """Rows of the head."""
        return self.draft_vocab_size or self.vocab_size

    @property
    def weight_format(self) -> WeightFormat:
        """How the linears are multiplied on a GPU, unless a setting says otherwise."""
        return self.quantization.kind

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def drafting(self) -> range:
        """The numbers of the layers that only draft."""
        return range(self.num_layers, self.num_layers + self.draft_layers)

    @property
    def num_heads(self) -> int:
        return max(layer.mixer.num_heads for layer in self.layers)

    @property
    def num_kv_heads(self) -> int:
        return max(layer.mixer.num_kv_heads for layer in self.layers)

    @property
    def head_dim(self) -> int:
        return max(layer.mixer.head_dim for layer in self.layers)

    @property
    def intermediate_size(self) -> int:
        """The most numbers that a token has between gate and down, over all experts that it visits."""
        return max(_middle(layer.mlp) for layer in self.layers)

    @property
    def rope(self) -> RopeSpec:
        """The first layer's that has positions."""
        return next((layer.mixer.rope for layer in self.layers if layer.mixer.rope is not None), RopeSpec())

    @property
    def ropes(self) -> tuple[RopeSpec, ...]:
        """Each variant once, in the order of the layers."""
        return tuple(dict.fromkeys(layer.mixer.rope for layer in self.layers if layer.mixer.rope is not None))

    @property
    def qk_norm(self) -> bool:
        return any(layer.mixer.qk_norm != "none" for layer in self.layers)

    @property
    def qkv_bias(self) -> bool:
        return any(layer.mixer.qkv_bias for layer in self.layers)

    @property
    def output_bias(self) -> bool:
        return any(layer.mixer.output_bias for layer in self.layers)

    @property
    def mlp_bias(self) -> bool:
        return any(layer.mlp.bias for layer in self.layers)


def _middle(mlp: DenseSpec | ExpertsSpec) -> int:
    if isinstance(mlp, DenseSpec):
        return mlp.intermediate_size
    return mlp.router.top_k * mlp.intermediate_size + mlp.shared_size
