"""Layers that keep their KV in several pools, each with block tables of its own, give the tokens of one pool."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from bench.engine.driver import Driver
from bench.engine.driver import Request as Driven
from common.cache.grouped_pool import GroupedPool, PoolGroup
from common.cache.pool import BlockPool
from common.cache.retention import KEEP_ALL, Retention
from common.engine.cpu.int8_runner import Int8Runner
from common.engine.cpu.runner import CpuRunner
from common.engine.cpu.torch_runner import TorchRunner
from common.engine.layer_group import LayerGroup
from common.engine.plan import StepPlan, StepRow
from common.engine.sequence import Sequence
from common.engine.sequence_cache import SequenceCache
from common.protocol import tokens as token_bytes
from common.protocol.errors import ConfigError, InvalidParameter
from common.protocol.handles import WorkerRef
from common.protocol.messages import Generation, SamplingParams
from services.decode.scheduler import DecodeScheduler
from tests.models.driver import GREEDY, Request, open_runner, run
from tests.models.oracles import build, greedy_choices, oracle_prompt, save

WINDOW = Retention(window=256)
"""As long as the sequences here: what the second group keeps is all that full attention reads."""
NUM_BLOCKS = (90, 70)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> CpuRunner:
    runner = open_runner(save(build("llama"), tmp_path_factory.mktemp("llama")))
    assert isinstance(runner, CpuRunner)
    return runner


def split(plain: CpuRunner, retention: Retention = WINDOW) -> TorchRunner:
    """The layers of `plain`, the second of which has a pool of its own."""
    shape = list(plain.groups[0].pool.shape)
    pools = [torch.full([blocks, 1, *shape[2:]], float("nan")) for blocks in NUM_BLOCKS]
    groups = [LayerGroup(pools[0], [0]), LayerGroup(pools[1], [1], retention)]
    return TorchRunner(plain.decoder, groups, fingerprint="split", threads=1)


def sequence(number: int, prompt: list[int], max_tokens: int) -> Sequence:
    generation = Generation(
        request=f"r{number}",
        attempt=0,
        gateway=WorkerRef("gateway", "g", 1),
        tokens=token_bytes.pack(prompt),
        prompt_tokens=len(prompt),
        sampling=SamplingParams(temperature=0.0, max_tokens=max_tokens),
        deadline_ms=1 << 60,
    )
    return Sequence.of(generation, vocab_size=256, max_context=256)


def test_two_pools_give_the_tokens_of_one(plain: CpuRunner) -> None:
    """In shared steps, in chunks, with prefix hits, with proposals that are mostly wrong."""
    runner, dice = split(plain), random.Random(3)
    pools = [BlockPool(blocks, runner.block_tokens) for blocks in NUM_BLOCKS]
    cache = SequenceCache(GroupedPool(PoolGroup(pools[0], KEEP_ALL), PoolGroup(pools[1], WINDOW)), fingerprint="split")
    scheduler = DecodeScheduler(
        cache,
        token_budget=50,
        max_running=8,
        max_context=256,
        propose=lambda s, limit: [dice.randrange(3, 250) for _ in range(min(limit, 2))],
    )
    prompts = [oracle_prompt(seed=seed % 3, length=length) for seed, length in enumerate((20, 150, 33, 100, 160, 64))]
    every = [sequence(number, prompt, 12) for number, prompt in enumerate(prompts)]
    for s in every:
        scheduler.admit(s)
        for _ in range(4):
            if (plan := scheduler.plan(0.0)) is not None:
                scheduler.commit(plan, runner.execute(plan), 0.0)
    while (plan := scheduler.plan(0.0)) is not None:
        scheduler.commit(plan, runner.execute(plan), 0.0)
    assert sum(s.num_cached for s in every) > 0, "no prefix was found"
    expected = run(plain, [Request(prompt, 12) for prompt in prompts])
    assert [s.tokens[len(prompt) :] for s, prompt in zip(every, prompts, strict=True)] == expected
    cache.check()
    assert not cache.pool.usage().owned


def test_warming_up_leaves_every_pool_as_it_was(plain: CpuRunner) -> None:
    runner = split(plain)
    runner.warm_up()
    assert all(group.pool.isnan().all() for group in runner.groups)


@pytest.mark.parametrize(
    ("start", "more_blocks", "message"),
    [
        (0, [], "block tables"),
        (0, [[70]], "outside the pool of 70"),
        (0, [[-1]], "outside the pool of 70"),
        (0, [[]], "don't hold"),
        (40, [[-1, -1, 3]], "outside the pool of 70"),
    ],
)
def test_a_row_without_what_a_group_reads_is_refused(
    plain: CpuRunner, start: int, more_blocks: list[list[int]], message: str
) -> None:
    row = StepRow([5], start, [1, 2, 3], 1, GREEDY, 1, more_blocks=more_blocks)
    with pytest.raises(InvalidParameter, match=message):
        split(plain, Retention(window=20)).execute(StepPlan(0, [row]))


def test_a_layer_in_no_group_or_in_two_is_refused(plain: CpuRunner) -> None:
    pool = torch.zeros(4, 1, *plain.groups[0].pool.shape[2:])
    for layers in ([0], [0, 0], [0, 2]):
        with pytest.raises(ConfigError, match="cache groups"):
            groups = [LayerGroup(pool, [layer]) for layer in layers]
            TorchRunner(plain.decoder, groups, fingerprint="", threads=1)


def test_eight_bit_weights_refuse_several_groups(plain: CpuRunner) -> None:
    with pytest.raises(ConfigError, match="float32"):
        Int8Runner(plain.decoder, split(plain).groups, fingerprint="", threads=1)


def test_the_driver_of_benchmarks_gives_windows_their_blocks(tmp_path: Path) -> None:
    """More requests than the windows' pool holds whole, one after the other and together."""
    model = build("gpt-oss")
    runner = open_runner(save(model, tmp_path), num_blocks=24, max_running=2, token_budget=32)
    assert min(len(group.pool) for group in runner.groups) < 4 * 2 + 4  # type: ignore[attr-defined]
    requests = [Driven(oracle_prompt(seed=seed, length=length), 20) for seed, length in enumerate((90, 33, 120, 61, 90))]
    driver = Driver(runner, token_budget=32, max_rows=2)
    driver.generate(requests)
    for request in requests:
        assert request.output == greedy_choices(model, request.prompt, request.output)
    assert all(len(group.free) == group.num_blocks for group in driver.groups)
