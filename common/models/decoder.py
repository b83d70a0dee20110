"""The decoder: a loop over layers, each a mixer and an MLP (`blocks`) as its specification says.

A step's tokens are flat: rows of all sequences, one after the other, go through the linears together; only attention knows
where a row begins. What goes from block to block is a `Border`.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypedDict

import torch

from common.models.blocks.attention import Attention, AttentionBlock, load_attention
from common.models.blocks.border import Border, Norms
from common.models.blocks.loading import take_norm
from common.models.blocks.mlp import DenseBlock, load_dense
from common.models.blocks.moe import ExpertsBlock, load_experts
from common.models.blocks.shards import ShardRule
from common.models.config import ModelConfig
from common.models.reduced_vocabulary import spread, target_ids
from common.models.rope import RopeTable, inverse_frequencies
from common.models.spec import DenseSpec, RopeSpec
from common.models.weights.base import WeightLoader
from common.models.weights.expected import ROPE_FACTORS, TARGET_OFFSETS
from common.ops.linear.embed import embed
from common.ops.linear.linear import linear
from common.ops.linear.weight import LinearWeight, Role
from common.ops.tensors import Feed

SHARDS: dict[str, ShardRule] = {"embedding": "replicated", "norm": "replicated", "head": "outputs"}


class KvForm(TypedDict):
    """How K and V are written: fields of `ops.kv.forms.KvTarget`."""

    kv_scale: torch.Tensor | None
    k_center: torch.Tensor | None
    mix: bool


LinearPlace = tuple[int, Role]
"""A linear of a layer; the head is one of the layer behind the last."""


def modules(config: ModelConfig, place: LinearPlace) -> list[str]:
    """Return what the files call the parts of a layer's linear."""
    names = config.names.layer
    parts = {"qkv": names.qkv, "output": (names.output,), "gate_up": names.gate_up, "down": (names.down,)}
    return [f"{config.names.layers}.{place[0]}.{name}" for name in parts[place[1]]]


@dataclass(slots=True)
class Inputs:
    """One step. tokens: int64 [tokens], padding included. samples: int64 [samples], the tokens whose logits are wanted; None:
    all, in order. `attention` knows rows, positions and the KV pool. `feed`: see `ops.linear.embed`. noted: by layer, rising,
    gets what every token had before it, [tokens, hidden_size]; the number of layers stands for behind the last one."""

    tokens: torch.Tensor
    samples: torch.Tensor | None
    attention: Attention
    feed: Feed | None = None
    noted: dict[int, torch.Tensor] | None = None


@dataclass(slots=True, frozen=True)
class Layer:
    """A mixer and the MLP behind it. The properties are the parts by which FP8 choices and benchmarks name them."""

    mixer: AttentionBlock
    mlp: DenseBlock | ExpertsBlock

    @property
    def input_norm(self) -> torch.Tensor:
        assert self.mixer.norms.before is not None
        return self.mixer.norms.before

    @property
    def qkv(self) -> LinearWeight:
        return self.mixer.qkv

    @property
    def q_norm(self) -> torch.Tensor | None:
        return self.mixer.q_norm

    @property
    def k_norm(self) -> torch.Tensor | None:
        return self.mixer.k_norm

    @property
    def output(self) -> LinearWeight:
        return self.mixer.output

    @property
    def mlp_norm(self) -> torch.Tensor:
        assert self.mlp.norms.before is not None
        return self.mlp.norms.before

    @property
    def gate_up(self) -> LinearWeight:
        assert isinstance(self.mlp, DenseBlock)
        return self.mlp.gate_up

    @property
    def down(self) -> LinearWeight:
        assert isinstance(self.mlp, DenseBlock)
        return self.mlp.down

    @property
    def linears(self) -> dict[Role, LinearWeight]:
        return {"qkv": self.qkv, "output": self.output, **self.mlp.linears}

    def with_linears(self, weights: Mapping[Role, LinearWeight]) -> Layer:
        """Return this layer with other weights for those linears."""
        mixer = {role: weight for role, weight in weights.items() if role in ("qkv", "output")}
        mlp = {role: weight for role, weight in weights.items() if role in ("gate_up", "down")}
        return Layer(replace(self.mixer, **mixer), replace(self.mlp, **mlp))


