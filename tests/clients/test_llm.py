"""llm, the command: a prompt, a conversation that goes on, and a schema, with Penstock as its documentation has it set up."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from running import KEY, MODEL, Penstock, script

SETTINGS = """
- model_id: penstock
  model_name: {model}
  api_base: {url}
  api_key_name: penstock
  supports_schema: true
"""


@pytest.fixture
def configured(penstock: Penstock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLM_USER_PATH", str(tmp_path))
    (tmp_path / "keys.json").write_text(json.dumps({"penstock": KEY}))
    (tmp_path / "extra-openai-models.yaml").write_text(SETTINGS.format(model=MODEL, url=penstock.v1))


ASK = ("-m", "penstock", "-o", "max_tokens", "60", "-o", "temperature", "0")


@pytest.mark.usefixtures("configured")
def test_a_prompt_and_a_conversation() -> None:
    assert "Paris" in script("llm", *ASK, "What is the capital of France?")
    assert "Paris" in script("llm", *ASK, "--no-stream", "What is the capital of France?")
    assert script("llm", "-c", "-o", "max_tokens", "30", "And of Italy?").strip()


@pytest.mark.usefixtures("configured")
def test_a_schema() -> None:
    age = {"type": "integer", "minimum": 0, "maximum": 99}
    schema = {"type": "object", "properties": {"age": age}, "required": ["age"], "additionalProperties": False}
    assert set(json.loads(script("llm", *ASK, "--schema", json.dumps(schema), "An old dog as JSON."))) == {"age"}
