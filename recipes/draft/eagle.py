"""An EAGLE-3-style head: one decoder layer that proposes tokens from hidden states of the target's own forward pass.

    feature(p) = fc(the target's residuals at position p)           where the target has computed position p
               = the head's own output at position p - 1            in later steps of a draft
    x = feature(p) + attention(norm(embedding of token p + 1), norm(feature(p)));  x = x + mlp(norm(x))
    token p + 2 = argmax(rows of the target's head, norm(x))

The pair (feature of p, embedding of token p + 1) has rotary position p. Names of weights are those of published EAGLE-3
checkpoints (Li et al., "EAGLE-3: Scaling up inference acceleration of LLMs via training-time test", 2025).

Training unrolls a draft from every position at once (`unroll`, training-time test). Step j at position p belongs to the draft
that began at a = p - j: it sees the features of the target up to a, and of the draft's own steps the one at each position
between, which is step i at a + i.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import torch
from torch import nn
from torch.nn import functional

from common.protocol.errors import ConfigError
from recipes.draft.draft_model import copy_layer, largest_neurons
from recipes.draft.llama import Attention, Layer, LlamaShape, Mlp, RmsNorm, rotary_tables
from recipes.draft.target import Target

NUM_FEATURES = 3


def default_layer_ids(num_layers: int) -> tuple[int, int, int]:
    """Return a low, a middle and a high layer, as EAGLE-3 chooses them; a number i is the residual that enters layer i."""
    return min(2, num_layers - 2), num_layers // 2, max(num_layers - 3, 1)


class MidLayer(nn.Module):
    """The decoder layer: attention over norm(embedding) and norm(feature), side by side."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.input_layernorm = RmsNorm(shape.hidden_size, shape.rms_norm_eps)
        self.hidden_norm = RmsNorm(shape.hidden_size, shape.rms_norm_eps)
        self.self_attn = Attention(shape, 2 * shape.hidden_size)
        self.post_attention_layernorm = RmsNorm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp = Mlp(shape)

    def inputs(self, feature: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        """feature, embedded: [batch, tokens, hidden]. Returns [batch, tokens, 2 * hidden]."""
        return torch.cat([self.input_layernorm(embedded), self.hidden_norm(feature)], -1)

    def outputs(self, feature: torch.Tensor, mixed: torch.Tensor) -> torch.Tensor:
        """mixed: [batch, heads, tokens, head_dim], what attention read. Returns [batch, tokens, hidden]."""
        x = feature + self.self_attn.joined(mixed).to(feature.dtype)
        return x + self.mlp(self.post_attention_layernorm(x)).to(feature.dtype)


class EagleHead(nn.Module):
    """`shape.num_hidden_layers` layers, of which the first, `midlayer`, reads pairs, and the others, `layers`, what the one
    before left. The weights that are trained, and what is the target's: embedding [vocab, hidden], head [draft_vocab, hidden]
    (rows `ids` of the target's).

    feature_scale: [3 * hidden], what the target's residuals are divided by before `fc`, so that channels of very different
    size train equally well; `export` folds it into `fc`.
    """

    embedding: torch.Tensor
    head: torch.Tensor
    ids: torch.Tensor
    feature_scale: torch.Tensor

    def __init__(
        self, shape: LlamaShape, layer_ids: Sequence[int], embedding: torch.Tensor, head: torch.Tensor, ids: torch.Tensor
    ) -> None:
        """:raises ConfigError: if shapes do not fit."""
        super().__init__()
        if embedding.shape != (shape.vocab_size, shape.hidden_size) or head.shape != (len(ids), shape.hidden_size):
            raise ConfigError(
                f"a head of hidden size {shape.hidden_size} and {len(ids)} ids does not fit an embedding "
                f"{list(embedding.shape)} and rows {list(head.shape)}"
            )
        if len(layer_ids) != NUM_FEATURES:
            raise ConfigError(f"a head reads {NUM_FEATURES} layers of the target, not {len(layer_ids)}")
        self.shape = shape
        self.layer_ids = tuple(layer_ids)
        self.fc = nn.Linear(NUM_FEATURES * shape.hidden_size, shape.hidden_size, bias=False)
        self.midlayer = MidLayer(self.shape)
        self.layers = nn.ModuleDict({str(number): Layer(shape) for number in range(1, shape.num_hidden_layers)})
        self.norm = RmsNorm(shape.hidden_size, shape.rms_norm_eps)
        self.register_buffer("feature_scale", torch.ones(NUM_FEATURES * shape.hidden_size))
        self.register_buffer("embedding", embedding, persistent=False)
        self.register_buffer("head", head, persistent=False)
        self.register_buffer("ids", ids, persistent=False)

    def features(self, residuals: torch.Tensor) -> torch.Tensor:
        """residuals: [..., 3 * hidden], the target's. Returns [..., hidden], float32 as the weights are."""
        return self.fc(residuals.float() / self.feature_scale).to(self.fc.weight.dtype)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., hidden], outputs of steps. Returns float32 [..., draft_vocab]."""
        with torch.autocast(x.device.type, enabled=False):
            return self.norm(x.float()) @ self.head.float().T

    def unroll(self, residuals: torch.Tensor, tokens: torch.Tensor, steps: int) -> list[torch.Tensor]:
        """Draft from every position at once.

        residuals: [batch, tokens, 3 * hidden], the target's; tokens: int64 [batch, tokens], padded on the right. Returns for
        each step [batch, tokens - 1, hidden]; index p of step j proposes token p + 2 of the draft that began at p - j, and
        means nothing where p < j.
        """
        count = tokens.shape[1] - 1
        embedded = self.embedding[tokens[:, 1:]].to(self.fc.weight.dtype)
        cosines, sines = rotary_tables(count, self.shape, tokens.device)
        feature = self.features(residuals[:, :-1])
        keys: list[list[torch.Tensor]] = [[] for _ in range(self.shape.num_hidden_layers)]
        values: list[list[torch.Tensor]] = [[] for _ in keys]

        def mixed(layer: int, attention: Attention, inputs: torch.Tensor) -> torch.Tensor:
            query, key, value = attention.projected(inputs, cosines, sines)
            keys[layer].append(key)
            values[layer].append(value)
            return unrolled_attention(query, keys[layer], values[layer])

        found: list[torch.Tensor] = []
        for _ in range(steps):
            x = self.step(feature, embedded, mixed)
            found.append(x)
            feature = x.roll(1, 1)
        return found

    def step(
        self, feature: torch.Tensor, embedded: torch.Tensor, mixed: Callable[[int, Attention, torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """One step of all layers. feature, embedded: [batch, tokens, hidden], the halves of pairs. mixed: returns what the
        attention of a layer, whose number comes first, reads for its inputs, [batch, heads, tokens, head_dim]. Returns [batch,
        tokens, hidden]."""
        x = self.midlayer.outputs(feature, mixed(0, self.midlayer.self_attn, self.midlayer.inputs(feature, embedded)))
        for number, layer in self.further:
            attention = layer.self_attn
            x = x + attention.joined(mixed(number, attention, layer.input_layernorm(x))).to(x.dtype)
            x = x + layer.mlp(layer.post_attention_layernorm(x)).to(x.dtype)
        return x

    @property
    def further(self) -> list[tuple[int, Layer]]:
        """The layers behind `midlayer` with their numbers."""
        return [(int(name), layer) for name, layer in self.layers.items() if isinstance(layer, Layer)]


def unrolled_attention(query: torch.Tensor, keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> torch.Tensor:
    """Attention of the last step of an unrolled draft.

    query: [batch, heads, tokens, head_dim] of step j = len(keys) - 1; keys, values: of steps 0 to j, each [batch, kv_heads,
    tokens, head_dim]. Position p reads step 0 up to p - j, and step i at p - j + i. Returns as `query`.
    """
    if len(keys) == 1:
        return functional.scaled_dot_product_attention(query, keys[0], values[0], is_causal=True, enable_gqa=True)
    step = len(keys) - 1
    batch, heads, count, size = query.shape
    kv_heads = keys[0].shape[1]
    grouped = query.reshape(batch, kv_heads, -1, count, size) * size**-0.5  # [batch, kv_heads, group, tokens, head_dim]
    hidden = torch.ones(count, count, dtype=torch.bool, device=query.device).triu(1 - step)
    # softmax in the dtype of its input, which rounds its result alone: autocast would copy all scores to fp32
    with torch.autocast(query.device.type, enabled=False):
        first = (grouped.flatten(2, 3) @ keys[0].transpose(-1, -2)).view(batch, kv_heads, -1, count, count)
        # of each later step a position reads one key: a product of rows, not of matrices
        own = [(grouped * keys[i].roll(step - i, 2).unsqueeze(2)).sum(-1, keepdim=True) for i in range(1, step + 1)]
        weights = torch.cat([first.masked_fill(hidden, float("-inf")), *own], -1).softmax(-1)
        mixed = (weights[..., :count].flatten(2, 3) @ values[0]).view_as(grouped)
        for i in range(1, step + 1):
            mixed = mixed + weights[..., count + i - 1, None] * values[i].roll(step - i, 2).unsqueeze(2)
    return mixed.reshape(batch, heads, count, size)


def draft_step_by_step(
    head: EagleHead, residuals: torch.Tensor, tokens: torch.Tensor, steps: int
) -> tuple[torch.Tensor, list[int]]:
    """Draft as a server does, one sequence, greedily: the reference of `unroll`, and of what a runtime must compute.

    residuals: [known - 1, 3 * hidden]; tokens: int64 [known]: the last token has not been through the target. Returns the
    outputs of the steps, [steps, hidden], and the target's ids that were proposed.
    """
    embedded = head.embedding[tokens[1:]].to(head.fc.weight.dtype)[None]
    feature = head.features(residuals)[None]
    total = len(tokens) - 1 + steps
    cosines, sines = rotary_tables(total, head.shape, tokens.device)
    nothing = torch.empty(1, head.shape.num_key_value_heads, 0, head.shape.head_dim, device=tokens.device)
    keys, values = ([nothing] * head.shape.num_hidden_layers for _ in range(2))
    outputs: list[torch.Tensor] = []
    proposed: list[int] = []

    def mixed(layer: int, attention: Attention, inputs: torch.Tensor) -> torch.Tensor:
        begin = keys[layer].shape[2]
        end = begin + inputs.shape[1]
        query, key, value = attention.projected(inputs, cosines[begin:end], sines[begin:end])
        keys[layer], values[layer] = torch.cat([keys[layer], key], 2), torch.cat([values[layer], value], 2)
        visible = torch.ones(end - begin, end, dtype=torch.bool, device=tokens.device).tril(begin)
        return functional.scaled_dot_product_attention(query, keys[layer], values[layer], attn_mask=visible, enable_gqa=True)

    for _ in range(steps):
        feature = head.step(feature, embedded, mixed)[:, -1:]
        outputs.append(feature[0, 0])
        proposed.append(int(head.ids[head.logits(feature[0, 0]).argmax()]))
        embedded = head.embedding[proposed[-1]].to(head.fc.weight.dtype)[None, None]
    return torch.stack(outputs), proposed


def new_head(
    target: Target, ids: torch.Tensor, intermediate_size: int, layer_ids: Sequence[int] = (), num_layers: int = 1
) -> EagleHead:
    """Return a head in fp32 that begins with the target's last layers and final norm; see `fit_features` for `fc`.

    The first layer's attention begins with the target's weights for both its inputs, at half their size. An MLP that is
    narrower than the target's keeps the neurons with the largest product of weight norms.

    :raises ConfigError: if the head does not fit the target.
    """
    layer_ids = tuple(layer_ids) or default_layer_ids(target.shape.num_hidden_layers)
    if any(not 0 <= number <= target.shape.num_hidden_layers for number in layer_ids):
        raise ConfigError(f"the target's layers are 0 to {target.shape.num_hidden_layers}, not {list(layer_ids)}")
    if not 1 <= intermediate_size <= target.shape.intermediate_size:
        raise ConfigError(f"a head has an MLP of 1 to {target.shape.intermediate_size}, not {intermediate_size}")
    if not len(ids) or int(ids.min()) < 0 or int(ids.max()) >= target.shape.vocab_size:
        raise ConfigError(f"the draft vocabulary must be ids below {target.shape.vocab_size}")
    if not 1 <= num_layers <= target.shape.num_hidden_layers:
        raise ConfigError(f"a head has 1 to {target.shape.num_hidden_layers} layers, not {num_layers}")
    shape = msgspec.structs.replace(target.shape, intermediate_size=intermediate_size, num_hidden_layers=num_layers)
    ids = ids.to(target.head.device)
    head = EagleHead(shape, layer_ids, target.embedding, target.head[ids], ids).to(target.head.device)
    source, *others = target.decoder.layers[-num_layers:]
    assert isinstance(source, Layer)
    with torch.no_grad():
        for (_, layer), other in zip(head.further, others, strict=True):
            assert isinstance(other, Layer)
            copy_layer(layer, other)
        for name in ("q_proj", "k_proj", "v_proj"):
            weight = getattr(source.self_attn, name).weight
            getattr(head.midlayer.self_attn, name).weight.copy_(torch.cat([weight, weight], 1) / 2)
        head.midlayer.self_attn.o_proj.weight.copy_(source.self_attn.o_proj.weight)
        kept = largest_neurons(source.mlp, intermediate_size)
        head.midlayer.mlp.gate_proj.weight.copy_(source.mlp.gate_proj.weight[kept])
        head.midlayer.mlp.up_proj.weight.copy_(source.mlp.up_proj.weight[kept])
        head.midlayer.mlp.down_proj.weight.copy_(source.mlp.down_proj.weight[:, kept])
        for norm, other in (
            (head.midlayer.hidden_norm, source.input_layernorm),
            (head.midlayer.post_attention_layernorm, source.post_attention_layernorm),
            (head.norm, target.decoder.norm),
        ):
            norm.weight.copy_(other.weight)
    return head


@torch.no_grad()
def fit_features(head: EagleHead, residuals: torch.Tensor) -> None:
    """Take the root mean square of each channel as its scale, and begin with an `fc` that passes the high residual on as it is.

    So the layer, which is the target's last one, begins with what it knows, and adds to it at the size that it had.
    residuals: [..., 3 * hidden], the target's on some text. Tokens with a hundred times the usual size (a sequence's first one,
    in many models) are left out.
    """
    hidden = head.shape.hidden_size
    rows = residuals.flatten(0, -2).float()
    high = rows[:, -hidden:].norm(dim=1)
    rows = rows[high < 4 * high.median()]
    scale = rows.pow(2).mean(0).sqrt()
    head.feature_scale.copy_(scale.clamp(min=0.05 * float(scale.median())))
    high_scale = head.feature_scale[-hidden:]
    head.fc.weight.mul_(0.1 * high_scale.median())
    head.fc.weight[:, -hidden:] += torch.diag(high_scale)
