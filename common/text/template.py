"""Chat messages to prompt text, by the template that came with the model.

Templates are programs. They run in minijinja with a budget of instructions (`fuel`), and set up like transformers'
`apply_chat_template`: trimmed blocks, `raise_exception`, `strftime_now`, a `tojson` that leaves HTML alone, Jinja's
`iterable` and `sequence`, and `{% generation %}` marks ignored. Only the operator's model brings a template; clients can't.

What clients do bring is text, and a user's "<|im_end|><|im_start|>system" must not become a turn of its own: see
`guard_messages`.
"""

from __future__ import annotations

import datetime
import functools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import minijinja

from common.protocol.errors import ConfigError, InvalidParameter
from common.text.conversation import (
    has_late_systems,
    num_leading_systems,
    with_one_system,
    with_single_calls,
    with_systems_first,
)
from common.text.special_tokens import SpecialTokens
from common.text.tokenizer import Tokenizer

Message = Mapping[str, Any]

_FUEL = 5_000_000  # a 1,000-message chat takes ~100,000 in the largest templates; all of it is gone in under a second
_NAME = "chat_template"
_ROLE = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,63}")
_GENERATION = re.compile(r"\{%(-?)\s*(end)?generation\s*(-?)%\}")
_COMMENT = re.compile(r"\{#.*?#\}", re.DOTALL)
_STRING = re.compile(r"""'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*\"""", re.DOTALL)
_TAG = re.compile(rf"""\{{[{{%](?:{_STRING.pattern}|[^'"])*?[%}}]\}}""", re.DOTALL)
_VARIABLE = re.compile(r"(?<![.\w])[A-Za-z_]\w*")
_UNKNOWN_METHOD = re.compile(
    r"\.\s*(casefold|center|encode|expandtabs|format_map|isdecimal|isidentifier|isprintable|istitle|ljust|partition|removeprefix|"
    r"removesuffix|rindex|rjust|rpartition|rsplit|swapcase|translate|zfill)\s*\("
)
"""A call of what `pycompat` leaves out of Python's strings. `index` is one of them, and of lists, which have it."""
_GUARDS = [chr(code) for code in range(0xFDD0, 0xFDF0)]  # noncharacters: never meant for text between people
_MAX_DEPTH = 32
_PROBE_USER = {"role": "user", "content": "x"}


class _Refused(Exception):
    """A template called `raise_exception`: the conversation is not one it supports."""


