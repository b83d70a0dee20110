"""What a step runs, and what comes back: the only words a scheduler and a runner share.

    plan = scheduler.plan(now)  →  result = runner.execute(plan)  →  scheduler.commit(plan, result, now)

A scheduler knows requests, blocks and budgets; a runner knows tensors. Neither knows the other. With a runner that runs ahead,
the next step is planned and submitted before this one's result is known: a row then says which sample it is *fed*.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from common.engine.history import History
from common.engine.outcomes import Outcome, accept, proposal_behind
from common.protocol.messages import SamplingParams, TokenLogprobs

Masks = NDArray[np.int32]
"""Allowed tokens, int32 [samples, ceil(vocab_size / 32)]: bit t % 32 of word t // 32 is token t's."""


class Constraint(Protocol):
    """What a row may be sampled from. Used by one thread at a time: the runner's, or the scheduler's while no step runs."""

    def fill(self, output: Sequence[int], proposal: Sequence[int], out: Masks, *, start: int = 0) -> None:
        """Write what may follow `output`, and `output` with each beginning of `proposal`.

        start: the tokens before this output index are those of an earlier call, and not in `output`.
        out: int32 [1 + len(proposal), words], contiguous; where the proposal is not allowed, nothing is written behind it.
        """
        ...


FIXED_POINT = 2.0**-28
"""Units that hidden states are added up in."""

UNKNOWN = -1
"""In the place of a token that a step in flight will sample."""

NO_TOKEN = -1
"""In the place of a sample whose logits were not all finite."""


class Room(NamedTuple):
    """How many tokens of a row the device may choose: by looking up what may follow its text, which is searched for that, or
    from what is posted on its board. A text may also be searched where the row takes nothing from there."""

    num_tokens: int = 0
    is_searched: bool = False
    is_posted: bool = False


NO_ROOM = Room()


class StepRow(msgspec.Struct):
    """One sequence's share of a step.

    `blocks` is the block table of the first cache group, `more_blocks` has those of the other groups. The KV of the positions
    before `start` that a group's layers read is in the group's table; -1 stands for blocks that they don't read. From a row's
    planning until its step has run, a table only grows, or lets go of blocks that the step does not read. A `BlockTable` says
    when else it has changed, so that a runner may keep a copy.

    `tokens` are the inputs at positions [start, start + len(tokens)), whose KV this step writes. The logits of the last
    `num_samples` positions are sampled: 0 in the middle of a prompt, 1 as a rule, k + 1 to verify k proposed tokens, which are
    then the last k of `tokens`.

    `history` is the sequence's tokens [0, start + len(tokens)) whenever `sampling` needs them (penalties), else empty; the
    first `prompt_tokens` are the prompt. A `History` names its sequence, so that a runner may keep what it has counted of it.
    With a `constraint`, `output` is what has been generated from output index `output_start` on, without proposed tokens. The
    sample at input position p is the token at position p + 1, output index p + 1 - prompt_tokens, and draws
    Gumbel(seed, p + 1, token).

    A row that is read gives no samples. The final hidden states of its last `num_read` positions are looked at: with `targets`,
    one for each of them, the tokens that follow them are known, and are scored; without, the states are added up.

    `feed` >= 0: the row's first token is not known yet. It is that sample of the plan submitted before (counting the samples
    of all its rows); `tokens` and the ends of `history` and `output` hold `UNKNOWN` in its place. If that plan's row verifies
    tokens, `verified`, the first token is the sample behind those that are accepted, and all positions of this row are as many
    higher. `outcomes` say what this row verifies, behind which outcome; `tokens` has zeros in that place, as many as the
    longest needs.

    `text`: the sequence's tokens as far as the host knows them when it plans the row, for a runner that looks up on the device
    what may follow (`engine/gpu/lookup.py`). With `feed` the first token comes behind them, else it is the last of them. The
    device proposes up to `room` tokens, for which `tokens` has zeros behind the first; `outcomes` are empty then. What the
    row behind such a one verifies is known to the device alone: its `verified` is as many `UNKNOWN` as there was room for.

    `board` >= 0: the slot of the sequence on the runner's board, if it has one. With `is_posted` the row is fed, and takes up
    to `room` tokens that are posted there when the step begins (`engine/board.py`), in place of `outcomes` and of what is
    looked up. As there, the next row's `verified` is `UNKNOWN`s.

    `serial` >= 0 names the sequence to a head that drafts from hidden states: it notes those of this row. `drafts`: how many
    tokens it proposes behind the row's samples at most; with 1 or more it also computes what it has noted. It stops behind a
    token where the chance of all so far, as it sees it, is below `least_chance`. `following`: the token behind a row without
    samples. A runner without a head passes over these.
    """

    tokens: list[int]
    start: int
    blocks: list[int]
    num_samples: int
    sampling: SamplingParams
    prompt_tokens: int
    history: list[int] | History = []
    feed: int = -1
    constraint: Constraint | None = None
    output: list[int] = []
    output_start: int = 0
    num_read: int = 0
    targets: list[int] = []
    more_blocks: Sequence[list[int]] = []
    verified: list[int] = []
    outcomes: Sequence[Outcome] = []
    text: History | None = None
    room: int = 0
    serial: int = -1
    drafts: int = 0
    least_chance: float = 0.0
    following: int = 0
    board: int = -1
    is_posted: bool = False

    @property
    def is_prompt_part(self) -> bool:
        """Whether it computes tokens of a prompt, and not the next token of an answer or proposed ones."""
        return len(self.tokens) > max(1, self.num_samples)

    @property
    def is_open(self) -> bool:
        """Whether its inputs behind the first token, or their positions, depend on the outcome of the step before."""
        return bool(self.verified or self.outcomes or self.is_posted)

    @property
    def follows_device(self) -> bool:
        """Whether the device chose what the step before verifies of its sequence."""
        return bool(self.verified) and self.verified[0] == UNKNOWN

    @property
    def is_constrained(self) -> bool:
        """Whether samples of this step need a mask."""
        return self.constraint is not None and self.num_samples > 0


