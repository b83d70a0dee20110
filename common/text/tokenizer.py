"""Text to token ids and back, for one model: a thin, typed shell over the `tokenizers` library.

Two things it adds. *Safety*: text is data unless the caller says `parse_special=True`, so a user's "<|im_end|>" is ten
characters and not the end of their turn; a prompt that can't fit the context is refused before the work of tokenizing it.
*Speed*: a table with every token's bytes makes decoding a lookup (see `detokenize`), which a gateway needs for each token of
each stream.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

from tokenizers import Tokenizer as Backend

from common.models.source import ModelFiles
from common.models.weights.gguf_metadata import read_metadata
from common.protocol.errors import ConfigError, ContextLengthExceeded, InvalidParameter
from common.text import gguf_tokenizer
from common.text.detokenize import Detokenizer

Leading = Literal["keep", "strip_space", "drop_marks"]
"""What decoding does to the first token: nothing, strip one leading space, or drop its space marks (▁)."""

_SPACE_MARK = "▁"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_PROBE_CHARS = 8  # characters per token that hardly any real text exceeds


class Tokenizer:
    """One model's tokenizer. Immutable after construction; safe to use from several threads."""

    def __init__(
        self,
        backend: Backend,
        *,
        eos_ids: Iterable[int] = (),
        bos_id: int | None = None,
        begins_with_bos: bool = False,
        special_tokens: dict[str, str] | None = None,
    ) -> None:
        """`special_tokens` are the names templates use, such as bos_token and eos_token, with their text.

        :raises ConfigError: if the backend decodes in a way that can't be streamed token by token.
        """
        self._backend = backend
        self._backend_lock = threading.Lock()
        backend.encode_special_tokens = True
        added = backend.get_added_tokens_decoder()
        self.eos_ids: list[int] = list(dict.fromkeys(eos_ids))
        self.bos_id = bos_id
        self.special_tokens = special_tokens or {}
        self.special_ids: frozenset[int] = frozenset(index for index, token in added.items() if token.special)
        self.vocab_size: int = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self._specials = {token.content: (index, token) for index, token in added.items() if token.special}
        # longest first: of two that begin alike, the longer one is meant
        alternatives = sorted((content for content in self._specials if content), key=len, reverse=True)
        self._special_pattern = re.compile("|".join(map(re.escape, alternatives))) if alternatives else None
        self._prefix, self._suffix = self._affixes(begins_with_bos)
        self._is_byte_level, self.leading = _decoder_kind(backend)
        self._bytes = self._byte_table()
        self._visible_bytes = [b"" if index in self.special_ids else piece for index, piece in enumerate(self._bytes)]
        self.longest_token_bytes = max(map(len, self._bytes), default=1) or 1

    # ── encoding ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def encode(
        self,
        text: str,
        add_special: bool = False,
        *,
        parse_special: bool = False,
        guard: str = "",
        max_tokens: int | None = None,
    ) -> list[int]:
        """Token ids of `text`.

        `add_special` puts the model's BOS (and whatever else it begins texts with) around it. `parse_special` turns the
        text of special tokens, such as "<|im_end|>", into those tokens: for text that a template or the operator wrote,
        never for a user's. `guard` is a character that was put into users' special-token text to hide it from that (see
        `template.guard_messages`): it is taken out again after special tokens were found. With `max_tokens`, a text that
        must be longer is refused before it is tokenized.

        :raises InvalidParameter: if `text` holds a lone surrogate, which no UTF-8 text can.
        :raises ContextLengthExceeded: if it is longer than `max_tokens`.
        """
        if max_tokens is not None:
            self.check_length(text, max_tokens, parse_special=parse_special)
        ids = self._encode_checked(text, parse_special, guard)
        if add_special:
            ids = self._prefix + ids + self._suffix
        if max_tokens is not None and len(ids) > max_tokens:
            raise ContextLengthExceeded(f"the prompt has {len(ids)} tokens; at most {max_tokens} fit", param="prompt")
        return ids

    def check_length(self, text: str, max_tokens: int, *, parse_special: bool = False) -> None:
        """Refuses a text that can't fit, at a cost that does not grow with how much too long it is.

        No token is longer than `longest_token_bytes`, so very long texts are refused unread. For those in between, a
        part that holds `max_tokens` of any usual text is tokenized first.

        :raises InvalidParameter, ContextLengthExceeded: as `encode`.
        """
        size = len(text)
        if size > max_tokens * self.longest_token_bytes:
            raise ContextLengthExceeded(f"the prompt of {size} characters can't fit {max_tokens} tokens", param="prompt")
        probe = max_tokens * _PROBE_CHARS
        if size > 2 * probe + 1024:
            # cutting inside a word may cost a few tokens more than the whole text has there
            at_least = len(self._encode_checked(text[:probe], parse_special, "")) - self.longest_token_bytes
            if at_least > max_tokens:
                raise ContextLengthExceeded(
                    f"the prompt has more than {at_least} tokens; at most {max_tokens} fit", param="prompt"
                )

    def find_special(self, text: str) -> bool:
        """Whether `text` holds the text of a special token."""
        return self._special_pattern is not None and self._special_pattern.search(text) is not None

    def guard_special(self, text: str, guard: str) -> str:
        """`text` with `guard` inside each special token's text, so that `encode` takes it for plain text."""
        if self._special_pattern is None:
            return text
        return self._special_pattern.sub(lambda match: match[0][:1] + guard + match[0][1:], text)

    def _encode_checked(self, text: str, parse_special: bool, guard: str) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidParameter(f"the text is not valid Unicode: {error.reason}", param="prompt") from error
        if self._is_byte_level:
            return self._encode_pieces(text, guard) if parse_special else self._encode_plain(text)
        if guard:
            raise InvalidParameter("messages must not hold the text of this model's special tokens", param="messages")
        # SentencePiece treats the first piece of a text differently, so the library itself must find the special tokens
        with self._backend_lock:
            self._backend.encode_special_tokens = not parse_special
            return self._backend.encode(text, add_special_tokens=False).ids

    def _encode_plain(self, text: str) -> list[int]:
        return self._backend.encode(text, add_special_tokens=False).ids

    def _encode_pieces(self, text: str, guard: str) -> list[int]:
        """Special tokens as such, and what lies between them as plain text without `guard`."""
        ids: list[int] = []
        at = 0
        strip_next = False
        for match in self._special_pattern.finditer(text) if self._special_pattern else ():
            index, token = self._specials[match[0]]
            piece = text[at : match.start()]
            piece = piece.lstrip() if strip_next else piece
            piece = piece.rstrip() if token.lstrip else piece
            if piece:
                ids += self._encode_plain(piece.replace(guard, "") if guard else piece)
            ids.append(index)
            at, strip_next = match.end(), token.rstrip
        rest = text[at:].lstrip() if strip_next else text[at:]
        if rest:
            ids += self._encode_plain(rest.replace(guard, "") if guard else rest)
        return ids

    def _affixes(self, begins_with_bos: bool) -> tuple[list[int], list[int]]:
        """What `add_special` puts before and after a text."""
        bare = self._backend.encode("a", add_special_tokens=False).ids
        full = self._backend.encode("a", add_special_tokens=True).ids
        for at in range(len(full) - len(bare) + 1 if bare else 0):
            if full[at : at + len(bare)] == bare:
                prefix, suffix = full[:at], full[at + len(bare) :]
                break
        else:
            prefix, suffix = full, []
        if begins_with_bos and self.bos_id is not None and self.bos_id not in prefix:
            prefix = [self.bos_id, *prefix]
        return prefix, suffix

    # ── decoding ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Text of `ids`, without special tokens; bytes that are not UTF-8 become U+FFFD."""
        detokenizer = Detokenizer(self, skip_special=skip_special)
        return detokenizer.push(ids) + detokenizer.finish()

    def token_bytes(self, token: int) -> bytes:
        """The bytes `token` stands for (a special token: its text); empty for an id past the vocabulary."""
        return self._bytes[token] if 0 <= token < len(self._bytes) else b""

    def token_text(self, token: int) -> str:
        """`token_bytes` as text; a token that is part of a character shows as U+FFFD."""
        return self.token_bytes(token).decode(errors="replace")

    def byte_table(self, *, skip_special: bool) -> list[bytes]:
        """Per token id the bytes it adds to a text; with `skip_special`, none for special tokens."""
        return self._visible_bytes if skip_special else self._bytes

    def _byte_table(self) -> list[bytes]:
        table = [b""] * self.vocab_size
        for token, index in self._backend.get_vocab(with_added_tokens=True).items():
            if self._is_byte_level:
                # like the library's decoder: a token with any character outside the byte alphabet stands for itself
                mapped = _BYTE_CHARACTERS.issuperset(token)
                table[index] = token.translate(_TO_BYTE).encode("latin-1") if mapped else token.encode()
            elif match := _BYTE_TOKEN.fullmatch(token):
                table[index] = bytes([int(match[1], 16)])
            else:
                table[index] = token.replace(_SPACE_MARK, " ").encode()
        return table


