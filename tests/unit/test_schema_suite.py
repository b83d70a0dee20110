"""A public suite's schemas: each compiles and is kept exactly, or is refused with a typed error."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from jsonschema.validators import validator_for

from common.models.source import ModelFiles
from common.protocol.errors import InvalidParameter
from common.text.grammar import GrammarCompiler
from common.text.tokenizer import load_tokenizer
from services.gateway.structured import structure_of
from tests.fixtures.slow import some_slow
from tests.unit.walks import walk

PATH = Path(__file__).parents[1] / "data" / "json_schemas.jsonl"
SCHEMAS: list[dict[str, Any]] = [json.loads(line) for line in PATH.read_text().splitlines()]
ENDINGS = ['"', "}", "]", "0", "1970-01-01T00:00:00Z"]
MIN_SUPPORTED = 0.7


def grammar_of(schema: Any) -> str:
    return structure_of({"type": "json_schema", "json_schema": {"name": "it", "schema": schema}}, None).grammar


@pytest.mark.timeout(600)
@pytest.mark.parametrize("step", some_slow([1, 20], quick=[20]))
def test_answers_to_supported_schemas_are_valid_and_others_are_refused(step: int, smollm2: ModelFiles) -> None:
    """Walks at temperature 1 of a model that finds all tokens equally likely, over SmolLM2's vocabulary."""
    tokenizer = load_tokenizer(smollm2)
    compiler = GrammarCompiler(tokenizer)
    refused: list[str] = []
    unfinished: list[str] = []
    valid = 0
    for case in SCHEMAS[::step]:
        try:
            matcher = compiler.compile(grammar_of(case["schema"]))
        except InvalidParameter as error:
            refused.append(f"{case['name']}: {error}")
            continue
        text = walk(matcher, tokenizer, random.Random(case["name"]), endings=ENDINGS, max_tokens=200)
        if text is None:
            unfinished.append(case["name"])
            continue
        validator = validator_for(case["schema"], jsonschema.Draft202012Validator)
        validator(case["schema"]).validate(json.loads(text))
        valid += 1
    total = len(SCHEMAS[::step])
    counts = f"{total} schemas: {valid} valid answers, {len(unfinished)} too long, {len(refused)} refused"
    print(counts, *refused, sep="\n")  # noqa: T201
    assert valid + len(unfinished) >= MIN_SUPPORTED * total
    assert len(unfinished) <= total // 10, unfinished
