"""Seed-OSS: calls as Qwen3-Coder writes them, within `<seed:tool_call>` and `</seed:tool_call>`.

Source: the chat template of Seed-OSS-36B-Instruct, and vLLM's `seed_oss_tool_parser.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

from common.text.output.families import qwen3_coder
from common.text.output.grammar_writer import Callee, CallSyntax, GrammarWriter
from common.text.output.scan import Reading, Scan
from common.text.output.sink import Sink
from common.text.output.tools import ToolSet

TAGS = qwen3_coder.Tags("<seed:tool_call>", "</seed:tool_call>")


def read(scan: Scan, sink: Sink, tools: ToolSet) -> Reading[None]:
    yield from qwen3_coder.read(scan, sink, tools, TAGS)


def grammar(writer: GrammarWriter, callees: Sequence[Callee]) -> CallSyntax:
    return qwen3_coder.grammar(writer, callees, TAGS)
