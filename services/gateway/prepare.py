"""From a decoded request to a `Job`: what has to be generated, checked against the model that is served.

How long an answer may get: `max_tokens` (chat: also `max_completion_tokens`) as given; more than fits behind the prompt is
a 400 `context_length_exceeded`, as at OpenAI. Not given: chat takes what the context has left, a completion 16 tokens.

Tokenizing takes half a second per megabyte: above `_INLINE_CHARS` it happens in a thread, at most two at a time, so that
nobody's stream waits for somebody's long prompt; what can't fit the context is refused before.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import anyio
import anyio.to_thread
import msgspec

from common.protocol.errors import ContextLengthExceeded, EmptyPrompt, InvalidParameter, UnknownModel
from common.protocol.messages import SamplingParams
from common.text.bundle import TextBundle
from services.gateway import openai
from services.gateway.bodies import Kind
from services.gateway.choices import StopStrings
from services.gateway.config import GatewayConfig
from services.gateway.openai import Arguments, ChatRequest, CompletionRequest

_INLINE_CHARS = 8192
_COMPLETION_MAX_TOKENS = 16
_T = TypeVar("_T")
_RESERVED_VARIABLES = frozenset({"messages", "tools", "documents", "add_generation_prompt", "strftime_now"})


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """A valid request. `id` names it inside, `shown_id` to the client. Choice number c of prompt p has index p * n + c.

    `sampling.seed` is the first choice's (see `choices.choice_seed`). `echoes[p]` is sent before the text of prompt p's
    choices. `top_logprobs`: -1 none, else how many alternatives each token lists.
    """

    id: str
    shown_id: str
    kind: Kind
    created: int
    model: str
    prompts: list[list[int]]
    echoes: list[str]
    n: int
    sampling: SamplingParams
    stops: StopStrings | None
    include_stop: bool
    top_logprobs: int
    stream: bool
    include_usage: bool
    deadline_s: float

    @property
    def num_choices(self) -> int:
        return self.n * len(self.prompts)

    def sampling_of(self, seed: int) -> SamplingParams:
        return self.sampling if seed == self.sampling.seed else msgspec.structs.replace(self.sampling, seed=seed)


def new_id(kind: Kind) -> str:
    """Unguessable: whoever has it may cancel the request."""
    return f"{'chatcmpl' if kind == 'chat' else 'cmpl'}-{os.urandom(12).hex()}"


class Preparer:
    """Turns bodies into jobs for one model."""

    def __init__(self, bundle: TextBundle, config: GatewayConfig) -> None:
        self._bundle = bundle
        self._config = config
        self._tokenizer = bundle.tokenizer
        self._model = bundle.name
        self._threads: anyio.CapacityLimiter | None = None

    async def prepare(
        self,
        kind: Kind,
        body: bytes,
        *,
        id: str,
        shown_id: str = "",
        deadline_ms: str | None = None,
        stream_default: bool = False,
    ) -> Job:
        """`shown_id` is `id` unless the client chose one. `deadline_ms` is a header's value; the shorter of it and the body's
        `timeout` holds.

        :raises RequestError: what is wrong with the request; nothing has been taken then.
        """
        request = openai.decode_chat(body) if kind == "chat" else openai.decode_completion(body)
        if request.model is not None and request.model != self._model:
            raise UnknownModel(f"the model {request.model[:100]!r} is not served here; {self._model} is", param="model")
        deadline_s = self._deadline(request.timeout, deadline_ms)
        echoes = [""]
        if isinstance(request, ChatRequest):
            num_prompts, prompts = 1, [await self._chat_prompt(request)]
            max_tokens = request.max_completion_tokens or request.max_tokens
            logprobs = (request.top_logprobs or 0) if request.logprobs else -1
        else:
            num_prompts = len(request.prompts)
            self._check_choices(request, num_prompts)
            prompts, echoes = await self._completion_prompts(request)
            max_tokens = request.max_tokens
            logprobs = -1 if request.logprobs is None else request.logprobs
        self._check_choices(request, num_prompts)
        room = self._bundle.max_context - max(map(len, prompts))
        if max_tokens is None:
            max_tokens = room if kind == "chat" else min(room, _COMPLETION_MAX_TOKENS)
        elif max_tokens > room:
            raise ContextLengthExceeded(
                f"the prompt takes {self._bundle.max_context - room} of {self._bundle.max_context} tokens of context: "
                f"max_tokens can be at most {room}, not {max_tokens}",
                param="max_tokens",
            )
        return Job(
            id=id,
            shown_id=shown_id or id,
            kind=kind,
            created=int(time.time()),
            model=self._model,
            prompts=prompts,
            echoes=echoes,
            n=request.n or 1,
            sampling=self._sampling(request, max_tokens, logprobs),
            stops=StopStrings(request.stops) if request.stops else None,
            include_stop=bool(request.include_stop_str_in_output),
            top_logprobs=logprobs,
            stream=stream_default if request.stream is None else request.stream,
            include_usage=bool(request.stream_options and request.stream_options.include_usage),
            deadline_s=deadline_s,
        )

    def _check_choices(self, request: Arguments, num_prompts: int) -> None:
        n = request.n or 1
        if n > self._config.max_n:
            raise InvalidParameter(f"n is {n}; at most {self._config.max_n} choices are served", param="n")
        if n * num_prompts > openai.MAX_CHOICES:
            raise InvalidParameter(
                f"{num_prompts} prompts with n={n} are {n * num_prompts} choices; send at most {openai.MAX_CHOICES}",
                param="prompt",
            )

    def _deadline(self, timeout_s: float | None, header: str | None) -> float:
        limit_s = self._config.max_deadline_s
        asked: list[float] = [] if timeout_s is None else [timeout_s]
        if header is not None:
            if not (header.isascii() and header.isdigit() and len(header) <= 12 and int(header) > 0):
                raise InvalidParameter("the deadline header must be milliseconds: a positive whole number", param="timeout")
            asked.append(int(header) / 1000)
        if any(seconds > limit_s for seconds in asked):
            raise InvalidParameter(f"the deadline can be at most {limit_s:g} s", param="timeout")
        return min(asked, default=min(self._config.default_deadline_s, limit_s))

    async def _chat_prompt(self, request: ChatRequest) -> list[int]:
        variables = request.chat_template_kwargs or {}
        if taken := _RESERVED_VARIABLES.intersection(variables):
            raise InvalidParameter(f"chat_template_kwargs can't set {min(taken)}", param="chat_template_kwargs")
        messages = [openai.template_message(message) for message in request.messages]
        limit = self._bundle.max_context - 1

        def encode() -> list[int]:
            return self._bundle.encode_chat(
                messages,
                add_generation_prompt=request.add_generation_prompt is not False,
                variables=variables,
                max_tokens=limit,
            )

        size = sum(_size(message) for message in messages)
        self._check_size(size, limit, "messages")
        prompt = await self._in_thread(encode) if size > _INLINE_CHARS or len(messages) > 64 else encode()
        if not prompt:
            raise EmptyPrompt("the chat template made an empty prompt of these messages", param="messages")
        return prompt

    async def _completion_prompts(self, request: CompletionRequest) -> tuple[list[list[int]], list[str]]:
        """The prompts' token ids, and what `echo` puts before each choice."""
        parts = request.prompts
        limit = self._bundle.max_context - 1
        if not parts or not all(parts):
            raise EmptyPrompt("the prompt is empty: send at least one character or token", param="prompt")
        for part in parts:
            if isinstance(part, str):
                self._check_size(len(part), limit, "prompt")
            elif len(part) > limit:
                raise ContextLengthExceeded(f"the prompt has {len(part)} tokens; at most {limit} fit", param="prompt")
            elif max(part) >= self._tokenizer.vocab_size:
                raise self._past_vocabulary("prompt", max(part))

        def encode() -> tuple[list[list[int]], list[str]]:
            prompts = [self._bundle.encode_prompt(p, max_tokens=limit) if isinstance(p, str) else p for p in parts]
            if not request.echo:
                return prompts, [""] * len(parts)
            return prompts, [part if isinstance(part, str) else self._tokenizer.decode(part) for part in parts]

        return await self._in_thread(encode) if sum(map(len, parts)) > _INLINE_CHARS else encode()

    def _check_size(self, size: int, limit: int, param: str) -> None:
        if size > limit * self._tokenizer.longest_token_bytes:
            raise ContextLengthExceeded(f"the prompt of {size} characters can't fit {limit} tokens", param=param)

    async def _in_thread(self, encode: Callable[[], _T]) -> _T:
        if self._threads is None:
            self._threads = anyio.CapacityLimiter(2)
        return await anyio.to_thread.run_sync(encode, limiter=self._threads)

    def _past_vocabulary(self, param: str, token: int) -> InvalidParameter:
        return InvalidParameter(f"token id {token} is past the vocabulary of {self._tokenizer.vocab_size}", param=param)

    def _sampling(self, request: Arguments, max_tokens: int, logprobs: int) -> SamplingParams:
        bias = request.logit_bias or {}
        stop_ids = request.stop_token_ids or []
        for param, ids in (("logit_bias", bias), ("stop_token_ids", stop_ids)):
            for token in ids:
                if not 0 <= token < self._tokenizer.vocab_size:
                    raise self._past_vocabulary(param, token)
        min_tokens = request.min_tokens or 0
        if min_tokens > max_tokens:
            raise InvalidParameter(f"min_tokens is {min_tokens}, but at most {max_tokens} can come", param="min_tokens")
        top_p = _given(request.top_p, 1.0)
        top_k = max(request.top_k or 0, 0)
        return SamplingParams(
            seed=_given(request.seed, int.from_bytes(os.urandom(8), "little") >> 1),
            temperature=_given(request.temperature, 1.0),
            # OpenAI allows top_p 0, which keeps the likeliest token alone
            top_k=1 if top_p == 0 else min(top_k, self._tokenizer.vocab_size),
            top_p=top_p or 1.0,
            min_p=_given(request.min_p, 0.0),
            presence_penalty=_given(request.presence_penalty, 0.0),
            frequency_penalty=_given(request.frequency_penalty, 0.0),
            repetition_penalty=_given(request.repetition_penalty, 1.0),
            logit_bias=bias,
            logprobs=logprobs,
            max_tokens=max_tokens,
            min_tokens=min_tokens,
            stop_token_ids=sorted({*stop_ids, *(() if request.ignore_eos else self._bundle.eos_ids)}),
        )


def _given(value: _T | None, default: _T) -> _T:
    return default if value is None else value


def _size(message: Mapping[str, Any]) -> int:
    """Characters of text in a template's message."""
    content = message["content"]
    parts = content if isinstance(content, list) else [content]
    return sum(len(part["text"] if isinstance(part, Mapping) else part) for part in parts) + len(
        str(message.get("reasoning_content", ""))
    )
