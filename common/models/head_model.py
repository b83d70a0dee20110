"""A head that drafts from its target's hidden states, as a GPU computes it (docs/heads.md)."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from common.models.attention import DeviceAttention
from common.models.blocks.attention import AttentionBlock
from common.models.blocks.border import Border, Norms
from common.models.blocks.mlp import DenseBlock
from common.models.head_config import HeadKind
from common.models.head_weights import HeadTensors
from common.models.reduced_vocabulary import are_all, spread
from common.models.rope import RopeTable, inverse_frequencies
from common.models.spec import AttentionSpec, DenseSpec
from common.ops.attention.form import AttentionForm
from common.ops.drafting.head_inputs import WINDOW
from common.ops.kv.forms import HeadForm
from common.ops.linear.embed import embed
from common.ops.linear.linear import linear
from common.ops.linear.weight import LinearWeight, PackFormat, pack_linear


class HeadModel(ABC):
    """The head's weights in `dtype` on `device`, and what it computes of a step's pairs, of which each sees the last `WINDOW`.
    `head_model` makes one.

    format: of the linears; what is drafted need not be exact. An lm_head that is the target's and quantised stays as it is.
    """

    def __init__(self, tensors: HeadTensors, *, dtype: torch.dtype, device: torch.device, format: PackFormat = "plain") -> None:
        spec = self.spec = tensors.spec
        self.dtype = dtype

        def packed(weight: torch.Tensor, bias: torch.Tensor | None = None) -> LinearWeight:
            bias = None if bias is None else bias.to(device, dtype)
            return pack_linear(weight.to(device, dtype), bias, format=format)

        def norms(weight: torch.Tensor | None) -> Norms:
            return Norms(None if weight is None else weight.to(device, dtype), None, spec.rms_eps)

        lm_head = tensors.lm_head
        if isinstance(lm_head, LinearWeight) and lm_head.format == "plain" and format != "plain":
            lm_head = lm_head.data
        self.lm_head = packed(lm_head) if isinstance(lm_head, torch.Tensor) else lm_head
        self.embedding = tensors.embedding.to(device, dtype)
        self.ids = None if are_all(tensors.ids, spec.vocab_size) else tensors.ids.to(device)
        self.fc = packed(tensors.fc)
        self.embedding_norm, self.feature_norm = norms(tensors.embedding_norm), norms(tensors.feature_norm)
        self.norm = norms(tensors.norm)
        self.rope = spec.rope
        mixer = AttentionSpec(
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            scale=spec.head_dim**-0.5,
            window=WINDOW,
            rope=self.rope,
            qkv_bias=spec.qkv_bias,
        )
        blocks = [
            (
                AttentionBlock(
                    spec=mixer,
                    form=AttentionForm(mixer.scale, window=WINDOW),
                    heads=HeadForm(num_heads=spec.num_heads, eps=spec.rms_eps),
                    norms=norms(layer.input_norm),
                    qkv=packed(layer.qkv, layer.qkv_bias),
                    q_norm=None,
                    k_norm=None,
                    output=packed(layer.output),
                ),
                DenseBlock(
                    DenseSpec(intermediate_size=spec.intermediate_size, activation="silu"),
                    norms(layer.mlp_norm),
                    packed(layer.gate_up),
                    packed(layer.down),
                ),
            )
            for layer in tensors.layers
        ]
        (self.mixer, self.mlp), *self.further = blocks

    def rope_table(self, places: int) -> torch.Tensor:
        """Return float32 [places, head_dim], see `RopeTable.table`."""
        frequencies, scale = inverse_frequencies(self.rope, self.spec.head_dim, places)
        return RopeTable(frequencies, scale, self.dtype, self.embedding.device).table(places)

    @abstractmethod
    def features(self, states: torch.Tensor) -> torch.Tensor:
        """states: [pairs, layers · hidden_size], those of the target. Returns [pairs, hidden_size], what `forward` takes."""

    @abstractmethod
    def attend(self, embedded: torch.Tensor, features: torch.Tensor, attention: DeviceAttention) -> Border:
        """The first layer's attention. embedded, features: [pairs, hidden_size], the halves of the pairs; features may change.
        Writes K and V; returns the border in front of the MLP."""

    @abstractmethod
    def following(self, border: Border, normed: torch.Tensor) -> torch.Tensor:
        """Return [pairs, hidden_size], the features of the pairs behind these, which the target has not computed. border: of
        `forward`, after `read`, which returned `normed`."""

    def forward(self, tokens: torch.Tensor, features: torch.Tensor, attention: DeviceAttention) -> Border:
        """tokens: int64 [pairs]. features: [pairs, hidden_size], changed. Writes K and V; returns the last layer's border."""
        border = self.mlp.forward(self.attend(embed(tokens, self.embedding), features, attention))
        for number, (mixer, mlp) in enumerate(self.further, 1):
            border = mlp.forward(mixer.forward(border, attention, number, None))
        return border

    def read(self, border: Border) -> torch.Tensor:
        """border: of `forward`; its residual is the last layer's output from here on. Returns [pairs, hidden_size], for
        `logits`."""
        return _normed(border, self.norm)

    def logits(self, normed: torch.Tensor) -> torch.Tensor:
        """normed: [rows, hidden_size], of `read`. Returns float32 [rows, vocab_size], of the target's tokens."""
        logits = linear(normed, self.lm_head, wide=True)
        return logits if self.ids is None else spread(logits, self.ids, self.spec.vocab_size)


class EagleModel(HeadModel):
    """EAGLE-3: attention reads both halves of a pair, and what it makes is added to the feature."""

    def features(self, states: torch.Tensor) -> torch.Tensor:
        return linear(states, self.fc)

    def attend(self, embedded: torch.Tensor, features: torch.Tensor, attention: DeviceAttention) -> Border:
        normed = _normed(Border(features), self.feature_norm)
        both = torch.cat((_normed(Border(embedded), self.embedding_norm), normed), -1)
        attended = attention(linear(both, self.mixer.qkv, split=True), self.mixer, 0)
        residual = normed if self.spec.norm_before_residual else features
        return Border(residual).leave_linear(attended, self.mixer.output, self.mixer.norms)

    def following(self, border: Border, normed: torch.Tensor) -> torch.Tensor:
        return border.residual


class MtpModel(HeadModel):
    """A model's own layer for multi-token prediction: one linear joins the halves of a pair, and a layer like the model's
    reads what comes of it."""

    def features(self, states: torch.Tensor) -> torch.Tensor:
        return states

    def attend(self, embedded: torch.Tensor, features: torch.Tensor, attention: DeviceAttention) -> Border:
        halves = _normed(Border(features), self.feature_norm), _normed(Border(embedded), self.embedding_norm)
        return self.mixer.forward(Border(linear(torch.cat(halves, -1), self.fc)), attention, 0, None)

    def following(self, border: Border, normed: torch.Tensor) -> torch.Tensor:
        return normed


_MODELS: dict[HeadKind, type[HeadModel]] = {"eagle3": EagleModel, "mtp": MtpModel}


def head_model(tensors: HeadTensors, *, dtype: torch.dtype, device: torch.device, format: PackFormat = "plain") -> HeadModel:
    """Return what computes heads of this kind; see `HeadModel`."""
    return _MODELS[tensors.spec.kind](tensors, dtype=dtype, device=device, format=format)


def _normed(border: Border, norms: Norms) -> torch.Tensor:
    normed = border.read(norms, None)
    assert isinstance(normed, torch.Tensor)
    return normed