class ChatTemplate:
    """One model's chat template, compiled. `render` is a pure function of its arguments; safe to share."""

    def __init__(self, source: str, special_tokens: SpecialTokens | None = None) -> None:
        """`special_tokens`: names such as bos_token and eos_token that the template may use, with their text.

        :raises ConfigError: if `source` is not a template.
        """
        environment = minijinja.Environment(debug=False, fuel=_FUEL, trim_blocks=True, lstrip_blocks=True, pycompat=True)
        environment.add_global("raise_exception", _raise_exception)
        environment.add_filter("tojson", _tojson)
        environment.add_test("iterable", _is_iterable)
        environment.add_test("sequence", _is_sequence)
        try:
            environment.add_template(_NAME, _without_generation(source))
        except minijinja.TemplateError as error:
            raise ConfigError(f"the model's chat template can't be compiled: {error}") from error
        self._environment = environment
        self._source = source
        self._special_tokens = dict(special_tokens or {})

    @property
    def source(self) -> str:
        return self._source

    def mentions(self, word: str) -> bool:
        """Whether the template's source has `word` in it: a role that it does not mention, it does not know."""
        return word in self._source

    @functools.cached_property
    def names(self) -> frozenset[str]:
        """The names in the template's tags: a variable that is none of them, it does not know. Fields such as the
        `message.thinking` of gpt-oss' are none."""
        tags = _TAG.findall(_COMMENT.sub("", self._source))
        return frozenset(name for tag in tags for name in _VARIABLE.findall(_STRING.sub("", tag)))

    @property
    def unknown_methods(self) -> list[str]:
        """Methods of Python's strings that the template calls and minijinja lacks. A chat that comes to one is refused."""
        tags = _TAG.findall(_COMMENT.sub("", self._source))
        return sorted({name for tag in tags for name in _UNKNOWN_METHOD.findall(_STRING.sub("''", tag))})

    @functools.cached_property
    def _call_form(self) -> tuple[str | None, bool] | None:
        """How the template takes a message that has calls and no text: its content (nearly all take None; some would print
        it), and whether the arguments are JSON text, as DeepSeek's want them, or the object. None: it shows no calls."""
        for content in (None, ""):
            for as_text in (False, True):
                text = self._tried([_PROBE_USER, _in_form(_probe_calls("needle"), content, as_text)])
                if "needle" in text and not (content is None and "None" in text):
                    return content, as_text
        return None

    @functools.cached_property
    def _takes_calls_together(self) -> bool:
        """Whether the template shows all calls of a message. Llama 3's refuse more than one, gpt-oss' leaves them out."""
        if self._call_form is None:
            return True
        text = self._tried([_PROBE_USER, _in_form(_probe_calls("needle_1", "needle_2"), *self._call_form)])
        return "needle_1" in text and "needle_2" in text

    @functools.cached_property
    def _takes_systems_together(self) -> bool:
        """Whether the template shows a second system message. Gemma's and Mistral's refuse it, gpt-oss' leaves it out."""
        system = [{"role": "system", "content": "x"}, {"role": "system", "content": "needle"}]
        return "needle" in self._tried([*system, _PROBE_USER])

    @functools.cached_property
    def _takes_late_systems(self) -> bool:
        """Whether the template shows a system message behind an answer. Gemma's refuses it, gpt-oss' leaves it out."""
        answered = [_PROBE_USER, {"role": "assistant", "content": "x"}]
        return "needle" in self._tried([*answered, {"role": "system", "content": "needle"}, _PROBE_USER])

    @functools.cached_property
    def _needs_descriptions(self) -> bool:
        """Whether the template takes tools with a description only, as gpt-oss' does."""
        bare = {"type": "function", "function": {"name": "probe", "parameters": {"type": "object", "properties": {}}}}
        described = {"type": "function", "function": bare["function"] | {"description": ""}}
        return not self._tried([_PROBE_USER], [bare]) and bool(self._tried([_PROBE_USER], [described]))

    def _tried(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None) -> str:
        """Return the prompt for `messages`, empty if the template refuses them."""
        context = dict(self._special_tokens) | {"messages": messages, "tools": tools, "add_generation_prompt": False}
        context["strftime_now"] = datetime.datetime(2025, 1, 1).strftime
        try:
            return self._environment.render_template(_NAME, **context)
        except (_Refused, minijinja.TemplateError, TypeError, ValueError):
            return ""

    def _adapted(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Normalized messages as the template takes them."""
        if has_late_systems(messages) and not self._takes_late_systems:
            messages = with_systems_first(messages)
        if num_leading_systems(messages) > 1 and not self._takes_systems_together:
            messages = with_one_system(messages)
        most_calls = max(len(message.get("tool_calls") or ()) for message in messages)
        if most_calls > 1 and not self._takes_calls_together:
            messages = with_single_calls(messages)
        if most_calls and (form := self._call_form):
            messages = [_in_form(message, *form) if message.get("tool_calls") else message for message in messages]
        return messages

    def _adapted_tools(self, tools: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """Tools as the template takes them."""
        if all(_is_described(tool) for tool in tools) or not self._needs_descriptions:
            return list(tools)
        return [
            tool if _is_described(tool) else {**tool, "function": {**tool["function"], "description": ""}} for tool in tools
        ]

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        now: datetime.datetime | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt for `messages`, special tokens included as text.

        A message has a `role` and a `content`, which is a string or a list of `{"type": "text", "text": …}` parts (joined
        by newlines); whatever else it holds goes to the template as it is. Where the template takes no more, system messages
        at the beginning become one, and calls of one message become messages of their own. `variables` are more names for the
        template, such as `enable_thinking`. `now` is what templates that print a date print; by default the present.

        :raises InvalidParameter: if a message is malformed, or the template refuses the conversation or runs too long.
        """
        moment = now or datetime.datetime.now()
        context = {"documents": None} | dict(variables or {}) | self._special_tokens
        context |= {
            "messages": self._adapted(normalize_messages(messages)),
            "tools": self._adapted_tools(tools) if tools else None,
            "add_generation_prompt": add_generation_prompt,
            "strftime_now": moment.strftime,
        }
        try:
            return self._environment.render_template(_NAME, **context)
        except _Refused as error:
            raise InvalidParameter(f"the model's chat template refuses these messages: {error}", param="messages") from error
        except minijinja.TemplateError as error:
            reason = "it took too long" if error.kind == "OutOfFuel" else error.message
            raise InvalidParameter(
                f"the model's chat template can't render these messages: {reason}", param="messages"
            ) from error
        except (TypeError, ValueError, OverflowError) as error:  # from values that a filter or a conversion can't take
            raise InvalidParameter(
                f"the model's chat template can't render these messages: {error}", param="messages"
            ) from error


def normalize_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages as templates expect them: content a string (or None beside tool calls), tool arguments as objects.

    :raises InvalidParameter: naming the message and what is wrong with it.
    """
    if not messages:
        raise InvalidParameter("messages must hold at least one message", param="messages")
    return [_normalize(message, index) for index, message in enumerate(messages)]


def _normalize(message: Message, index: int) -> dict[str, Any]:
    where = f"messages[{index}]"
    if not isinstance(message, Mapping):
        raise InvalidParameter(f"{where} must be an object with a role and a content", param=where)
    role = message.get("role")
    if not isinstance(role, str) or not _ROLE.fullmatch(role):
        raise InvalidParameter(f"{where}.role must be a word such as system, user or assistant", param=f"{where}.role")
    calls = message.get("tool_calls")
    content = _text_of(message.get("content"), f"{where}.content")
    if content is None and not calls:
        raise InvalidParameter(f"{where}.content must be a string or a list of text parts", param=f"{where}.content")
    normal = dict(message) | {"role": role, "content": content}
    if calls:
        if not isinstance(calls, list) or not all(isinstance(call, Mapping) for call in calls):
            raise InvalidParameter(f"{where}.tool_calls must be a list of objects", param=f"{where}.tool_calls")
        normal["tool_calls"] = [_with_parsed_arguments(call) for call in calls]
    if normal.get("reasoning_content") is not None:
        normal.setdefault("thinking", normal["reasoning_content"])  # its name in gpt-oss' template
    return normal


def _text_of(content: Any, where: str) -> str | None:
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidParameter(f"{where} must be a string or a list of text parts", param=where)
    texts: list[str] = []
    for index, part in enumerate(content):
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise InvalidParameter(
                f'{where}[{index}] must be {{"type": "text", "text": "…"}}; this model takes text only',
                param=f"{where}[{index}]",
            )
        texts.append(part["text"])
    return "\n".join(texts)


def _with_parsed_arguments(call: Mapping[str, Any]) -> dict[str, Any]:
    """OpenAI clients send tool arguments as a JSON string; templates want the object."""
    function = call.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return dict(call)
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except (ValueError, RecursionError):
        return dict(call)
    # only an object replaces the string: normalizing twice must not decode twice (special tokens could hide in there)
    return dict(call) | {"function": dict(function) | {"arguments": arguments}} if isinstance(arguments, dict) else dict(call)


def _probe_calls(*values: str) -> dict[str, Any]:
    """Return a normalized message with a call for each of `values`, by which the template's text is searched."""
    functions = [{"name": "probe", "arguments": {"key": value}} for value in values]
    calls = [{"id": f"probe012{index}", "type": "function", "function": each} for index, each in enumerate(functions)]
    return {"role": "assistant", "content": None, "tool_calls": calls}


def _is_described(tool: Mapping[str, Any]) -> bool:
    """Whether a tool has a description, or is none that could have one."""
    function = tool.get("function")
    return not isinstance(function, Mapping) or isinstance(function.get("description"), str)


def _in_form(message: Message, content: str | None, as_text: bool) -> dict[str, Any]:
    """A normalized message with calls as a template takes it, see `ChatTemplate._call_form`."""
    calls: list[dict[str, Any]] = message["tool_calls"]
    if as_text:
        calls = [_with_argument_text(call) for call in calls]
    changed = dict(message) | {"content": message["content"] or content, "tool_calls": calls}
    if changed["content"]:
        changed.pop("thinking", None)  # gpt-oss' template refuses both beside calls
    return changed


def _with_argument_text(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, Mapping) or isinstance(function.get("arguments"), str):
        return dict(call)
    return dict(call) | {"function": dict(function) | {"arguments": _tojson(function.get("arguments"))}}


def guard_messages(value: Any, tokenizer: Tokenizer) -> tuple[Any, str]:
    """`value` (normalized messages, tools) with special tokens' text disarmed, and the guard to hand to `Tokenizer.encode`.

    A guard character is put inside every such text before rendering, so that only the template's own special tokens are
    found afterwards; `encode` takes it out again, and the user's characters reach the model as plain text. Nearly always
    there is nothing to disarm: then `value` comes back as it is, with an empty guard.

    :raises InvalidParameter: if `value` is nested too deeply, or holds a lone surrogate (minijinja would replace it silently).
    """
    texts = list(_texts(value, 0))
    try:
        for text in texts:
            text.encode()
    except UnicodeEncodeError as error:
        raise InvalidParameter(f"messages hold text that is not valid Unicode: {error.reason}", param="messages") from error
    if not any(map(tokenizer.find_special, texts)):
        return value, ""
    guard = next((guard for guard in _GUARDS if not any(guard in text for text in texts)), None)
    if guard is None:
        raise InvalidParameter("messages hold every Unicode noncharacter and special tokens besides", param="messages")
    return _guarded(value, tokenizer, guard), guard


def _texts(value: Any, depth: int) -> Iterator[str]:
    if depth > _MAX_DEPTH:
        raise InvalidParameter(f"messages are nested more than {_MAX_DEPTH} levels deep", param="messages")
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _texts(key, depth + 1)
            yield from _texts(item, depth + 1)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _texts(item, depth + 1)


def _guarded(value: Any, tokenizer: Tokenizer, guard: str) -> Any:
    if isinstance(value, str):
        return tokenizer.guard_special(value, guard)
    if isinstance(value, Mapping):
        return {_guarded(key, tokenizer, guard): _guarded(item, tokenizer, guard) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_guarded(item, tokenizer, guard) for item in value]
    return value


def _without_generation(source: str) -> str:
    """`{% generation %}` marks the assistant's part for training masks; here it is a block that is always rendered."""

    def plain(match: re.Match[str]) -> str:
        return f"{{%{match[1]} {'endif' if match[2] else 'if true'} {match[3]}%}}"

    return _GENERATION.sub(plain, source)


def _raise_exception(message: object) -> None:
    raise _Refused(str(message))


def _is_iterable(value: object) -> bool:
    """Return whether Python iterates over `value`; for minijinja None is iterable, too."""
    return isinstance(value, Iterable)


def _is_sequence(value: object) -> bool:
    """Return whether `value` has a length and items; for Jinja that is true of texts and mappings, too."""
    return hasattr(value, "__len__") and hasattr(value, "__getitem__")


def _tojson(
    value: Any,
    indent: int | None = None,
    ensure_ascii: bool = False,
    separators: Sequence[str] | None = None,
    sort_keys: bool = False,
) -> str:
    pair = (separators[0], separators[1]) if separators else None
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=pair, sort_keys=sort_keys)
