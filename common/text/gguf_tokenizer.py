"""Builds a `tokenizers` tokenizer from the vocabulary in a GGUF header.

GGUF names the algorithm (`tokenizer.ggml.model`: gpt2 is byte-level BPE, llama is SentencePiece) and the rule that cuts text
into words before BPE (`tokenizer.ggml.pre`), but not the rule itself: those are known by name, as in llama.cpp's
`llama-vocab.cpp`. A name that is not known here is refused, since a wrong rule would only show as a slightly dumber model.
"""

from __future__ import annotations

from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE

from common.protocol.errors import ConfigError

_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4
_SPACE_MARK = "▁"

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3_RULE = _CONTRACTIONS + _WORDS % "{1,3}"
_QWEN2_RULE = _CONTRACTIONS + _WORDS % ""

_CASED = r"[^\r\n\p{L}\p{N}]?"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_O200K_RULE = (
    f"{_CASED}{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|{_CASED}{_UPPER}+{_LOWER}*{_CONTRACTIONS}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Of tiktoken's o200k_base."""
_TEKKEN_RULE = (
    f"{_CASED}{_UPPER}*{_LOWER}+|{_CASED}{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Of Mistral's models since Nemo."""
_SEED_RULE = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"

_GPT2 = {"gpt-2", "default", "phi-2", "jina-en", "olmo", "dbrx-gpt2", "exaone4"}
_DIGITS = {"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"}
_LLAMA3 = {"llama3", "llama-v3", "llama-bpe", "falcon3", "dbrx", "smaug-bpe"}
_GLM4 = {"glm4", "chatglm-bpe"}
_O200K = {"gpt-4o", "llama4"}
_TEKKEN = {"tekken"}
_SEED = {"seed-coder"}
_QWEN2 = {"qwen2", "deepseek-r1-qwen", "stablelm2"}

_PATTERNS = {
    **dict.fromkeys(_LLAMA3 | _GLM4, _LLAMA3_RULE),
    **dict.fromkeys(_QWEN2, _QWEN2_RULE),
    **dict.fromkeys(_O200K, _O200K_RULE),
    **dict.fromkeys(_TEKKEN, _TEKKEN_RULE),
    **dict.fromkeys(_SEED, _SEED_RULE),
}
_WHOLE_WORDS = _LLAMA3 | _TEKKEN
"""A word that is a token is not made of others, and text begins with BOS where the file does not say whether it does."""


def build(metadata: dict[str, Any]) -> tuple[Tokenizer, bool]:
    """The tokenizer in `metadata`, and whether text begins with the model's BOS token by default.

    :raises ConfigError: if the vocabulary is missing, inconsistent, or of a kind that is not supported.
    """
    kind = metadata.get("tokenizer.ggml.model")
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens or not all(isinstance(token, str) for token in tokens):
        raise ConfigError("the GGUF file holds no tokenizer (tokenizer.ggml.tokens)")
    vocabulary = {token: index for index, token in enumerate(tokens)}
    if kind == "gpt2":
        backend = _byte_level(metadata, vocabulary)
    elif kind == "llama":
        backend = _sentencepiece(metadata, vocabulary)
    else:
        raise ConfigError(f"the GGUF file's tokenizer is of kind {kind!r}; gpt2 (byte-level BPE) and llama are supported")
    _add_specials(backend, metadata, tokens)
    begins_with_bos = metadata.get("tokenizer.ggml.add_bos_token")
    if begins_with_bos is None:
        begins_with_bos = kind == "llama" or metadata.get("tokenizer.ggml.pre") in _WHOLE_WORDS
    return backend, bool(begins_with_bos)


def _byte_level(metadata: dict[str, Any], vocabulary: dict[str, int]) -> Tokenizer:
    rule = metadata.get("tokenizer.ggml.pre", "gpt-2")
    pairs = [merge.split(" ", 1) for merge in _list(metadata, "tokenizer.ggml.merges", str)]
    if any(len(pair) != 2 for pair in pairs):
        raise ConfigError("the GGUF file's tokenizer.ggml.merges are damaged")
    merges = [(left, right) for left, right in pairs]
    try:
        backend = Tokenizer(BPE(vocabulary, merges, ignore_merges=rule in _WHOLE_WORDS))
    except Exception as error:  # the library raises plain Exception for a merge that is not in the vocabulary
        raise ConfigError(f"the GGUF file's tokenizer is damaged: {error}") from error
    if rule in _GPT2:
        cut = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    elif rule in _DIGITS:
        digits = pre_tokenizers.Digits(individual_digits=True)
        cut = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)])
    elif pattern := _PATTERNS.get(rule):
        words = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
        cut = pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    else:
        raise ConfigError(f"the GGUF file's pre-tokenizer {rule!r} is not supported; use the model's safetensors folder")
    backend.pre_tokenizer = cut
    if rule in _QWEN2:
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(metadata: dict[str, Any], vocabulary: dict[str, int]) -> Tokenizer:
    """SentencePiece BPE as byte-fallback BPE; its merges are those of two pieces into a piece, best score first."""
    scores = _list(metadata, "tokenizer.ggml.scores", (int, float))
    if len(scores) != len(vocabulary):
        raise ConfigError("the GGUF file's tokenizer has no score for each token (tokenizer.ggml.scores)")
    merges: list[tuple[float, tuple[str, str]]] = []
    for piece, index in vocabulary.items():
        cuts = ((piece[:at], piece[at:]) for at in range(1, len(piece)))
        found = [(left, right) for left, right in cuts if left in vocabulary and right in vocabulary]
        found.sort(key=lambda pair: (vocabulary[pair[0]], vocabulary[pair[1]]))
        merges += [(-scores[index], pair) for pair in found]
    merges.sort(key=lambda merge: merge[0])
    unknown = metadata.get("tokenizer.ggml.unknown_token_id", 0)
    unknown_token = next((token for token, index in vocabulary.items() if index == unknown), "<unk>")
    backend = Tokenizer(
        BPE(vocabulary, [pair for _, pair in merges], unk_token=unknown_token, fuse_unk=True, byte_fallback=True)
    )
    prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    marks: list[normalizers.Normalizer] = [normalizers.Prepend(_SPACE_MARK)] if prefix else []
    backend.normalizer = normalizers.Sequence([*marks, normalizers.Replace(" ", _SPACE_MARK)])
    steps: list[decoders.Decoder] = [decoders.Replace(_SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return backend


def _add_specials(backend: Tokenizer, metadata: dict[str, Any], tokens: list[str]) -> None:
    """Control tokens are special (skipped in output); user-defined ones are text, but never cut."""
    types = _list(metadata, "tokenizer.ggml.token_type", int)
    special = [token for token, kind in zip(tokens, types, strict=False) if kind in (_CONTROL, _UNKNOWN)]
    whole = [token for token, kind in zip(tokens, types, strict=False) if kind == _USER_DEFINED]
    backend.add_tokens([AddedToken(token, normalized=False) for token in whole if token])
    backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special if token])


def _list(metadata: dict[str, Any], key: str, kind: type | tuple[type, ...]) -> list[Any]:
    """Return an array of the metadata; empty if it is missing. :raises ConfigError: if it is something else."""
    found = metadata.get(key, [])
    if not isinstance(found, list) or not all(isinstance(one, kind) for one in found):
        raise ConfigError(f"the GGUF file's {key} are damaged")
    return found
