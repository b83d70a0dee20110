"""OpenAI's request bodies: the schemas, and a strict decoder that turns every mistake into one typed 400.

Strict means: no numbers as strings, no NaN, every size bounded, unknown arguments refused with the nearest known name. Three
kinds of argument are known but not obeyed:

* *ignored* ones, which clients send and which change no token (`user`, `metadata`, …);
* *unsupported* ones (`tools`, `response_format`, …): a 400 that says so, except for the values that ask for nothing;
* `null` anywhere means "not given", as at OpenAI.

What needs the model (its vocabulary, its context, its template) is checked in `prepare.py`. Pure.
"""

from __future__ import annotations

import difflib
import gc
import re
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from common.protocol.errors import InvalidParameter

MAX_STOPS = 16
MAX_STOP_CHARS = 256
MAX_CHOICES = 128
MAX_LOGPROBS = 20
MAX_STOP_TOKEN_IDS = 128
MAX_LOGIT_BIAS = 1024
MAX_TEMPLATE_ARGUMENTS = 16

TokenId = Annotated[int, Meta(ge=0, le=2**32 - 1)]
Count = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
StopString = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_CHARS)]
Scalar = bool | int | float | str | None

Unread = msgspec.Raw
"""The JSON of an argument that is not obeyed: checked for syntax, never turned into objects."""

_NOT_GIVEN = msgspec.Raw()


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None  # ignored: OpenAI's padding against traffic analysis


class ContentPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Only `type: text` is served; the others are decoded so that the error can say so."""

    type: str
    text: str | None = None
    image_url: Unread = _NOT_GIVEN
    input_audio: Unread = _NOT_GIVEN
    file: Unread = _NOT_GIVEN
    refusal: str | None = None


class ChatMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The last six come back from clients that resend an assistant's message; only empty ones mean nothing."""

    role: str
    content: str | list[ContentPart] | None = None
    name: Annotated[str, Meta(max_length=256)] | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    annotations: Unread = _NOT_GIVEN
    audio: Unread = _NOT_GIVEN
    function_call: Unread = _NOT_GIVEN
    tool_calls: Unread = _NOT_GIVEN
    tool_call_id: str | None = None


