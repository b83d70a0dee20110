"""A head that drafts from its target's hidden states, as a GPU computes it (docs/heads.md)."""

from __future__ import annotations

import torch

from common.models.attention import DeviceAttention
from common.models.blocks.attention import AttentionBlock
from common.models.blocks.border import Border, Norms
from common.models.blocks.mlp import DenseBlock
from common.models.head_weights import HeadTensors
from common.models.reduced_vocabulary import spread
from common.models.rope import RopeTable, inverse_frequencies
from common.models.spec import AttentionSpec, DenseSpec
from common.ops.attention.form import AttentionForm
from common.ops.drafting.head_inputs import WINDOW
from common.ops.kv.forms import HeadForm
from common.ops.linear.embed import embed
from common.ops.linear.linear import linear
from common.ops.linear.weight import LinearWeight, PackFormat, pack_linear


class HeadLayer:
    """The head's weights in `dtype` on `device`, and what it computes of a step's pairs, of which each sees the last `WINDOW`.

    format: of the linears; what is drafted need not be exact.
    """

    def __init__(self, tensors: HeadTensors, *, dtype: torch.dtype, device: torch.device, format: PackFormat = "plain") -> None:
        spec = self.spec = tensors.spec
        self.dtype = dtype

        def packed(weight: torch.Tensor) -> LinearWeight:
            return pack_linear(weight.to(device, dtype), format=format)

        def norm(weight: torch.Tensor) -> torch.Tensor:
            return weight.to(device, dtype)

        self.embedding = tensors.embedding.to(device, dtype)
        self.ids = None if len(tensors.ids) == spec.vocab_size else tensors.ids.to(device)
        self.fc, self.lm_head = packed(tensors.fc), packed(tensors.lm_head)
        self.embedding_norm = Norms(norm(tensors.embedding_norm), None, spec.rms_eps)
        self.feature_norm = Norms(norm(tensors.feature_norm), None, spec.rms_eps)
        self.norm = Norms(norm(tensors.norm), None, spec.rms_eps)
        self.rope = spec.rope
        mixer = AttentionSpec(
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            scale=spec.head_dim**-0.5,
            window=WINDOW,
            rope=self.rope,
        )
        self.mixer = AttentionBlock(
            spec=mixer,
            form=AttentionForm(mixer.scale, window=WINDOW),
            heads=HeadForm(num_heads=spec.num_heads, eps=spec.rms_eps),
            norms=Norms(None, None, spec.rms_eps),
            qkv=packed(tensors.qkv),
            q_norm=None,
            k_norm=None,
            output=packed(tensors.output),
        )
        self.mlp = DenseBlock(
            DenseSpec(intermediate_size=spec.intermediate_size, activation="silu"),
            Norms(norm(tensors.mlp_norm), None, spec.rms_eps),
            packed(tensors.gate_up),
            packed(tensors.down),
        )

    def rope_table(self, places: int) -> torch.Tensor:
        """Return float32 [places, head_dim], see `RopeTable.table`."""
        frequencies, scale = inverse_frequencies(self.rope, self.spec.head_dim, places)
        return RopeTable(frequencies, scale, self.dtype, self.embedding.device).table(places)

    def features(self, states: torch.Tensor) -> torch.Tensor:
        """states: [pairs, 3 · hidden_size], those of the target. Returns [pairs, hidden_size], what `forward` takes."""
        return linear(states, self.fc)

    def forward(self, tokens: torch.Tensor, features: torch.Tensor, attention: DeviceAttention) -> Border:
        """tokens: int64 [pairs]. features: [pairs, hidden_size], changed. Writes K and V; returns the layer's border."""
        normed = _normed(Border(features), self.feature_norm)
        both = torch.cat((_normed(Border(embed(tokens, self.embedding)), self.embedding_norm), normed), -1)
        attended = attention(linear(both, self.mixer.qkv, split=True), self.mixer, 0)
        residual = normed if self.spec.norm_before_residual else features
        border = Border(residual).leave_linear(attended, self.mixer.output, self.mixer.norms)
        return self.mlp.forward(border)

    def read(self, border: Border) -> torch.Tensor:
        """border: of `forward`, whose residual is x from here on. Returns what `logits` takes, [pairs, hidden_size]."""
        return _normed(border, self.norm)

    def logits(self, normed: torch.Tensor) -> torch.Tensor:
        """normed: [rows, hidden_size], of `read`. Returns float32 [rows, vocab_size], of the target's tokens."""
        logits = linear(normed, self.lm_head, wide=True)
        return logits if self.ids is None else spread(logits, self.ids, self.spec.vocab_size)


def _normed(border: Border, norms: Norms) -> torch.Tensor:
    normed = border.read(norms, None)
    assert isinstance(normed, torch.Tensor)
    return normed
