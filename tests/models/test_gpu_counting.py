"""Models of real sizes on a card, whose answers are known: whatever layers compute, the token after token t is t + 1.

Small models take other kernels than these: a kernel for few rows of 4-bit weights, say, is for thousands of outputs.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bench.engine.driver import Driver
from bench.engine.driver import Request as Ahead
from common.engine.load.layout import EngineConfig
from common.engine.load.runners import load_runner
from common.models.source import resolve
from tests.models.driver import Request, run

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize(
    ("shape", "quantization"),
    [("llama-3.2-1b", "none"), ("llama-3.2-1b", "fp8"), ("llama-3.2-1b-awq", "auto"), ("llama-3.1-8b-awq-4-layers", "auto")],
)
def test_a_model_counts(shape: str, quantization: str, drafts: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In steps that are waited for, and a step ahead of the host, of one row to 24, behind prompts of one token to 200."""
    monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path))
    precision = {"dtype": "bfloat16", "quantization": quantization}
    engine = EngineConfig(device="cuda", num_blocks=800, max_running=24, token_budget=4096, **precision)  # type: ignore[arg-type]
    runner = load_runner(resolve(f"dummy:{shape}-counting"), engine, drafts=drafts)
    for rows in (1, 3, 8, 24):
        firsts = [1000 * row + 500 for row in range(rows)]
        prompts = [[7] * (first * 31 % 200) + [first] for first in firsts]
        meant = [list(range(first + 1, first + 17)) for first in firsts]
        assert run(runner, [Request(prompt, 16) for prompt in prompts]) == meant
        requests = [Ahead(prompt, 16) for prompt in prompts]
        Driver(runner, token_budget=512, max_rows=24).generate(requests)
        assert [request.output for request in requests] == meant
