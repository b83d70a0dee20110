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
from typing import Any

from tokenizers import Tokenizer as Backend

from common.models.families.wrappers import unwrapped
from common.models.fields import MAX_SIZE
from common.models.json_files import read_object_if_any
from common.models.lfs import pointer_hint
from common.models.source import ModelFiles
from common.models.weights.gguf_metadata import read_metadata
from common.protocol.errors import ConfigError, ContextLengthExceeded, InvalidParameter
from common.text import gguf_tokenizer, special_tokens, token_bytes
from common.text.detokenize import detokenizer
from common.text.special_tokens import SpecialTokens

_PROBE_CHARS = 8  # characters per token that hardly any real text exceeds
_MIN_LONGEST_BYTES = 128  # for tokenizers whose longest word is one unknown token


class Tokenizer:
    """One model's tokenizer. Immutable after construction; safe to use from several threads."""

    def __init__(
        self,
        backend: Backend,
        *,
        eos_ids: Iterable[int] = (),
        bos_id: int | None = None,
        begins_with_bos: bool = False,
        special_tokens: SpecialTokens | None = None,
    ) -> None:
        """`special_tokens` are the names templates use, such as bos_token and eos_token, with their text."""
        self._backend = backend
        self._backend_lock = threading.Lock()
        backend.encode_special_tokens = True
        added = backend.get_added_tokens_decoder()
        self.eos_ids: list[int] = list(dict.fromkeys(eos_ids))
        self.bos_id = bos_id
        self.special_tokens: SpecialTokens = special_tokens or {}
        self.special_ids: frozenset[int] = frozenset(index for index, token in added.items() if token.special)
        self.vocab_size: int = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self._specials = {token.content: (index, token) for index, token in added.items() if token.special}
        # longest first: of two that begin alike, the longer one is meant
        alternatives = sorted((content for content in self._specials if content), key=len, reverse=True)
        self._special_pattern = re.compile("|".join(map(re.escape, alternatives))) if alternatives else None
        self._prefix, self._suffix = self._affixes(begins_with_bos)
        self.leading: token_bytes.Leading
        self._is_byte_level, self.leading, table = token_bytes.decoding_of(backend)
        self._steps = token_bytes.decoder_steps(backend)
        self._bytes = table
        self._visible_bytes: dict[frozenset[int], list[bytes]] = {}
        self.longest_token_bytes = max(map(len, table), default=1) or 1 if table is not None else self._longest_bytes()
        self.anchor_id = None if table is not None else self._anchor()
        self._others_bytes: dict[int, bytes] = {}

    # ── encoding ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def encode(
        self,
        text: str,
        add_special: bool = False,
        *,
        parse_special: bool = False,
        guard: str = "",
        max_tokens: int | None = None,
        param: str = "prompt",
    ) -> list[int]:
        """Token ids of `text`.

        `add_special` puts the model's BOS (and whatever else it begins texts with) around it. `parse_special` turns the
        text of special tokens, such as "<|im_end|>", into those tokens: for text that a template or the operator wrote,
        never for a user's. `guard` is a character that was put into users' special-token text to hide it from that (see
        `template.guard_messages`): it is taken out again after special tokens were found. With `max_tokens`, a text that
        must be longer is refused before it is tokenized. `param` is what errors call the text.

        :raises InvalidParameter: if `text` holds a lone surrogate, which no UTF-8 text can.
        :raises ContextLengthExceeded: if it is longer than `max_tokens`.
        """
        if max_tokens is not None:
            self.check_length(text, max_tokens, parse_special=parse_special, param=param)
        ids = self._encode_checked(text, parse_special, guard, param)
        if add_special:
            ids = self.add_special(ids)
        if max_tokens is not None and len(ids) > max_tokens:
            raise _too_long(param, f"{len(ids)} tokens", max_tokens)
        return ids

    def add_special(self, ids: list[int]) -> list[int]:
        """`ids` with what `encode` puts around a text by `add_special`."""
        return [*self._prefix, *ids, *self._suffix]

    def check_length(self, text: str, max_tokens: int, *, parse_special: bool = False, param: str = "prompt") -> None:
        """Refuses a text that can't fit, at a cost that does not grow with how much too long it is.

        No token is longer than `longest_token_bytes`, so very long texts are refused unread. For those in between, a
        part that holds `max_tokens` of any usual text is tokenized first.

        :raises InvalidParameter, ContextLengthExceeded: as `encode`.
        """
        size = len(text)
        if size > max_tokens * self.longest_token_bytes:
            raise _too_long(param, f"{size} characters", max_tokens)
        probe = max_tokens * _PROBE_CHARS
        if size > 2 * probe + 1024:
            # cutting inside a word may cost a few tokens more than the whole text has there
            at_least = len(self._encode_checked(text[:probe], parse_special, "", param)) - self.longest_token_bytes
            if at_least > max_tokens:
                raise _too_long(param, f"more than {at_least} tokens", max_tokens)

    def serialised(self) -> dict[str, Any]:
        """Return what tokenizer.json says, or would say: `model` with vocabulary and merges, `added_tokens` and so on."""
        return json.loads(self._backend.to_str())

    def find_special(self, text: str) -> bool:
        """Whether `text` holds the text of a special token."""
        return self._special_pattern is not None and self._special_pattern.search(text) is not None

    def guard_special(self, text: str, guard: str) -> str:
        """`text` with `guard` inside each special token's text, so that `encode` takes it for plain text."""
        if self._special_pattern is None:
            return text
        return self._special_pattern.sub(lambda match: match[0][:1] + guard + match[0][1:], text)

    def _encode_checked(self, text: str, parse_special: bool, guard: str, param: str) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidParameter(f"the text is not valid Unicode: {error.reason}", param=param) from error
        if self._is_byte_level:
            return self._encode_pieces(text, guard) if parse_special else self._encode_plain(text)
        # SentencePiece treats the first piece of a text differently, so the library itself must find the special tokens
        with self._backend_lock:
            self._backend.encode_special_tokens = not parse_special
            ids = self._encode_plain(text)
        return self._without_guard(ids, guard, text.count(guard)) if guard else ids

    def _encode_plain(self, text: str) -> list[int]:
        # without offsets: twice as fast, and a long text's are freed while nobody else may run
        return self._backend.encode_batch_fast([text], add_special_tokens=False)[0].ids

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

    def _without_guard(self, ids: list[int], guard: str, count: int) -> list[int]:
        """Return `ids` without the `count` guards in them, each the tokens of its bytes: no vocabulary has a noncharacter.

        :raises InvalidParameter: if the vocabulary has no tokens for bytes.
        """
        guard_ids = [self._backend.token_to_id(f"<0x{byte:02X}>") for byte in guard.encode()]
        kept: list[int] = []
        for token in ids:
            kept.append(token)
            if token == guard_ids[-1] and kept[-len(guard_ids) :] == guard_ids:
                del kept[-len(guard_ids) :]
                count -= 1
        if count:
            raise InvalidParameter("messages must not hold the text of this model's special tokens", param="messages")
        return kept

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
        if not self.has_byte_table:
            return self.backend_text([index for index in ids if 0 <= index < self.vocab_size], skip_special=skip_special)
        text = detokenizer(self, skip_special=skip_special)
        return text.push(ids) + text.finish()

    def backend_text(self, ids: list[int], *, skip_special: bool = True) -> str:
        """What the `tokenizers` library makes of `ids`."""
        return self._backend.decode(ids, skip_special_tokens=skip_special)

    def token_bytes(self, token: int) -> bytes:
        """The bytes `token` stands for (a special token: its text); empty for an id past the vocabulary."""
        if self._bytes is not None:
            return self._bytes[token] if 0 <= token < len(self._bytes) else b""
        if token not in self._others_bytes:
            self._others_bytes[token] = self._bytes_after_anchor(token)
        return self._others_bytes[token]

    def token_name(self, token: int) -> str:
        """What the vocabulary calls `token`, as in tokenizer.json (`Ġthe`); empty for an id that it lacks."""
        return self._backend.id_to_token(token) or ""

    def token_text(self, token: int) -> str:
        """`token_bytes` as text; a token that is part of a character shows as U+FFFD."""
        return self.token_bytes(token).decode(errors="replace")

    @property
    def has_byte_table(self) -> bool:
        """Whether each token adds the same bytes wherever it stands, so that `byte_table` says all there is to know."""
        return self._bytes is not None

    def byte_table(self, *, skip_special: bool, shown: frozenset[int] = frozenset()) -> list[bytes]:
        """Per token id the bytes it adds to a text; with `skip_special`, none for special tokens but those in `shown`."""
        assert self._bytes is not None, "a tokenizer without a byte table streams through WindowDetokenizer"
        if not skip_special:
            return self._bytes
        if shown not in self._visible_bytes:
            table = list(self._bytes)
            for index in self.special_ids - shown:
                table[index] = b""
            self._visible_bytes[shown] = table
        return self._visible_bytes[shown]

    def special_ids_of(self, texts: Iterable[str]) -> frozenset[int]:
        """The special tokens among `texts`."""
        return frozenset(self._specials[text][0] for text in texts if text in self._specials)

    def special_token_ids(self, texts: Iterable[str]) -> dict[str, int]:
        """The ids of those of `texts` that are special tokens."""
        return {text: self._specials[text][0] for text in texts if text in self._specials}

    def _bytes_after_anchor(self, token: int) -> bytes:
        """What `token` adds between two words, for decoders that look at the tokens around."""
        name = self._backend.id_to_token(token) if 0 <= token < self.vocab_size else None
        if name is None:
            return b""
        if token in self.special_ids:
            return name.encode()
        own = token_bytes.own_bytes(name, self._steps)
        if own is not None or self.anchor_id is None:
            return name.encode() if own is None else own
        anchor = self.anchor_id
        before = self.backend_text([anchor])
        behind = self.backend_text([anchor, anchor]).removeprefix(before) or before  # a decoder may merge equal neighbours
        return self.backend_text([anchor, token, anchor]).removeprefix(before).removesuffix(behind).encode()

    def _anchor(self) -> int | None:
        """A token that is a word of its own."""
        vocabulary = self._backend.get_vocab(with_added_tokens=False)
        for token, index in sorted(vocabulary.items(), key=lambda entry: entry[1]):
            text = self.backend_text([index]) if index not in self.special_ids else ""
            if text.strip().isalnum() and token_bytes.own_bytes(token, self._steps) in (None, token.encode()):
                return index
        return None

    def _longest_bytes(self) -> int:
        """A word of any length may be one token, the unknown one, but hardly any word is longer than this."""
        tokens = self._backend.get_vocab(with_added_tokens=True)
        return max([_MIN_LONGEST_BYTES, *(len(token.encode()) + 1 for token in tokens)])


