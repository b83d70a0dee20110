"""What a step runs, and what comes back: the only words a scheduler and a runner share.

    plan = scheduler.plan(now)  →  result = runner.execute(plan)  →  scheduler.commit(plan, result, now)

A scheduler knows requests, blocks and budgets; a runner knows tensors. Neither knows the other.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from common.protocol.messages import SamplingParams, TokenLogprobs


class StepRow(msgspec.Struct):
    """One sequence's share of a step.

    The KV of positions [0, start) is in `blocks`; `tokens` are the inputs at positions [start, start + len(tokens)), whose
    KV this step writes. The logits of the last `num_samples` positions are sampled: 0 in the middle of a prompt, 1 as a
    rule, k + 1 to verify k proposed tokens (which are then the last k of `tokens`).

    `history` is the sequence's tokens [0, start + len(tokens)) whenever `sampling` needs them (penalties), else empty; the
    first `prompt_tokens` are the prompt. The sample at input position p is the token at position p + 1, output index
    p + 1 - prompt_tokens, and draws Gumbel(seed, p + 1, token).
    """

    tokens: list[int]
    start: int
    blocks: list[int]
    num_samples: int
    sampling: SamplingParams
    prompt_tokens: int
    history: list[int] = []


class StepPlan(msgspec.Struct):
    """Rows are independent; the runner may reorder them inside but returns samples in this order."""

    step: int
    rows: list[StepRow]

    @property
    def num_tokens(self) -> int:
        return sum(len(row.tokens) for row in self.rows)


class RowSamples(msgspec.Struct):
    """The `num_samples` sampled tokens of a row, and their logprobs when asked for."""

    tokens: list[int]
    logprobs: list[TokenLogprobs] | None = None


class StepResult(msgspec.Struct):
    rows: list[RowSamples]
    elapsed_s: float = 0.0


class Runner(Protocol):
    """Executes plans. `execute` blocks and is called from one worker thread at a time.

    `storage` holds the KV bytes that transports copy (`None`: nothing to copy, a simulated engine).
    """

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
