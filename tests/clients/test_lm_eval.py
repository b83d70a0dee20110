"""lm-eval over completions: a generate task and one that compares likelihoods, on questions of ours, since nothing is fetched
from elsewhere. Tokens are Penstock's own, over /tokenizer_info and /tokenize."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from running import KEY, MODEL, Penstock, script

TASKS = Path(__file__).parent / "lm_eval_tasks"


@pytest.mark.parametrize(
    ("task", "metric"),
    [("penstock_generate", "exact_match,first_word"), ("penstock_loglikelihood", "acc,none")],
)
def test_a_task(penstock: Penstock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, task: str, metric: str) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.chdir(TASKS)
    settings = f"model={MODEL},base_url={penstock.v1}/completions,tokenizer_backend=remote,max_length=1024,auth_token={KEY}"
    asked = ("--model", "local-completions", "--model_args", settings, "--tasks", task, "--include_path", ".")
    script("lm-eval", "run", *asked, "--output_path", str(tmp_path / "out"), "--log_samples")
    [report] = (tmp_path / "out").rglob("results_*.json")
    assert json.loads(report.read_text())["results"][task][metric] >= 0.5, "SmolLM2 knows capitals"
