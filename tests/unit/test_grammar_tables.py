"""A compiler's tables fit the model's logits, nobody waits while they are made, and nothing is kept that may not be."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llguidance import LLMatcher
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers

from common.engine.masks import allowed_tokens, fill_masks
from common.engine.matcher import Matcher
from common.engine.plan import StepRow
from common.models.source import ModelFiles
from common.protocol.errors import InvalidParameter
from common.protocol.messages import SamplingParams
from common.text import grammar
from common.text.grammar import GrammarCompiler, WorkerGrammars
from common.text.tokenizer import Tokenizer
from tests.actors.edge import BUNDLE, EOS

VOCAB = BUNDLE.tokenizer.vocab_size
FILES = ModelFiles(name="m", format="gguf", path=Path("none"))
GRAMMAR = "start: /[a-c]{1,3}/"


def worker(monkeypatch: pytest.MonkeyPatch, *, vocab_size: int, **settings: int) -> WorkerGrammars:
    monkeypatch.setattr("common.text.grammar.load_tokenizer", lambda files: BUNDLE.tokenizer)
    return WorkerGrammars(FILES, vocab_size=vocab_size, **settings)


@pytest.mark.parametrize("vocab_size", [VOCAB, VOCAB + 100])
def test_logits_beyond_the_tokenizer_are_never_allowed(monkeypatch: pytest.MonkeyPatch, vocab_size: int) -> None:
    matcher = Matcher(*worker(monkeypatch, vocab_size=vocab_size).compile(GRAMMAR))
    found = fill_masks([StepRow([5], 0, [0], 1, SamplingParams(), 1, constraint=matcher)], vocab_size)
    assert found is not None
    letters = [BUNDLE.tokenizer.encode(letter)[0] for letter in "abc"]
    assert np.flatnonzero(allowed_tokens(found.words[0], vocab_size)).tolist() == letters


def test_tokens_beyond_the_logits_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokenizers get a token added at times, to pad with, that the model's head does not know."""
    monkeypatch.setattr(BUNDLE.tokenizer, "eos_ids", [3, EOS])
    matcher = Matcher(*worker(monkeypatch, vocab_size=VOCAB - 40).compile("start: /[!-~]{0,3}/"))
    found = fill_masks([StepRow([5], 0, [0], 1, SamplingParams(), 1, constraint=matcher)], VOCAB - 40)
    assert found is not None and allowed_tokens(found.words[0], VOCAB - 40).any()
    assert matcher.error == ""


def test_a_model_whose_end_has_no_logit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidParameter, match="does not support structured output"):
        worker(monkeypatch, vocab_size=min(BUNDLE.tokenizer.eos_ids)).compile(GRAMMAR)


def sentencepiece() -> Tokenizer:
    """A tokenizer that puts a space before a text, as Llama 2's, Mistral's and Phi-3's do."""
    pieces = ["<unk>", "</s>", "▁", *"abcdeot", "▁t", *(f"<0x{byte:02X}>" for byte in range(256))]
    backend = Backend(models.BPE({piece: index for index, piece in enumerate(pieces)}, [("▁", "t")], byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    backend.add_special_tokens(["</s>"])
    return Tokenizer(backend, eos_ids=[1])


def composing() -> Tokenizer:
    """A tokenizer that composes accents, as Qwen's do."""
    pieces = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "</s>"]
    backend = Backend(models.BPE({piece: index for index, piece in enumerate(pieces)}, []))
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["</s>"])
    return Tokenizer(backend, eos_ids=[len(pieces) - 1])


@pytest.mark.parametrize("build", [sentencepiece, composing])
def test_what_must_follow_is_not_what_the_tokenizer_makes_of_it(build: Callable[[], Tokenizer]) -> None:
    tokenizer, text = build(), 'to "e\u0301" do'
    matcher = Matcher(GrammarCompiler(tokenizer).compile(LLMatcher.grammar_from_regex(f"({text}){{2}}")))
    output: list[int] = []
    while not output or output[-1] not in tokenizer.eos_ids:
        found = fill_masks(
            [StepRow([5], 0, [0], 1, SamplingParams(), 1, output=output, constraint=matcher)], tokenizer.vocab_size
        )
        assert found is not None and not matcher.error
        output.append(int(np.flatnonzero(allowed_tokens(found.words[0], tokenizer.vocab_size))[0]))
    assert b"".join(map(tokenizer.token_bytes, output[:-1])).decode() == 2 * text


def test_nobody_waits_for_a_grammar_while_tables_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go_on = threading.Event(), threading.Event()
    make = grammar.LLTokenizer

    def slowly(*args: Any, **options: Any) -> Any:
        begun.set()
        assert go_on.wait(30)
        return make(*args, **options)

    monkeypatch.setattr(grammar, "LLTokenizer", slowly)
    compiler = GrammarCompiler(BUNDLE.tokenizer)
    compiling = threading.Thread(target=compiler.compile, args=(GRAMMAR,))
    compiling.start()
    assert begun.wait(30)
    asking = threading.Thread(target=compiler.cached, args=(GRAMMAR,), daemon=True)
    asking.start()
    asking.join(5)
    waits = asking.is_alive()
    go_on.set()
    compiling.join()
    assert not waits
    assert compiler.cached(GRAMMAR) is not None


def test_where_nothing_may_be_kept_each_request_compiles_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    grammars = worker(monkeypatch, vocab_size=VOCAB, max_cached=0)
    grammars.compile(GRAMMAR)
    assert grammars.cached(GRAMMAR) is None
