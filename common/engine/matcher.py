"""A grammar's state behind the tokens of one sequence."""

from __future__ import annotations

from collections.abc import Sequence

from llguidance import LLExecutor, LLMatcher

from common.engine.plan import Masks

MAX_FORCED = 16
"""Forced tokens that are proposed at once."""

_MIN_PROPOSED = 8
"""Forced tokens that were proposed before it is judged whether they are worth it."""

MAX_UNDONE = 64
"""Tokens at the end of an output that may turn out to be others: those of steps in flight, with their proposals."""


class Matcher:
    """`plan.Constraint` of a compiled grammar. It follows whatever output it is given, forwards and back.

    `error`: why the grammar can't go on, where that is not the output's end; what was sampled since then is not constrained.
    `twin`: see `text.grammar.Compiled`.
    """

    def __init__(self, inner: LLMatcher, twin: int = 0) -> None:
        self.error = ""
        self.twin = twin
        self._inner = inner
        self._consumed: list[int] = []
        self._offered: list[int] = []
        self._num_proposed = 0
        self._num_accepted = 0

    @property
    def num_settled(self) -> int:
        """Tokens of the output that it need not be told again."""
        return max(0, len(self._consumed) - MAX_UNDONE)

    def fill(self, output: Sequence[int], proposal: Sequence[int], out: Masks, *, start: int = 0) -> None:
        self.follow(output, start)
        inner, row_bytes, num_consumed = self._inner, out.shape[1] * 4, 0
        for index in range(len(proposal) + 1):
            inner.unsafe_compute_mask_ptr(out.ctypes.data + index * row_bytes, row_bytes)
            if inner.is_stopped():
                out[index + 1 :] = out[index]
                break
            if index == len(proposal) or not inner.try_consume_tokens([proposal[index]]):
                break
            num_consumed += 1
        if inner.is_error():
            self._fail(inner.get_error())
            out[:] = -1
        elif num_consumed:
            inner.rollback(num_consumed)

    def forced(self, output: Sequence[int], limit: int, *, start: int = 0) -> list[int]:
        """Return the tokens that the grammar leaves no choice about.

        The same text may come in other tokens; where most of it did, nothing is returned any more.
        """
        if limit <= 0 or self.error or (self._num_proposed >= _MIN_PROPOSED and 2 * self._num_accepted < self._num_proposed):
            return []
        self.follow(output, start)
        if self.error or self._inner.is_stopped():
            return []
        self._offered = list(self._inner.compute_ff_tokens()[: min(limit, MAX_FORCED)])
        return self._offered

    def allowed(self, output: Sequence[int], proposal: Sequence[int], *, start: int = 0) -> int:
        """Return how many tokens of `proposal` the grammar allows after `output`."""
        self.follow(output, start)
        return 0 if self.error or self._inner.is_stopped() else self._inner.validate_tokens(list(proposal))

    def was_forced(self, proposal: Sequence[int], accepted: int) -> bool:
        """Whether `proposal` is what `forced` returned last; if so, count how much of it was `accepted`."""
        if not proposal or list(proposal) != self._offered:
            return False
        self._num_proposed += len(proposal)
        self._num_accepted += accepted
        return True

    def follow(self, output: Sequence[int], start: int = 0) -> None:
        """Move to the state behind `output`, which begins at output index `start`."""
        known = self._consumed
        if self.error:
            return None
        tail = known[start:]
        count = len(tail)
        if tail != output[:count]:
            count = next((at for at, (a, b) in enumerate(zip(tail, output, strict=False)) if a != b), min(count, len(output)))
            if not self._inner.rollback(len(tail) - count):
                return self._fail(self._inner.get_error())
            del known[start + count :]
        for token in output[count:]:
            if self._inner.is_stopped():
                return None  # nothing follows: the end-of-sequence token again, for a request that ignores it
            if not self._inner.consume_token(token):
                return self._fail(f"token {token} does not continue the grammar: {self._inner.get_error()}")
            known.append(token)
        return None

    def _fail(self, reason: str) -> None:
        self.error = " ".join(reason.split())[:200] or "the grammar's state is lost"


def fill_together(executor: LLExecutor, cases: Sequence[tuple[Matcher, Sequence[int], int, int]], out: Masks) -> None:
    """Do what `fill` does for each (matcher, output, start, row of `out`), without proposals, in the executor's threads."""
    running: list[tuple[Matcher, int]] = []
    for matcher, output, start, row in cases:
        matcher.follow(output, start)
        if matcher.error:
            out[row] = -1
        else:
            running.append((matcher, row))
    if not running:
        return
    running.sort(key=_twin)  # a thread takes neighbours, so that few wait for a twin's lock
    pairs = [(matcher._inner, row) for matcher, row in running]
    executor.unsafe_compute_mask_ptr(pairs, out.ctypes.data, out.shape[1] * 4, len(out))
    for matcher, row in running:
        if matcher._inner.is_error():
            matcher._fail(matcher._inner.get_error())
            out[row] = -1


def _twin(case: tuple[Matcher, int]) -> int:
    return case[0].twin
