"""What a head is: what its config.json says, or, of a model's own MTP layer, what the model's does. Pure.

An EAGLE-3 head has a config.json in EAGLE-3's own form, with SGLang's additions, or in the form of the speculators library:

    LlamaForCausalLMEagle3                 fields of the layer, draft_vocab_size
    Eagle3Speculator, Eagle3DraftModel     the layer's fields in transformer_layer_config, norm_before_residual beside them

Which hidden states a head reads is counted in two ways. `eagle_aux_hidden_state_layer_ids` at the top, as vLLM has it, names
layers by what enters them, as `HeadSpec.layers` does; within `eagle_config`, as SGLang has it, by what leaves them. Published
heads often say neither: then it is what enters layer 2, the middle one and the third from the end.

A layer for multi-token prediction (MTP; Gloeckle et al. 2024, DeepSeek-V3) has the form of a layer of its model.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from common.models.families.common import SCALED, read_rope
from common.models.fields import Fields
from common.models.shipped import TrainedFor, trained_for
from common.models.spec import DenseSpec, ModelSpec, RopeSpec
from common.protocol.errors import ConfigError

ARCHITECTURE = "LlamaForCausalLMEagle3"
_SPECULATORS = ("Eagle3Speculator", "Eagle3DraftModel")
STATES = 3
"""Hidden states of the target that an EAGLE-3 head's feature is made of."""
MAX_LAYERS = 8
"""Of a head; more would be a draft model."""
HeadKind = Literal["eagle3", "mtp"]
"""docs/heads.md says what each computes."""
_MTP_MODELS = ("mimo",)
"""`model_type` of the models whose MTP layer drafts."""
_LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
_REFUSED: dict[str, object] = {
    "attention_bias": False,
    "mlp_bias": False,
    "bias": False,
    "norm_before_fc": False,
    "hidden_act": "silu",
    "logit_scale": 1.0,
}
"""What else a layer could be, and the value that each of these has in one that is supported."""


class HeadSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A head as its config.json describes it. layers: before which layers of the target its hidden states are taken, rising;
    the target's number of layers stands for behind the last one; empty: the usual ones (`usual_layers`). num_layers: the head's
    own; those behind the first are as in any decoder. norm_before_residual: the normalised feature is what attention and MLP
    add to. embedding_from_target, head_from_target: None: what the head's file does not hold is the target's. target: the model
    it was trained for. qkv_bias: Q, K and V have one."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeSpec
    rms_eps: float
    vocab_size: int
    draft_vocab_size: int
    layers: tuple[int, ...]
    num_layers: int = 1
    kind: HeadKind = "eagle3"
    qkv_bias: bool = False
    norm_before_residual: bool = False
    embedding_from_target: bool | None = None
    head_from_target: bool | None = None
    target: TrainedFor = TrainedFor("", "")

    @property
    def fc_inputs(self) -> int:
        """Inputs of the first linear: EAGLE-3's takes the target's hidden states, an MTP layer's both halves of a pair."""
        return (STATES if self.kind == "eagle3" else 2) * self.hidden_size

    @property
    def qkv_inputs(self) -> int:
        """Inputs of the layer's attention: EAGLE-3's takes both halves of a pair."""
        return (2 if self.kind == "eagle3" else 1) * self.hidden_size


def num_mtp_layers(config: Mapping[str, Any]) -> int:
    """Return how many MTP layers a model's config.json says that it has, of those that can draft; 0 for none."""
    count: Any = config.get("num_nextn_predict_layers")
    return int(count) if config.get("model_type") in _MTP_MODELS and _is_positive(count) else 0


def mtp_spec(model: ModelSpec) -> HeadSpec:
    """Return the head that a model's MTP layer is: as the model's last layer, and behind it.

    :raises ConfigError: if that layer has experts.
    """
    mixer, mlp = model.layers[-1].mixer, model.layers[-1].mlp
    if not isinstance(mlp, DenseSpec):
        raise ConfigError("the model's MTP layer has experts, and heads have none", param="head")
    return HeadSpec(
        kind="mtp",
        hidden_size=model.hidden_size,
        intermediate_size=mlp.intermediate_size,
        num_heads=mixer.num_heads,
        num_kv_heads=mixer.num_kv_heads,
        head_dim=mixer.head_dim,
        rope=mixer.rope or model.rope,
        rms_eps=model.rms_eps,
        vocab_size=model.vocab_size,
        draft_vocab_size=model.vocab_size,
        layers=(model.num_layers,),
        qkv_bias=mixer.qkv_bias,
        embedding_from_target=True,
        head_from_target=True,
    )


