"""What scheduler tests share: generations, a pool and a simulated runner whose tokens give away any wrong KV."""

from __future__ import annotations

import numpy as np

from common.cache.pool import BlockPool
from common.engine.sequence import Sequence, SequenceCache
from common.engine.simulated import BYTES_PER_TOKEN, SimulatedRunner
from common.protocol import tokens as token_bytes
from common.protocol.handles import WorkerRef
from common.protocol.messages import Generation, SamplingParams

GATEWAY = WorkerRef("gateway", "gateway-1", 1)
BLOCK_TOKENS = 4
VOCAB = 1000
MAX_CONTEXT = 256


def generation(request: str, prompt: list[int], *, seed: int = 7, max_tokens: int = 8, attempt: int = 0) -> Generation:
    return Generation(
        request=request,
        attempt=attempt,
        gateway=GATEWAY,
        tokens=token_bytes.pack(prompt),
        prompt_tokens=len(prompt),
        sampling=SamplingParams(seed=seed, max_tokens=max_tokens),
        deadline_ms=1 << 60,
    )


def sequence(request: str, prompt: list[int], **options: int) -> Sequence:
    return Sequence.of(generation(request, prompt, **options), vocab_size=VOCAB, max_context=MAX_CONTEXT)


class Bench:
    """A pool, its cache and a runner over the same blocks."""

    def __init__(self, num_blocks: int = 64) -> None:
        self.pool = BlockPool(num_blocks, BLOCK_TOKENS)
        self.cache = SequenceCache(self.pool, block_tokens=BLOCK_TOKENS, fingerprint="test")
        self.runner = SimulatedRunner(
            "instant",
            storage=np.full((num_blocks, BLOCK_TOKENS * BYTES_PER_TOKEN), 0xA5, np.uint8),
            block_tokens=BLOCK_TOKENS,
            max_context=MAX_CONTEXT,
            vocab_size=VOCAB,
            fingerprint="test",
            time_scale=0,
        )

    def expected(self, s: Sequence) -> list[int]:
        """The tokens that `s` must have generated, as many as it has."""
        prompt = token_bytes.unpack(s.generation.tokens)[: s.generation.prompt_tokens]
        return self.runner.expected_tokens(prompt, s.sampling, s.num_outputs)

    def all_given_back(self) -> bool:
        self.pool.check()
        usage = self.pool.usage()
        return usage.owned == usage.leased == 0
