"""Which bytes each token adds to a text, for the decoders where that depends on the token alone.

These are byte-level BPE and SentencePiece with byte fallback, so nearly every published language model. For them a table turns
decoding into a lookup; what remains is what happens to the first token of a text (`Leading`). Other decoders, such as
WordPiece's, are left to the `tokenizers` library.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

from tokenizers import Tokenizer as Backend

Leading = Literal["keep", "strip_space", "drop_marks"]
"""What decoding does to the first token: nothing, strip one leading space, or drop its space marks (▁)."""

_SPACE_MARK = "▁"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Decoding(NamedTuple):
    """`table[id]` are the bytes of a token, None if they depend on the tokens around it."""

    is_byte_level: bool
    leading: Leading
    table: list[bytes] | None


def decoding_of(backend: Backend) -> Decoding:
    names = _names(backend)
    match decoder_steps(backend):
        case ["ByteLevel"]:
            return Decoding(True, "keep", _table(names, _byte_level_bytes))
        case ["Metaspace"] if _state(backend).get("prepend_scheme") == "never":
            return Decoding(False, "keep", _table(names, _piece_bytes))
        case ["Metaspace"]:
            return Decoding(False, "drop_marks", _table(names, _piece_bytes))
        case ["Replace", "ByteFallback", "Fuse"] if _replaces_marks(backend):
            return Decoding(False, "keep", _table(names, _piece_bytes))
        case ["Replace", "ByteFallback", "Fuse", "Strip"] if _replaces_marks(backend) and _strips_a_space(backend):
            return Decoding(False, "strip_space", _table(names, _piece_bytes))
        case _:
            return Decoding(False, "keep", None)


def decoder_steps(backend: Backend) -> list[str]:
    """The kinds of the decoder's steps, such as ["Replace", "ByteFallback", "Fuse"]; empty if there is no decoder."""
    return [step.get("type", "") for step in _steps(backend)]


def own_bytes(token: str, steps: list[str]) -> bytes | None:
    """The bytes of a token that stands for bytes, which on their own may be no text; None for the others."""
    if "ByteFallback" in steps and (match := _BYTE_TOKEN.fullmatch(token)):
        return bytes([int(match[1], 16)])
    return _byte_level_bytes(token) if "ByteLevel" in steps else None


def _state(backend: Backend) -> dict[str, Any]:
    return {} if backend.decoder is None else json.loads(backend.decoder.__getstate__())


def _steps(backend: Backend) -> list[dict[str, Any]]:
    state = _state(backend)
    return state.get("decoders", [state] if state else [])


def _replaces_marks(backend: Backend) -> bool:
    step = _steps(backend)[0]
    return step.get("pattern") == {"String": _SPACE_MARK} and step.get("content") == " "


def _strips_a_space(backend: Backend) -> bool:
    step = _steps(backend)[-1]
    return (step.get("content"), step.get("start"), step.get("stop")) == (" ", 1, 0)


def _names(backend: Backend) -> dict[int, str]:
    """What the decoder gets for each token. For an added token that texts are searched for behind the normalizer, that is what
    the normalizer makes of it: Llama 2's puts a space before it."""
    names = {index: token for token, index in backend.get_vocab(with_added_tokens=True).items()}
    for index, token in backend.get_added_tokens_decoder().items():
        if token.normalized:
            names[index] = backend.id_to_token(index) or token.content
    return names


def _table(names: Mapping[int, str], bytes_of: Callable[[str], bytes]) -> list[bytes]:
    table = [b""] * (max(names, default=-1) + 1)
    for index, token in names.items():
        table[index] = bytes_of(token)
    return table


def _byte_level_bytes(token: str) -> bytes:
    # like the library's decoder: a token with any character outside the byte alphabet stands for itself
    mapped = _BYTE_CHARACTERS.issuperset(token)
    return token.translate(_TO_BYTE).encode("latin-1") if mapped else token.encode()


def _piece_bytes(token: str) -> bytes:
    if match := _BYTE_TOKEN.fullmatch(token):
        return bytes([int(match[1], 16)])
    return token.replace(_SPACE_MARK, " ").encode()


def _byte_alphabet() -> dict[int, int]:
    """GPT-2's: every byte has a printable character; bytes that have none of their own get one from U+0100 on."""
    own = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in own]
    return {byte: byte for byte in own} | {0x100 + rank: byte for rank, byte in enumerate(others)}


_TO_BYTE = _byte_alphabet()
_BYTE_CHARACTERS = frozenset(map(chr, _TO_BYTE))
