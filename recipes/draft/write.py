"""Lets a target answer prompts in large batches of plain torch, and writes the answers as shards: `generate` without a server.

    python -m recipes.draft.write build/draft --minutes 1.5

Beside the prompts that are there, a share of the training prompts is what the target itself writes as a user's turn (Xu et al.,
"Magpie: Alignment data synthesis from scratch", 2024), which no list of templates is as varied as. Held-out prompts and
questions are answered first; training prompts in an order in which any beginning is like the whole. What is on disk is left
out.

    python -m recipes.draft.write build/draft --sitting 1 --turns 200000 --max-tokens 160 --minutes 5

answers nothing but further user's turns that the target writes, in shards beside those that are there.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from common.models.source import DEFAULT_MODEL, resolve
from common.protocol.errors import ConfigError
from common.text.bundle import TextBundle, load_bundle
from recipes.draft.batched import Ask, BatchedWriter
from recipes.draft.prompts import Split, read
from recipes.draft.samples import Sample, read_shard, shard_path, write_shard
from recipes.draft.target import load_target
from recipes.draft.trainer import device_of, dtype_of

TEMPERATURES = (0.0, 0.0, 0.7, 0.0, 1.0)
"""Of prompts in turn: most answers are greedy, since that is where drafts are judged."""
USER_TEMPERATURE = 0.9
USER_TOKENS = 96
"""Of a user's turn that the target writes; longer ones are left out."""
_SEED_OF_USERS = 1 << 32
"""Seeds of the user's turns of sitting n begin at n + 1 times this."""
SITTING_SHARDS = 10_000
"""Numbers of the shards of sitting n begin at n times this."""
SPLITS: tuple[Split, ...] = ("held_out", "questions", "train")


