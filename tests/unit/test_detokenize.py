"""A stream never shows half a character, and all its pieces together are what decoding at once gives."""

from __future__ import annotations

import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers
from tokenizers import Tokenizer as Backend

from common.models.source import ModelFiles
from common.text.detokenize import Detokenizer
from common.text.tokenizer import Tokenizer, load_tokenizer


@pytest.fixture(scope="module")
def tokenizer(smollm2: ModelFiles) -> Tokenizer:
    return load_tokenizer(smollm2)


def stream(detokenizer: Detokenizer, ids: list[int], sizes: list[int]) -> list[str]:
    """The pieces when tokens come in frames of these sizes, the rest one by one."""
    pieces: list[str] = []
    at = 0
    for size in sizes:
        pieces.append(detokenizer.push(ids[at : at + size]))
        at += size
    pieces += [detokenizer.push([token]) for token in ids[at:]]
    return [*pieces, detokenizer.finish()]


SMOLLM2_IDS = st.lists(st.one_of(st.integers(0, 49151), st.integers(0, 300), st.integers(0, 16)), max_size=60)
SIZES = st.lists(st.integers(0, 5), max_size=10)


@settings(max_examples=400, deadline=None)
@given(ids=SMOLLM2_IDS, sizes=SIZES, skip=st.booleans())
def test_any_tokens_in_any_frames_give_the_full_decode(
    tokenizer: Tokenizer, ids: list[int], sizes: list[int], skip: bool
) -> None:
    whole = tokenizer._backend.decode(ids, skip_special_tokens=skip)
    assert "".join(stream(Detokenizer(tokenizer, skip_special=skip), ids, sizes)) == whole


@settings(max_examples=200, deadline=None)
@given(text=st.text(), sizes=SIZES)
def test_valid_text_never_shows_half_a_character(tokenizer: Tokenizer, text: str, sizes: list[int]) -> None:
    ids = tokenizer.encode(text)
    whole = tokenizer.decode(ids)
    pieces = stream(Detokenizer(tokenizer), ids, sizes)
    shown = ""
    for piece in pieces:
        shown += piece
        assert whole.startswith(shown)
    assert shown == whole


def test_an_emoji_appears_when_it_is_whole(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("😀!")
    pieces = stream(Detokenizer(tokenizer), ids, [])
    assert len(ids) > 2
    assert [piece for piece in pieces if piece] == ["😀", "!"]


def test_a_character_that_is_never_finished_ends_as_a_replacement(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a😀")[:-1]
    detokenizer = Detokenizer(tokenizer)
    assert detokenizer.push(ids) == "a"
    assert detokenizer.finish() == "\ufffd"


def test_ids_past_the_vocabulary_add_nothing(tokenizer: Tokenizer) -> None:
    assert Detokenizer(tokenizer).push([tokenizer.vocab_size, 10**9, -1, *tokenizer.encode("ok")]) == "ok"


def test_a_token_costs_microseconds(tokenizer: Tokenizer) -> None:
    ids = random.Random(7).choices(range(tokenizer.vocab_size), k=50_000)
    best = float("inf")
    for _ in range(3):
        detokenizer = Detokenizer(tokenizer)
        began = time.thread_time()
        for token in ids:
            detokenizer.push((token,))
        best = min(best, (time.thread_time() - began) / len(ids))
    assert best < 5e-6


# ── SentencePiece ────────────────────────────────────────────────────────────────────────────────────────────────────────

PIECES = ["<unk>", "<s>", "▁", "▁the", "▁▁", "cat", "a▁b", "é", "日本", *(f"<0x{byte:02X}>" for byte in range(256))]


def sentencepiece(decoder: decoders.Decoder) -> Tokenizer:
    backend = Backend(models.BPE({piece: index for index, piece in enumerate(PIECES)}, [], byte_fallback=True))
    backend.decoder = decoder
    backend.add_special_tokens([AddedToken("<s>", special=True, normalized=False)])
    return Tokenizer(backend)


STEPS = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
DECODERS = {
    "llama": decoders.Sequence([*STEPS, decoders.Strip(" ", 1, 0)]),
    "gemma": decoders.Sequence(STEPS),
    "metaspace": decoders.Metaspace(prepend_scheme="first"),
    "metaspace-never": decoders.Metaspace(prepend_scheme="never"),
}


@pytest.mark.parametrize("kind", DECODERS)
@settings(max_examples=100, deadline=None)
@given(ids=st.lists(st.integers(0, 8), max_size=12), sizes=SIZES)
def test_sentencepiece_streams_the_full_decode(kind: str, ids: list[int], sizes: list[int]) -> None:
    tokenizer = sentencepiece(DECODERS[kind])
    whole = tokenizer._backend.decode(ids, skip_special_tokens=True)
    assert "".join(stream(Detokenizer(tokenizer), ids, sizes)) == whole


@settings(max_examples=100, deadline=None)
@given(text=st.text(min_size=1), sizes=SIZES)
def test_sentencepiece_bytes_become_characters(text: str, sizes: list[int]) -> None:
    tokenizer = sentencepiece(DECODERS["llama"])
    ids = [9 + byte for byte in ("x" + text).encode()]
    assert "".join(stream(Detokenizer(tokenizer), ids, sizes)) == "x" + text


def test_text_that_continues_a_prompt_keeps_its_space() -> None:
    tokenizer = sentencepiece(DECODERS["llama"])
    assert Detokenizer(tokenizer).push([3, 5]) == "thecat"
    assert Detokenizer(tokenizer, continues=True).push([3, 5]) == " thecat"


def test_an_added_token_is_what_the_normalizer_makes_of_it() -> None:
    """As Llama 2's puts a space before each word, and texts are searched for the token behind it."""
    backend = Backend(models.BPE({piece: index for index, piece in enumerate(PIECES)}, [], byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = DECODERS["llama"]
    backend.add_tokens(["<call>", AddedToken("<tool>", normalized=False)])
    call, tool = len(PIECES), len(PIECES) + 1
    ids = [5, call, tool, 5]
    assert backend.decode(ids) == "cat <call><tool>cat"
    tokenizer = Tokenizer(backend)
    assert tokenizer.decode(ids) == "".join(stream(Detokenizer(tokenizer), ids, [2])) == backend.decode(ids)
    assert tokenizer.token_bytes(call) == b" <call>"