class BlockCopy(NamedTuple):
    """What block `source` of cache group number `group` holds goes into block `target` of that group."""

    group: int
    source: int
    target: int


class StepPlan(msgspec.Struct):
    """Rows are independent; the runner may reorder them inside but returns samples in this order. `copies` are made before the
    step, and behind the steps submitted before it; no target is another one's source."""

    step: int
    rows: list[StepRow]
    copies: Sequence[BlockCopy] = ()

    @property
    def num_tokens(self) -> int:
        return sum([len(row.tokens) for row in self.rows])  # faster than a generator, with hundreds of rows


class Drafted(msgspec.Struct):
    """`tokens` may follow a row's accepted samples, says a head. chances[k]: how sure it is of number k, behind the others."""

    tokens: list[int]
    chances: list[float]


class LookedUp(NamedTuple):
    """What a device found for the end of a row's text: `tokens` that followed the longest match of it, of which the row
    verifies the first `num_verified`. The match has `length` tokens, 0 if there is none; it occurs `num_found` times, and
    `num_agreeing` of these go on with the first of `tokens`."""

    num_verified: int
    length: int
    num_found: int
    num_agreeing: int
    tokens: list[int]


class Taken(NamedTuple):
    """What a row took from the board: `tokens`, which it verifies; there were `num_there` that it could have. is_cut: a head
    drafted no more of them, since a logit was not finite."""

    tokens: list[int]
    num_there: int
    is_cut: bool = False


class DraftPass(NamedTuple):
    """What a head computed in one go: `num_tokens` of all rows, in `seconds`. The first of a step takes the target's states."""

    num_tokens: int
    seconds: float


class RowSamples(msgspec.Struct):
    """The `num_samples` sampled tokens of a row (`NO_TOKEN` where a logit was not finite), and their logprobs when asked for.
    Samples behind the first that differs from the proposed token in its place are never used: they may be `NO_TOKEN`, without
    logprobs.

    Of a row that is read: `scores` of its `targets`, with as many alternatives as its `sampling.logprobs` says; or `total`, its
    hidden states added up, int64 [hidden_size] in units of `FIXED_POINT`, so that the order of adding changes nothing.
    `drafted`: of a row with `drafts`. `looked_up`: of a row with a `text`, unless that is not on the device yet. `taken`: of a
    row that `is_posted`.
    """

    tokens: list[int]
    logprobs: list[TokenLogprobs] | None = None
    scores: list[TokenLogprobs] | None = None
    total: NDArray[np.int64] | None = None
    drafted: Drafted | None = None
    looked_up: LookedUp | None = None
    taken: Taken | None = None

    def chosen(self, row: StepRow) -> list[int]:
        """Return what the device chose to verify for a row with `room`."""
        if row.is_posted:
            return [] if self.taken is None else self.taken.tokens
        return [] if self.looked_up is None else self.looked_up.tokens[: self.looked_up.num_verified]


