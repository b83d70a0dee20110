"""What runners on a CPU share: a step is checked, its logits are computed and its tokens sampled, in the caller's thread."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from common.engine.layer_group import LayerGroup, check_copies, check_groups, make_copies
from common.engine.plan import DraftPass, LaterStep, RowSamples, StepPlan, StepResult, StepRow, resolve_feeds
from common.engine.reading import read_rows
from common.engine.sampling import penalised, sample_rows
from common.models.decoder import Decoder
from common.protocol.errors import InvalidParameter
from common.protocol.messages import SamplingParams

if TYPE_CHECKING:
    from common.engine.cpu.head import Head


class CpuRunner(ABC):
    """`plan.Runner` over a decoder.

    groups: a pool for each cache group, in the runner's dtype; each layer is in one of them.

    :raises ConfigError: if the pools' shapes or dtypes are not the model's.
    """

    run_ahead = 1

    def __init__(
        self, decoder: Decoder, groups: Sequence[LayerGroup], dtype: torch.dtype, *, fingerprint: str, threads: int
    ) -> None:
        config = decoder.config
        check_groups(groups, config, [dtype])
        self.decoder = decoder
        self.groups = groups
        pool = groups[0].pool
        self.num_blocks, self.block_tokens = pool.shape[0], pool.shape[3]
        self.max_context = config.max_context
        self.vocab_size = config.vocab_size
        self.fingerprint = fingerprint
        self.threads = threads
        self.head: Head | None = None
        """What drafts behind each step; None: nothing does."""
        self._prepared = threading.local()
        self._sampled: list[int] = []

    def execute(self, plan: StepPlan) -> StepResult:
        """:raises InvalidParameter: if a row can't be run; nothing has been written then."""
        begun = time.perf_counter()
        self._prepare_thread()
        if not plan.rows:
            return StepResult(rows=[])
        rows = resolve_feeds(plan, self._sampled)
        for row in rows:
            self._check(row)
        check_copies(self.groups, plan.copies)
        with torch.inference_mode():
            make_copies(self.groups, plan.copies)
            samples = sample_rows(self.logits(rows), rows)
            if any(row.num_read for row in rows):
                read_rows(self, rows, samples)
            passes = self._draft(rows, samples)
        self._sampled = [token for row in samples for token in row.tokens]
        return StepResult(rows=samples, elapsed_s=time.perf_counter() - begun, passes=passes)

    def _draft(self, rows: Sequence[StepRow], samples: Sequence[RowSamples]) -> list[DraftPass]:
        if self.head is None or all(row.serial < 0 for row in rows):
            return []
        return self.head.draft(rows, samples, *self.noted_states(rows))

    @abstractmethod
    def logits(self, rows: Sequence[StepRow]) -> torch.Tensor:
        """Computes a step; K and V are written. Returns float32 [samples, vocab_size], row by row, good until the next step."""

    @abstractmethod
    def read_states(self) -> torch.Tensor:
        """The hidden states that the step's rows ask to be read, float32 [read, hidden_size], row by row."""

    @abstractmethod
    def read_logits(self, start: int, end: int) -> torch.Tensor:
        """The logits of states [start, end) of `read_states`, float32 [end - start, vocab_size]. Only rows with targets have
        some."""

    @abstractmethod
    def noted_states(self, rows: Sequence[StepRow]) -> tuple[NDArray[np.float32], Sequence[int]]:
        """What the step's tokens had before the layers that the head asks for, float32 [tokens, layers · hidden_size]; and
        where each row's begin there."""

    def submit(self, plan: StepPlan) -> LaterStep:
        return LaterStep(self, plan)

    def may_compile(self, plan: StepPlan) -> bool:
        return False  # kernels are the same for every step, and `warm_up` has run them

    def warm_up(self) -> None:
        """Run a step of every kind on the first block, and leave it as it was: kernels are compiled by their first call."""
        kept, more = [group.pool[0].clone() for group in self.groups], [[0]] * (len(self.groups) - 1)
        tokens = [0] * min(3, self.block_tokens)
        for sampling in (
            SamplingParams(temperature=0.0),
            SamplingParams(temperature=1.0),
            SamplingParams(temperature=1.0, top_p=0.5),
            SamplingParams(temperature=1.0, top_k=2, top_p=0.5, logprobs=1),
        ):
            rows = [
                StepRow([0], 0, [0], 1, sampling, 1, serial=0, drafts=2),
                StepRow(tokens, 0, [0], 1, sampling, len(tokens), serial=1, drafts=1),
            ]
            self._warm_up(rows, more)
        self._warm_up([StepRow(tokens, 0, [0], 0, SamplingParams(logprobs=1), 1, num_read=1, targets=[0])], more)
        for group, block in zip(self.groups, kept, strict=True):
            group.pool[0] = block

    def _warm_up(self, rows: list[StepRow], more_blocks: list[list[int]]) -> None:
        for row in rows:
            row.more_blocks = more_blocks
        self.execute(StepPlan(0, rows))

    def _prepare_thread(self) -> None:
        """The number of threads is a property of each calling thread in OpenMP, not of the process."""
        if not getattr(self._prepared, "done", False):
            torch.set_num_threads(self.threads)
            self._prepared.done = True

    def _check(self, row: StepRow) -> None:
        if not row.tokens or row.start < 0 or not 0 <= row.num_samples <= len(row.tokens):
            raise InvalidParameter(f"a row of {len(row.tokens)} tokens can't give {row.num_samples} samples")
        if 1 + len(row.more_blocks) != len(self.groups):
            raise InvalidParameter(f"a row has {1 + len(row.more_blocks)} block tables for {len(self.groups)} cache groups")
        for group, table in zip(self.groups, (row.blocks, *row.more_blocks), strict=True):
            group.check(row, table)
        if min(row.tokens) < 0 or max(row.tokens) >= self.vocab_size:
            raise InvalidParameter(f"a token id is outside the vocabulary of {self.vocab_size}")
        if not 0 <= row.num_read <= len(row.tokens) or (row.num_read and row.num_samples):
            raise InvalidParameter(
                f"a row of {len(row.tokens)} tokens and {row.num_samples} samples can't be read at {row.num_read}"
            )
        if row.targets and (
            len(row.targets) != row.num_read or not 0 <= min(row.targets) <= max(row.targets) < self.vocab_size
        ):
            raise InvalidParameter(f"{len(row.targets)} targets, or one outside the vocabulary, for {row.num_read} positions")
        if row.num_samples and penalised(row.sampling) and len(row.history) < row.start + len(row.tokens):
            raise InvalidParameter(
                f"penalties need the row's {row.start + len(row.tokens)} tokens as history, not {len(row.history)}"
            )
