"""What the grammar of a family's calls allows, its parser reads as whole calls whose arguments match the tools' schemas."""

from __future__ import annotations

import functools
import itertools
import json
import random
from typing import Any

import jsonschema
import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from common.models.source import ModelFiles
from common.protocol.errors import InvalidParameter
from common.text.grammar import GrammarCompiler
from common.text.output.answer_grammar import Wanted, answer_grammar
from common.text.output.events import CallEnd, CallStart
from common.text.output.formats import TOOL_FORMATS, Dialect
from common.text.output.grammar_writer import Callee
from common.text.output.parser import OutputParser
from common.text.output.tools import ToolSet
from common.text.tokenizer import Tokenizer, load_tokenizer
from services.gateway.structured import structure_of
from tests.fixtures.slow import some_slow
from tests.unit.output_cases import calls_of, events_of, reasoning_of, text_of
from tests.unit.walks import walk

WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "days": {"type": "integer", "minimum": 1, "maximum": 14},
        "city": {"type": "string", "minLength": 1, "maxLength": 12},
        "unit": {"enum": ["C", "F"]},
        "near": {"anyOf": [{"type": "string", "maxLength": 8}, {"type": "null"}]},
        "sky": {"$ref": "#/$defs/Sky"},
        "tags": {"type": "array", "items": {"enum": ["wind", "rain", None]}, "maxItems": 3},
        "place": {"$ref": "#/$defs/Place"},
        "exact": {"type": "boolean"},
        "height": {"type": ["number", "null"]},
        "note": {"type": "string"},
    },
    "required": ["city", "unit", "exact"],
    "additionalProperties": False,
    "$defs": {
        "Sky": {"type": "string", "enum": ["clear", 'grey\nor "so"']},
        "Place": {
            "type": "object",
            "properties": {"of": {"$ref": "#/$defs/Place"}, "n": {"type": "string", "maxLength": 4}},
            "additionalProperties": False,
        },
    },
}
FREE: dict[str, Any] = {"type": "object", "properties": {"x": {"type": "integer"}}}
SCHEMAS: dict[str, dict[str, Any]] = {"weather": WEATHER, "weather_now": {}, "look-up": FREE}
TOOLS = ToolSet([{"function": {"name": name, "parameters": schema}} for name, schema in SCHEMAS.items()])
FAMILIES = sorted(TOOL_FORMATS)
VARIANTS = {  # what stands in the templates of other versions
    "mistral": ["[TOOL_CALLS]", "[TOOL_CALLS][ARGS]"],
    "deepseek": ["", "<｜tool▁sep｜>\n```json\n"],
    "dsml": ["", "｜DSML｜function_calls"],
}
CASES = [(family, template) for family in FAMILIES for template in VARIANTS.get(family, [""])]
THINKING = ["none", "think", "open"]
FORM = {"type": "object", "properties": {"answer": {"type": "integer"}}, "required": ["answer"], "additionalProperties": False}
MODES = ["required", "one", "auto", "form"]
ENDINGS = ['"', "}", "]", ")", "\n</parameter>\n", "</arg_value>", "</think>", "</｜DSML｜parameter>\n"]
ENDINGS += ["</｜DSML｜tool_calls>", "</｜DSML｜function_calls>", "<｜tool▁calls▁end｜>", "</function>", "</tool_call>"]
ENDINGS += ["<|channel|>final<|message|>", "<|end|>"]
HINTS = [
    ", ", '"name": "', "1", "true", "\n", "<", "{", "[", "<think>", "<tool_call>", "<tool_call>\n<function=", "[TOOL_CALLS]",
    "<｜tool▁calls▁begin｜>", "<｜DSML｜tool_calls>", "<｜DSML｜function_calls>", '{"name": "weather", "parameters": ',
    "[weather(", "[weather_now(", "<|python_start|>", "<|python_tag|>", "<|channel|>commentary",
    "<|end|><|start|>assistant", '{"type": "function", "name": "',
    "\n[weather_now()]", '\n{"name": "weather_now", "parameters": {}}',
]  # fmt: skip


def callees(*strict: str) -> list[Callee]:
    return [
        Callee(name=name, parameters=schema if name in strict else None, place=f"the schema of {name}")
        for name, schema in SCHEMAS.items()
    ]


