"""Compile grammars for one model's vocabulary.

A grammar is llguidance's own text: Lark, or the JSON that its compilers for JSON schemas and regular expressions write.
Everything that can grow with it is bounded by `LIMITS`, in steps rather than seconds, so that the same grammar is taken or
refused on every machine.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from common.models.source import ModelFiles
from common.protocol.errors import InvalidParameter
from common.text.tokenizer import Tokenizer, load_tokenizer

MAX_GRAMMAR_BYTES = 256 * 1024
MAX_CACHED = 128
"""Compiled grammars kept; the least recently used go first."""

_ANCHOR = "\x02"
"""A text that begins with it is tokenized as if it stood behind others: no token joins it with more."""

SLICES = [
    *(rf'[^"\\\x00-\x1F\x7F]{{1,{most}}}' for most in (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 30)),
    r'[^"\\\x00-\x1F\x7F]+',
]
"""Tokens by length that strings of JSON may hold: where a grammar allows all of one kind, llguidance need not look at each.
Those of few characters are for strings that may not be long any more (`maxLength`)."""

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
    """The tokenizer as llguidance reads it, with `vocab_size` tokens: those that only the logits have are empty, and match
    nothing. llguidance takes the number of tokens from here, whatever `n_vocab` says."""

    def __init__(self, tokenizer: Tokenizer, eos_ids: Sequence[int], vocab_size: int) -> None:
        bos = tokenizer.bos_id
        self.eos_token_id = eos_ids[0]
        self.bos_token_id = bos if bos is not None and bos < vocab_size else None
        tokens = tokenizer.byte_table(skip_special=False)[:vocab_size]
        self.tokens = tokens + [b""] * (vocab_size - len(tokens))
        self.special_token_ids = sorted(index for index in tokenizer.special_ids if index < vocab_size)
        self._tokenizer = tokenizer
        self._anchor_ids = tokenizer.encode(_ANCHOR)
        specials = frozenset(self.special_token_ids)
        self._byte_ids = {token: index for index, token in enumerate(self.tokens) if len(token) == 1 and index not in specials}

    def __call__(self, text: str) -> list[int]:
        """Return tokens whose bytes are those of `text`, as it stands behind others.

        Tokenizers may change a text: SentencePiece puts a space before it, Qwen's composes accents. What a grammar forces must
        stay as it is.
        """
        size = len(self._anchor_ids)
        for ids in (self._tokenizer.encode(text), self._tokenizer.encode(_ANCHOR + text)[size:]):
            if max(ids, default=0) < len(self.tokens) and b"".join([self.tokens[index] for index in ids]) == text.encode():
                return ids
        return [self._byte_ids[each] for each in map(bytes, zip(text.encode(), strict=True)) if each in self._byte_ids]


class GrammarCompiler:
    """Compiled grammars of one vocabulary. Safe to use from several threads; makes its tables at the first use (0.1 s)."""

    def __init__(self, tokenizer: Tokenizer, *, vocab_size: int = 0, max_cached: int = MAX_CACHED) -> None:
        """`vocab_size`: of the model's logits, which may be more than the tokenizer's, or fewer; 0: the tokenizer's.
        `max_cached`: compiled grammars kept."""
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size or tokenizer.vocab_size
        self._max_cached = max_cached
        self._lock = threading.Lock()  # never held while tables are made or a grammar is compiled: event loops take it
        self._making_tables = threading.Lock()
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()
        self._vocabulary: LLTokenizer | None = None

    def twin(self) -> GrammarCompiler:
        """Return another compiler with the same tables, whose matchers share nothing that changes with this one's."""
        other = GrammarCompiler(self._tokenizer, vocab_size=self._vocab_size, max_cached=self._max_cached)
        other._vocabulary = self._tables()
        return other

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
            while len(self._compiled) > self._max_cached:
                self._compiled.popitem(last=False)
        return matcher.deep_copy()

    def _tables(self) -> LLTokenizer:
        with self._making_tables:
            if self._vocabulary is None:
                eos_ids = [index for index in self._tokenizer.eos_ids if index < self._vocab_size]
                if not self._tokenizer.has_byte_table or not eos_ids:
                    raise InvalidParameter("this model's tokenizer does not support structured output")
                wrapped = TokenizerWrapper(_Vocabulary(self._tokenizer, eos_ids, self._vocab_size))
                self._vocabulary = LLTokenizer(wrapped, n_vocab=self._vocab_size, eos_token=eos_ids, slices=SLICES)
            return self._vocabulary


class Compiled(NamedTuple):
    """A matcher at the beginning of a grammar. Those of one grammar and `twin` share a lock: no two of them work at once."""

    matcher: LLMatcher
    twin: int


class WorkerGrammars:
    """Compiled grammars of a model whose tokenizer is read when the first grammar comes.

    llguidance's copies of a matcher share their lexer's states, which saves time, and a lock, which costs it where the masks of
    a step are filled in several threads. So a grammar is compiled up to `twins` times, and requests get copies in turn.
    """

    def __init__(self, files: ModelFiles | None, *, vocab_size: int, twins: int = 1, max_cached: int = MAX_CACHED) -> None:
        """`files`: None for a model without a tokenizer. `vocab_size`: of its logits. `max_cached`: grammars kept of a twin."""
        self._files = files
        self._vocab_size = vocab_size
        self._max_cached = max_cached
        self._num_twins = twins
        self._compilers: list[GrammarCompiler] = []
        self._next = 0

    def cached(self, grammar: str) -> Compiled | None:
        """Return a matcher of the twin whose turn it is, if that has compiled `grammar` before."""
        if not self._compilers:
            return None
        found = self._compilers[self._next].cached(grammar)
        return None if found is None else Compiled(found, self._turn())

    def compile(self, grammar: str) -> Compiled:
        """Call it from one thread at a time.

        :raises InvalidParameter, ConfigError: as `GrammarCompiler.compile` and `load_tokenizer`.
        """
        if not self._compilers:
            if self._files is None:
                raise InvalidParameter("this worker knows no tokenizer: structured output is not supported")
            tokenizer = load_tokenizer(self._files)
            first = GrammarCompiler(tokenizer, vocab_size=self._vocab_size, max_cached=self._max_cached)
            self._compilers = [first, *(first.twin() for _ in range(1, self._num_twins))]
        twin = self._turn()
        return Compiled(self._compilers[twin].compile(grammar), twin)

    def _turn(self) -> int:
        twin, self._next = self._next, (self._next + 1) % len(self._compilers)
        return twin


def _on_one_line(text: str) -> str:
    return " ".join(text.split())[:300] or "unknown reason"
