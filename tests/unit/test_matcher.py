"""A grammar's state follows whatever output it is asked about, and allows what the grammar allows and nothing else."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

from common.engine import masks as step_masks
from common.engine.masks import allowed_tokens, fill_masks
from common.engine.matcher import MAX_UNDONE, Matcher
from common.engine.plan import Masks, StepPlan, StepRow, resolve_feeds
from common.models.source import ModelFiles
from common.protocol.errors import InvalidParameter
from common.protocol.messages import SamplingParams
from common.text.grammar import MAX_CACHED, MAX_GRAMMAR_BYTES, GrammarCompiler, WorkerGrammars
from services.gateway.structured import structure_of
from tests.actors.edge import BUNDLE, EOS, ids

COMPILER = GrammarCompiler(BUNDLE.tokenizer)
COMPILERS = [COMPILER, COMPILER.twin(), COMPILER.twin()]
VOCAB = BUNDLE.tokenizer.vocab_size
WORDS = -(-VOCAB // 32)

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "colour": {"enum": ["red", "green", None, 3]},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
SCHEMAS: dict[str, Any] = {
    "object": PERSON,
    "array": {"type": "array", "items": PERSON, "minItems": 1, "maxItems": 2},
    "any of": {"anyOf": [{"type": "boolean"}, {"const": "x"}, {"type": "number", "minimum": -1, "maximum": 1}]},
    "reference": {
        "$ref": "#/$defs/tree",
        "$defs": {
            "tree": {
                "type": "object",
                "properties": {"leaf": {"type": "boolean"}, "next": {"$ref": "#/$defs/tree"}},
                "required": ["leaf"],
                "additionalProperties": False,
            }
        },
    },
    "pattern": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"},
    "format": {"type": "string", "format": "date"},
    "tuple": {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "null"}], "items": False, "minItems": 2},
}


def grammar_of(schema: Any) -> str:
    return structure_of({"type": "json_schema", "json_schema": {"schema": schema}}, None).grammar


def matcher(schema: Any, twin: int = 0) -> Matcher:
    return Matcher(COMPILERS[twin].compile(grammar_of(schema)), twin)


def masks(one: Matcher, output: Sequence[int], proposal: Sequence[int] = ()) -> Masks:
    words = np.full((1 + len(proposal), WORDS), -1, np.int32)
    one.fill(output, proposal, words)
    return words


def allowed(one: Matcher, output: Sequence[int]) -> list[int]:
    return np.flatnonzero(allowed_tokens(masks(one, output)[0], VOCAB)).tolist()


def walk(one: Matcher, dice: random.Random, limit: int = 600) -> list[int]:
    """Tokens at random, of those that are allowed, up to the end; the end whenever it may come, so that there is one."""
    output: list[int] = []
    while len(output) < limit:
        choices = allowed(one, output)
        assert choices and not one.error
        output.append(EOS if EOS in choices else dice.choice([t for t in choices if t not in ids(" \n\t\r")] or choices))
        if output[-1] == EOS:
            return output
    raise AssertionError(BUNDLE.tokenizer.decode(output))


@pytest.mark.parametrize("name", SCHEMAS)
def test_whatever_is_allowed_is_valid(name: str) -> None:
    for seed in range(8):
        output = walk(matcher(SCHEMAS[name]), random.Random(seed))
        text = BUNDLE.tokenizer.decode(output[:-1])
        jsonschema.validate(json.loads(text), SCHEMAS[name])


def test_every_beginning_of_a_valid_text_is_allowed() -> None:
    one = matcher(PERSON)
    output = [*ids('{\n  "name": "Zoë",\n  "age": 7, "colour": null}'), EOS]
    for end in range(len(output)):
        assert output[end] in allowed(one, output[:end]), BUNDLE.tokenizer.decode(output[:end])
    assert EOS not in allowed(one, output[:-2])


def test_it_goes_back_and_to_other_outputs() -> None:
    one, dice = matcher(SCHEMAS["array"]), random.Random(5)
    outputs = [walk(matcher(SCHEMAS["array"]), random.Random(seed)) for seed in range(4)]
    for _ in range(200):
        output = dice.choice(outputs)
        prefix = output[: dice.randrange(len(output) + 1)]
        assert allowed(one, prefix) == allowed(matcher(SCHEMAS["array"]), prefix)


def test_proposals_are_judged_and_leave_no_trace() -> None:
    one = matcher(PERSON)
    good, bad = ids('"name":"a"'), ids('"nome"')
    found = masks(one, ids("{"), good)
    for end in range(len(good) + 1):
        assert (found[end] == masks(matcher(PERSON), ids("{") + good[:end])[0]).all()
    found = masks(one, ids("{"), bad)
    assert (found[:3] == masks(matcher(PERSON), ids("{"), bad[:2])).all()
    assert (found[3:] == -1).all(), "nobody looks behind a token that is not allowed"
    assert one.allowed(ids("{"), good) == len(good) and one.allowed(ids("{"), bad) == 2
    assert allowed(one, ids("{")) == allowed(matcher(PERSON), ids("{"))


def test_behind_the_end_there_is_only_the_end() -> None:
    one = matcher({"const": 1})
    assert allowed(one, ids("1")) == [EOS]
    for more in range(3):
        assert allowed(one, [*ids("1"), *[EOS] * more]) == [EOS]
    found = masks(one, ids("1"), [EOS, EOS])
    assert all(np.flatnonzero(allowed_tokens(words, VOCAB)).tolist() == [EOS] for words in found)
    assert not one.error and allowed(one, []) == ids("1")


def test_a_token_that_does_not_fit_is_an_error_and_ends_the_constraint() -> None:
    one = matcher(PERSON)
    assert (masks(one, ids("[")) == -1).all()
    assert one.error
    assert one.forced(ids("["), 8) == [] and one.allowed(ids("["), [1]) == 0


def test_forced_tokens_are_what_must_follow_and_end_when_they_are_not_taken() -> None:
    one = matcher({"type": "object", "properties": {"identifier": {"type": "integer"}}, "required": ["identifier"]})
    forced = one.forced(ids('{"'), 64)
    assert forced and BUNDLE.tokenizer.decode(forced).startswith("identifier")
    assert one.forced(ids('{"'), 3) == forced[:3]
    assert not one.was_forced([1, 2], 0)
    assert one.was_forced(forced[:3], 0)
    for _ in range(8):
        assert one.was_forced(one.forced(ids('{"'), 64), 0) or not one.forced(ids('{"'), 64)
    assert one.forced(ids('{"'), 64) == []


def test_compiling_is_cached_and_bounded() -> None:
    compiler = GrammarCompiler(BUNDLE.tokenizer)
    assert compiler.cached(grammar_of(PERSON)) is None
    compiler.compile(grammar_of(PERSON))
    assert compiler.cached(grammar_of(PERSON)) is not None
    for number in range(MAX_CACHED):
        compiler.compile(grammar_of({"const": number}))
    assert compiler.cached(grammar_of(PERSON)) is None
    with pytest.raises(InvalidParameter, match="longer than"):
        compiler.compile(" " * (MAX_GRAMMAR_BYTES + 1))
    for nonsense in ("{", "start: missing", '{"grammars":[]}'):
        with pytest.raises(InvalidParameter, match="can't be used"):
            compiler.compile(nonsense)


def test_only_constrained_samples_of_a_step_have_masks() -> None:
    one = matcher(PERSON)
    free = StepRow([5], 3, [0], 1, SamplingParams(), 3)
    waiting = StepRow([5], 3, [0], 0, SamplingParams(), 9, constraint=one)
    verified = StepRow([5, *ids('{"')], 3, [0], 3, SamplingParams(), 3, constraint=one, output=[])
    found = fill_masks([free, waiting, verified], VOCAB)
    assert found is not None
    assert found.samples.tolist() == [1, 2, 3] and found.words.shape == (3, WORDS)
    assert (found.words == masks(matcher(PERSON), [], ids('{"'))).all()
    assert fill_masks([free, waiting], VOCAB) is None


def test_a_row_whose_grammar_fails_leaves_its_neighbours_masks_alone() -> None:
    outputs = [walk(matcher(SCHEMAS["array"]), random.Random(seed)) for seed in range(3)]
    rows = [
        StepRow([5], 3, [0], 1, SamplingParams(), 3, constraint=matcher(SCHEMAS["array"]), output=output)
        for output in [outputs[0], ids("nothing"), *outputs[1:]]
    ]
    filled = fill_masks(rows, VOCAB, lambda count, words: np.zeros((count, words), np.int32))
    assert filled is not None
    assert (filled.words[1] == -1).all()
    for index, output in zip((0, 2, 3), outputs, strict=True):
        assert (filled.words[index] == masks(matcher(SCHEMAS["array"]), output)[0]).all()
    assert [bool(row.constraint.error) for row in rows if isinstance(row.constraint, Matcher)] == [False, True, False, False]


def test_many_rows_filled_at_once_are_as_each_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    outputs = [walk(matcher(SCHEMAS["array"]), random.Random(seed)) for seed in range(12)]
    outputs = [output[: seed * len(output) // 12] for seed, output in enumerate(outputs)]
    broken = ids("nothing")

    def found() -> tuple[Any, list[Matcher]]:
        rows = [
            StepRow([5], 3, [0], 1, SamplingParams(), 3, constraint=matcher(SCHEMAS["array"], index % 3), output=output)
            for index, output in enumerate([*outputs, broken])
        ]
        rows.insert(4, StepRow([5, *ids("[")], 3, [0], 2, SamplingParams(), 3, constraint=matcher(SCHEMAS["array"]), output=[]))
        filled = fill_masks(rows, VOCAB)
        assert filled is not None
        return filled.words, [row.constraint for row in rows]  # pyright: ignore[reportReturnType]

    monkeypatch.setattr(step_masks, "num_threads", lambda: 1)
    alone, _ = found()
    step_masks._executor.cache_clear()
    monkeypatch.setattr(step_masks, "num_threads", lambda: 2)
    together, matchers = found()
    assert (together == alone).all()
    assert [bool(one.error) for one in matchers] == [False] * 13 + [True]


def test_a_long_output_is_told_by_its_end() -> None:
    long = ids("[" + ", ".join(str(number) for number in range(200)))
    schema = {"type": "array", "items": {"type": "integer"}}
    one = matcher(schema)
    assert one.num_settled == 0
    for end in (len(long) - 40, len(long) - 90, len(long)):  # forwards, back, and forwards again
        start = one.num_settled
        row = StepRow([5], 3, [0], 1, SamplingParams(), 3, constraint=one, output=long[start:end], output_start=start)
        found = fill_masks([row], VOCAB)
        assert found is not None
        assert (found.words == masks(matcher(schema), long[:end])).all()
    assert one.num_settled == len(long) - MAX_UNDONE
    assert one.error == ""


def test_twins_of_a_grammar_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("common.text.grammar.load_tokenizer", lambda files: BUNDLE.tokenizer)
    grammars = WorkerGrammars(ModelFiles(name="m", format="gguf", path=Path("none")), vocab_size=VOCAB, twins=3)
    text = grammar_of(PERSON)
    assert grammars.cached(text) is None
    assert [grammars.compile(text).twin for _ in range(3)] == [0, 1, 2]
    again = [grammars.cached(text) for _ in range(4)]
    assert [one.twin for one in again if one is not None] == [0, 1, 2, 0]
    for one in again:
        assert one is not None
        assert (masks(Matcher(*one), []) == masks(matcher(PERSON), [])).all()


def test_a_fed_row_gets_the_token_into_its_output() -> None:
    row = StepRow([-1], 4, [0], 1, SamplingParams(), 3, feed=1, constraint=matcher(PERSON), output=[7, -1])
    resolve_feeds(StepPlan(1, [row]), [4, 9])
    assert row.output == [7, 9] and row.tokens == [9]
