"""On a card, in CUDA graphs: steps beside rows that begin, end and move give what packed ones give."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from common.cache.block_table import BlockTable
from common.engine.gpu import continuing
from common.engine.load.layout import EngineConfig
from common.engine.load.runners import load_runner
from common.engine.plan import StepPlan
from common.models.source import resolve
from tests.models.test_continuing import random_steps, run

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def renewed(plans: list[StepPlan]) -> list[StepPlan]:
    """The same steps with block tables of their own: a table that grew is known by its version."""
    tables: dict[int, BlockTable] = {}
    for plan in plans:
        for row in plan.rows:
            row.blocks = tables.setdefault(id(row.blocks), BlockTable(list(row.blocks)))
    return plans


@pytest.mark.parametrize("model", ["dummy:llama-3.2-1b", "dummy:llama-3.2-1b-awq-counting-80"])
def test_other_rows_beside_those_that_go_on(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Draws are of a seed and a position; a token may differ only where two are as likely."""
    monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path))
    settings = {"device": "cuda", "dtype": "bfloat16", "quantization": "none"}
    engine = EngineConfig(num_blocks=600, block_tokens=16, max_running=64, token_budget=256, max_model_len=512, **settings)  # type: ignore[arg-type]
    runner = load_runner(resolve(model), engine)
    follow = continuing.Continuing.follow
    followed: list[bool] = []

    def counted(self: continuing.Continuing, rows: object) -> continuing.Following | None:
        found = follow(self, rows)  # type: ignore[arg-type]
        followed.append(found is not None)
        return found

    same = total = 0
    for seed in range(12):
        monkeypatch.setattr(continuing.Continuing, "follow", counted)
        found = run(runner, renewed(random_steps(seed)))
        monkeypatch.setattr(continuing.Continuing, "follow", lambda *_: None)
        packed = run(runner, renewed(random_steps(seed)))
        for own, other in zip(found, packed, strict=True):
            total += len(own.rows)
            same += sum(one.tokens == two.tokens for one, two in zip(own.rows, other.rows, strict=True))
    assert sum(followed) > 0.7 * len(followed)
    assert any(has_given for _, has_given in runner._continuing._graphs), "no step had rows beside those that go on"  # type: ignore[attr-defined]
    assert same >= 0.98 * total, (same, total)
