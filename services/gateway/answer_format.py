"""What a chat request says of reasoning and tools, against what the model's template knows of them. Pure."""

from __future__ import annotations

from typing import Any

from common.protocol.errors import InvalidParameter
from common.text.bundle import TextBundle
from common.text.output.tools import ToolSet
from common.text.template import ChatTemplate
from services.gateway.arguments import Notes
from services.gateway.choice_events import AnswerFormat
from services.gateway.openai import ChatRequest
from services.gateway.tools import named_tool

_RESERVED = frozenset({"messages", "tools", "add_generation_prompt", "strftime_now"})
_SWITCHES = ("enable_thinking", "thinking")
"""Names that templates have for whether the model reasons."""
_PROMPT_END_TOKENS = 16


def template_variables(bundle: TextBundle, request: ChatRequest, notes: Notes) -> dict[str, Any]:
    """Return the variables that a request sets in its template; those of `chat_template_kwargs` come first, and `documents` is
    one. `notes` hears of reasoning that is asked of a model that does not reason, or has no levels of it: agents ask for it
    with each request, whatever the model.

    :raises InvalidParameter: as `template_of`; if a variable can't be set, no reasoning is wanted of a model that always
        reasons, or `notes` refuses what has no effect.
    """
    template = template_of(bundle, request)
    reasons = bundle.dialect_of(template).reasoning != "none"
    variables: dict[str, Any] = dict(request.chat_template_kwargs or {})
    if taken := _RESERVED.intersection(variables):
        raise InvalidParameter(f"chat_template_kwargs can't set {min(taken)}", param="chat_template_kwargs")
    if request.documents:
        variables.setdefault("documents", request.documents)
    if variables.get("documents") and "documents" not in template.names:
        raise InvalidParameter("the chat template of this model shows no documents: send none", param="documents")
    switch = next((name for name in _SWITCHES if name in template.names), None)
    effort = request.reasoning_effort
    if effort is not None:
        if "reasoning_effort" in template.names:
            variables.setdefault("reasoning_effort", effort)
        elif effort == "none":
            if switch is not None:
                variables.setdefault(switch, False)
        else:
            notes.note("reasoning_effort", "this model has no such levels")
    if request.enable_thinking is not None:
        if switch is not None:
            variables.setdefault(switch, request.enable_thinking)
        elif request.enable_thinking and not reasons:
            notes.note("enable_thinking", "this model does not reason")
        elif reasons and not request.enable_thinking:
            raise InvalidParameter("this model always reasons: leave enable_thinking out", param="enable_thinking")
    return variables


def template_of(bundle: TextBundle, request: ChatRequest) -> ChatTemplate:
    """Return the template that renders a request.

    :raises InvalidParameter: if there is none, or the request offers tools, and the model can't be shown any or its calls can't
        be read.
    """
    offered = request.offered_tools
    template = bundle.template_called(request.chat_template or "", tools=bool(offered))
    if offered and "tools" not in template.names:
        raise InvalidParameter("the chat template of this model shows no tools: send none", param="tools")
    if offered and bundle.dialect_of(template).tool_format is None:
        raise InvalidParameter("it is not known how this model calls tools (tool_parser): send none", param="tools")
    return template


def format_of(bundle: TextBundle, request: ChatRequest, prompt: list[int], *, constrained: bool = False) -> AnswerFormat | None:
    """Return how answers to `prompt` are read; None if they are text and nothing else.

    `constrained`: a form was asked for. Without tools it holds from the first token on: there is neither reasoning nor a call.

    :raises InvalidParameter: as `template_of`.
    """
    offered = request.offered_tools
    if constrained and not offered:
        return None
    dialect = bundle.dialect_of(template_of(bundle, request))
    reasons = dialect.reasoning != "none"
    if not offered and not reasons and dialect.tools != "harmony":
        return None
    end = _end_of(bundle, request, prompt) if reasons else ""
    return AnswerFormat(
        dialect=dialect,
        tools=ToolSet(offered) if offered else None,
        is_open=dialect.is_open(end, continues=request.continues),
        shows_reasoning=request.include_reasoning is not False,
        max_calls=1 if request.parallel_tool_calls is False or named_tool(request.tool_choice) else None,
        shown=bundle.tokenizer.special_ids_of(dialect.marks(tools=bool(offered), reasoning=reasons)),
    )


def _end_of(bundle: TextBundle, request: ChatRequest, prompt: list[int]) -> str:
    """Return the prompt's last words, or the message that is continued."""
    if not request.continues:
        return bundle.tokenizer.decode(prompt[-_PROMPT_END_TOKENS:], skip_special=False)
    content = request.messages[-1].content
    return content if isinstance(content, str) else "\n".join(part.text or "" for part in content or ())
