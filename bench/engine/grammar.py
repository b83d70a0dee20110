"""What structured output costs an engine: the same requests with and without a JSON schema, in turns.

    python -m bench.engine.grammar                                              on a GPU: the 8B shape in FP8, 64 rows
    python -m bench.engine.grammar --model smollm2-135m-instruct --precision auto --rows 4 --tokens 32 --device cpu

Without a tokenizer of its own (`dummy:` models) the vocabulary is that of `--vocabulary`, a file in tekken's format (PyPI's
mistral-common has some), or made up: bytes, and words of letters with and without a space before them. Words of random letters
share fewer beginnings than real ones, which makes masks dearer.

The schema is a list of objects that does not end before the request does: `bounded` has strings of limited length, the dearest
there is; `free` has numbers, words from lists, dates, and last a string without a limit.
Prints medians over the turns: tokens per second both ways, their ratio, the time of a step, and that of filling its masks.
"""

from __future__ import annotations

import argparse
import base64
import json
import random
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from bench.engine.driver import Driver, Request
from bench.engine.measure import settings_of
from bench.engine.opening import PRECISIONS, Opening, open_runner
from common.engine import masks as step_masks
from common.engine.masks import num_threads
from common.engine.matcher import Matcher
from common.models.source import resolve
from common.protocol.messages import SamplingParams
from common.text.grammar import SLICES, GrammarCompiler
from common.text.tokenizer import load_tokenizer

_PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "email": {"type": "string"},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 4},
        "score": {"type": "number"},
    },
    "required": ["name", "age", "email", "tags", "score"],
    "additionalProperties": False,
}
_TOKEN_BUDGET = 8192
_ORDER = {
    "type": "object",
    "properties": {
        "number": {"type": "integer", "minimum": 0},
        "day": {"type": "string", "format": "date"},
        "paid": {"type": "boolean"},
        "state": {"enum": ["new", "packed", "sent", "returned"]},
        "lines": {"type": "array", "items": {"type": "number"}, "minItems": 1, "maxItems": 4},
        "note": {"type": "string"},
    },
    "required": ["number", "day", "paid", "state", "lines", "note"],
    "additionalProperties": False,
}
_GRAMMARS = {
    name: LLMatcher.grammar_from_json_schema({"type": "array", "items": items, "minItems": 100_000})
    for name, items in (("bounded", _PERSON), ("free", _ORDER))
}


class _Words:
    """A made-up vocabulary. The last token ends a text."""

    def __init__(self, size: int) -> None:
        dice = random.Random(0)
        words = {bytes([byte]): None for byte in range(256)}
        for mark in ('":', '",', '", "', '{"', '": "', '"}', "},", "[", "]", '"]', "  ", "\n", "\n  "):
            words[mark.encode()] = None
        while len(words) < size - 1:
            word = "".join(dice.choices("etaoinshrdlucmfwypvbgkjqxz", k=min(2 + int(dice.expovariate(0.25)), 16)))
            words[(dice.choice(("", " ", " ")) + word).encode()] = None
        self.tokens = [*words, b"<|end|>"]
        self.eos_token_id = size - 1
        self.bos_token_id = None
        self.special_token_ids = [size - 1]

    def __call__(self, text: bytes | str) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


class _Tekken(_Words):
    """The first `size` tokens of a file in tekken's format, and one that ends a text."""

    def __init__(self, path: Path, size: int) -> None:
        vocab = json.loads(path.read_bytes())["vocab"][: size - 1]
        self.tokens = [base64.b64decode(one["token_bytes"]) for one in vocab]
        self.tokens += [f"<|{index}|>".encode() for index in range(len(vocab), size)]
        self.eos_token_id = size - 1
        self.bos_token_id = None
        self.special_token_ids = list(range(len(vocab), size))


