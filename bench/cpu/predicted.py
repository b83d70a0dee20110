"""What a prediction of the answer gives a chat, prompt by prompt: `python -m bench.cpu.predicted`.

    python -m bench.cpu.predicted --every 10 --tokens 256 -- --head=off

Each prompt is answered greedily, first without a prediction, then with the answer itself in which every so-many-th word is
another one. What is behind `--` is for `penstock up`. Ratios are of the seconds that a whole answer takes, the medians of a
prompt's turns. Nothing of an earlier answer is found in any cache. Ends with 1 if an answer with a prediction is another one.
Prints a table in Markdown.
"""

from __future__ import annotations

import argparse
import sys
import time
from statistics import median

import anyio
import httpx

from bench.common.machine import describe
from bench.cpu.chat import PROMPTS, title
from bench.cpu.others import undisturbed
from bench.cpu.up import penstock_up


async def answer(http: httpx.AsyncClient, prompt: str, tokens: int, **body: object) -> tuple[float, str]:
    """Return how many seconds the whole answer took, and its text."""
    asked = {"messages": [{"role": "user", "content": prompt}], "max_tokens": tokens, "temperature": 0, **body}
    began = time.monotonic()
    found = (await http.post("/v1/chat/completions", json=asked)).raise_for_status().json()
    return time.monotonic() - began, found["choices"][0]["message"]["content"]


async def pair(url: str, prompt: str, tokens: int, salt: str, every: int) -> tuple[float, float, bool]:
    """Return the seconds without a prediction and with one, and whether both answers are the same."""
    async with httpx.AsyncClient(base_url=url, timeout=300) as http:
        plain_s, text = await answer(http, prompt, tokens, cache_salt=f"{salt} plain")
        words = text.split(" ")
        words[every - 1 :: every] = ["otherwise"] * len(words[every - 1 :: every])
        prediction = {"type": "content", "content": " ".join(words)}
        predicted_s, again = await answer(http, prompt, tokens, cache_salt=f"{salt} predicted", prediction=prediction)
        return plain_s, predicted_s, again == text


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.cpu.predicted", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("flags", nargs="*", metavar="FLAG", help="of `penstock up`")
    parser.add_argument("--every", type=int, default=10, help="words from one that is changed to the next")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--turns", type=int, default=1)
    parser.add_argument("--max-others", type=float, default=0.1)
    options = parser.parse_args()
    ratios: dict[str, list[float]] = {prompt: [] for prompt in PROMPTS}
    same = True
    with penstock_up([*options.flags, "--zero-retention"]) as url:
        anyio.run(pair, url, "Hello", 16, "warm-up", options.every)
        for turn in range(options.turns):
            for prompt in PROMPTS:
                asked = (prompt, options.tokens, f"turn {turn}", options.every)
                plain, predicted, equal = undisturbed(options.max_others, pair, url, *asked)
                same = same and equal
                ratios[prompt].append(plain / predicted)
                print(f"turn {turn + 1}, {title(prompt)}: {plain:.2f} s, {predicted:.2f} s", file=sys.stderr, flush=True)
    print(f"{describe()}\n\n| prompt | with a prediction |\n|---|---|")
    medians = {prompt: median(found) for prompt, found in ratios.items()}
    for prompt, ratio in medians.items():
        print(f"| {title(prompt)} | {ratio:.2f} |")
    print(f"| median | {median(medians.values()):.2f} |\n| worst | {min(medians.values()):.2f} |")
    print("\nall answers are the same" if same else "\nanswers differ")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