def _byte_alphabet() -> dict[int, int]:
    """GPT-2's: every byte has a printable character; bytes that have none of their own get one from U+0100 on."""
    own = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in own]
    return {byte: byte for byte in own} | {0x100 + rank: byte for rank, byte in enumerate(others)}


_TO_BYTE = _byte_alphabet()
_BYTE_CHARACTERS = frozenset(map(chr, _TO_BYTE))


def _decoder_kind(backend: Backend) -> tuple[bool, Leading]:
    """(is byte-level, what happens to the first token). A table of bytes per token can express these decoders exactly."""
    if backend.decoder is None:
        raise ConfigError("the tokenizer has no decoder: its tokens can't be turned into text")
    state: dict[str, Any] = json.loads(backend.decoder.__getstate__())
    steps: list[dict[str, Any]] = state.get("decoders", [state])
    kinds = [step.get("type") for step in steps]
    if kinds == ["ByteLevel"]:
        return True, "keep"
    if kinds == ["Metaspace"]:
        return False, "keep" if steps[0].get("prepend_scheme") == "never" else "drop_marks"
    if kinds == ["Replace", "ByteFallback", "Fuse"]:
        return False, "keep"
    if kinds == ["Replace", "ByteFallback", "Fuse", "Strip"]:
        return False, "strip_space"
    raise ConfigError(f"the tokenizer's decoder ({' + '.join(map(str, kinds))}) is not supported")


