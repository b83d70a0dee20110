"""Texts that count, for the two emulations of drafting: the next token is the last one plus one.

The draft model's first choice is right behind a share of all tokens, and its second choice behind half of the others
(`choices`). `Counts` is what a target finds of proposals, and its cells of a table.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence

import msgspec

from common.engine.outcomes import accept
from common.engine.plan import RowSamples
from common.protocol.messages import TokenLogprobs
from services.decode.speculation import DraftBook
from services.decode.speculation_policy import SpeculationPolicy
from services.decode.step_costs import SIZES, StepCosts

VOCAB = 1 << 20
BLOCK_TOKENS = 16
PROMPT, VERIFIED = 128, 7


def texts(streams: int) -> dict[str, list[int]]:
    """Return the prompt of each sequence, by its name."""
    return {f"s{number}": [number * 10_007 + place for place in range(PROMPT)] for number in range(streams)}


def choices(token: int, percent: float, vocab: int = VOCAB) -> tuple[int, int]:
    """Return what the draft model says behind a token first and second; the token after it is right. vocab: ids that there
    are, in the first half of which texts count."""
    dice = random.Random(token)
    right, wrong = (token + 1) % vocab, (token + vocab // 2) % vocab
    if 100 * dice.random() < percent:
        return right, wrong
    return wrong, right if dice.random() < 0.5 else (wrong + 1) % vocab


def samples(first: int, second: int, *, with_logprobs: bool, vocab: int = VOCAB) -> RowSamples:
    """Return what a draft step gives for a row with these two choices: the first one, and its log-probabilities. As with dummy
    models that count, the second one is as likely as one in six if it is right, and next to impossible else."""
    others = range(vocab // 2 - 8, vocab // 2 - 2)
    best, next_best = (-0.18, -1.97) if second < vocab // 2 <= first else (-1e-4, -12.0)
    said = TokenLogprobs(best, (first, second, *others), (best, next_best, *(-14.0 - rank for rank in range(6))))
    return RowSamples([first], logprobs=[said] if with_logprobs else None)


def draft_book(step_s: Callable[[int], float]) -> DraftBook:
    """Return a decode worker's book of proposals. step_s: how long a step of so many tokens takes the target."""
    costs = StepCosts(stale_after=1 << 60)
    for size in SIZES * 9:
        costs.observe(size, step_s(size))
    return DraftBook(SpeculationPolicy(max_tokens=VERIFIED, max_step_tokens=512, costs=costs), vocab_size=VOCAB)


class Counts(msgspec.Struct):
    """Of all sequences. verifying: their steps with a proposal; verified, accepted: its tokens."""

    steps: int = 0
    tokens: int = 0
    verifying: int = 0
    verified: int = 0
    accepted: int = 0

    def end_step(
        self, book: DraftBook, known: Mapping[str, list[int]], verified: Mapping[str, Sequence[int]]
    ) -> dict[str, int]:
        """A step has run. Extend the texts `known`, count, and tell the book.

        verified: the proposal of each sequence that had one. Return how many tokens of it were accepted, for each sequence.
        """
        self.steps += 1
        found: dict[str, int] = {}
        for name, text in known.items():
            proposal = verified.get(name, ())
            came = [(text[-1] + 1 + place) % VOCAB for place in range(len(proposal) + 1)]
            accepted = found[name] = accept(proposal, came)
            text += came[: accepted + 1]
            self.tokens += accepted + 1
            self.verifying += bool(proposal)
            self.verified += len(proposal)
            self.accepted += accepted
            book.record(name, len(proposal), accepted)
        return found

    def cells(self, streams: int, seconds: float, plain_step_s: float) -> list[str]:
        """Return tokens per second over those of steps without proposals; steps that verify something; tokens accepted of
        those, and by step that verifies."""
        plain = streams / plain_step_s
        return [
            f"{self.tokens / seconds / plain:.2f}",
            f"{self.verifying / self.steps / streams:.0%}",
            f"{self.accepted / max(1, self.verified):.0%}, {self.accepted / max(1, self.verifying):.2f}",
        ]
