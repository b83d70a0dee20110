"""Models of a few kilobytes in folders, with tokenizers, for tests that need another model than the default one."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend


def save_tokenizer(folder: Path, *special: str) -> None:
    """A tokenizer of 256 tokens, two letters each, so that a text tells its tokens. `special`: the last ones, from the end."""
    letters = "ABCDEFGHIJKLMNOP"
    vocabulary = {high + low: 16 * i + j for i, high in enumerate(letters) for j, low in enumerate(letters)}
    for name, token in zip(special, sorted(vocabulary, reverse=True), strict=False):
        vocabulary[name] = vocabulary.pop(token)
    backend = Backend(models.WordLevel(vocabulary, unk_token="AA"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(".."), "isolated")
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(name, special=True) for name in special])
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"clean_up_tokenization_spaces": False}))


def save_byte_tokenizer(folder: Path, eos: str) -> None:
    """A tokenizer of 256 tokens, a byte each; the last one, which no text has, is `eos`."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    unused = chr(0xFF)  # byte-level tokenizers write this byte as the character of that number
    vocabulary = {eos if character == unused else character: index for index, character in enumerate(alphabet)}
    backend = Backend(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(eos, special=True)])
    backend.save(str(folder / "tokenizer.json"))
    config = {"clean_up_tokenization_spaces": False, "eos_token": eos}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
