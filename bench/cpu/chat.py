"""What a setting does to answers, prompt by prompt: `python -m bench.cpu.chat -- "--draft=0" "--draft=1"`.

    python -m bench.cpu.chat --prompts copying -- "--lookup=off" "--lookup=on"      answers that repeat much of the prompt
    python -m bench.cpu.chat --prompts FILE -- "--head=off" "--head=auto"                one's own, a line each

Every arrangement runs at the same time, and they answer each prompt in turn, so that a change of the machine's speed meets all.
Ratios are to the first one's tokens per second (of the tokens after the first), the median of a prompt's turns. A turn in which
other processes had more than `--max-others` of the machine is taken again. Nothing of an earlier turn is found in any cache.
Prints a table in Markdown.
"""

from __future__ import annotations

import argparse
import sys
from contextlib import ExitStack
from pathlib import Path
from statistics import median

import anyio
import httpx

from bench.common.machine import describe
from bench.cpu import copying
from bench.cpu.others import undisturbed
from bench.cpu.up import model_of, penstock_up, stream_chat

PROMPTS = (
    "Why is the sky blue?",
    "Write a short story about a lighthouse keeper and a lost whale.",
    "Explain how vaccines work to a ten-year-old.",
    "What should I cook tonight with eggs, spinach and old bread?",
    "Give me three arguments for and three against working from home.",
    "Describe the city of Lisbon to somebody who has never been there.",
    "How does a bicycle stay upright?",
    "Write a polite letter to my landlord about a broken heater.",
    "What is the difference between a virus and a bacterium?",
    "Tell me about the history of chess.",
    "My neighbour's dog barks all night. What can I do?",
    "Summarise the plot of Romeo and Juliet for somebody in a hurry.",
    "How do I write a for loop in Python, and when is a while loop better?",
    "What are good names for a small bakery by the sea?",
    "Explain compound interest with an example.",
    "I have a job interview tomorrow and I am nervous. Any advice?",
    "Why did the Roman Empire fall?",
    "Write a dialogue between the moon and a tired astronaut.",
    "How should I train for my first ten-kilometre run?",
    "What is inflation, and who gains from it?",
)


LISTS = (
    "Write fifty random numbers.",
    "List the first forty prime numbers.",
    "Write a table of ten people with random names, ages and cities.",
    "Write a poem in which each line begins with the same word.",
    "List twenty cities with their populations.",
    "Write a shopping list with prices.",
)
"""Answers with a form that repeats itself and contents that do not."""
SETS = {"free": PROMPTS, "lists": LISTS, "copying": copying.PROMPTS}


async def rates(urls: list[str], prompt: str, tokens: int, salt: str, temperature: float = 0.0) -> list[float]:
    """Tokens per second of one answer of each system, one after the other; nothing is reused across salts."""
    found: list[float] = []
    for url in urls:
        async with httpx.AsyncClient(base_url=url, timeout=300) as http:
            timing = await stream_chat(
                http, await model_of(http), prompt, tokens, cache_salt=salt, temperature=temperature, seed=1
            )
            found.append(timing.tokens_per_s)
    return found


def prompts_of(name: str) -> tuple[str, ...]:
    """The set of that name, or the lines of that file that are not blank, each once. Ends the program where there are none."""
    if name in SETS:
        return SETS[name]
    try:
        found = tuple(dict.fromkeys(filter(None, map(str.strip, Path(name).read_text().splitlines()))))
    except OSError as error:
        raise SystemExit(f"--prompts: {error}, and it is none of {', '.join(SETS)}") from error
    return found or sys.exit(f"--prompts: {name} has no line")


def title(prompt: str) -> str:
    """Return its first line."""
    return prompt.partition("\n")[0]


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.cpu.chat", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("arrangements", nargs="+", metavar="FLAGS", help="of `penstock up`, the baseline first")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--max-others", type=float, default=0.1)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--prompts", default="free", metavar="|".join([*SETS, "FILE"]))
    options = parser.parse_args()
    prompts = prompts_of(options.prompts)
    ratios: dict[str, list[list[float]]] = {prompt: [] for prompt in prompts}
    with ExitStack() as running:
        urls = [running.enter_context(penstock_up(flags.split())) for flags in options.arrangements]
        anyio.run(rates, urls, "Hello", 16, "warm-up")
        for turn in range(options.turns):
            for prompt in prompts:
                asked = (prompt, options.tokens, f"turn {turn}", options.temperature)
                found = undisturbed(options.max_others, rates, urls, *asked)
                ratios[prompt].append([rate / found[0] for rate in found[1:]])
                print(
                    f"turn {turn + 1}, {title(prompt)}: {', '.join(f'{rate:.1f}' for rate in found)}",
                    file=sys.stderr,
                    flush=True,
                )
    print(f"{describe()}\n")
    print(f"| prompt | {' | '.join(options.arrangements[1:])} |\n|{'---|' * len(options.arrangements)}")
    medians = {prompt: [median(column) for column in zip(*turns, strict=True)] for prompt, turns in ratios.items()}
    for prompt, row in medians.items():
        print(f"| {title(prompt)} | {' | '.join(f'{ratio:.2f}' for ratio in row)} |")
    columns = list(zip(*medians.values(), strict=True))
    print(f"| median | {' | '.join(f'{median(column):.2f}' for column in columns)} |")
    print(f"| worst | {' | '.join(f'{min(column):.2f}' for column in columns)} |")


if __name__ == "__main__":
    main()
