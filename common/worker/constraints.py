"""The grammars of a worker's sequences: compiled in a thread before a sequence is planned, and watched after each step."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import anyio
from anyio.abc import TaskGroup

from common.engine.masks import num_threads
from common.engine.matcher import Matcher
from common.engine.sequence import Sequence
from common.engine.settings import EngineServiceConfig
from common.models.source import ModelFiles
from common.protocol.errors import PenstockError
from common.runtime import logs
from common.text.grammar import MAX_CACHED, WorkerGrammars

log = logs.get("engine")


class Worker(Protocol):
    """What this needs of its worker."""

    task_group: TaskGroup
    config: EngineServiceConfig

    def is_held(self, sequence: Sequence) -> bool: ...

    def fail(self, sequence: Sequence, code: str, message: str) -> None: ...

    def wake(self) -> None: ...


class Constraints:
    """`begin` for each sequence with a grammar, `check` after each step."""

    def __init__(self, worker: Worker, files: ModelFiles | None, *, vocab_size: int) -> None:
        """`files`: None for a model without a tokenizer. `vocab_size`: of its logits."""
        max_cached = 0 if worker.config.zero_retention else MAX_CACHED  # a grammar holds its request's schema
        self.grammars = WorkerGrammars(files, vocab_size=vocab_size, twins=num_threads(), max_cached=max_cached)
        self._worker = worker
        self._compiling = anyio.CapacityLimiter(1)

    def begin(self, sequence: Sequence) -> None:
        """Give a sequence the state of its grammar, at once or as soon as it is compiled."""
        known = self.grammars.cached(sequence.sampling.grammar)
        if known is not None:
            sequence.matcher = Matcher(*known)
        else:
            self._worker.task_group.start_soon(self._compile, sequence)

    async def _compile(self, sequence: Sequence) -> None:
        grammar = sequence.sampling.grammar
        try:
            compiled = await anyio.to_thread.run_sync(self.grammars.compile, grammar, limiter=self._compiling)
        except PenstockError as error:
            self._fail(sequence, error.code, str(error))
            return
        except Exception:
            log.exception("grammar_not_compiled", request=sequence.request)
            self._fail(sequence, "internal_error", "the grammar could not be compiled; see the worker's log")
            return
        sequence.matcher = Matcher(*compiled)
        self._worker.wake()

    def _fail(self, sequence: Sequence, code: str, message: str) -> None:
        if self._worker.is_held(sequence):
            self._worker.fail(sequence, code, message)

    def check(self, news: Iterable[tuple[Sequence, int]]) -> None:
        """After a step: end those whose grammar could not go on. What they got since then is not sent: the tokens from the
        output index on that stands beside each."""
        for sequence, start in news:
            if sequence.matcher is not None and sequence.matcher.error and self._worker.is_held(sequence):
                # the reason quotes what was generated
                reason = "" if self._worker.config.zero_retention else sequence.matcher.error
                log.error("grammar_failed", request=sequence.request, reason=reason)
                del sequence.tokens[sequence.generation.prompt_tokens + start :]
                self._worker.fail(sequence, "internal_error", "the grammar's state became too complex: simplify the schema")