def turn_around(bundle: TextBundle) -> tuple[list[int], list[int]]:
    """Return the tokens before and behind a user's turn in a conversation of one turn."""
    one, other = (bundle.encode_chat([{"role": "user", "content": text}]) for text in ("A", "7 z"))
    before = next(at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    behind = next(at for at, (a, b) in enumerate(zip(one[::-1], other[::-1], strict=False)) if a != b)
    return one[:before], one[len(one) - behind :]


def written_prompts(
    writer: BatchedWriter, bundle: TextBundle, count: int, rows: int, deadline_s: float, sitting: int = 0
) -> list[list[int]]:
    """Return at most `count` different prompts whose user's turn the target wrote, others in each sitting."""
    before, behind = turn_around(bundle)
    found: dict[tuple[int, ...], None] = {}
    for first in range(0, count, rows):
        if time.monotonic() > deadline_s:
            break
        seeds = range(first, min(first + rows, count))
        asks = [Ask(before, (1 + sitting) * _SEED_OF_USERS + seed, USER_TEMPERATURE) for seed in seeds]
        for tokens in writer.write(asks, USER_TOKENS, deadline_s):
            if 4 <= len(tokens) <= USER_TOKENS and tokens[-1] in bundle.eos_ids:
                found[(*before, *tokens[:-1], *behind)] = None
    return [list(prompt) for prompt in found]


def asks_of(prompts: Sequence[Sequence[int]], max_prompt: int) -> list[Ask]:
    """Return an ask for each prompt of at most `max_prompt` tokens; its number is its seed."""
    return [
        Ask(prompt, number, TEMPERATURES[number % len(TEMPERATURES)])
        for number, prompt in enumerate(prompts)
        if len(prompt) <= max_prompt
    ]


def waves_of(asks: Sequence[Ask], rows: int, seed: int = 0) -> list[list[Ask]]:
    """Cut asks into waves of at most `rows`, of similar prompt length, in random order."""
    ordered = sorted(asks, key=lambda ask: (len(ask.prompt), ask.seed))
    waves = [ordered[begin : begin + rows] for begin in range(0, len(ordered), rows)]
    random.Random(seed).shuffle(waves)
    return waves


def write(arguments: argparse.Namespace) -> None:
    """:raises ConfigError: if prompts are missing, or the target is not one that this recipe takes."""
    deadline_s = time.monotonic() + 60 * arguments.minutes
    folder: Path = arguments.folder
    files = resolve(arguments.model)
    bundle = load_bundle(files)
    device = device_of(arguments.device)
    target = load_target(files, device, dtype_of(device))
    torch.set_float32_matmul_precision("high")  # of bf16 numbers, TF32 products are exact
    writer = BatchedWriter(target, bundle.eos_ids)
    limit = arguments.limit or None
    print(f"target and tokenizer are loaded, {deadline_s - time.monotonic():.0f} s are left", flush=True)
    splits: tuple[Split, ...] = ("train",) if arguments.sitting else SPLITS
    for split in splits:
        # the given prompts are answered in sitting 0
        prompts = [] if arguments.sitting else encode(folder, bundle, split, limit)
        count = turns_of(arguments, len(prompts)) if split == "train" else 0
        if count:
            # of the tokens of a turn and its answer, at most
            share = USER_TOKENS / (USER_TOKENS + arguments.max_tokens)
            users_deadline_s = time.monotonic() + share * (deadline_s - time.monotonic())
            own = written_prompts(writer, bundle, count, arguments.rows, users_deadline_s, arguments.sitting)
            print(f"{len(own)} prompts by the target itself, {deadline_s - time.monotonic():.0f} s are left", flush=True)
            prompts += own
        asks = asks_of(prompts, arguments.max_prompt)
        for number, wave in enumerate(waves_of(asks, arguments.rows), arguments.sitting * SITTING_SHARDS):
            path = shard_path(folder, split, number)
            if path.exists():
                continue
            if time.monotonic() > deadline_s:
                print(f"stopped before {path.name}: {arguments.minutes} minutes are over")
                return
            write_wave(writer, wave, path, arguments.max_tokens, arguments.cache_gb)


def turns_of(arguments: argparse.Namespace, num_prompts: int) -> int:
    """Return how many user's turns the target is to write beside so many training prompts that are given."""
    share = arguments.written_share
    return arguments.turns or int(num_prompts * share / (1 - share))


def encode(folder: Path, bundle: TextBundle, split: Split, limit: int | None = None) -> list[list[int]]:
    """Return the token ids of the prompts on disk, and keep them beside the prompts, since the chat template takes its time.

    :raises ConfigError: if there are none.
    """
    path = folder / f"prompts-{split}.npz"
    if path.exists():
        return [sample.tokens.tolist() for sample in read_shard(path)[:limit]]
    found = [
        bundle.encode_chat([{"role": message.role, "content": message.content} for message in prompt.messages])
        for prompt in read(folder / f"{split}.jsonl")[:limit]
    ]
    write_shard(path, [Sample(np.array(tokens, np.uint32), len(tokens), 0, 0.0) for tokens in found])
    return found


def write_wave(writer: BatchedWriter, wave: Sequence[Ask], path: Path, max_tokens: int, cache_gb: float) -> None:
    """Answer the asks, in as many parts as the cache needs, and write them as one shard."""
    begun = time.monotonic()
    fitting = writer.rows_that_fit(len(wave[-1].prompt) + max_tokens + 64, int(cache_gb * 1e9))
    samples: list[Sample] = []
    for begin in range(0, len(wave), fitting):
        some = wave[begin : begin + fitting]
        for ask, output in zip(some, writer.write(some, max_tokens), strict=True):
            tokens = np.array([*ask.prompt, *output], np.uint32)
            samples.append(Sample(tokens, len(ask.prompt), ask.seed, ask.temperature))
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # the next cache has another length, and would not fit into what is left of this one
    write_shard(path, samples)
    written = sum(len(sample.tokens) - sample.prompt_length for sample in samples)
    seconds = time.monotonic() - begun
    print(f"{path.name}: {len(samples)} answers, {written} tokens, {written / seconds:.0f} tokens/s", flush=True)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="recipes.draft.write", description=__doc__)
    parser.add_argument("folder", type=Path, help="holds train.jsonl and held_out.jsonl; shards are written there")
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--minutes", type=float, default=2.0, help="no wave is begun later (default: %(default)s)")
    parser.add_argument("--limit", type=int, default=0, help="prompts of each split; 0: all")
    parser.add_argument("--rows", type=int, default=3072, help="answers in work at once (default: %(default)s)")
    parser.add_argument("--max-prompt", type=int, default=512, help="longer prompts are left out (default: %(default)s)")
    parser.add_argument("--max-tokens", type=int, default=320, help="of an answer (default: %(default)s)")
    parser.add_argument("--cache-gb", type=float, default=36.0, help="of keys and values (default: %(default)s)")
    parser.add_argument(
        "--written-share", type=float, default=0.5, help="of training prompts, by the target itself (default: %(default)s)"
    )
    parser.add_argument("--turns", type=int, default=0, help="user's turns by the target itself, in place of that share")
    parser.add_argument(
        "--sitting", type=int, default=0, help="1 and up: answer only --turns turns, others than in the sittings before"
    )
    arguments = parser.parse_args(argv)
    if min(arguments.rows, arguments.max_tokens) < 1 or not 0 <= arguments.written_share < 1:
        raise SystemExit("--rows and --max-tokens must be at least 1, --written-share in [0, 1)")
    if min(arguments.turns, arguments.sitting) < 0 or (arguments.sitting and not arguments.turns):
        raise SystemExit("--turns and --sitting must not be negative, and a later sitting needs --turns")
    try:
        write(arguments)
    except ConfigError as error:
        raise SystemExit(str(error)) from error


if __name__ == "__main__":
    main()
