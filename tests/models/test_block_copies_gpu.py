"""On a card, a row that goes on in a copied block has, bit for bit, the logits of one that goes on in the block itself."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from common.engine.load.layout import EngineConfig
from common.engine.load.runners import load_runner
from common.engine.plan import BlockCopy, RowSamples, StepPlan, StepRow
from common.models.source import resolve
from common.protocol.messages import SamplingParams

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

PROMPT = [(7 * place + 3) % 5000 for place in range(21)]
"""Its last five tokens are in its second block."""
SAID = SamplingParams(temperature=0.0, logprobs=2)


def row(tokens: list[int], start: int, blocks: list[int]) -> StepRow:
    return StepRow(tokens, start, blocks, 1, SAID, len(PROMPT))


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
def test_a_copy_has_what_its_block_has(kv_cache_dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path))
    settings = {"device": "cuda", "dtype": "bfloat16", "quantization": "none", "kv_cache_dtype": kv_cache_dtype}
    engine = EngineConfig(num_blocks=600, block_tokens=16, max_running=8, token_budget=256, max_model_len=512, **settings)  # type: ignore[arg-type]
    runner = load_runner(resolve("dummy:llama-3.2-1b"), engine)
    runner.execute(StepPlan(1, [row(PROMPT, 0, [3, 4])]))

    def second(token: int, block: int, copies: list[BlockCopy]) -> RowSamples:
        """A token behind the prompt, in `block` behind the first one, beside a row with blocks of its own."""
        rows = [row([7], len(PROMPT), [3, 12]), row([token], len(PROMPT), [3, block])]
        return runner.execute(StepPlan(2, rows, copies)).rows[1]

    for token in (9, 77, 1234):
        own = second(token, 4, [])
        assert second(token, 6, [BlockCopy(0, 4, 6)]) == own
        assert second(token, 8, []).logprobs != own.logprobs, "what is in the block matters"
