"""`--dtype auto` on a CPU: 8-bit weights and bfloat16 KV, as invariant as float32, and close to it on real text."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from common.engine.cpu.int8_runner import Int8Runner
from common.engine.plan import Runner, StepPlan, StepRow
from common.models.source import ModelFiles
from common.ops.cpu_int8 import team_cpu
from common.ops.kept import CACHE_VARIABLE
from common.protocol.messages import SamplingParams
from tests.models.driver import GREEDY, Request, logits_of_first, open_runner, seen_logits
from tests.models.oracles import ORACLES, build, oracle_prompt, save
from tests.models.test_smollm2 import text_tokens


@pytest.fixture(scope="module")
def runner(smollm2: ModelFiles) -> Any:
    return open_runner(smollm2, dtype="auto")


def all_logits(runner: Any, tokens: list[int]) -> torch.Tensor:
    """Logits of each position of `tokens`, computed in one step."""
    blocks = list(range(-(-len(tokens) // runner.block_tokens)))
    with seen_logits(runner) as seen:
        runner.execute(StepPlan(0, [StepRow(tokens, 0, blocks, len(tokens), GREEDY, len(tokens))]))
    return seen[0]


@pytest.mark.slow
def test_logits_have_the_same_bits_alone_in_a_batch_in_chunks_and_on_two_threads(runner: Any, smollm2: ModelFiles) -> None:
    assert isinstance(runner, Int8Runner) and runner.groups[0].pool.dtype == torch.bfloat16
    prompt = text_tokens(smollm2, 200, seed=5)
    alone = logits_of_first(runner, [Request(prompt, 4)])
    for chunk in (7, 16, 100):
        assert torch.equal(logits_of_first(runner, [Request(prompt, 4, chunk=chunk)]), alone), chunk
    threaded = open_runner(smollm2, dtype="auto", threads=2)
    for other in (runner, threaded):
        others = [Request(text_tokens(smollm2, 3 + 11 * i, seed=i), 4) for i in range(10)]
        assert torch.equal(logits_of_first(other, [Request(prompt, 4), *others]), alone)


def test_rows_shared_out_among_threads_give_the_same_tokens_and_logprobs(runner: Any, smollm2: ModelFiles) -> None:
    params = SamplingParams(temperature=0.8, seed=3, logprobs=2)
    blocks = [[3 * row, 3 * row + 1, 3 * row + 2] for row in range(13)]
    prompts = [text_tokens(smollm2, 3 + 3 * row, seed=row) for row in range(13)]
    rows = [
        StepRow(prompt, 0, held, int(row % 5 > 0), params, len(prompt))
        for row, (prompt, held) in enumerate(zip(prompts, blocks, strict=True))
    ]
    threaded = open_runner(smollm2, dtype="auto", threads=3)
    assert threaded.execute(StepPlan(0, rows)).rows == runner.execute(StepPlan(0, rows)).rows


_LIKE_LLAMA = (name for name in ORACLES if name.split("-")[0] in ("llama", "qwen3") and "moe" not in name)
EIGHT_BITS = [*_LIKE_LLAMA, "qwen2", "phi3", "smollm3"]
TWO_LAYERS: dict[str, dict[str, Any]] = {"smollm3": {"num_hidden_layers": 2, "no_rope_layer_interval": 2}}
"""What 8 bits change adds up over the layers."""


@pytest.mark.parametrize("name", EIGHT_BITS)
def test_every_kind_of_model_is_close_to_float32(name: str, tmp_path: Path) -> None:
    files = save(build(name, **TWO_LAYERS.get(name, {})), tmp_path)
    tokens = oracle_prompt(length=70)
    exact = all_logits(open_runner(files), tokens)
    for threads in (1, 3):
        runner = open_runner(files, dtype="auto", threads=threads)
        assert isinstance(runner, Int8Runner)
        found = all_logits(runner, tokens)
        assert (found - exact).norm() < 0.03 * exact.norm()


def test_helpers_that_never_come_are_not_missed(runner: Any, smollm2: ModelFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = text_tokens(smollm2, 20, seed=3)
    threaded: Any = open_runner(smollm2, dtype="auto", threads=3)
    released = threading.Event()
    helpers = ThreadPoolExecutor(2)
    monkeypatch.setattr(team_cpu, "_executor", lambda: helpers)
    try:
        for _ in range(2):
            helpers.submit(released.wait)
        found = all_logits(threaded, tokens)
    finally:
        released.set()
    assert torch.equal(found, all_logits(runner, tokens))


@pytest.mark.slow
def test_compiled_steps_are_kept_and_two_processes_steps_go_together_in_a_third(tmp_path: Path) -> None:
    """The first two compile one each, for heads of other sizes; what they kept bears names that the third must tell apart.

    Logits have the same bits where a step was compiled and where it is loaded.
    """
    program = """
import hashlib
import sys
from pathlib import Path
from common.models.source import ModelFiles
from common.ops.cpu_int8 import team_cpu
from tests.models.driver import Request, logits_of_first, open_runner
for path in sys.argv[1:]:
    runner = open_runner(ModelFiles(name="m", format="safetensors", path=Path(path)), dtype="auto")
    logits = logits_of_first(runner, [Request(list(range(5, 205)), 6)])
    counts = runner._forward.stats
    digest = hashlib.sha256(logits.numpy().tobytes()).hexdigest()
    print(sum(counts.cache_hits.values()), sum(counts.cache_misses.values()), digest)
"""
    paths = [tmp_path / name for name in ("llama", "qwen3")]
    for path in paths:
        path.mkdir()
        save(build(path.name), path)

    def lines(*paths: Path) -> list[list[str]]:
        environment = os.environ | {CACHE_VARIABLE: str(tmp_path / "kernels")}
        command = [sys.executable, "-c", program, *map(str, paths)]
        root = Path(__file__).parents[2]
        done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return [line.split() for line in done.stdout.splitlines()]

    compiled = [lines(path)[0] for path in paths]
    assert [line[:2] for line in compiled] == [["0", "1"]] * 2
    assert lines(*paths) == [["1", "0", *line[2:]] for line in compiled]


def test_a_prompt_s_logits_are_those_of_one_token_at_a_time(runner: Any, smollm2: ModelFiles) -> None:
    """Prefill, decode and verification agree on every position, not only on the last."""
    tokens = text_tokens(smollm2, 150, seed=9)
    whole = all_logits(runner, tokens)
    blocks = list(range(20, 30))
    with seen_logits(runner) as seen:
        for at in [*range(0, 140, 7), *range(140, 150)]:
            row = tokens[at : at + 7] if at < 140 else tokens[at : at + 1]
            runner.execute(StepPlan(0, [StepRow(row, at, blocks, len(row), GREEDY, len(tokens))]))
    assert torch.equal(torch.cat(seen), whole)


def test_it_is_close_to_float32_on_real_text(runner: Runner, smollm2: ModelFiles) -> None:
    tokens = text_tokens(smollm2, 160, seed=2)
    following = torch.tensor(tokens[1:])[:, None]
    exact = all_logits(open_runner(smollm2, num_blocks=20), tokens).log_softmax(-1)
    found = all_logits(runner, tokens).log_softmax(-1)
    errors = (found - exact)[:-1].gather(1, following).abs()
    assert errors.mean() < 0.05
    assert (exact.exp() * (exact - found)).sum(-1).mean() < 5e-3  # KL divergence, nats
    assert (found.argmax(-1) == exact.argmax(-1)).float().mean() > 0.95
