"""Which pools a small machine without a GPU should start, and with how many threads: `python -m bench.cpu.arrangements`.

    python -m bench.cpu.arrangements                                          today's defaults and others, three turns
    python -m bench.cpu.arrangements -- "" "--prefill=1 --threads=1"          these flags of `penstock up`

Arrangements take turns, because a machine's speed changes: in each turn every one of them is started, measured and stopped.
`start`: from the command to /ready. Then a closed loop, as `penstock bench` has it: `--clients` of them, prompts of
`--prompt-words` words that share no prefix, answers of `--tokens`; before it the same with one client. A turn in which other
processes had more than `--max-others` of the machine is taken again. Prints a table in Markdown: medians over turns of each
turn's median.
"""

from __future__ import annotations

import argparse
import sys
import time
from statistics import median

import anyio
import httpx
import msgspec

from bench.common.machine import describe
from bench.cpu.others import Others, wait_for_quiet
from bench.cpu.up import model_of, penstock_up, stream_chat
from common.cli.bench import closed_loop, prompt_of
from common.cli.chunks import Timing

DEFAULTS = (
    "",
    "--prefill=1 --draft=1 --kvstore=1",
    "--prefill=1 --draft=0 --kvstore=1",
    "--prefill=1 --draft=0 --kvstore=1 --threads=1",
    "--prefill=0 --draft=1 --kvstore=1",
    "--prefill=0 --draft=0 --kvstore=1",
    "--prefill=0 --draft=0 --kvstore=0",
    "--prefill=0 --draft=0 --kvstore=0 --threads=1",
)


class Turn(msgspec.Struct):
    """Seconds and tokens per second of one arrangement in one turn; `alone_…`: with one client."""

    start_s: float
    alone_ttft_s: float
    alone_rate: float
    ttft_s: float
    rate: float


async def measure(url: str, options: argparse.Namespace, first: int) -> tuple[float, float, float, float]:
    """TTFT and tokens/s with one client, then with all. `first`: number of the first prompt, so that none comes twice."""
    async with httpx.AsyncClient(base_url=url, timeout=600) as http:
        name = await model_of(http)

        async def ask(number: int) -> Timing:
            return await stream_chat(http, name, prompt_of(number, options.prompt_words), options.tokens, ignore_eos=True)

        await ask(first)
        alone = await closed_loop(lambda number: ask(first + 1 + number), options.requests // 4, 1)
        crowd = await closed_loop(lambda number: ask(first + 1000 + number), options.requests, options.clients)
    return (
        median(timing.ttft_s for timing in alone.timings),
        alone.tokens_per_s,
        median(timing.ttft_s for timing in crowd.timings),
        crowd.tokens_per_s,
    )


def take_turn(flags: str, options: argparse.Namespace, first: int) -> Turn:
    """Start, measure and stop one arrangement; again for as long as others disturb it."""
    while True:
        wait_for_quiet(options.max_others)
        others, began = Others(), time.monotonic()
        with penstock_up(flags.split()) as url:
            started = time.monotonic() - began
            numbers = anyio.run(measure, url, options, first)
            share = others.share()
        if share <= options.max_others:
            return Turn(started, *numbers)
        print(f"{flags or 'defaults'}: others had {share:.0%} of the machine; once more", file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.cpu.arrangements", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("arrangements", nargs="*", default=DEFAULTS, metavar="FLAGS")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--prompt-words", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--max-others", type=float, default=0.1, help="share of the machine that other processes may take")
    options = parser.parse_args()
    found: dict[str, list[Turn]] = {flags: [] for flags in options.arrangements}
    for turn in range(options.turns):
        for index, flags in enumerate(found):
            found[flags].append(take_turn(flags, options, 10_000 * (turn * len(found) + index)))
            print(f"turn {turn + 1}, {flags or 'defaults'}: {found[flags][-1]}", file=sys.stderr, flush=True)
    print(f"{describe()}\n")
    titles = ["`penstock up …`", "start, s", "1 client: TTFT, ms", "tokens/s"]
    titles += [f"{options.clients} clients: TTFT, ms", "tokens/s"]
    print(f"| {' | '.join(titles)} |\n|{'---|' * len(titles)}")
    for flags, turns in found.items():
        cells = [f"{median(turn.start_s for turn in turns):.1f}"]
        cells += [
            f"{1000 * median(turn.alone_ttft_s for turn in turns):.0f}",
            f"{median(turn.alone_rate for turn in turns):.1f}",
        ]
        cells += [f"{1000 * median(turn.ttft_s for turn in turns):.0f}", f"{median(turn.rate for turn in turns):.1f}"]
        print(f"| {flags or '(defaults)'} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