class StepResult(msgspec.Struct):
    """`passes`: of the head, in their order; their time is part of `elapsed_s`."""

    rows: list[RowSamples]
    elapsed_s: float = 0.0
    passes: list[DraftPass] = []


PACKED_TOKENS = 2048
"""A step takes up no further prompt once prompts have so many tokens in it, which keep a GPU as busy as more would
(docs/performance/gpu.md): longer steps would only make everyone wait. A longer prompt fills the step up to the token budget."""
PART_TOKENS = 1024
"""Long prompts are parted at multiples of this: attention to what is before a part then takes few pieces, of sizes that are
planned (`ops/attention/parts.py`). Behind an odd number of tokens it takes twice as many, each merged with the others."""


def part_of(start: int, left: int, budget: int) -> int:
    """Return how many of the `left` tokens of a prompt, from token `start` on, a step takes that has room for `budget`: up to a
    multiple of PART_TOKENS where that fills most of the room."""
    if left <= budget:
        return left
    aligned = (start + budget) // PART_TOKENS * PART_TOKENS - start
    return aligned if aligned >= max(PART_TOKENS, budget // 2) else budget


class RunnerLost(Exception):
    """The device failed in a way that it does not recover from: no later step can run. The process should end."""


class PendingStep(Protocol):
    """A submitted step."""

    def has_run(self) -> bool:
        """Whether its result is there, or why there is none. Costs little; for those who ask again and again."""
        ...

    def result(self) -> StepResult:
        """Blocks until the step has run. Call it once per step, in the order of submission.

        :raises RunnerLost: see there.
        """
        ...


class Runner(Protocol):
    """Executes plans, from one thread at a time. `submit` returns once the device has the step; `execute` when it has run.

    Up to `run_ahead` steps may be submitted before the first one's result is taken: 1, or 2 where a device runs one while the
    next is prepared.
    """

    @property
    def run_ahead(self) -> int: ...

    @property
    def block_tokens(self) -> int: ...

    @property
    def num_blocks(self) -> int: ...

    @property
    def max_context(self) -> int:
        """Tokens; the longest sequence the model was made for."""
        ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def fingerprint(self) -> str:
        """Model, weights' precision and cache layout: KV may move only between equal fingerprints."""
        ...

    def execute(self, plan: StepPlan) -> StepResult: ...

    def submit(self, plan: StepPlan) -> PendingStep: ...

    def may_compile(self, plan: StepPlan) -> bool:
        """Whether this step may have to compile kernels first, and so take many times as long as the next one like it."""
        ...


def resolve_feeds(plan: StepPlan, samples: Sequence[int]) -> list[StepRow]:
    """Put the tokens in that fed rows wait for. samples: all samples of the step before, in order.

    Return the rows to compute: copies of those that are open, since whoever planned those goes by what was planned.

    :raises IndexError: if a row is fed with a sample that the step before did not have.
    """
    return [row if row.feed < 0 else _fed(row, samples) for row in plan.rows]


def _fed(row: StepRow, samples: Sequence[int]) -> StepRow:
    accepted = accept(row.verified, samples[row.feed : row.feed + len(row.verified)])
    token = max(0, samples[row.feed + accepted])  # what follows `NO_TOKEN` is dropped
    if row.is_open:
        proposal = proposal_behind(row.outcomes, accepted, token)
        rest = [*proposal, *row.tokens[1 + len(proposal) :]]
        return msgspec.structs.replace(row, tokens=[token, *rest], start=row.start + accepted)
    row.tokens[0] = token
    if row.history:
        _settle(row.history, token)
    if row.output:
        row.output[-1] = token
    return row


def _settle(history: list[int] | History, token: int) -> None:
    if isinstance(history, History):
        history.settle(token)
    else:
        history[-1] = token


class LaterStep:
    """A `PendingStep` of a runner that computes on this CPU: it runs when its result is asked for."""

    def __init__(self, runner: Runner, plan: StepPlan) -> None:
        self._runner = runner
        self._plan = plan

    def has_run(self) -> bool:
        return True

    def result(self) -> StepResult:
        return self._runner.execute(self._plan)
