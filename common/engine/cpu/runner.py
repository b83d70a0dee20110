"""What runners on a CPU share: a step is checked, its logits are computed and its tokens sampled, in the caller's thread."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from common.engine.plan import LaterStep, StepPlan, StepResult, StepRow, resolve_feeds
from common.engine.reading import read_rows
from common.engine.sampling import penalised, sample_rows
from common.models.decoder import Decoder
from common.protocol.errors import ConfigError, InvalidParameter
from common.protocol.messages import SamplingParams


class CpuRunner(ABC):
    """`plan.Runner` over a decoder.

    pool: [num_blocks, layers, 2, block_tokens, kv_heads, head_dim], contiguous, in the runner's dtype.

    :raises ConfigError: if the pool's shape or dtype is not the model's.
    """

    run_ahead = 1

    def __init__(self, decoder: Decoder, pool: torch.Tensor, dtype: torch.dtype, *, fingerprint: str, threads: int) -> None:
        config = decoder.config
        if (
            pool.ndim != 6
            or pool.shape[1:3] != (config.num_layers, 2)
            or pool.shape[4:] != (config.num_kv_heads, config.head_dim)
        ):
            raise ConfigError(f"a KV pool of shape {list(pool.shape)} does not fit this model")
        if pool.dtype != dtype:
            raise ConfigError(f"a {pool.dtype} KV pool does not fit this model: it keeps {dtype}")
        self.decoder = decoder
        self.pool = pool
        self.num_blocks, self.block_tokens = pool.shape[0], pool.shape[3]
        self.max_context = config.max_context
        self.vocab_size = config.vocab_size
        self.fingerprint = fingerprint
        self.threads = threads
        self._prepared = threading.local()
        self._sampled: list[int] = []

    def execute(self, plan: StepPlan) -> StepResult:
        """:raises InvalidParameter: if a row can't be run; nothing has been written then."""
        begun = time.perf_counter()
        self._prepare_thread()
        if not plan.rows:
            return StepResult(rows=[])
        resolve_feeds(plan, self._sampled)
        for row in plan.rows:
            self._check(row)
        with torch.inference_mode():
            samples = sample_rows(self.logits(plan.rows), plan.rows)
            if any(row.num_read for row in plan.rows):
                read_rows(self, plan.rows, samples)
        self._sampled = [token for row in samples for token in row.tokens]
        return StepResult(rows=samples, elapsed_s=time.perf_counter() - begun)

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

    def submit(self, plan: StepPlan) -> LaterStep:
        return LaterStep(self, plan)

    def may_compile(self, plan: StepPlan) -> bool:
        return False  # kernels are the same for every step, and `warm_up` has run them

    def warm_up(self) -> None:
        """Run a step of every kind on the first block, and leave it as it was: kernels are compiled by their first call."""
        kept = self.pool[0].clone()
        tokens = [0] * min(3, self.block_tokens)
        for sampling in (SamplingParams(temperature=0.0), SamplingParams(temperature=1.0, top_k=2, top_p=0.5, logprobs=1)):
            rows = [StepRow([0], 0, [0], 1, sampling, 1), StepRow(tokens, 0, [0], 1, sampling, len(tokens))]
            self.execute(StepPlan(0, rows))
        self.execute(StepPlan(0, [StepRow(tokens, 0, [0], 0, SamplingParams(logprobs=1), 1, num_read=1, targets=[0])]))
        self.pool[0] = kept

    def _prepare_thread(self) -> None:
        """The number of threads is a property of each calling thread in OpenMP, not of the process."""
        if not getattr(self._prepared, "done", False):
            torch.set_num_threads(self.threads)
            self._prepared.done = True

    def _check(self, row: StepRow) -> None:
        end = row.start + len(row.tokens)
        if not row.tokens or row.start < 0 or not 0 <= row.num_samples <= len(row.tokens):
            raise InvalidParameter(f"a row of {len(row.tokens)} tokens can't give {row.num_samples} samples")
        if len(row.blocks) * self.block_tokens < end:
            raise InvalidParameter(f"{len(row.blocks)} blocks of {self.block_tokens} tokens don't hold {end} tokens")
        if min(row.blocks) < 0 or max(row.blocks) >= self.num_blocks:
            raise InvalidParameter(f"a row names a block outside the pool of {self.num_blocks}")
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
        if row.num_samples and penalised(row.sampling) and len(row.history) < end:
            raise InvalidParameter(f"penalties need the row's {end} tokens as history, not {len(row.history)}")