class Arguments(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What both endpoints share. `timeout` is the deadline in seconds; `top_k` 0 or -1 is off."""

    model: Annotated[str, Meta(max_length=512)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=10)] | None = None
    logit_bias: dict[int, Annotated[float, Meta(ge=-100, le=100)]] | None = None
    max_tokens: Count | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    stop: StopString | Annotated[list[StopString], Meta(max_length=MAX_STOPS)] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=MAX_STOP_TOKEN_IDS)] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    timeout: Annotated[float, Meta(gt=0)] | None = None

    user: Unread = _NOT_GIVEN
    metadata: Unread = _NOT_GIVEN
    store: bool | None = None
    service_tier: Unread = _NOT_GIVEN
    safety_identifier: Unread = _NOT_GIVEN
    prompt_cache_key: Unread = _NOT_GIVEN
    prompt_cache_retention: Unread = _NOT_GIVEN

    response_format: Unread = _NOT_GIVEN

    @property
    def stops(self) -> list[str]:
        if self.stop is None:
            return []
        return [self.stop] if isinstance(self.stop, str) else self.stop


class ChatRequest(Arguments, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Meta(max_length=65536)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Scalar] | None = None

    parallel_tool_calls: bool | None = None  # ignored: says nothing without tools

    tools: Unread = _NOT_GIVEN
    tool_choice: Unread = _NOT_GIVEN
    functions: Unread = _NOT_GIVEN
    function_call: Unread = _NOT_GIVEN
    modalities: Unread = _NOT_GIVEN
    audio: Unread = _NOT_GIVEN
    prediction: Unread = _NOT_GIVEN
    web_search_options: Unread = _NOT_GIVEN
    reasoning_effort: Unread = _NOT_GIVEN
    verbosity: Unread = _NOT_GIVEN


class CompletionRequest(Arguments, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/completions. `prompt`: a string, strings, token ids, or lists of token ids."""

    prompt: str | list[str | TokenId | list[TokenId]]
    logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    echo: bool | None = None

    suffix: Unread = _NOT_GIVEN
    best_of: Unread = _NOT_GIVEN

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """One entry per prompt.

        :raises InvalidParameter: if strings, ids and lists of ids are mixed.
        """
        if isinstance(self.prompt, str):
            return [self.prompt]
        texts = [part for part in self.prompt if isinstance(part, str)]
        ids = [part for part in self.prompt if isinstance(part, int)]
        lists = [part for part in self.prompt if isinstance(part, list)]
        if len(texts) == len(self.prompt):
            return texts
        if len(lists) == len(self.prompt):
            return lists
        if len(ids) == len(self.prompt):
            return [ids]
        raise InvalidParameter("prompt mixes strings, token ids and lists of token ids: send one kind", param="prompt")


_ASKS_FOR_NOTHING: dict[str, tuple[Any, ...]] = {
    "response_format": ({"type": "text"},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "reasoning_effort": (),
    "verbosity": (),
    "suffix": ("",),
    "best_of": (1,),
}
_MAX_HARMLESS_BYTES = 64

_chat_decoder = msgspec.json.Decoder(ChatRequest)
_completion_decoder = msgspec.json.Decoder(CompletionRequest)
_RequestT = TypeVar("_RequestT", ChatRequest, CompletionRequest)


def decode_chat(body: bytes) -> ChatRequest:
    """:raises InvalidParameter: naming the argument, for anything a well-formed chat request does not have."""
    request = _decode(_chat_decoder, body, ChatRequest)
    if not request.messages:
        raise InvalidParameter("messages is empty: send at least one message", param="messages")
    for index, message in enumerate(request.messages):
        _check_message(message, f"messages[{index}]")
    if request.top_logprobs and not request.logprobs:
        raise InvalidParameter("top_logprobs needs logprobs: true", param="top_logprobs")
    if request.max_tokens is not None and request.max_completion_tokens not in (None, request.max_tokens):
        raise InvalidParameter("max_tokens and max_completion_tokens differ: send one", param="max_completion_tokens")
    if len(request.chat_template_kwargs or {}) > MAX_TEMPLATE_ARGUMENTS:
        raise InvalidParameter(
            f"chat_template_kwargs has more than {MAX_TEMPLATE_ARGUMENTS} entries", param="chat_template_kwargs"
        )
    return request


def decode_completion(body: bytes) -> CompletionRequest:
    """:raises InvalidParameter: naming the argument, for anything a well-formed completion request does not have."""
    request = _decode(_completion_decoder, body, CompletionRequest)
    if request.echo and request.logprobs is not None:
        raise InvalidParameter("echo together with logprobs is not supported yet", param="echo")
    return request


def template_message(message: ChatMessage) -> dict[str, Any]:
    """The message as chat templates expect it."""
    content: Any = message.content
    if isinstance(content, list):
        content = [{"type": "text", "text": part.text} for part in content]
    body: dict[str, Any] = {"role": message.role, "content": content or ""}
    if message.name is not None:
        body["name"] = message.name
    if message.reasoning_content is not None:
        body["reasoning_content"] = message.reasoning_content
    return body


_ROLES = ("system", "developer", "user", "assistant")


def _check_message(message: ChatMessage, where: str) -> None:
    calls = _given(message.tool_calls, ([],)) or _given(message.function_call)
    if message.role in ("tool", "function") or calls or message.tool_call_id:
        raise InvalidParameter("tools are not supported yet: send messages without tool calls", param=where)
    if message.role not in _ROLES:
        raise InvalidParameter(f"unknown role {message.role[:64]!r}: use one of {', '.join(_ROLES)}", param=f"{where}.role")
    if message.content is None and message.role != "assistant":
        raise InvalidParameter("content is missing", param=f"{where}.content")
    for part in message.content if isinstance(message.content, list) else ():
        if part.type != "text" or part.text is None:
            raise InvalidParameter(
                f"content of type {part.type[:64]!r} is not supported yet: send text", param=f"{where}.content"
            )


def _decode(decoder: msgspec.json.Decoder[_RequestT], body: bytes, kind: type[_RequestT]) -> _RequestT:
    collecting = gc.isenabled()
    gc.disable()  # a body of millions of small values would set off a collection every few thousand of them
    try:
        request = decoder.decode(body)
    except msgspec.ValidationError as error:
        raise _explain(str(error), kind) from error
    except UnicodeDecodeError as error:
        raise InvalidParameter("the body is not valid UTF-8") from error
    except RecursionError as error:
        raise InvalidParameter("the body is nested too deeply") from error
    except msgspec.DecodeError as error:
        raise InvalidParameter(f"the body is not valid JSON: {error}") from error
    finally:
        if collecting:
            gc.enable()
    for field, harmless in _ASKS_FOR_NOTHING.items():
        if _given(getattr(request, field, _NOT_GIVEN), harmless):
            raise InvalidParameter(f"{field} is not supported yet: leave it out", param=field)
    if request.stream_options is not None and not request.stream:
        raise InvalidParameter("stream_options needs stream: true", param="stream_options")
    if len(request.logit_bias or {}) > MAX_LOGIT_BIAS:
        raise InvalidParameter(f"logit_bias has more than {MAX_LOGIT_BIAS} entries", param="logit_bias")
    return request


def _given(argument: msgspec.Raw, harmless: tuple[Any, ...] = ()) -> bool:
    """Whether an unread argument is there, and asks for more than one of `harmless`."""
    raw = memoryview(argument)
    if not raw or raw == b"null":
        return False
    return len(raw) > _MAX_HARMLESS_BYTES or msgspec.json.decode(argument) not in harmless


_UNKNOWN = re.compile(r"unknown field `(.*?)`", re.DOTALL)
_MISSING = re.compile(r"required field `(.*?)`")
_PATH = re.compile(r"`\$\.?([^`]*)`$")


def _explain(message: str, kind: type[Arguments]) -> InvalidParameter:
    """msgspec's complaint in OpenAI's terms: which argument, and what it should have been."""
    path = found[1] if (found := _PATH.search(message)) else ""
    if found := _UNKNOWN.search(message):
        name = found[1][:64]
        near = [] if path else difflib.get_close_matches(name, kind.__struct_fields__, n=1)
        hint = f": did you mean {near[0]}?" if near else ""
        return InvalidParameter(f"unknown argument {name!r}{hint}", param=f"{path}.{name}" if path else name)
    if found := _MISSING.search(message):
        name = f"{path}.{found[1]}" if path else found[1]
        return InvalidParameter(f"{name} is missing", param=name)
    param = path.split("[...]")[0] or None
    expected = message.split(" - at ")[0].replace("`", "").replace(" | null", "")
    return InvalidParameter(f"invalid {param or 'body'}: {expected[:1].lower()}{expected[1:]}", param=param)
