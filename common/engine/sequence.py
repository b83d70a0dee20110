"""One request on one worker: its tokens, how much of its KV is computed, and the blocks that hold it. Pure.

tokens   [0, prompt_tokens)            the client's prompt
         [prompt_tokens, len(tokens))  generated, by earlier attempts or here
KV       [0, num_computed)             valid in `blocks` and `more_blocks`, as far as later tokens read it
         [num_computed, num_planned)   being computed by steps in flight (`num_steps` of them)
         [num_planned, length)         still to be planned: one token when decoding, more while prefilling

A sequence that is read (`ReadTask`) has all its tokens in `given`, and generates nothing: `tokens` grows as they are scored, or
hidden states are added up in `total`. The last token of a sequence that is scored is never an input: nothing follows it.

`length` counts the tokens and those that steps in flight will sample (`num_awaited`; `last_sample` is the index of the newest
among its step's samples). A step that verifies tokens may give several: until it has run, `length` counts one of them, and
what is planned behind it moves along when more are accepted (`shift`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from collections.abc import Sequence as Sized
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.cache.block_table import BlockTable
from common.cache.prefix import TOKEN_BYTES
from common.engine.history import History
from common.engine.known_tokens import KnownTokens
from common.engine.matcher import Matcher
from common.engine.outcomes import Outcome, proposal_behind, width_of
from common.engine.plan import FIXED_POINT, NO_ROOM, NO_TOKEN, UNKNOWN, Room, RowSamples, StepRow
from common.engine.timeline import Timeline
from common.protocol import tokens as token_bytes
from common.protocol.errors import ContextLengthExceeded, EmptyPrompt, ProtocolError
from common.protocol.messages import FinishReason, Generation, SamplingParams, TokenFrame, TokenLogprobs

MAX_SAMPLING_NUMBER = 1000.0


@dataclass(slots=True, eq=False)
class Sequence:
    """`held_from`: index in `tokens` of the first token whose logprobs are kept here (what came before, others sent).
    `blocks`: the block table of the first cache group; `more_blocks`: those of the other groups; `reserved`: blocks of each
    group that were promised to it (see `SequenceCache`). `ends_at`: the request's deadline in seconds of the worker's clock;
    `due_at`: when its first token is due; 0: at no time. `matcher`: the state of the request's grammar, once that is compiled.
    `num_reported`: outputs of a sequence that is read which its gateway has, or is being sent. `is_broken`: logits of it were
    not finite: it has no next token. `verifying`: what the oldest step in flight that samples it verifies; `UNKNOWN`s where
    the device chooses that. `num_open`: steps in flight that may give several tokens. `shift`: tokens beyond the first that
    the step before the oldest in flight gave: positions of that step's row are as many higher than planned. `newest`: the row
    that was planned last, in step `planned_step`. `timeline`: what has happened to it here, since it was admitted. `serial`:
    its number among all of this process. `arrival`, `admitted_step`: its number among those admitted, and the step before
    which it was. `board`: see `StepRow`.
    """

    generation: Generation
    tokens: list[int]
    held_from: int
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    blocks: BlockTable = field(default_factory=BlockTable)
    more_blocks: list[BlockTable] = field(default_factory=list)
    reserved: list[int] = field(default_factory=list)
    hashes: list[bytes] = field(default_factory=list)
    num_computed: int = 0
    num_planned: int = 0
    num_steps: int = 0
    num_awaited: int = 0
    last_sample: int = -1
    num_published: int = 0
    num_cached: int = -1
    finish: FinishReason | None = None
    cancelled: bool = False
    arrival: int = 0
    admitted_step: int = 0
    ends_at: float = math.inf
    due_at: float = 0.0
    matcher: Matcher | None = None
    given: list[int] = field(default_factory=list)
    num_reported: int = 0
    total: NDArray[np.int64] | None = None
    embedding: bytes = b""
    is_broken: bool = False
    timeline: Timeline | None = None
    verifying: list[int] = field(default_factory=list)
    num_open: int = 0
    shift: int = 0
    newest: StepRow | None = None
    planned_step: int = 0
    serial: int = field(default_factory=itertools.count().__next__)
    board: int = -1

    @classmethod
    def of(cls, generation: Generation, *, vocab_size: int, max_context: int, prefix: KnownTokens | None = None) -> Sequence:
        """Return the sequence of a request. `prefix`: of this vocabulary; what it knows is not looked at again.

        :raises EmptyPrompt, ContextLengthExceeded, ProtocolError: nothing has been taken then.
        """
        known = prefix.tokens if prefix is not None and prefix.begins(generation) else []
        unseen, scored = generation.tokens[TOKEN_BYTES * len(known) :], token_bytes.unpack(generation.given)
        tokens = [*known, *token_bytes.unpack(unseen)]
        if not tokens or generation.prompt_tokens < 1:
            raise EmptyPrompt("the prompt has no tokens")
        if len(tokens) + len(scored) > max_context:
            raise ContextLengthExceeded(
                f"{len(tokens) + len(scored)} tokens; this worker holds at most {max_context} a sequence"
            )
        largest = max(map(token_bytes.largest, (unseen, generation.given, generation.prediction)))
        if generation.prompt_tokens > len(tokens) or largest >= vocab_size:
            raise ProtocolError(f"token ids must be below {vocab_size}, and no fewer than the prompt has")
        if scored and generation.pooling:
            raise ProtocolError("a prompt is scored or pooled, not both")
        if not 0 < generation.weight <= MAX_SAMPLING_NUMBER:  # NaN is not
            raise ProtocolError("a tenant's weight is out of range")
        _check_sampling(generation.sampling)
        given = [*tokens, *scored] if scored or generation.pooling else []
        sequence = cls(generation=generation, tokens=tokens, held_from=len(tokens), given=given)
        sequence.num_reported = sequence.num_outputs
        if known and prefix is not None:
            sequence.hashes = [*prefix.hashes]
        return sequence

    @property
    def request(self) -> str:
        return self.generation.request

    @property
    def attempt(self) -> int:
        return self.generation.attempt

    @property
    def tenant(self) -> str:
        return self.generation.tenant

    @property
    def sampling(self) -> SamplingParams:
        return self.generation.sampling

    @property
    def tables(self) -> list[BlockTable]:
        """The block table of each cache group."""
        return [self.blocks, *self.more_blocks]

    @property
    def num_outputs(self) -> int:
        return len(self.tokens) - self.generation.prompt_tokens

    @property
    def is_ready(self) -> bool:
        """Whether it can be planned: not before its grammar is compiled."""
        return self.matcher is not None or not self.generation.sampling.grammar

    @property
    def output(self) -> list[int]:
        return self.tokens[self.generation.prompt_tokens :]

    @property
    def is_read(self) -> bool:
        """Whether it is read, rather than continued."""
        return bool(self.given)

    @property
    def needs_every_state(self) -> bool:
        """Whether no token's computation can be left out, however well its KV is known."""
        return self.generation.pooling == "mean"

    @property
    def length(self) -> int:
        if self.given:
            return len(self.given) if self.generation.pooling else len(self.given) - 1
        return len(self.tokens) + self.num_awaited

    @property
    def num_uncomputed(self) -> int:
        """Tokens that are known, and whose KV is not there yet: one of a sequence that decodes, more of a prompt."""
        return self.length - self.num_awaited - self.num_computed

    @property
    def num_unplanned(self) -> int:
        return self.length - self.num_planned

    @property
    def longest(self) -> int:
        """`length` if all tokens that are being verified are accepted."""
        return self.length + (len(self.verifying) if self.num_awaited else 0)

    def may_go_on(self, max_context: int) -> bool:
        """Whether its next token can be planned, and there will be one unless a step in flight ends the text.

        What a grammar or penalties allow, and the end of a minimum length, depend on tokens, not on their number alone: such a
        sequence waits for the outcome of a verification.
        """
        generation, length = self.generation, self.length  # for each sequence of each step: few properties
        if length - generation.prompt_tokens >= generation.sampling.max_tokens or length >= max_context:
            return False
        return not self.num_open or (self.num_steps == 1 and self.may_be_open)

    @property
    def may_be_open(self) -> bool:
        """Whether a row may be planned while the outcome of a verification before it is not known."""
        is_free = self.matcher is None and not _needs_history(self.sampling)
        return is_free and self.sampling.min_tokens <= self.num_outputs + 1

    def computed(self, num_tokens: int) -> None:
        """KV of the first `num_tokens` tokens is there; no step is in flight."""
        assert not self.num_steps
        self.num_computed = self.num_planned = num_tokens

    def plan(
        self, num_tokens: int, proposal: Sized[int], num_samples: int, outcomes: Sized[Outcome] = (), room: Room = NO_ROOM
    ) -> StepRow:
        """The next `num_tokens` tokens, then `proposal`, as a step's row; sampled when it reaches the end.

        num_samples: of the step's rows before this one. outcomes: instead of `proposal`, of a row that is fed. room: instead of
        both, if it has tokens.
        """
        if self.given:
            return self._plan_reading(num_tokens)
        start, end = self.num_planned, self.num_planned + num_tokens
        sampled, feed = end == self.length, self.last_sample if self.num_awaited else -1
        verified: list[int] = []
        if feed < 0:
            inputs = [*self.tokens[start:end], *proposal]
            self.verifying, self.shift = [*proposal], 0
            if room.num_tokens:
                inputs += [0] * room.num_tokens
                self.verifying = [UNKNOWN] * room.num_tokens
        else:
            inputs = [UNKNOWN]
            if width := room.num_tokens or width_of(outcomes):
                inputs += [0] * width
            verified = self.verifying
        self.num_planned = end
        self.num_steps += 1
        if sampled:
            self.num_awaited += 1
            self.last_sample = num_samples
        row_samples = len(inputs) - num_tokens + 1 if sampled else 0
        self.num_open += row_samples > 1
        before = self.newest if feed >= 0 else None
        row = self.newest = StepRow(
            tokens=inputs,
            start=start,
            blocks=self.blocks,
            more_blocks=self.more_blocks,
            num_samples=row_samples,
            sampling=self.generation.sampling,
            prompt_tokens=self.generation.prompt_tokens,
            feed=feed,
            board=self.board,
        )
        if sampled and _needs_history(row.sampling):
            known, tail = (end, [*proposal]) if feed < 0 else (len(self.tokens), [UNKNOWN])
            row.history = History(self.serial, self.tokens, known, tail)
        if self.matcher is not None:
            row.constraint = self.matcher
            if sampled:
                row.output_start = self.matcher.num_settled
                row.output = self.tokens[row.prompt_tokens + row.output_start :] + [UNKNOWN] * (feed >= 0)
        if verified:
            row.verified = verified
        if outcomes:
            row.outcomes = outcomes
        if room is not NO_ROOM:
            row.room, row.is_posted = room.num_tokens, room.is_posted
        if room.is_searched or (before is not None and before.room and not before.is_posted):
            row.text = History(self.serial, self.tokens, len(self.tokens), [], self.generation.prediction)
        return row

    def _plan_reading(self, num_tokens: int) -> StepRow:
        start, end = self.num_planned, self.num_planned + num_tokens
        pooling, known = self.generation.pooling, len(self.tokens)  # what is scored may have to be computed again
        first = {"": max(start, known - 1), "mean": start, "last": max(start, len(self.given) - 1)}[pooling]
        self.num_planned = end
        self.num_steps += 1
        return StepRow(
            tokens=self.given[start:end],
            start=start,
            blocks=self.blocks,
            more_blocks=self.more_blocks,
            num_samples=0,
            sampling=self.sampling,
            prompt_tokens=self.generation.prompt_tokens,
            num_read=max(0, end - first),
            targets=[] if pooling else self.given[first + 1 : end + 1],
        )

    def read(self, samples: RowSamples) -> None:
        """Take what a step has read of it. A score that is not finite breaks it."""
        if samples.scores and not all(math.isfinite(score.logprob) for score in samples.scores):
            self.is_broken = True
            return
        if samples.scores:
            self.tokens += self.given[len(self.tokens) : len(self.tokens) + len(samples.scores)]
            self.logprobs += samples.scores
        if samples.total is not None:
            self.total = samples.total if self.total is None else self.total + samples.total
        if self.num_computed < self.length:
            return
        self.finish = "stop"
        if self.total is not None:
            num_pooled = len(self.given) if self.generation.pooling == "mean" else 1
            self.embedding = _normalised(self.total * (FIXED_POINT / num_pooled))

    def ran(self, row: StepRow) -> None:
        """The oldest step in flight has run this row. Its proposal counts as computed once it is accepted (`went_on`)."""
        self.num_steps -= 1
        self.num_awaited -= row.num_samples > 0
        self.num_open -= row.num_samples > 1
        self.num_computed = row.start + self.shift + len(row.tokens) - max(0, row.num_samples - 1)

    def went_on(self, num_tokens: int) -> None:
        """The row that `ran` gave so many tokens: what is computed, and what is planned behind it, moves along."""
        self.shift = max(0, num_tokens - 1)
        self.num_computed += self.shift
        self.num_planned += self.shift
        later = self.newest if self.num_awaited else None
        if later is not None and later.room:
            self.verifying = [UNKNOWN] * later.room
        else:
            self.verifying = proposal_behind(later.outcomes if later is not None else (), self.shift, self.tokens[-1])

    def rewind(self) -> None:
        """The steps in flight failed: go back to what was computed before them."""
        self.num_steps = self.num_awaited = self.num_open = self.shift = 0
        self.verifying = []
        self.last_sample = -1
        self.num_planned = self.num_computed

    def append(self, samples: RowSamples, count: int, *, max_context: int) -> int:
        """Take the first `count` sampled tokens, up to the one that ends the request, or that is none and breaks it. Returns
        how many were taken."""
        params = self.sampling
        for taken in range(count):
            token = samples.tokens[taken]
            if token == NO_TOKEN:
                self.is_broken = True
                return taken
            self.tokens.append(token)
            if samples.logprobs is not None:
                self.logprobs.append(samples.logprobs[taken])
            if token in params.stop_token_ids and self.num_outputs >= params.min_tokens:
                self.finish = "stop"
            elif self.num_outputs >= params.max_tokens or len(self.tokens) >= max_context:
                self.finish = "length"
            if self.finish is not None:
                return taken + 1
        return count

    def frame(self, start: int, *, max_entries: int = 1 << 30) -> TokenFrame:
        """Return the tokens from output index `start` on, as sent to the gateway, and the end of the request if it comes next.

        max_entries: tokens and their alternatives that it may hold; at least one token is in it.
        """
        generation, tokens, start = self.generation, self.tokens, max(start, 0)  # for each token of each step: no properties
        first, end = generation.prompt_tokens + start, len(tokens)
        alternatives, logprobs = generation.sampling.logprobs, None
        if end - first > 1:
            end = min(end, first + max(1, max_entries // (1 + max(alternatives, 0))))
        if alternatives >= 0 and first >= self.held_from:
            logprobs = self.logprobs[first - self.held_from : end - self.held_from]
        finish = self.finish if end == len(tokens) else None
        return TokenFrame(
            request=generation.request,
            attempt=generation.attempt,
            start=start,
            tokens=tokens[first:end],
            logprobs=logprobs,
            finish=finish,
            cached_tokens=self.num_cached,
            embedding=self.embedding if finish else b"",
        )


def uncomputed_tokens(sequences: Iterable[Sequence]) -> int:
    """Of the prompts among them; the next token of one that decodes is none."""
    return sum(left for sequence in sequences if (left := sequence.num_uncomputed) > 1)


def _normalised(vector: NDArray[np.floating[Any]]) -> bytes:
    """The vector with length 1, as float32, little-endian; zeros stay zeros."""
    norm = float(np.sqrt(np.square(vector).sum()))
    return (vector / norm if norm else vector).astype("<f4").tobytes()


def _check_sampling(params: SamplingParams) -> None:
    """One row that can't be sampled would fail its whole step, and everyone else's rows with it.

    :raises ProtocolError: if no gateway would have let this pass.
    """
    numbers = (params.temperature, params.top_p, params.presence_penalty, params.frequency_penalty, params.repetition_penalty)
    within = all(abs(number) <= MAX_SAMPLING_NUMBER for number in (*numbers, *params.logit_bias.values()))  # NaN is not
    if not (within and 0 <= params.min_p <= 1 and params.repetition_penalty > 0 and params.max_tokens > 0):
        raise ProtocolError("sampling parameters are out of range")


def _needs_history(params: SamplingParams) -> bool:
    return params.presence_penalty != 0.0 or params.frequency_penalty != 0.0 or params.repetition_penalty != 1.0
