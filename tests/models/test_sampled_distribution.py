"""With speculation on, tokens are distributed as the target's probabilities say: of transformers, not of our own sampler.

Equal tokens with speculation off and on would follow from a sampler that is wrong in both. Here thousands of seeds write a few
tokens each; verified, accepted and rejected ones are compared with the probabilities that each had behind its own prefix.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from common.cache.grouped_pool import GroupedPool, PoolGroup
from common.cache.pool import BlockPool
from common.engine.sequence import Sequence
from common.engine.sequence_cache import SequenceCache
from common.ops.sampling.sample_reference import filter_reference
from common.protocol.messages import SamplingParams
from services.decode.scheduler import DecodeScheduler
from tests.fixtures.slow import some_slow
from tests.models.driver import open_runner
from tests.models.oracles import build, oracle_prompt, save
from tests.unit.scheduling import generation

PROMPT = oracle_prompt(length=19)
LIKELY = range(40, 52)
"""Tokens that a bias makes the only likely ones: random weights like all of them alike."""
BIAS = dict.fromkeys(LIKELY, 7.0)
TOKENS, SEEDS, TOGETHER = 4, 3000, 50
MAX_DEVIATION = 4.5
"""Standard deviations of a count: one of the 52 that a test looks at is beyond it by chance in one of 3,000 sets of seeds."""


class Target:
    """A tiny model: its engine here, and its probabilities by transformers."""

    def __init__(self, folder: Path) -> None:
        self.oracle = build("qwen3")
        self.runner: Any = open_runner(save(self.oracle, folder), num_blocks=400)
        self._known: dict[tuple[tuple[int, ...], float], torch.Tensor] = {}

    def probabilities(self, output: list[int], sampling: SamplingParams) -> torch.Tensor:
        """float64 [vocab], of the token behind PROMPT and `output`."""
        key = (tuple(output), sampling.temperature)
        if key not in self._known:
            with torch.no_grad():
                logits = self.oracle(torch.tensor([PROMPT + output])).logits[0, -1]
            for token, bias in sampling.logit_bias.items():
                logits[token] += bias
            kept = filter_reference(logits / sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p)
            self._known[key] = kept.double().softmax(-1)
        return self._known[key]

    def write(
        self, sampling: SamplingParams, proposal: Callable[[Sequence, int], list[int]]
    ) -> tuple[list[list[int]], int, int]:
        """Outputs of SEEDS seeds, and how many tokens were proposed and accepted."""
        runner = self.runner
        outputs: list[list[int]] = []
        proposed = accepted = 0
        for first in range(0, SEEDS, TOGETHER):
            pools = [PoolGroup(BlockPool(len(group.pool), runner.block_tokens), group.retention) for group in runner.groups]
            scheduler = DecodeScheduler(
                SequenceCache(GroupedPool(*pools), fingerprint=runner.fingerprint),
                token_budget=4096,
                max_running=TOGETHER,
                max_context=runner.max_context,
                propose=proposal,
            )
            made = [self._sequence(seed, sampling) for seed in range(first, first + TOGETHER)]
            for sequence in made:
                scheduler.admit(sequence)
            while (plan := scheduler.plan(0.0)) is not None:
                for done in scheduler.commit(plan, runner.execute(plan), 0.0):
                    proposed, accepted = proposed + done.proposed, accepted + done.accepted
            outputs += [sequence.output for sequence in made]
        return outputs, proposed, accepted

    def _sequence(self, seed: int, sampling: SamplingParams) -> Sequence:
        fields = {name: getattr(sampling, name) for name in ("temperature", "top_p", "logit_bias")}
        asked = generation(f"seed {seed}", PROMPT, seed=seed, max_tokens=TOKENS, **fields)
        return Sequence.of(asked, vocab_size=self.runner.vocab_size, max_context=self.runner.max_context)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return Target(tmp_path_factory.mktemp("qwen3"))


def deviations(target: Target, outputs: list[list[int]], sampling: SamplingParams) -> list[float]:
    """By how many standard deviations counts are off: of each likely token at each place, and of the likeliest one there."""
    found: list[float] = []
    for place in range(TOKENS):
        rows = torch.stack([target.probabilities(output[:place], sampling) for output in outputs])
        drawn = torch.tensor([output[place] for output in outputs])
        for chances, came in (*((rows[:, token], drawn == token) for token in LIKELY), (rows.amax(1), drawn == rows.argmax(1))):
            spread = math.sqrt(float((chances * (1 - chances)).sum()))
            if spread > 3:  # else no sum of many
                found.append((int(came.sum()) - float(chances.sum())) / spread)
    return found


@pytest.mark.parametrize("temperature", some_slow([0.7, 1.0], quick=[1.0]))
def test_tokens_have_the_targets_probabilities_whatever_is_proposed(target: Target, temperature: float) -> None:
    sampling = SamplingParams(temperature=temperature, top_p=0.9, logit_bias=BIAS)

    def likeliest(output: list[int]) -> int:
        return int(target.probabilities(output, sampling).argmax())

    def proposal(sequence: Sequence, limit: int) -> list[int]:
        first = likeliest(sequence.output)
        return [first, likeliest([*sequence.output, first])][:limit]

    outputs, proposed, accepted = target.write(sampling, proposal)
    assert proposed > 3000 and 0.05 < accepted / proposed < 0.95
    assert len({tuple(output) for output in outputs}) > 500
    found = deviations(target, outputs, sampling)
    assert len(found) > 20 and max(map(abs, found)) < MAX_DEVIATION

    # the same measure finds a rule that accepts what is merely likely, in one of ten answers
    biased = [list(output) for output in outputs]
    for output in biased[::10]:
        output[1] = likeliest(output[:1])
    assert max(map(abs, deviations(target, biased, sampling))) > MAX_DEVIATION
