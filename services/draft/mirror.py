"""What a draft worker with a model holds of one sequence."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from common.cache.block_table import BlockTable
from common.protocol.draft_messages import DraftSampling
from common.protocol.errors import ProtocolError
from common.protocol.messages import SamplingParams
from services.draft.choices import Choice
from services.draft.proposer import MirrorKey

MAX_SAMPLING_NUMBER = 1000.0


@dataclass(slots=True)
class Air:
    """What steps that are planned and have not ended compute of a text (`flights.py`).

    num_steps: of them, of which the last is number `last`. If that is not void, it is number `step`, too, computes the text up
    to index `end`, and has as its sample `sample` what follows; -1: it samples nothing of it. era: rows planned in an earlier
    one are void. place: which of its rows the text had in the last step that it was in; -1: it was in none.
    """

    num_steps: int = 0
    last: int = -1
    era: int = 0
    step: int = -1
    end: int = 0
    sample: int = -1
    place: int = -1

    def void(self) -> None:
        """What is on its way does not hold."""
        self.era += 1
        self.step, self.end, self.sample = -1, 0, -1

    @property
    def length(self) -> int:
        """Tokens of the text when these steps have ended, as far as they compute it; 0: all are void."""
        return self.end + (self.sample >= 0)

    @property
    def until(self) -> int:
        """The last of the steps that are on their way, void ones among them; -1: none is."""
        return self.last if self.num_steps else -1


@dataclass(slots=True, eq=False)
class Branch:
    """Another text behind the first `position` tokens of a mirror's: `tokens`, of which the first is an alternative to what
    the mirror has drafted there, and the others are drafted behind it.

    tables: the full blocks before `position` are the mirror's, those behind them its own. num_computed: tokens with valid KV,
    from the text's first one on. choices: of `tokens[1:]`. is_over: it is not drafted further.
    """

    mirror: Mirror
    position: int
    tokens: list[int]
    tables: list[BlockTable]
    num_computed: int
    choices: list[Choice] = field(default_factory=list)
    is_over: bool = False
    is_closed: bool = False
    air: Air = field(default_factory=Air)

    @property
    def end(self) -> int:
        """Known tokens of the text with this branch."""
        return self.position + len(self.tokens)

    @property
    def begin(self) -> int:
        """Tokens that are computed, or on their way."""
        return max(self.num_computed, self.air.end)

    @property
    def num_tokens(self) -> int:
        """Its tokens, one that is on its way among them."""
        return max(self.end, self.air.length) - self.position


BranchKey = tuple[int, int]
"""Position and first token."""


@dataclass(slots=True, eq=False)
class Mirror:
    """`is_whole`: no update was lost. `is_broken`: its logits were not finite; it is not continued until it is opened anew.
    `proposed_end`: length of the text that was proposed last. `last_step`: number of the step that it was in last.

    choices: of drafted tokens, by position. acceptance: moving average of drafted tokens that were confirmed. `table_changed`:
    since it was proposed last; `table_due`: an update has come since then.
    """

    key: MirrorKey
    tables: list[BlockTable]
    text: list[int] = field(default_factory=list)
    num_confirmed: int = 0
    num_computed: int = 0
    sampling: SamplingParams = field(default_factory=SamplingParams)
    asking: SamplingParams = field(default_factory=SamplingParams)
    prompt_tokens: int = 1
    is_whole: bool = True
    is_broken: bool = False
    is_closed: bool = False
    proposed_end: int = 0
    last_step: int = 0
    choices: dict[int, Choice] = field(default_factory=dict)
    branches: dict[BranchKey, Branch] = field(default_factory=dict)
    acceptance: float = 0.7
    table_changed: bool = False
    table_due: bool = False
    air: Air = field(default_factory=Air)

    @property
    def num_drafted(self) -> int:
        return len(self.text) - self.num_confirmed

    @property
    def end(self) -> int:
        """Known tokens."""
        return len(self.text)

    @property
    def begin(self) -> int:
        """Tokens that are computed, or on their way."""
        return max(self.num_computed, self.air.end)

    @property
    def num_ahead(self) -> int:
        """Tokens behind what is confirmed, one that is on its way among them."""
        return max(self.end, self.air.length) - self.num_confirmed


def params_of(sampling: DraftSampling, tokens: Sequence[int], vocab_size: int) -> SamplingParams:
    """Return how a sequence is drawn to which `tokens` are told.

    :raises ProtocolError: for what would fail a step.
    """
    if any(not 0 <= token < vocab_size for token in tokens):
        raise ProtocolError(f"token ids must be between 0 and {vocab_size - 1}")
    numbers = (sampling.temperature, sampling.top_p, sampling.min_p)
    if not all(math.isfinite(number) and 0 <= number <= MAX_SAMPLING_NUMBER for number in numbers) or sampling.min_p > 1:
        raise ProtocolError("sampling parameters are out of range")
    return SamplingParams(
        seed=sampling.seed,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
    )
