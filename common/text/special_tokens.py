"""The special tokens that a model names, as its chat template knows them: `bos_token`, `eos_token` and others.

Templates see what they see in transformers: every `…_token` of tokenizer_config.json (or of special_tokens_map.json, where
older models keep them), and the list `additional_special_tokens`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common.models.json_files import read_object_if_any

SpecialTokens = dict[str, str | list[str]]

_LISTS = ("additional_special_tokens", "extra_special_tokens")
_GGUF_KEYS = {
    "bos": "bos_token",
    "eos": "eos_token",
    "eot": "eot_token",
    "eom": "eom_token",
    "unknown": "unk_token",
    "seperator": "sep_token",  # GGUF's spelling
    "padding": "pad_token",
    "cls": "cls_token",
    "mask": "mask_token",
}


def names_in_folder(folder: Path) -> SpecialTokens:
    """:raises ConfigError: if one of the files is damaged."""
    names: SpecialTokens = {}
    for file in ("tokenizer_config.json", "special_tokens_map.json"):
        for name, value in read_object_if_any(folder / file).items():
            if name in names:
                continue
            if name.endswith("_token") and (text := _content(value)) is not None:
                names[name] = text
            elif name in _LISTS and isinstance(value, list):
                texts = [text for entry in value if (text := _content(entry)) is not None]
                names.setdefault("additional_special_tokens", texts)
            elif name == "extra_special_tokens" and isinstance(value, dict):  # names of the model's own, such as image_token
                names |= {own: text for own, entry in value.items() if (text := _content(entry)) is not None}
    return names


def ids_in_gguf(metadata: Mapping[str, Any]) -> dict[str, int]:
    """Token ids by GGUF's names: bos, eos, unknown …"""
    size = len(metadata["tokenizer.ggml.tokens"])
    found = {name: metadata.get(f"tokenizer.ggml.{name}_token_id") for name in _GGUF_KEYS}
    return {name: index for name, index in found.items() if isinstance(index, int) and 0 <= index < size}


def names_in_gguf(metadata: Mapping[str, Any]) -> SpecialTokens:
    tokens, ids = metadata["tokenizer.ggml.tokens"], ids_in_gguf(metadata)
    return {name: tokens[ids[key]] for key, name in _GGUF_KEYS.items() if key in ids}


def _content(value: Any) -> str | None:
    """A token is given as its text, or as an object with `content`."""
    content = value.get("content") if isinstance(value, dict) else value
    return content if isinstance(content, str) else None
