"""OpenAI's request bodies: the schemas of what is obeyed, and how a mistake in one is explained.

Strict means: no numbers as strings, no NaN, every size bounded. `null` anywhere means "not given", as at OpenAI. What is known
but not obeyed is in `arguments.py`; `parse.py` turns bytes into these. What needs the model (its vocabulary, its context, its
template) is checked in `prepare.py`. Pure.
"""

from __future__ import annotations

import re
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from common.protocol.errors import InvalidParameter
from services.gateway.json_slices import Steps
from services.gateway.tools import check_calls, check_depth, check_tool_choice, check_tools, template_call

MAX_STOPS = 16
MAX_STOP_CHARS = 256
MAX_CHOICES = 128
MAX_LOGPROBS = 20
MAX_STOP_TOKEN_IDS = 128
MAX_LOGIT_BIAS = 1024
MAX_TEMPLATE_ARGUMENTS = 16
MAX_DOCUMENTS = 1024
MAX_DOCUMENT_BYTES = 256 * 1024
MAX_DOCUMENTS_BYTES = 4 * 1024 * 1024
MAX_MESSAGES = 8192
MAX_PARTS = 16384
"""Content parts of all messages of a request."""
MAX_PREDICTION_BYTES = 48 * 1024
"""Of a prediction's JSON in a body that is not decoded at once (`parse.SMALL_BYTES`); a larger one has no effect there."""

RANDOM_SEED = -1
NO_LIMIT = -1

TokenId = Annotated[int, Meta(ge=0, le=2**32 - 1)]
Count = Annotated[int, Meta(ge=NO_LIMIT, le=2**31 - 1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
StopString = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_CHARS)]

TEXT_PARTS = frozenset({"text", "input_text", "output_text", "refusal"})


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`continuous_usage_stats` is vLLM's: with `include_usage`, every chunk tells the usage so far."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class ContentPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """A piece of text. `refusal` is the text of a part of that type, which an assistant's message may hold."""

    type: str
    text: str | None = None
    refusal: str | None = None


class Prediction(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """OpenAI's predicted output, of type `content`: a text that the answer is expected to repeat in parts. It is looked up, and
    changes no token."""

    type: str
    content: str | list[ContentPart]

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join([part.text or "" for part in self.content])


class ChatMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """`reasoning` is another name of `reasoning_content`, which some templates show. `prefix`: the model goes on with this
    message, the last one."""

    role: str
    content: str | list[ContentPart] | None = None
    name: Annotated[str, Meta(max_length=256)] | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: Annotated[str, Meta(max_length=256)] | None = None
    prefix: bool | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class SharedArguments(msgspec.Struct, frozen=True, kw_only=True):
    """What every view takes under these names. `timeout` is the deadline in seconds; `top_k` 0 or -1 is off; `seed` -1 is a
    random one; `cache_salt` keeps the prompt's KV apart from that of requests with another one; a
    lower `priority` is earlier."""

    model: Annotated[str, Meta(max_length=512)] | None = None
    stream: bool | None = None
    seed: Annotated[int, Meta(ge=RANDOM_SEED, le=2**63 - 1)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=10)] | None = None
    logit_bias: dict[int, Annotated[float, Meta(ge=-100, le=100)]] | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    stop: StopString | Annotated[list[StopString], Meta(max_length=MAX_STOPS)] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=MAX_STOP_TOKEN_IDS)] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    ignore_eos: bool | None = None
    timeout: Annotated[float, Meta(gt=0)] | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    priority: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] | None = None


class Arguments(SharedArguments, frozen=True, kw_only=True):
    """What chat and completions share besides. `max_tokens` -1 is no limit. For `response_format` and `structured_outputs` see
    `structured.py`."""

    stream_options: StreamOptions | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    best_of: int | None = None
    max_tokens: Count | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    prediction: Prediction | None = None
    prompt_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | bool | None = None

    @property
    def asks_prompt_logprobs(self) -> int:
        """How many alternatives each of the prompt's tokens lists; -1: its log-probabilities are not asked for."""
        return -1 if self.prompt_logprobs is None or self.prompt_logprobs is False else int(self.prompt_logprobs)

    @property
    def stops(self) -> list[str]:
        if self.stop is None:
            return []
        return [self.stop] if isinstance(self.stop, str) else self.stop


