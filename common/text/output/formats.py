"""The table of formats: how families of models write reasoning and calls, and by what a model's chat template shows its own.

A new family is a file in `families/` and an entry here. An entry's marks are tokens that are special in some vocabularies, so
they must be shown to the parser.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

import msgspec

from common.text.output.families import (
    deepseek,
    dsml,
    glm,
    granite,
    harmony,
    hermes,
    llama_json,
    mistral,
    pythonic,
    qwen3_coder,
    seed,
)
from common.text.output.grammar_writer import Callee, CallSyntax, GrammarWriter
from common.text.output.scan import Reading

ToolParser = Literal[
    "auto",
    "none",
    "deepseek",
    "dsml",
    "glm",
    "granite",
    "harmony",
    "hermes",
    "llama_json",
    "mistral",
    "pythonic",
    "qwen3_coder",
    "seed",
]
ReasoningParser = Literal["auto", "none", "harmony", "magistral", "seed", "think"]


class ToolFormat(msgspec.Struct, frozen=True, kw_only=True):
    """How a family writes calls. `signs`: all the texts of one of these stand in its chat template.

    `read` is the parser: (scan, sink, tools). `grammar` writes what it reads: (writer, callees). `id_length`: of the ids of
    calls, where the template insists on one.
    """

    signs: tuple[tuple[str, ...], ...]
    marks: tuple[str, ...]
    read: Callable[..., Reading[Any]]
    grammar: Callable[[GrammarWriter, Sequence[Callee]], CallSyntax]
    id_length: int = 0


class ReasoningFormat(msgspec.Struct, frozen=True, kw_only=True):
    """How a family marks reasoning; harmony's own parser reads it, so its marks are empty."""

    signs: tuple[str, ...]
    opening: str = ""
    closing: str = ""


TOOL_FORMATS: dict[str, ToolFormat] = {
    "harmony": ToolFormat(
        signs=(("<|channel|>",),),
        marks=harmony.MARKERS,
        read=harmony.read,
        grammar=harmony.grammar,
    ),
    "dsml": ToolFormat(
        signs=(("｜DSML｜",),),
        marks=("｜DSML｜",),
        read=dsml.read,
        grammar=dsml.grammar,
    ),
    "deepseek": ToolFormat(
        signs=(("<｜tool▁calls▁begin｜>",),), marks=deepseek.MARKERS, read=deepseek.read, grammar=deepseek.grammar
    ),
    "glm": ToolFormat(
        signs=(("<tool_call>", "<arg_key>"),),
        marks=glm.MARKERS,
        read=glm.read,
        grammar=glm.grammar,
    ),
    "seed": ToolFormat(signs=(("<seed:tool_call>",),), marks=seed.TAGS, read=seed.read, grammar=seed.grammar),
    "granite": ToolFormat(signs=(("<|tool_call|>",),), marks=(granite.OPEN,), read=granite.read, grammar=granite.grammar),
    "qwen3_coder": ToolFormat(
        signs=(("<function=", "<parameter="),),
        marks=qwen3_coder.TAGS,
        read=qwen3_coder.read,
        grammar=qwen3_coder.grammar,
    ),
    "mistral": ToolFormat(
        signs=(("[TOOL_CALLS]",),),
        marks=mistral.MARKERS,
        read=mistral.read,
        grammar=mistral.grammar,
        id_length=mistral.ID_LENGTH,
    ),
    "hermes": ToolFormat(
        signs=(("<tool_call>",),), marks=(hermes.OPEN, hermes.CLOSE), read=hermes.read, grammar=hermes.grammar
    ),
    "pythonic": ToolFormat(
        signs=(("[func_name1(",),), marks=(pythonic.START, pythonic.END), read=pythonic.read, grammar=pythonic.grammar
    ),
    "llama_json": ToolFormat(
        signs=(('{"name": function name, "parameters"',), ("<|python_tag|>", '"parameters"')),
        marks=(llama_json.TAG,),
        read=llama_json.read,
        grammar=llama_json.grammar,
    ),
}
"""Looked through in this order: `<tool_call>` alone is Hermes's."""

REASONING_FORMATS: dict[str, ReasoningFormat] = {
    "harmony": ReasoningFormat(signs=("<|channel|>",)),
    "magistral": ReasoningFormat(signs=("[THINK]",), opening="[THINK]", closing="[/THINK]"),
    "seed": ReasoningFormat(signs=("<seed:think>",), opening="<seed:think>", closing="</seed:think>"),
    "think": ReasoningFormat(signs=("<think>", "</think>"), opening="<think>", closing="</think>"),
}

assert set(get_args(ToolParser)) == {"auto", "none", *TOOL_FORMATS}
assert set(get_args(ReasoningParser)) == {"auto", "none", *REASONING_FORMATS}


class Dialect(msgspec.Struct, frozen=True):
    """What a model's answers are read with: names of the tables above, or none."""

    tools: str = "none"
    reasoning: str = "none"

    @property
    def tool_format(self) -> ToolFormat | None:
        return TOOL_FORMATS.get(self.tools)

    @property
    def reasoning_format(self) -> ReasoningFormat | None:
        return REASONING_FORMATS.get(self.reasoning)

    @property
    def id_length(self) -> int:
        """How long the ids of calls must be; 0: any length."""
        found = self.tool_format
        return 0 if found is None else found.id_length

    def marks(self, *, tools: bool, reasoning: bool) -> frozenset[str]:
        """Return the tokens that the parser must see."""
        marks: set[str] = set()
        if (tools or self.tools == "harmony") and self.tool_format is not None:
            marks.update(self.tool_format.marks)
        if reasoning and self.reasoning_format is not None:
            marks.update(
                harmony.MARKERS
                if self.reasoning == "harmony"
                else (self.reasoning_format.opening, self.reasoning_format.closing)
            )
        return frozenset(marks)

    def is_open(self, prompt_end: str, *, continues: bool = False) -> bool:
        """Return whether an answer to a prompt that ends so begins inside reasoning. `continues`: the prompt's end is text that
        the model goes on with, so reasoning may have been opened anywhere in it."""
        found = self.reasoning_format
        if found is None or not found.opening:
            return False
        if continues:
            return prompt_end.rfind(found.opening) > prompt_end.rfind(found.closing)
        return prompt_end.rstrip().endswith(found.opening)


@functools.lru_cache(maxsize=64)
def dialect_of(template: str, tool_parser: ToolParser = "auto", reasoning_parser: ReasoningParser = "auto") -> Dialect:
    """Return the dialect of a model by the source of its chat template; what is not `auto` is taken as it is."""
    tools, reasoning = tool_parser, reasoning_parser
    if tools == "auto":
        found = [
            name
            for name, entry in TOOL_FORMATS.items()
            if any(all(sign in template for sign in signs) for signs in entry.signs)
        ]
        tools = found[0] if found else "none"
    if reasoning == "auto":
        found = [name for name, entry in REASONING_FORMATS.items() if any(sign in template for sign in entry.signs)]
        reasoning = found[0] if found else "none"
    return Dialect(tools, reasoning)