# ── loading ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


def load_tokenizer(files: ModelFiles, *, metadata: dict[str, Any] | None = None) -> Tokenizer:
    """The tokenizer of `files`; `metadata` is the GGUF header where the caller has read it already.

    :raises ConfigError: if it is missing, damaged or not supported; the message names the file.
    """
    try:
        if files.format == "gguf":
            return _from_gguf(read_metadata(files.path) if metadata is None else metadata)
        return _from_folder(files.path)
    except ConfigError as error:
        raise ConfigError(f"{files.path}: {error}") from error


def _from_gguf(metadata: dict[str, Any]) -> Tokenizer:
    backend, begins_with_bos = gguf_tokenizer.build(metadata)

    def token_id(name: str) -> int | None:
        value = metadata.get(f"tokenizer.ggml.{name}_token_id")
        return value if isinstance(value, int) and 0 <= value < len(metadata["tokenizer.ggml.tokens"]) else None

    eos_ids = [index for name in ("eos", "eot", "eom") if (index := token_id(name)) is not None]
    names = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
    special_tokens = {
        name: metadata["tokenizer.ggml.tokens"][index] for key, name in names.items() if (index := token_id(key)) is not None
    }
    return Tokenizer(
        backend,
        eos_ids=eos_ids,
        bos_id=token_id("bos"),
        begins_with_bos=begins_with_bos,
        special_tokens=special_tokens,
    )


def _from_folder(folder: Path) -> Tokenizer:
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ConfigError("the folder has no tokenizer.json; save the model with a fast tokenizer")
    try:
        backend = Backend.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        raise ConfigError(f"tokenizer.json can't be loaded: {error}") from error
    backend.no_truncation()
    backend.no_padding()
    config = read_json(folder / "tokenizer_config.json")
    names = ("bos_token", "eos_token", "unk_token", "pad_token")
    special_tokens = {name: text for name in names if (text := _token_content(config.get(name)))}
    generation, model = read_json(folder / "generation_config.json"), read_json(folder / "config.json")
    eos: list[Any] = []
    for value in (generation.get("eos_token_id", model.get("eos_token_id")), _id_of(backend, special_tokens.get("eos_token"))):
        eos += value if isinstance(value, list) else [value]
    bos = _id_of(backend, special_tokens.get("bos_token"))
    return Tokenizer(
        backend,
        eos_ids=[index for index in eos if isinstance(index, int)],
        bos_id=bos if bos is not None else model.get("bos_token_id"),
        special_tokens=special_tokens,
    )


def read_json(path: Path) -> dict[str, Any]:
    """The object in `path`; empty when there is no such file.

    :raises ConfigError: if the file is not a JSON object.
    """
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_bytes())
    except (ValueError, OSError) as error:
        raise ConfigError(f"{path.name} can't be read: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path.name} holds no JSON object")
    return value


def _token_content(value: Any) -> str | None:
    """tokenizer_config.json gives a token as its text, or as an object with `content`."""
    content = value.get("content") if isinstance(value, dict) else value
    return content if isinstance(content, str) else None


def _id_of(backend: Backend, token: str | None) -> int | None:
    return None if token is None else backend.token_to_id(token)