@functools.cache
def marked_tokenizer() -> Tokenizer:
    """A token is a byte, or a mark of some family."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE(vocab={character: index for index, character in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    marks = sorted({mark for entry in TOOL_FORMATS.values() for mark in entry.marks} | {"<think>", "</think>"})
    backend.add_special_tokens([AddedToken(mark, special=True) for mark in [*marks, "<|eos|>"]])
    eos = backend.token_to_id("<|eos|>")
    assert eos is not None
    return Tokenizer(backend, eos_ids=[eos])


@functools.cache
def compiler_of(tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer)


def grammar_of(tokenizer: Tokenizer, dialect: Dialect, template: str, mode: str, *, is_open: bool) -> str:
    strict = ["weather", "weather_now"] if mode == "auto" else list(SCHEMAS)
    wanted = Wanted(
        callees=callees(*strict)[: 1 if mode == "one" else None],
        must_call=mode in ("required", "one"),
        many=mode != "one",
        form=structure_of({"type": "json_schema", "json_schema": {"schema": FORM}}, None).grammar if mode == "form" else "",
    )
    special = tokenizer.special_token_ids(dialect.marks(tools=True, reasoning=True))
    return answer_grammar(wanted, dialect, template=template, special=special, is_open=is_open)


def check(family: str, template: str, mode: str, thinking: str, tokenizer: Tokenizer, seeds: range) -> int:
    """Walk, parse, and look at what came; returns how many calls there were."""
    reasoning = "harmony" if family == "harmony" else "none" if thinking == "none" else "think"
    dialect, is_open = Dialect(family, reasoning), thinking == "open" and family != "harmony"
    grammar = grammar_of(tokenizer, dialect, template, mode, is_open=is_open)
    compiler = compiler_of(tokenizer)
    count = ended = 0
    for seed in seeds:
        dice = random.Random(seed)
        matcher, end_chance = compiler.compile(grammar), 0.02 if mode == "auto" else 0.5
        text = walk(matcher, tokenizer, dice, hints=HINTS, endings=ENDINGS, max_tokens=250, end_chance=end_chance)
        if text is None:
            continue
        ended += 1
        events = events_of(OutputParser(dialect, tools=TOOLS, is_open=is_open), [text])
        places = sorted(dice.sample(range(len(text) + 1), min(5, len(text) + 1)))
        pieces = [text[start:end] for start, end in itertools.pairwise([0, *places, len(text)])]
        assert events_of(OutputParser(dialect, tools=TOOLS, is_open=is_open), pieces) == events
        calls, said = calls_of(events), text_of(events)
        assert [type(event) for event in events].count(CallStart) == [type(event) for event in events].count(CallEnd)
        for name, arguments in calls:
            strict = mode != "auto" or name != "look-up"
            jsonschema.validate(json.loads(arguments), SCHEMAS[name] if strict else {"type": "object"})
        if mode in ("required", "one"):
            assert calls and not said, text
        if mode == "one":
            assert [name for name, _ in calls] == ["weather"]
        if mode == "form":
            assert bool(calls) != bool(said), text
            assert calls or jsonschema.validate(json.loads(said), FORM) is None
        assert reasoning != "none" or not reasoning_of(events)
        count += len(calls)
    assert ended >= len(seeds) // 3, "most walks come to an end"
    return count


@pytest.mark.parametrize("seeds", some_slow([range(3), range(3, 15)], quick=[range(3)]), ids=str)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("family", "template"), CASES)
def test_what_the_grammar_allows_is_read_as_calls(
    family: str, template: str, mode: str, seeds: range, smollm2: ModelFiles
) -> None:
    if mode == "form" and family in ("llama_json", "pythonic"):
        pytest.skip("refused: see below")
    for thinking in THINKING[: 1 if family == "harmony" else None]:
        count = check(family, template, mode, thinking, marked_tokenizer(), seeds)
        if thinking != "none" and len(seeds) < 10:
            continue
        count += check(family, template, mode, thinking, smollm2_tokenizer(smollm2), seeds)
        assert count or len(seeds) < 10, "calls were made"


@functools.cache
def smollm2_tokenizer(files: ModelFiles) -> Tokenizer:
    return load_tokenizer(files)


@pytest.mark.parametrize("family", ["llama_json", "pythonic"])
def test_calls_without_marks_are_no_choice_beside_a_form(family: str) -> None:
    with pytest.raises(InvalidParameter, match="can't be told"):
        grammar_of(marked_tokenizer(), Dialect(family), "", "form", is_open=False)
