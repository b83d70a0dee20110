"""From a decoded request to a `Job`: what has to be generated, checked against the model that is served.

How long an answer may get: `max_tokens` (chat: also `max_completion_tokens`) as given; more than fits behind the prompt is
a 400 `context_length_exceeded`, as at OpenAI. Not given: chat takes what the context has left, a completion 16 tokens. -1, as
in llama.cpp: what the context has left. All choices and alternatives together are bounded by `max_answer_values`.

Tokenizing takes a quarter of a second per megabyte: above `_INLINE_CHARS` it happens in a thread, at most two at a time, so
that nobody's stream waits for somebody's long prompt; what can't fit the context is refused before.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import anyio.to_thread

from common.protocol.errors import ContextLengthExceeded, EmptyPrompt, InvalidParameter
from common.text.bundle import TextBundle
from common.text.grammar import MAX_CACHED, GrammarCompiler
from services.gateway import openai, tools
from services.gateway.answer_format import format_of, template_of, template_variables
from services.gateway.arguments import Notes
from services.gateway.choice_events import AnswerFormat
from services.gateway.choices import StopStrings
from services.gateway.config import GatewayConfig
from services.gateway.intake import Intake
from services.gateway.job import Job, Writers
from services.gateway.openai import Arguments, ChatRequest, CompletionRequest
from services.gateway.sampling import sampling_params
from services.gateway.structured import Structure, structure_of, takes_long
from services.gateway.tenants import Tenant, salt_of
from services.gateway.tool_grammar import calls_of, needs_grammar

_INLINE_CHARS = 8192
_COMPLETION_MAX_TOKENS = 16
_T = TypeVar("_T")


class Preparer:
    """Turns requests into jobs for one model. `context`: returns the tokens that a prompt and its answer may have now."""

    def __init__(self, bundle: TextBundle, config: GatewayConfig, intake: Intake, context: Callable[[], int]) -> None:
        self._bundle = bundle
        self._config = config
        self._context = context
        self._threads = intake.threads
        self._tokenizer = bundle.tokenizer
        max_cached = 0 if config.zero_retention else MAX_CACHED  # a grammar holds its request's schema
        self.grammars = GrammarCompiler(bundle.tokenizer, max_cached=max_cached)
        self._model = bundle.name

    async def prepare(
        self,
        request: ChatRequest | CompletionRequest,
        notes: Notes,
        *,
        writers: Writers,
        id: str,
        shown_id: str = "",
        deadline_ms: str | None = None,
        stream_default: bool = False,
        is_large: bool = False,
        tenant: Tenant | None = None,
    ) -> Job:
        """The job of a request for this model. `notes`: what of its body had no effect; `is_large`: the body was. `writers`:
        what encodes the answer.

        `shown_id` is `id` unless the client chose one. `deadline_ms` is a header's value; the shorter of it and the body's
        `timeout` holds. `tenant`: whose request it is.

        :raises RequestError: what is wrong with the request; nothing has been taken then.
        """
        deadline_s = deadline_of(self._config, request.timeout, deadline_ms)
        read = functools.partial(structure_of, request.response_format, request.structured_outputs)
        form = await self._in_thread(read) if takes_long(request.structured_outputs) else read()
        await self._check_grammar(form, request)
        grammar = form.grammar
        format: AnswerFormat | None = None
        if isinstance(request, ChatRequest):
            prompts, echoes = [await self._chat_prompt(request, notes, in_thread=is_large)], [""]
            logprobs = (request.top_logprobs or 0) if request.logprobs else -1
            format = format_of(self._bundle, request, prompts[0], constrained=bool(form.grammar))
            if format is not None and format.tools is not None:
                grammar = await self._call_grammar(request, format, form)
        else:
            self._check_choices(request, len(request.prompts))
            prompts, echoes = await self._completion_prompts(request)
            logprobs = -1 if request.logprobs is None else request.logprobs
        self._check_choices(request, len(prompts))
        prompt_top = request.asks_prompt_logprobs
        echo_top = logprobs if isinstance(request, CompletionRequest) and request.echo else -1
        max_tokens, fills_context = self._max_tokens(request, prompts, logprobs, tenant)
        self._check_prompt_scores(request, prompts, max(echo_top, prompt_top), max_tokens, logprobs)
        stream = stream_default if request.stream is None else request.stream
        if stream and prompt_top >= 0:
            raise InvalidParameter("prompt_logprobs can't be streamed: send stream: false", param="prompt_logprobs")
        options = request.stream_options
        include_usage = bool(options and options.include_usage)
        return Job(
            id=id,
            shown_id=shown_id or id,
            kind="chat" if isinstance(request, ChatRequest) else "completion",
            writers=writers,
            created=int(time.time()),
            model=request.model or self._model,
            prompts=prompts,
            echoes=echoes,
            n=request.n or 1,
            sampling=sampling_params(self._bundle, request, max_tokens=max_tokens, logprobs=logprobs, grammar=grammar),
            stops=StopStrings(request.stops) if request.stops else None,
            include_stop=bool(request.include_stop_str_in_output),
            top_logprobs=logprobs,
            stream=stream,
            include_usage=include_usage,
            usage_so_far=include_usage and bool(options and options.continuous_usage_stats),
            deadline_s=deadline_s,
            skip_special=request.skip_special_tokens is not False,
            salt=salt_of("" if tenant is None else tenant.name, request.cache_salt),
            warning=notes.text,
            format=format,
            continues=not isinstance(request, ChatRequest) or request.continues or bool(form.grammar),
            tenant="" if tenant is None else tenant.name,
            weight=1.0 if tenant is None else tenant.settings.weight,
            priority=request.priority or 0,
            echo_top=echo_top,
            prompt_top=prompt_top,
            prediction=await self._prediction(request),
            fills_context=fills_context,
        )

    async def count(self, request: ChatRequest, notes: Notes, *, is_large: bool) -> int:
        """How many tokens the prompt of a chat has. `notes`: what of its body had no effect.

        :raises RequestError: as `prepare`.
        """
        return len(await self._chat_prompt(request, notes, in_thread=is_large))

    def _check_choices(self, request: Arguments, num_prompts: int) -> None:
        n = request.n or 1
        if n > self._config.max_n:
            raise InvalidParameter(f"n is {n}; at most {self._config.max_n} choices are served", param="n")
        if n * num_prompts > openai.MAX_CHOICES:
            raise InvalidParameter(
                f"{num_prompts} prompts with n={n} are {n * num_prompts} choices; send at most {openai.MAX_CHOICES}",
                param="prompt",
            )

    def _check_prompt_scores(
        self, request: Arguments, prompts: list[list[int]], top: int, max_tokens: int, logprobs: int
    ) -> None:
        if top < 0:
            return
        choices = request.n or 1 if isinstance(request, CompletionRequest) else 1
        asked = sum(map(len, prompts)) * choices * (1 + top)
        asked += len(prompts) * (request.n or 1) * max_tokens * (1 + max(logprobs, 0))
        if asked > self._config.max_answer_values:
            raise InvalidParameter(
                f"the log-probabilities of the prompt and of the answer are {asked} values; at most "
                f"{self._config.max_answer_values} are answered",
                param="prompt",
            )

    def _max_tokens(
        self, request: Arguments, prompts: list[list[int]], logprobs: int, tenant: Tenant | None
    ) -> tuple[int, bool]:
        """How long each choice may get, and whether the context says so, not the client. What a client sends is a bound: agents
        send the same whatever the prompt leaves. More than the context has is a mistake."""
        param, asked = "max_tokens", request.max_tokens
        if isinstance(request, ChatRequest) and request.max_completion_tokens is not None:
            param, asked = "max_completion_tokens", request.max_completion_tokens
        context = self._context()
        if tenant is not None and tenant.settings.max_context:
            context = min(context, tenant.settings.max_context)
        room = context - max(map(len, prompts))
        if room < 1:
            raise ContextLengthExceeded(f"the prompt takes {context - room} of {context} tokens of context", param=param)
        choices, values = len(prompts) * (request.n or 1), 1 + max(logprobs, 0)
        limit = self._config.max_answer_values
        if asked is None or asked == openai.NO_LIMIT:
            default = room if asked is not None or isinstance(request, ChatRequest) else _COMPLETION_MAX_TOKENS
            asked = max(1, min(default, room, limit // (choices * values)))
            fills_context = asked == room
        elif asked > context:
            raise ContextLengthExceeded(
                f"the prompt takes {context - room} of {context} tokens of context: {param} can be at most {room}, not {asked}",
                param=param,
            )
        else:
            fills_context = asked > room
            asked = min(asked, room)
        if choices * asked * values > limit:
            raise InvalidParameter(
                f"prompts × n × {param} × (1 + logprobs) is {len(prompts)} × {request.n or 1} × {asked} × {values} = "
                f"{choices * asked * values}; at most {limit} values are answered",
                param=param,
            )
        return asked, fills_context

    async def _chat_prompt(self, request: ChatRequest, notes: Notes, *, in_thread: bool) -> list[int]:
        template, offered = request.chat_template or "", request.offered_tools
        variables = template_variables(self._bundle, request, notes)
        limit = self._context() - 1
        num_tools_chars = tools.size_of(offered)
        self._check_size(num_tools_chars, limit, "tools")
        self._check_size(tools.size_of(request.documents or ()), limit, "documents")
        num_other_chars = num_tools_chars + tools.size_of([variables])

        def size_of(messages: list[dict[str, Any]]) -> int:
            size = sum(map(_size, messages))
            self._check_size(size, limit, "messages")
            return size

        def encode(messages: list[dict[str, Any]]) -> list[int]:
            return self._bundle.encode_chat(
                messages,
                tools=offered,
                continues=request.continues,
                add_generation_prompt=request.add_generation_prompt is not False,
                variables=variables,
                max_tokens=limit,
                template=template,
            )

        def convert_and_encode() -> list[int]:
            messages = [openai.template_message(message) for message in request.messages]
            size_of(messages)
            return encode(messages)

        if in_thread:
            prompt = await self._in_thread(convert_and_encode)
        else:
            messages = [openai.template_message(message) for message in request.messages]
            is_long = size_of(messages) + num_other_chars > _INLINE_CHARS or len(messages) > 64
            prompt = await self._in_thread(lambda: encode(messages)) if is_long else encode(messages)
        if not prompt:
            raise EmptyPrompt("the chat template made an empty prompt of these messages", param="messages")
        return prompt

    async def _completion_prompts(self, request: CompletionRequest) -> tuple[list[list[int]], list[str]]:
        """The prompts' token ids, and what `echo` puts before each choice."""
        parts = request.prompts
        limit = self._context() - 1
        if not parts or not all(parts):
            raise EmptyPrompt("the prompt is empty: send at least one character or token", param="prompt")
        for part in parts:
            if isinstance(part, str):
                self._check_size(len(part), limit, "prompt")
            elif len(part) > limit:
                raise ContextLengthExceeded(f"the prompt has {len(part)} tokens; at most {limit} fit", param="prompt")

        def encode_one(part: str | list[int]) -> list[int]:
            if isinstance(part, str):
                special = request.add_special_tokens is not False
                return self._bundle.encode_prompt(part, add_special=special, max_tokens=limit)
            self._bundle.check_ids(part, "prompt")
            return part

        def encode() -> tuple[list[list[int]], list[str]]:
            prompts = [encode_one(part) for part in parts]
            if not all(prompts):
                raise EmptyPrompt("the prompt makes no token: send some text", param="prompt")
            if not request.echo:
                return prompts, [""] * len(parts)
            return prompts, [part if isinstance(part, str) else self._tokenizer.decode(part) for part in parts]

        return await self._in_thread(encode) if sum(map(len, parts)) > _INLINE_CHARS else encode()

    async def _prediction(self, request: Arguments) -> list[int]:
        """Return the tokens of the text that the client expects the answer to repeat."""
        text = "" if request.prediction is None else request.prediction.text

        def encode() -> list[int]:
            return [token for token in self._tokenizer.encode(text, param="prediction") if token < self._bundle.num_ids]

        return await self._in_thread(encode) if len(text) > _INLINE_CHARS else encode()

    def _check_size(self, size: int, limit: int, param: str) -> None:
        if size > limit * self._tokenizer.longest_token_bytes:
            what = "a prompt" if param == "prompt" else param
            raise ContextLengthExceeded(f"{what} of {size} characters can't fit {limit} tokens", param=param)

    async def _in_thread(self, encode: Callable[[], _T]) -> _T:
        return await anyio.to_thread.run_sync(encode, limiter=self._threads)

    async def _check_grammar(self, form: Structure, request: Arguments) -> None:
        """:raises InvalidParameter: if the answer can't match a grammar with this model's vocabulary, or in this request."""
        if not form.grammar:
            return
        if request.min_tokens:
            raise InvalidParameter(f"min_tokens can't be obeyed together with {form.param}: leave it out", param="min_tokens")
        if self.grammars.cached(form.grammar) is None:
            try:
                await self._in_thread(lambda: self.grammars.compile(form.grammar))
            except InvalidParameter as error:
                raise InvalidParameter(str(error), param=form.param) from error

    async def _call_grammar(self, request: ChatRequest, format: AnswerFormat, form: Structure) -> str:
        """Return the grammar of an answer that may call tools; empty if it may be anything.

        :raises InvalidParameter: if one is needed that can't be had; it names the tool or the argument.
        """
        template = template_of(self._bundle, request)

        def compile() -> Structure:
            return calls_of(request, format, form.grammar, template=template.source, grammars=self.grammars)

        found = await self._in_thread(compile) if needs_grammar(request, form.grammar) else Structure()
        await self._check_grammar(found, request)
        return found.grammar


def _size(message: Mapping[str, Any]) -> int:
    """Characters of text in a template's message."""
    content = message["content"] or ""
    parts = content if isinstance(content, list) else [content]
    size = sum(len(part["text"] if isinstance(part, Mapping) else part) for part in parts)
    return size + len(str(message.get("reasoning_content", ""))) + tools.size_of(message.get("tool_calls", []))


def deadline_of(config: GatewayConfig, timeout_s: float | None, header: str | None) -> float:
    """Seconds that a request may take: the shorter of what its body and its header say.

    :raises InvalidParameter: for a header that is no number, or more than `config` allows.
    """
    limit_s = config.max_deadline_s
    asked: list[float] = [] if timeout_s is None else [timeout_s]
    if header is not None:
        if not (header.isascii() and header.isdigit() and len(header) <= 12 and int(header) > 0):
            raise InvalidParameter("the deadline header must be milliseconds: a positive whole number", param="timeout")
        asked.append(int(header) / 1000)
    if any(seconds > limit_s for seconds in asked):
        raise InvalidParameter(f"the deadline can be at most {limit_s:g} s", param="timeout")
    return min(asked, default=min(config.default_deadline_s, limit_s))