class Decoder:
    """Weights and the forward pass. The KV pool (see `ops.kv.paged_kv`) comes with each step's attention.

    :raises WeightsError: if the weights don't fit `config`.
    """

    def __init__(self, config: ModelConfig, loader: WeightLoader) -> None:
        self.config = config
        self.device = loader.device
        self.dtype = loader.dtype
        names = config.names
        self.embedding = loader.take(f"{names.embedding}.weight", config.vocab_size, config.hidden_size)
        self.layers = [_load_layer(loader, config, layer) for layer in range(config.num_layers)]
        self.norm = take_norm(loader, config, names.norm, config.hidden_size)
        head = f"{names.head}.weight"
        if config.tie_embeddings:
            loader.skip(head)  # some files hold the tied copy too
            self.head = loader.pack_head(self.embedding)
        else:
            self.head = loader.pack_head(loader.take(head, config.head_size, config.hidden_size))
        self.target_ids: torch.Tensor | None = None
        """int64 [draft_vocab_size], of a head of a part of the vocabulary: the token of each of its rows."""
        if config.draft_vocab_size:
            self.target_ids = target_ids(loader.take_codes(TARGET_OFFSETS, config.draft_vocab_size), config.vocab_size)
        self.kv_scale = loader.take_kv_scales(config.num_layers, config.num_kv_heads)
        self.k_center: torch.Tensor | None = None
        """float32 [layers, kv_heads, head_dim], subtracted from K where the pool is FP8 (`ops.kv.qkv_rope`); set after load."""
        self._rope_factors = self._load_rope_factors(loader)
        self.ropes = self._new_ropes()
        loader.finish()

    @property
    def rope(self) -> RopeTable:
        """The table of the first layer that has positions."""
        return self.ropes[self.config.rope]

    def limit(self, config: ModelConfig) -> None:
        """Serve `config`, this model's with another context: its rotary positions may depend on that."""
        self.config = config
        self.ropes = self._new_ropes()

    @property
    def linears(self) -> Iterator[tuple[Role, LinearWeight]]:
        """Every linear, with what it is for."""
        for layer in self.layers:
            yield from layer.linears.items()
        yield "head", self.head

    def kv_form(self, pool: torch.dtype, layers: Sequence[int] | None = None) -> KvForm:
        """Return how `layers` (None: all) keep KV in a pool of that dtype: in 8 bits it is scaled, centred and mixed.

        Where scores have a cap or sinks, a softmax would see that keys are centred.
        """
        if pool != torch.float8_e4m3fn:
            return KvForm(kv_scale=None, k_center=None, mix=False)
        chosen = list(range(len(self.layers)) if layers is None else layers)
        scale, center = (None if x is None else x[chosen].contiguous() for x in (self.kv_scale, self.k_center))
        if center is not None:
            center[[self.layers[layer].mixer.form.kind.is_adjusted for layer in chosen]] = 0.0
        return KvForm(kv_scale=scale, k_center=center, mix=True)

    def with_linears(self, other: Decoder, places: Collection[LinearPlace]) -> Decoder:
        """This decoder with those linears of `other`, an equal model in another precision; the rest is shared."""
        mixed = copy.copy(self)
        mixed.layers = list(self.layers)
        for layer, role in places:
            if role == "head":
                mixed.head = other.head
                continue
            mixed.layers[layer] = mixed.layers[layer].with_linears({role: other.layers[layer].linears[role]})
        return mixed

    @torch.inference_mode()
    def forward(self, inputs: Inputs) -> torch.Tensor:
        """Writes the step's K and V into the pool. Returns logits, float32 [samples, vocab_size]."""
        return self.logits(self.states(inputs))

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """states: [rows, hidden_size], of `states`. Returns logits, float32 [rows, vocab_size], rounded to nothing narrower."""
        if not len(states):
            return torch.empty(0, self.config.vocab_size, device=self.device)
        logits = linear(states, self.head, wide=True)
        if self.config.logit_scale != 1.0:
            logits.mul_(self.config.logit_scale)
        if cap := self.config.logit_soft_cap:
            logits = logits.div_(cap).tanh_().mul_(cap)
        if self.target_ids is not None:
            logits = spread(logits, self.target_ids, self.config.vocab_size)
        return logits

    @torch.inference_mode()
    def states(self, inputs: Inputs) -> torch.Tensor:
        """Writes the step's K and V into the pool. Returns the hidden states behind the last norm, [samples, hidden_size] in
        the model's dtype."""
        hidden = embed(inputs.tokens, self.embedding, inputs.feed)
        if self.config.embedding_scale != 1.0:
            # rounded to the dtype, as in training, unless the family has it otherwise
            scale = torch.tensor(self.config.embedding_scale, dtype=hidden.dtype)
            hidden.mul_(self.config.embedding_scale if self.config.exact_embedding_scale else scale)
        border = Border(hidden)
        last, noted = len(self.layers) - 1, inputs.noted or {}
        for index, layer in enumerate(self.layers):
            if index in noted:
                noted[index] = border.stream(self.config.rms_eps)
            samples = inputs.samples if index == last and last + 1 not in noted else None
            border = layer.mixer.forward(border, inputs.attention, index, samples)
            if not border.rows:
                return border.residual
            border = layer.mlp.forward(border)
        if last + 1 in noted:
            noted[last + 1] = border.stream(self.config.rms_eps)
            border = Border(noted[last + 1] if inputs.samples is None else noted[last + 1][inputs.samples])
            if not border.rows:
                return border.residual
        states = border.read(Norms(self.norm, None, self.config.rms_eps), None)  # the head takes nothing quantised
        assert isinstance(states, torch.Tensor)
        return states

    # ── loading ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def _load_rope_factors(self, loader: WeightLoader) -> torch.Tensor | None:
        """float32 [head_dim / 2], by which frequencies are divided: how GGUF files say Llama 3's scaling."""
        for layer in range(self.config.num_layers):
            # old checkpoints hold what we compute
            loader.skip(f"{self.config.names.layers}.{layer}.self_attn.rotary_emb.inv_freq")
        if not loader.has(ROPE_FACTORS):
            return None
        return loader.take(ROPE_FACTORS, self.config.head_dim // 2, dtype=torch.float32).cpu()

    def _new_ropes(self) -> dict[RopeSpec, RopeTable]:
        tables: dict[RopeSpec, RopeTable] = {}
        for rope in self.config.ropes or (self.config.rope,):
            frequencies, scale = inverse_frequencies(rope, self.config.head_dim, self.config.max_context)
            if self._rope_factors is not None:
                frequencies = frequencies / self._rope_factors
            tables[rope] = RopeTable(frequencies, scale, self.dtype, self.device)
        return tables


def _load_layer(loader: WeightLoader, config: ModelConfig, layer: int) -> Layer:
    mixer, mlp = load_attention(loader, config, layer), config.layers[layer].mlp
    if isinstance(mlp, DenseSpec):
        return Layer(mixer, load_dense(loader, config, layer, mlp))
    return Layer(mixer, load_experts(loader, config, layer, mlp))
