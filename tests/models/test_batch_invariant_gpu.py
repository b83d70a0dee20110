"""On a GPU a batch-invariant engine computes a token's KV and logits in the same bits, whatever comes with it.

Two layers of a large model's shape: its linears are cut along K, and few rows leave partial sums where many do not.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import pairwise

import pytest
import torch

from bench.engine.opening import open_runner
from common.cache.block_table import BlockTable
from common.engine.gpu.runner import DeviceRunner
from common.engine.plan import StepPlan, StepRow
from common.protocol.messages import SamplingParams

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

TOKENS = 200
TABLE_BLOCKS = 24
OTHERS = 30
GREEDY = SamplingParams(temperature=0.0, logprobs=1)
WAYS = {
    "again": ((), 0),
    "in chunks": ((37, 100), 0),
    "beside 3 prompts": ((), 3),
    "beside 30 prompts": ((), 30),
    "in chunks beside 16 prompts": ((64, 128), 16),
    "token by token": (tuple(range(1, TOKENS)), 0),
    "9 tokens a step": (tuple(range(9, TOKENS, 9)), 0),
    "token by token beside 20 others": (tuple(range(150, TOKENS)), 20),
    "verified, 4 tokens a step": (tuple(range(4, TOKENS, 4)), 0),
    "verified beside 6 others": (tuple(range(4, TOKENS, 4)), 6),
}


class Engine:
    def __init__(self, model: str) -> None:
        blocks = 1 + 2 * OTHERS * TABLE_BLOCKS  # not all memory: the engine before, or another process, may still have some
        opened = open_runner(
            model, "bf16", device="cuda", max_running=64, token_budget=4096, num_blocks=blocks, batch_invariant=True
        )
        runner = getattr(opened, "runner", opened)
        assert isinstance(runner, DeviceRunner)
        self.runner = runner
        self.pool = runner.groups[0].pool
        dice = random.Random(0)
        self.prompt = self._random_prompt(dice, TOKENS)
        self.others = [self._random_prompt(dice, dice.randrange(20, 220)) for _ in range(OTHERS)]
        self._free = list(range(runner.num_blocks))
        dice.shuffle(self._free)
        self._step = 0

    def _random_prompt(self, dice: random.Random, length: int) -> list[int]:
        return [dice.randrange(10, self.runner.vocab_size - 1) for _ in range(length)]

    def _table(self, index: int) -> BlockTable:
        return BlockTable(self._free[index * TABLE_BLOCKS : (index + 1) * TABLE_BLOCKS])

    def compute(self, cuts: Sequence[int], num_others: int, *, verified: bool = False) -> tuple[torch.Tensor, int, float]:
        """Return the KV of the prompt and what follows it. It is computed in parts that begin at `cuts`, beside others,
        in a pool that was zero before.

        verified: each token of a part is sampled behind, as those of proposals are; others have as many."""
        table, answer = self._table(0), None
        self.pool.zero_()
        torch.cuda.synchronize()  # steps have a stream of their own
        for begin, end in pairwise((0, *cuts, TOKENS)):
            ends = [min(len(other), end - begin) if verified else len(other) for other in self.others[:num_others]]
            parts = [(self.prompt, begin, end, table)]
            parts += [(self.others[n], 0, other_end, self._table(1 + n)) for n, other_end in enumerate(ends)]
            rows = [self._row(*part, num_samples=part[2] - part[1] if verified else 1) for part in parts]
            self._step += 1
            answer = self.runner.execute(StepPlan(step=self._step, rows=rows)).rows[0]
        assert answer is not None
        assert answer.logprobs is not None
        blocks = -(-TOKENS // self.runner.block_tokens)
        kv = self.pool[torch.tensor(list(table)[:blocks], device=self.pool.device)]
        return kv.transpose(0, 1).clone(), answer.tokens[-1], answer.logprobs[-1].logprob

    def _row(self, tokens: list[int], begin: int, end: int, table: BlockTable, *, num_samples: int) -> StepRow:
        return StepRow(
            tokens=tokens[begin:end],
            start=begin,
            blocks=table,
            num_samples=num_samples,
            sampling=GREEDY,
            prompt_tokens=len(tokens),
        )


@pytest.fixture(scope="module", params=["dummy:llama-3.1-8b-2-layers", "dummy:qwen3-30b-a3b-2-layers"])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    yield Engine(request.param)
    torch.cuda.empty_cache()


@pytest.mark.parametrize("way", WAYS)
def test_kv_and_logits_have_the_same_bits(engine: Engine, way: str) -> None:
    kv, token, logprob = engine.compute((), 0)
    found, found_token, found_logprob = engine.compute(*WAYS[way], verified=way.startswith("verified"))
    different = [layer for layer, pair in enumerate(zip(kv, found, strict=True)) if not torch.equal(*pair)]
    assert not different
    assert (token, logprob) == (found_token, found_logprob)
