"""What structured output costs an engine: the same requests with and without a JSON schema, in turns.

    python -m bench.engine.grammar                                              on a GPU: the 8B shape in FP8, 64 rows
    python -m bench.engine.grammar --model smollm2-135m-instruct --precision auto --rows 4 --tokens 32 --device cpu

Without a tokenizer of its own (`dummy:` models) the vocabulary is made up: bytes, and words of letters with and without a
space before them, as long as those of a real one. The schema is a list of objects that does not end before the request does.
Prints medians over the turns: tokens per second both ways, their ratio, the time of a step, and that of filling its masks.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Sequence

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from bench.engine.driver import Driver, Request
from bench.engine.measure import settings_of
from bench.engine.opening import PRECISIONS, Opening, open_runner
from common.engine import masks as step_masks
from common.engine.matcher import Matcher
from common.models.source import resolve
from common.protocol.messages import SamplingParams
from common.text.grammar import GrammarCompiler
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
_GRAMMAR = LLMatcher.grammar_from_json_schema({"type": "array", "items": _PERSON, "minItems": 100_000})


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


def _template(opening: Opening, model: str) -> LLMatcher:
    if not model.startswith("dummy:"):
        tokenizer = load_tokenizer(resolve(model))
        return GrammarCompiler(tokenizer, vocab_size=opening.model.vocab_size).compile(_GRAMMAR)
    wrapper = TokenizerWrapper(_Words(opening.model.vocab_size))
    matcher = LLMatcher(LLTokenizer(wrapper, n_vocab=opening.model.vocab_size), _GRAMMAR, log_level=0)
    if matcher.is_error():
        raise SystemExit(matcher.get_error())
    return matcher


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.engine.grammar", description=__doc__)
    parser.add_argument("--model", default="dummy:llama-3.1-8b")
    parser.add_argument("--precision", choices=list(PRECISIONS), default="fp8")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a setting of the engine's")
    options = parser.parse_args(argv)
    settings = {"device": options.device, "max_running": options.rows} | settings_of(options.set)
    opening = open_runner(options.model, options.precision, **settings)
    driver = Driver(opening.runner, token_budget=8192, max_rows=options.rows)
    template = _template(opening, options.model)
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
                constraint=Matcher(template.deep_copy()) if constrained else None,
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
    print(f"tokens/s        {plain:,.0f} plain, {masked:,.0f} with a schema: {ratio:.3f}")
    print(
        f"step            {statistics.median(steps[False]) * 1e3:.2f} ms plain, {statistics.median(steps[True]) * 1e3:.2f} ms"
    )
    print(f"filling masks   {statistics.median(filling) * 1e3:.2f} ms a step, {max(filling) * 1e3:.2f} ms at most")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