class ChatRequest(Arguments, frozen=True, kw_only=True):
    """POST /v1/chat/completions. `chat_template` names one of the model's own templates. `continue_final_message`: the model
    goes on with the last message. `documents`: for templates that show them."""

    messages: list[ChatMessage]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    add_generation_prompt: bool | None = None
    chat_template: Annotated[str, Meta(max_length=65536)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    reasoning_effort: Annotated[str, Meta(max_length=32)] | None = None
    enable_thinking: bool | None = None
    include_reasoning: bool | None = None
    continue_final_message: bool | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None

    @property
    def continues(self) -> bool:
        """Whether the model goes on with the last message."""
        return bool(self.continue_final_message or (self.messages and self.messages[-1].prefix))

    @property
    def offered_tools(self) -> list[dict[str, Any]]:
        """The tools that may be called; none with `tool_choice: none`, and the template shows none then."""
        return [] if self.tool_choice == "none" else self.tools or []


class CompletionRequest(Arguments, frozen=True, kw_only=True):
    """POST /v1/completions. `prompt`: a string, strings, token ids, or lists of token ids."""

    prompt: str | list[str | TokenId | list[TokenId]]
    logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = None

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """One entry per prompt.

        :raises InvalidParameter: if strings, ids and lists of ids are mixed.
        """
        if isinstance(self.prompt, str):
            return [self.prompt]
        kinds = set(map(type, self.prompt))
        prompt: Any = self.prompt
        if kinds == {int}:
            return [prompt]
        if len(kinds) <= 1:
            return prompt
        raise InvalidParameter("prompt mixes strings, token ids and lists of token ids: send one kind", param="prompt")


def check_chat(request: ChatRequest) -> Steps[None]:
    """Check all but messages, which `check_message` looks at; a step for each tool and document.

    :raises InvalidParameter: for what is well-formed and yet makes no sense.
    """
    _check(request)
    if request.max_tokens == 0:
        raise InvalidParameter("max_tokens must be 1 at least", param="max_tokens")
    if request.top_logprobs and not request.logprobs:
        raise InvalidParameter("top_logprobs needs logprobs: true", param="top_logprobs")
    if request.max_tokens is not None and request.max_completion_tokens not in (None, request.max_tokens):
        raise InvalidParameter("max_tokens and max_completion_tokens differ: send one", param="max_completion_tokens")
    if request.max_completion_tokens == 0:
        raise InvalidParameter("max_completion_tokens must be 1 at least", param="max_completion_tokens")
    if len(request.chat_template_kwargs or {}) > MAX_TEMPLATE_ARGUMENTS:
        raise InvalidParameter(
            f"chat_template_kwargs has more than {MAX_TEMPLATE_ARGUMENTS} entries", param="chat_template_kwargs"
        )
    check_depth(request.chat_template_kwargs or {}, "chat_template_kwargs", "chat_template_kwargs")
    if len(request.documents or ()) > MAX_DOCUMENTS:
        raise too_many_documents()
    for index, document in enumerate(request.documents or ()):
        check_depth(document, f"documents[{index}]", "documents")
        yield
    yield from check_tools(request.tools or [])
    check_tool_choice(request.tool_choice, request.tools or [])
    if request.continues:
        _check_continued(request)


def too_many_documents(_: str = "") -> InvalidParameter:
    return InvalidParameter(f"documents has more than {MAX_DOCUMENTS} entries", param="documents")


def _check_continued(request: ChatRequest) -> None:
    param = "continue_final_message" if request.continue_final_message else f"messages[{len(request.messages) - 1}].prefix"
    last = request.messages[-1]
    if request.add_generation_prompt:
        raise InvalidParameter(f"{param} and add_generation_prompt exclude each other: send one", param=param)
    if last.role != "assistant" or last.tool_calls or not last.content:
        raise InvalidParameter("only an assistant's message with content can be continued", param=param)


def check_completion(request: CompletionRequest) -> None:
    """:raises InvalidParameter: for what is well-formed and yet makes no sense."""
    _check(request)
    if request.max_tokens == 0 and not request.echo and request.asks_prompt_logprobs < 0:
        raise InvalidParameter(
            "max_tokens can be 0 with echo or prompt_logprobs only: nothing else is answered", param="max_tokens"
        )


def _check(request: Arguments) -> None:
    if request.prompt_logprobs is True:
        raise InvalidParameter("prompt_logprobs is a number: 0 for the prompt's tokens alone", param="prompt_logprobs")
    if request.stream_options is not None and not request.stream:
        raise InvalidParameter("stream_options needs stream: true", param="stream_options")
    if request.best_of not in (None, request.n or 1):
        raise InvalidParameter("best_of is not supported yet: leave it out", param="best_of")
    if len(request.logit_bias or {}) > MAX_LOGIT_BIAS:
        raise InvalidParameter(f"logit_bias has more than {MAX_LOGIT_BIAS} entries", param="logit_bias")
    if request.prediction is not None:
        _check_prediction(request.prediction)


def _check_prediction(prediction: Prediction) -> None:
    if prediction.type != "content":
        raise InvalidParameter(f"unknown type {prediction.type[:64]!r}: send content", param="prediction.type")
    for part in prediction.content if isinstance(prediction.content, list) else ():
        if part.type not in TEXT_PARTS or part.text is None:
            raise InvalidParameter("a prediction is text: send parts of type text", param="prediction.content")


ROLES = ("system", "developer", "user", "assistant", "tool")


def check_message(message: ChatMessage, index: int) -> int:
    """Return how many content parts the message has.

    :raises InvalidParameter: if it can't be served.
    """
    where = f"messages[{index}]"
    if message.role == "function":
        raise InvalidParameter("functions are not supported yet: send tools, and results with the role tool", param=where)
    if message.role not in ROLES:
        raise InvalidParameter(f"unknown role {message.role[:64]!r}: use one of {', '.join(ROLES)}", param=f"{where}.role")
    if message.content is None and message.role != "assistant":
        raise InvalidParameter("content is missing", param=f"{where}.content")
    if message.tool_calls:
        if message.role != "assistant":
            raise InvalidParameter("only an assistant's message can have tool_calls", param=f"{where}.tool_calls")
        check_calls(message.tool_calls, where)
    if message.prefix and message.role != "assistant":
        raise InvalidParameter("only an assistant's message can be continued", param=f"{where}.prefix")
    if not isinstance(message.content, list):
        return 0
    for part in message.content:
        if part.type not in TEXT_PARTS or (part.refusal if part.type == "refusal" else part.text) is None:
            raise InvalidParameter(
                f"content of type {part.type[:64]!r} is not supported yet: send text", param=f"{where}.content"
            )
    return len(message.content)


def template_message(message: ChatMessage) -> dict[str, Any]:
    """The message as chat templates expect it."""
    content: Any = message.content
    if isinstance(content, list):
        content = [{"type": "text", "text": part.refusal if part.type == "refusal" else part.text} for part in content]
    body: dict[str, Any] = {"role": message.role, "content": content or ""}
    if message.tool_calls:
        body["content"] = content
        body["tool_calls"] = [template_call(call) for call in message.tool_calls]
    if message.tool_call_id is not None:
        body["tool_call_id"] = message.tool_call_id
    if message.name is not None:
        body["name"] = message.name
    reasoning = message.reasoning if message.reasoning_content is None else message.reasoning_content
    if reasoning is not None:
        body["reasoning_content"] = reasoning
    return body


_UNKNOWN = re.compile(r"unknown field `(.*?)`", re.DOTALL)
_FLOAT_FOR_INTEGER = re.compile(r"Expected `[^`]*\bint\b[^`]*`, got `float`")
_MISSING = re.compile(r"required field `(.*?)`")
_INDEX = re.compile(r"^\[(\d+)\]")
_PATH = re.compile(r"`\$\.?([^`]*)`$")


def is_unknown_field(error: msgspec.ValidationError) -> bool:
    return _UNKNOWN.search(str(error)) is not None


def is_float_for_integer(error: msgspec.ValidationError) -> bool:
    return _FLOAT_FOR_INTEGER.match(str(error)) is not None


def explain(error: msgspec.ValidationError, *, place: str = "", first: int = 0) -> InvalidParameter:
    """msgspec's complaint in OpenAI's terms: which argument, and what it should have been.

    `place`: where in the body the value stands, for example `messages`. `first`: the number of its first element there.
    """
    message = str(error)
    path = found[1] if (found := _PATH.search(message)) else ""
    path = _INDEX.sub(lambda index: f"[{int(index[1]) + first}]", path)
    path = f"{place}{path}" if path.startswith("[") else f"{place}.{path}".strip(".")
    if found := _MISSING.search(message):
        name = f"{path}.{found[1]}" if path else found[1]
        return InvalidParameter(f"{name} is missing", param=name)
    param = path.split("[...]")[0] or None
    expected = message.split(" - at ")[0].replace("`", "").replace(" | null", "")
    return InvalidParameter(f"invalid {param or 'body'}: {expected[:1].lower()}{expected[1:]}", param=param)
