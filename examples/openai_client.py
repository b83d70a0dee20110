"""The official client against Penstock: `pip install openai`, `penstock up`, `python examples/openai_client.py "Hello"`.

PENSTOCK_URL names another gateway, PENSTOCK_API_KEY its key.
"""

from __future__ import annotations

import os
import sys

from openai import OpenAI


def main(prompt: str) -> None:
    url, key = os.environ.get("PENSTOCK_URL", "http://127.0.0.1:8000"), os.environ.get("PENSTOCK_API_KEY", "unused")
    client = OpenAI(base_url=f"{url}/v1", api_key=key)
    model = next(iter(client.models.list())).id
    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": prompt}],
        max_completion_tokens=128,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    for chunk in stream:
        for choice in chunk.choices:
            print(choice.delta.content or "", end="", flush=True)
        if chunk.usage:
            print(f"\n{chunk.usage.prompt_tokens} prompt tokens, {chunk.usage.completion_tokens} generated")


main(" ".join(sys.argv[1:]) or "Why is the sky blue?")