def _too_long(param: str, size: str, max_tokens: int) -> ContextLengthExceeded:
    return ContextLengthExceeded(f"the prompt has {size}; at most {max_tokens} tokens fit: shorten {param}", param=param)


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
    ids = special_tokens.ids_in_gguf(metadata)
    return Tokenizer(
        backend,
        eos_ids=[ids[name] for name in ("eos", "eot", "eom") if name in ids],
        bos_id=ids.get("bos"),
        begins_with_bos=begins_with_bos,
        special_tokens=special_tokens.names_in_gguf(metadata),
    )


def _from_folder(folder: Path) -> Tokenizer:
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ConfigError("the folder has no tokenizer.json; save the model with a fast tokenizer")
    try:
        backend = Backend.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        raise ConfigError(f"tokenizer.json can't be loaded: {error}{pointer_hint(path)}") from error
    backend.no_truncation()
    backend.no_padding()
    names = special_tokens.names_in_folder(folder)
    generation = read_object_if_any(folder / "generation_config.json")
    model = unwrapped(read_object_if_any(folder / "config.json"))
    eos: list[Any] = []
    for value in (generation.get("eos_token_id", model.get("eos_token_id")), _id_of(backend, names.get("eos_token"))):
        eos += value if isinstance(value, list) else [value]
    bos = [_id_of(backend, names.get("bos_token")), model.get("bos_token_id")]
    return Tokenizer(
        backend,
        eos_ids=[index for index in eos if _is_id(index)],
        bos_id=next((index for index in bos if _is_id(index)), None),
        special_tokens=names,
    )


def _is_id(value: object) -> bool:
    """Whether a token may have this id. Files say -1 where they mean none."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < MAX_SIZE


def _id_of(backend: Backend, token: str | list[str] | None) -> int | None:
    return backend.token_to_id(token) if isinstance(token, str) else None