def _templates(opening: Opening, model: str, schema: str, vocabulary: Path | None) -> list[LLMatcher]:
    """A matcher for each thread that fills masks."""
    grammar = _GRAMMARS[schema]
    if not model.startswith("dummy:"):
        compiler = GrammarCompiler(load_tokenizer(resolve(model)), vocab_size=opening.model.vocab_size)
        return [compiler.twin().compile(grammar) for _ in range(num_threads())]
    size = opening.model.vocab_size
    wrapper = TokenizerWrapper(_Words(size) if vocabulary is None else _Tekken(vocabulary, size))
    tables = LLTokenizer(wrapper, n_vocab=size, slices=SLICES)
    return [LLMatcher(tables, grammar, log_level=0) for _ in range(num_threads())]


def _matcher(templates: Sequence[LLMatcher], row: int) -> Matcher:
    twin = row % len(templates)
    return Matcher(templates[twin].deep_copy(), twin)


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.engine.grammar", description=__doc__)
    parser.add_argument("--model", default="dummy:llama-3.1-8b")
    parser.add_argument("--precision", choices=list(PRECISIONS), default="fp8")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--schema", choices=list(_GRAMMARS), default="free")
    parser.add_argument("--vocabulary", type=Path, metavar="FILE", help="tokens of a dummy model, in tekken's format")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a setting of the engine's")
    options = parser.parse_args(argv)
    settings = {"device": options.device, "max_running": options.rows, "token_budget": _TOKEN_BUDGET} | settings_of(options.set)
    opening = open_runner(options.model, options.precision, **settings)
    driver = Driver(opening.runner, token_budget=_TOKEN_BUDGET, max_rows=options.rows)
    templates = _templates(opening, options.model, options.schema, options.vocabulary)
    broken = [one.get_error() for one in templates if one.is_error()]
    if broken:
        raise SystemExit(broken[0])
    dice = random.Random(1)
    fill = step_masks.fill_masks
    filling: list[float] = []

    def timed(*arguments: object) -> object:
        begun = time.perf_counter()
        found = fill(*arguments)  # pyright: ignore[reportArgumentType]
        if found is not None:
            filling.append(time.perf_counter() - begun)
        return found

    for module in list(sys.modules.values()):  # runners have imported it by name
        if getattr(module, "fill_masks", None) is fill:
            module.fill_masks = timed  # pyright: ignore[reportAttributeAccessIssue]

    def run(constrained: bool) -> tuple[float, float]:
        """Tokens per second after the first, and the median time of a decoding step."""
        requests = [
            Request(
                [dice.randrange(10, 250) for _ in range(options.prompt)],
                options.tokens,
                SamplingParams(temperature=1.0, seed=row),
                constraint=_matcher(templates, row) if constrained else None,
            )
            for row in range(options.rows)
        ]
        gaps = driver.generate(requests).decode_gaps_s()
        failed = [one.constraint.error for one in requests if isinstance(one.constraint, Matcher) and one.constraint.error]
        if failed:
            raise SystemExit(failed[0])
        return options.rows * len(gaps) / sum(gaps), statistics.median(gaps)

    for constrained in (False, True):
        run(constrained)
    filling.clear()
    speeds: dict[bool, list[float]] = {False: [], True: []}
    steps: dict[bool, list[float]] = {False: [], True: []}
    for turn in range(options.turns):
        for constrained in (False, True) if turn % 2 == 0 else (True, False):
            speed, step = run(constrained)
            speeds[constrained].append(speed)
            steps[constrained].append(step)
    plain, masked = statistics.median(speeds[False]), statistics.median(speeds[True])
    ratio = statistics.median(b / a for a, b in zip(speeds[False], speeds[True], strict=True))
    print(f"{options.model} {options.precision}, {options.rows} rows, {options.tokens} tokens each, {options.turns} turns")
    print(f"schema          {options.schema}")
    print(f"tokens/s        {plain:,.0f} plain, {masked:,.0f} with a schema: {ratio:.3f}")
    print(
        f"step            {statistics.median(steps[False]) * 1e3:.2f} ms plain, {statistics.median(steps[True]) * 1e3:.2f} ms"
    )
    print(f"filling masks   {statistics.median(filling) * 1e3:.2f} ms a step, {max(filling) * 1e3:.2f} ms at most")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