def is_head(config: Mapping[str, Any]) -> bool:
    """Return whether a config.json is a head's, supported or not."""
    return _architecture(config) in (ARCHITECTURE, *_SPECULATORS)


def usual_layers(num_layers: int) -> tuple[int, ...]:
    """Return which layers heads read that don't say it, of a target with so many."""
    return 2, num_layers // 2, num_layers - 3


def read_spec(config: Mapping[str, Any], where: str) -> HeadSpec:
    """where: what errors call the file.

    :raises ConfigError: if it describes no head that is supported.
    """

    def wrong(what: str) -> ConfigError:
        return ConfigError(f"{where}: {what}", param="head")

    def fields(name: str) -> dict[str, Any]:
        value = config.get(name) or {}
        if not isinstance(value, dict):
            raise wrong(f"{name} must be an object, not {str(value)[:40]!r}")
        return value

    if not is_head(config):
        raise wrong(f"architectures must be [{ARCHITECTURE!r}] or a speculator's; other models draft as --draft-model")
    layer: dict[str, Any] = dict(config)
    if _architecture(config) != ARCHITECTURE:
        layer = fields("transformer_layer_config") | {name: value for name, value in config.items() if name in _REFUSED}

    def number(name: str, kind: type = int, default: object = None, given: Mapping[str, Any] = layer) -> Any:
        value: Any = default if given.get(name) is None else given[name]
        if not _is_positive(value) or (kind is int and value != int(value)):
            raise wrong(f"{name} must be a positive number, not {str(value)[:40]!r}")
        return kind(value)

    def flag(name: str) -> bool | None:
        value: Any = config.get(name)
        if value is not None and not isinstance(value, bool):
            raise wrong(f"{name} must be true or false, not {str(value)[:40]!r}")
        return value

    for name, meant in _REFUSED.items():
        if layer.get(name) not in (None, meant):
            raise wrong(f"{name} {str(layer[name])[:40]!r} is not supported in a head, only {meant!r}")
    heads, hidden, vocab = number("num_attention_heads"), number("hidden_size"), number("vocab_size")
    if number("target_hidden_size", default=hidden, given=config) != hidden:
        raise wrong("a head that is not as wide as its target (target_hidden_size) is not supported")
    num_layers = number("num_hidden_layers", default=1)
    if num_layers > MAX_LAYERS:
        raise wrong(f"num_hidden_layers must be at most {MAX_LAYERS}, not '{num_layers}'")
    return HeadSpec(
        hidden_size=hidden,
        intermediate_size=number("intermediate_size"),
        num_heads=heads,
        num_kv_heads=number("num_key_value_heads", default=heads),
        head_dim=number("head_dim", default=hidden // heads),
        rope=_rope(layer, where),
        rms_eps=number("rms_norm_eps", float, 1e-6),
        vocab_size=vocab,
        draft_vocab_size=number("draft_vocab_size", default=vocab, given=config),
        layers=_layers(config, fields("eagle_config"), where),
        num_layers=num_layers,
        norm_before_residual=bool(flag("norm_before_residual")),
        embedding_from_target=flag("embedding_from_target"),
        head_from_target=flag("head_from_target"),
        target=trained_for(fields("target")),
    )


def _architecture(config: Mapping[str, Any]) -> str:
    names: Any = config.get("architectures")
    return str(names[0]) if isinstance(names, list) and len(names) == 1 else ""


def _rope(layer: Mapping[str, Any], where: str) -> RopeSpec:
    for name in ("rope_scaling", "rope_parameters"):
        if not isinstance(layer.get(name) or {}, dict):
            raise ConfigError(f"{where}: {name} must be an object, not {str(layer[name])[:40]!r}", param="head")
    try:
        return read_rope(Fields(layer, where), kinds=SCALED)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}", param="head") from error


def _layers(config: Mapping[str, Any], nested: Mapping[str, Any], where: str) -> tuple[int, ...]:
    given: Any = config.get(_LAYER_IDS)
    offset = 0
    if given is None:
        given, offset = nested.get(_LAYER_IDS), 1
    if given is None:
        return ()
    if not isinstance(given, list) or len(given) != STATES or len(set(map(str, given))) < STATES:
        raise ConfigError(f"{where}: {_LAYER_IDS} must be {STATES} different layers", param="head")
    if any(not isinstance(layer, int) or layer < 0 for layer in given) or sorted(given) != given:
        raise ConfigError(f"{where}: {_LAYER_IDS} must be rising numbers of layers", param="head")
    return tuple(layer + offset for layer in given)


def _is_positive(value: object) -> bool:
    """Return whether a value of a JSON file is a positive number that a float can hold."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value <= sys.float_info.max
