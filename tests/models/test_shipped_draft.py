"""The draft model that is shipped, on a CPU: of what its target writes it guesses a good part."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.engine.plan import StepPlan, StepRow
from common.models.source import DEFAULT_MODEL, ModelFiles, default_cache_dir
from common.text.bundle import load_bundle
from services.draft.config import DraftConfig
from services.draft.model_engine import open_draft_engine
from tests.models.driver import GREEDY, Request, open_runner, run

QUESTIONS = (
    "Why is the sky blue?",
    "How does a bicycle stay upright?",
    "Tell me about the history of chess.",
    "What is inflation?",
)
NUM_TOKENS = 48


def test_the_shipped_draft_model_guesses_much_of_a_greedy_answer(
    smollm2: ModelFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    home.mkdir()
    (home / "models").symlink_to(default_cache_dir() / "models")
    monkeypatch.setenv("PENSTOCK_HOME", str(home))
    bundle = load_bundle(smollm2)
    requests = [Request(list(bundle.encode_chat([{"role": "user", "content": text}])), NUM_TOKENS) for text in QUESTIONS]
    answers = run(open_runner(smollm2, dtype="auto"), requests)
    config = DraftConfig(draft_model="auto", num_blocks=64, max_model_len=1000, threads=1, shm_dir=str(tmp_path))
    assert config.model == DEFAULT_MODEL
    opened = open_draft_engine(config, "test", lambda done, total: None)
    try:
        held: list[bool] = []
        for request, answer in zip(requests, answers, strict=True):
            tokens = request.prompt + answer
            blocks = list(range(-(-len(tokens) // opened.engine.runner.block_tokens)))
            first = len(request.prompt) - 1
            rows = [StepRow(tokens[:first], 0, blocks, 0, GREEDY, len(request.prompt))]
            rows += [StepRow([tokens[at]], at, blocks, 1, GREEDY, len(request.prompt)) for at in range(first, len(tokens) - 1)]
            results = [opened.engine.runner.execute(StepPlan(0, [row])).rows[0].tokens for row in rows]
            held += [guessed == [token] for guessed, token in zip(results[1:], answer, strict=True)]
    finally:
        opened.engine.close()
    assert sum(held) > 0.35 * len(held)
