"""Models that wrap a decoder of text: the text part is served, and what else the files hold is left where it is. Torch-free.

config.json   the decoder's fields are `text_config`; the rest is about images
weights       language_model.model.X, language_model.lm_head     as first published
              model.language_model.X, lm_head                    as later versions of transformers write it
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from common.protocol.errors import ConfigError

_GEMMA3: dict[str, Any] = {
    "vocab_size": 262_208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 131_072,
    "tie_word_embeddings": True,
}
"""What published files leave out, since it is transformers' default."""

WRAPPERS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "gemma3": (("gemma3_text",), _GEMMA3),
    "llama4": (("llama4_text",), {}),
    "mistral3": (("mistral", "ministral3"), {}),
}
"""`model_type` of config.json: those that its `text_config` may have, the first where it says none, and fields that this may
lack."""

_PREFIXES = (("language_model.model.", "model."), ("language_model.", ""), ("model.language_model.", "model."))
_OTHERS = ("vision_tower.", "vision_model.", "multi_modal_projector.")
_TIED = "tie_word_embeddings"
_SHARED = ("quantization_config", "eos_token_id", "bos_token_id", _TIED)
_IMAGES = frozenset(
    {
        "boi_token_index",
        "eoi_token_index",
        "image_token_index",
        "image_token_id",
        "boi_token_id",
        "eoi_token_id",
        "mm_tokens_per_image",
        "multimodal_projector_bias",
        "projector_hidden_act",
        "spatial_merge_size",
        "vision_config",
        "vision_feature_layer",
    }
)


def unwrapped(data: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return config.json of the text part, or `data` itself where it wraps nothing.

    Of the two places that may say whether the head is the embedding, the wrapper's counts, as it does for transformers 5.

    :raises ConfigError: if there is no text part, or it is of another family.
    """
    kind = data.get("model_type")
    if not isinstance(kind, str) or kind not in WRAPPERS:
        return data
    families, defaults = WRAPPERS[kind]
    text = data.get("text_config")
    if not isinstance(text, Mapping):
        raise ConfigError(f"config.json of a {kind} model has no text_config")
    family = text.get("model_type", families[0])
    if family not in families:
        raise ConfigError(f"the text part of a {kind} model is {family!r}; supported: {', '.join(families)}")
    shared = {name: data[name] for name in _SHARED if data.get(name) is not None}
    # what neither is about images nor in the text part might change the computation: the family's reader judges it
    others = {name: value for name, value in data.items() if name not in _IMAGES and name not in (*_SHARED, "text_config")}
    tied = {_TIED: shared[_TIED]} if _TIED in shared else {}
    return {**others, **defaults, **shared, **text, **tied, "model_type": family}


def text_names(names: Mapping[str, Any]) -> dict[str, str]:
    """Return the tensors of the text part by the names that they have in a model of text alone. Other prefixes than those of a
    wrapper stay as they are, and so do all names if no tensor has one."""
    if not any(name.startswith(prefix) for name in names for prefix, _ in _PREFIXES):
        return {name: name for name in names}
    return {_text_name(name): name for name in names if not is_of_images(name)}


def is_of_images(name: str) -> bool:
    """Whether a wrapper's tensor is of what turns images into embeddings."""
    return name.removeprefix("model.").startswith(_OTHERS)


def _text_name(name: str) -> str:
    for prefix, short in _PREFIXES:
        if name.startswith(prefix):
            return short + name.removeprefix(prefix)
    return name
