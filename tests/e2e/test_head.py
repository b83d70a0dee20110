"""`penstock up --head FOLDER` says what `--head off` says, with a head of random weights; right guesses are accepted."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest

from common.models.source import ModelFiles
from tests.e2e.test_lookup import drafted
from tests.e2e.test_up import penstock_up
from tests.fixtures.head import write_constant_head, write_head

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

TOKEN = 260
"""What the hand-made head proposes."""
SAMPLING: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 0.7, "top_p": 0.9, "seed": 5},
    {"temperature": 1.0, "top_p": 0.9, "seed": 6, "frequency_penalty": 0.3},
    {"temperature": 0, "response_format": {"type": "json_object"}},
    {"temperature": 1.0, "seed": 7, "n": 2},
)
PROMPTS = ("Why is the sky blue?", "List three fruits as JSON.", "Repeat after me: one two one two one two.")
ASKED = [(prompt, sampling) for prompt in PROMPTS for sampling in SAMPLING]


def answers(folder: Path, *flags: str, biased: bool = False) -> tuple[list[list[str]], tuple[int, int]]:
    """The texts for each of `ASKED`, one after the other and then all at once; and what was verified and accepted. biased: to
    `TOKEN`, so that nothing else is said."""
    folder.mkdir()
    with penstock_up(folder, "--draft", "0", *flags) as (site, _), httpx.Client(timeout=120) as http:

        def ask(asked: tuple[str, dict[str, Any]]) -> list[str]:
            prompt, sampling = asked
            body = {"messages": [{"role": "user", "content": prompt}], "max_tokens": 60, **sampling}
            if biased:
                body = {**body, "logit_bias": {str(TOKEN): 100}, "response_format": {"type": "text"}, "frequency_penalty": 0}
            answer = http.post(f"http://127.0.0.1:{site.http_port}/v1/chat/completions", json=body).raise_for_status().json()
            return [choice["message"]["content"] for choice in answer["choices"]]

        found = [ask(each) for each in ASKED]
        with ThreadPoolExecutor(len(ASKED)) as clients:
            found += clients.map(ask, ASKED)
        return found, anyio.run(drafted, site.nats_port)


def test_a_head_of_random_weights_changes_no_text(tmp_path: Path, smollm2: ModelFiles) -> None:
    head = str(write_head(tmp_path / "random", smollm2, scale=0.02))
    without, unverified = answers(tmp_path / "off", "--head", "off", "--lookup", "off")
    assert unverified == (0, 0)
    always, (proposed, accepted) = answers(tmp_path / "always", "--head", head, "--lookup", "off", "--verify", "always")
    assert always == without
    assert proposed > 1000 > accepted
    mixed, _ = answers(tmp_path / "mixed", "--head", head, "--lookup", "on", "--verify", "always", "--prefill", "1")
    assert mixed == without, "beside lookup, and behind a hand-off"
    measured, (verified, _) = answers(tmp_path / "measured", "--head", head, "--lookup", "off")
    assert measured == without
    assert verified < proposed / 4, "what does not pay is not verified"


def test_what_a_head_guesses_rightly_is_accepted(tmp_path: Path, smollm2: ModelFiles) -> None:
    head = str(write_constant_head(tmp_path / "constant", smollm2, TOKEN))
    without, _ = answers(tmp_path / "off", "--head", "off", "--lookup", "off", biased=True)
    always, (proposed, accepted) = answers(
        tmp_path / "always", "--head", head, "--lookup", "off", "--verify", "always", biased=True
    )
    assert always == without
    assert accepted > 0.95 * proposed > 0
