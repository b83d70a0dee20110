"""Compile grammars for one model's vocabulary.

A grammar is llguidance's own text: Lark, or the JSON that its compilers for JSON schemas and regular expressions write.
Everything that can grow with it is bounded by `LIMITS`, in steps rather than seconds, so that the same grammar is taken or
refused on every machine.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from common.models.source import ModelFiles
from common.protocol.errors import InvalidParameter
from common.text.tokenizer import Tokenizer, load_tokenizer

MAX_GRAMMAR_BYTES = 256 * 1024
MAX_CACHED = 128
"""Compiled grammars kept; the least recently used go first."""

LIMITS = LLParserLimits(
    max_items_in_row=2_000,
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=200_000,
    step_max_items=50_000,
    max_lexer_states=50_000,
    max_grammar_size=200_000,
    precompute_large_lexemes=False,
    verbose_errors=False,
)


class _Vocabulary:
    """The tokenizer as llguidance reads it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.eos_token_id = tokenizer.eos_ids[0]
        self.bos_token_id = tokenizer.bos_id
        self.tokens = tokenizer.byte_table(skip_special=False)
        self.special_token_ids = sorted(tokenizer.special_ids)
        self._tokenizer = tokenizer

    def __call__(self, text: str) -> list[int]:
        return self._tokenizer.encode(text)


class GrammarCompiler:
    """Compiled grammars of one vocabulary. Safe to use from several threads; makes its tables at the first use (0.1 s)."""

    def __init__(self, tokenizer: Tokenizer, *, vocab_size: int = 0) -> None:
        """`vocab_size`: of the model's logits, which may be more than the tokenizer's."""
        self._tokenizer = tokenizer
        self._vocab_size = max(vocab_size, tokenizer.vocab_size)
        self._lock = threading.Lock()
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()
        self._vocabulary: LLTokenizer | None = None

    def special_token_ids(self, texts: Iterable[str]) -> dict[str, int]:
        """The ids of those of `texts` that are special tokens of the vocabulary, which no text matches."""
        return self._tokenizer.special_token_ids(texts)

    def cached(self, grammar: str) -> LLMatcher | None:
        """Return a matcher at the beginning of `grammar` if that has been compiled before."""
        with self._lock:
            known = self._compiled.get(grammar)
            if known is None:
                return None
            self._compiled.move_to_end(grammar)
            return known.deep_copy()

    def compile(self, grammar: str) -> LLMatcher:
        """Return a matcher at the beginning of `grammar`. Takes 1 ms as a rule, and up to seconds: call it in a thread.

        :raises InvalidParameter: if it is no grammar, or too large a one; or this vocabulary can't be matched.
        """
        if len(grammar) > MAX_GRAMMAR_BYTES:
            raise InvalidParameter(f"the grammar is longer than {MAX_GRAMMAR_BYTES} bytes")
        found = self.cached(grammar)
        if found is not None:
            return found
        matcher = LLMatcher(self._tables(), grammar, log_level=0, limits=LIMITS)
        if matcher.is_error():
            raise InvalidParameter(f"the grammar can't be used: {_on_one_line(matcher.get_error())}")
        with self._lock:
            self._compiled[grammar] = matcher
            while len(self._compiled) > MAX_CACHED:
                self._compiled.popitem(last=False)
        return matcher.deep_copy()

    def _tables(self) -> LLTokenizer:
        with self._lock:
            if self._vocabulary is None:
                if not self._tokenizer.has_byte_table or not self._tokenizer.eos_ids:
                    raise InvalidParameter("this model's tokenizer does not support structured output")
                wrapped = TokenizerWrapper(_Vocabulary(self._tokenizer))
                self._vocabulary = LLTokenizer(wrapped, n_vocab=self._vocab_size, eos_token=self._tokenizer.eos_ids)
            return self._vocabulary


class WorkerGrammars:
    """A `GrammarCompiler` for a model whose tokenizer is read when the first grammar comes."""

    def __init__(self, files: ModelFiles | None, *, vocab_size: int) -> None:
        """`files`: None for a model without a tokenizer. `vocab_size`: of its logits."""
        self._files = files
        self._vocab_size = vocab_size
        self._compiler: GrammarCompiler | None = None

    def cached(self, grammar: str) -> LLMatcher | None:
        return None if self._compiler is None else self._compiler.cached(grammar)

    def compile(self, grammar: str) -> LLMatcher:
        """Call it from one thread at a time.

        :raises InvalidParameter, ConfigError: as `GrammarCompiler.compile` and `load_tokenizer`.
        """
        if self._compiler is None:
            if self._files is None:
                raise InvalidParameter("this worker knows no tokenizer: structured output is not supported")
            self._compiler = GrammarCompiler(load_tokenizer(self._files), vocab_size=self._vocab_size)
        return self._compiler.compile(grammar)


def _on_one_line(text: str) -> str:
    return " ".join(text.split())[:300] or "unknown reason"
