"""Any tokenizer of the `tokenizers` library streams: pieces together are the whole text, and no character is ever split."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from common.models.source import ModelFiles
from common.text.detokenize import Detokenizer, WindowDetokenizer, detokenizer
from common.text.tokenizer import Tokenizer, load_tokenizer

CORPUS = [
    "the cat sat on the mat, and the dog didn't",
    "Hello wörld! 日本語 123 4567 😀 🙂",
    "def f(x):\n    return x + 1\n",
] * 40
SPECIALS = ["<s>", "</s>", "<pad>"]


def wordpiece() -> Backend:
    backend = Backend(models.WordPiece(unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=200, special_tokens=["[UNK]", *SPECIALS], show_progress=False)
    backend.train_from_iterator(CORPUS, trainer)
    return backend


def word_end_bpe() -> Backend:
    backend = Backend(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.BPEDecoder(suffix="</w>")
    trainer = trainers.BpeTrainer(
        vocab_size=250, special_tokens=["<unk>", *SPECIALS], end_of_word_suffix="</w>", show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    return backend


def unigram(decoder: Any) -> Callable[[], Backend]:
    def build() -> Backend:
        backend = Backend(models.Unigram())
        backend.normalizer = normalizers.Sequence([normalizers.NFKC()])
        backend.pre_tokenizer = pre_tokenizers.Metaspace()
        backend.decoder = decoder
        trainer = trainers.UnigramTrainer(
            vocab_size=200, special_tokens=["<unk>", *SPECIALS], unk_token="<unk>", show_progress=False
        )
        backend.train_from_iterator(CORPUS, trainer)
        return backend

    return build


def word_level() -> Backend:
    backend = Backend(models.WordLevel(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.train_from_iterator(CORPUS, trainers.WordLevelTrainer(special_tokens=["<unk>", *SPECIALS], show_progress=False))
    return backend


def byte_level_then_strip() -> Backend:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    backend.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, special_tokens=SPECIALS, show_progress=False)
    backend.train_from_iterator(CORPUS, trainer)
    return backend


def ctc() -> Backend:
    letters = ["<unk>", *SPECIALS, "|", *"abcdefghijklmnopqrstuvwxyz'"]
    backend = Backend(models.WordLevel({letter: index for index, letter in enumerate(letters)}, unk_token="<unk>"))
    backend.decoder = decoders.CTC(pad_token="<pad>", word_delimiter_token="|")
    backend.add_special_tokens(SPECIALS[:2])
    return backend


STEPS = [decoders.Replace("▁", " "), decoders.Fuse()]
KINDS: dict[str, Callable[[], Backend]] = {
    "wordpiece": wordpiece,
    "word-end-bpe": word_end_bpe,
    "unigram-metaspace": unigram(decoders.Metaspace()),
    "unigram-replace": unigram(decoders.Sequence(STEPS)),
    "unigram-replace-strip": unigram(decoders.Sequence([*STEPS, decoders.Strip(" ", 1, 0)])),
    "unigram-replace-bytes": unigram(decoders.Sequence([decoders.Replace("▁", "_"), decoders.ByteFallback(), decoders.Fuse()])),
    "word-level": word_level,
    "byte-level-strip": byte_level_then_strip,
    "ctc": ctc,
}
TABLES = {"unigram-metaspace"}


@pytest.fixture(scope="module")
def tokenizers() -> dict[str, Tokenizer]:
    return {name: Tokenizer(build()) for name, build in KINDS.items()}


def stream(tokenizer: Tokenizer, ids: list[int], sizes: list[int], *, skip: bool = True) -> list[str]:
    """The pieces when tokens come in frames of these sizes, the rest one by one."""
    text = detokenizer(tokenizer, skip_special=skip)
    pieces: list[str] = []
    at = 0
    for size in sizes:
        pieces.append(text.push(ids[at : at + size]))
        at += size
    return [*pieces, *(text.push([token]) for token in ids[at:]), text.finish()]


SIZES = st.lists(st.integers(0, 5), max_size=8)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=100, deadline=None)
@given(numbers=st.lists(st.integers(0, 10_000), max_size=40), sizes=SIZES, skip=st.booleans())
def test_any_tokens_in_any_frames_give_the_whole_text(
    tokenizers: dict[str, Tokenizer], kind: str, numbers: list[int], sizes: list[int], skip: bool
) -> None:
    tokenizer = tokenizers[kind]
    ids = [number % tokenizer.vocab_size for number in numbers]
    whole = tokenizer.backend_text(ids, skip_special=skip)
    pieces = stream(tokenizer, ids, sizes, skip=skip)
    if kind == "byte-level-strip" and "\ufffd" in whole:
        # bytes that are no text: only their number of replacement characters may differ
        assert "".join(pieces).replace("\ufffd", "") == whole.replace("\ufffd", "")
        return
    assert "".join(pieces) == whole
    assert tokenizer.decode(ids, skip_special=skip) == whole


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=80, deadline=None)
@given(
    text=st.lists(st.sampled_from(["the ", "cat", "日本", "😀", "🙂", " ", "didn't", "é", "1", "\n", "!"])).map("".join),
    sizes=SIZES,
)
def test_text_is_never_split_inside_a_character(
    tokenizers: dict[str, Tokenizer], kind: str, text: str, sizes: list[int]
) -> None:
    tokenizer = tokenizers[kind]
    ids = tokenizer.encode(text)
    whole = tokenizer.decode(ids)
    shown = ""
    for piece in stream(tokenizer, ids, sizes):
        shown += piece
        assert whole.startswith(shown)
    assert shown == whole


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_named_one_by_one_make_the_text(tokenizers: dict[str, Tokenizer], kind: str) -> None:
    """What log-probabilities call the tokens of an answer, put behind each other, is the answer."""
    tokenizer = tokenizers[kind]
    text = "the cat sat 日本 on" if kind != "ctc" else "c"
    ids = [index for index in tokenizer.encode(text) if index not in tokenizer.special_ids]
    text = b"".join(map(tokenizer.token_bytes, ids)).decode()
    assert text.strip(" _") == tokenizer.decode(ids).strip(" _")
    assert tokenizer.token_bytes(10**9) == tokenizer.token_bytes(-1) == b""


@pytest.mark.parametrize("kind", KINDS)
def test_which_kinds_need_the_library(tokenizers: dict[str, Tokenizer], kind: str) -> None:
    made = detokenizer(tokenizers[kind])
    assert isinstance(made, Detokenizer if kind in TABLES else WindowDetokenizer)


def test_text_that_continues_a_prompt_keeps_its_space(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["wordpiece"]
    ids = tokenizer.encode("the cat")
    assert detokenizer(tokenizer).push(ids) == "the cat"
    assert detokenizer(tokenizer, continues=True).push(ids) == " the cat"


def test_tokens_without_text_are_not_kept_for_ever(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["ctc"]
    pad = 3
    text = WindowDetokenizer(tokenizer)
    assert text.push([5, *[pad] * 5000, 5]) == "aa"
    assert len(text._window) < 200


def test_a_folder_with_any_decoder_is_served(tmp_path: Path) -> None:
    wordpiece().save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(ModelFiles(name="tiny", format="safetensors", path=tmp_path))
    assert tokenizer.decode(tokenizer.encode("the cat sat")) == "the cat sat"
