"""instructor, in the modes that it has for OpenAI's API."""

from __future__ import annotations

import instructor
import pytest
from asked import PARIS, City
from openai import OpenAI
from running import KEY, MODEL, Penstock


@pytest.mark.parametrize("mode", [instructor.Mode.JSON_SCHEMA, instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT])
def test_a_model_of_pydantic_comes_back(penstock: Penstock, mode: instructor.Mode) -> None:
    client = instructor.from_openai(OpenAI(base_url=penstock.v1, api_key=KEY, max_retries=0), mode=mode)
    found = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": PARIS}],
        response_model=City,
        max_tokens=200,
        max_retries=1,
        temperature=0,  # drawn at random, a string may take all the tokens that there are
    )
    assert isinstance(found, City)
