"""What `/tokenize` and `/detokenize` answer for one model.

A text may be longer than the context: to learn by how much is what many clients ask for. Bounded are the characters and the
ids, so that what two threads work on at a time, and what waits to be sent, stays small. Long ones are tokenized and their
answers encoded in a thread, a slice at a time, since an encoder holds the interpreter's lock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import anyio.to_thread
import msgspec

from common.protocol.errors import ContextLengthExceeded
from common.text.bundle import TextBundle
from services.gateway import openai, tools
from services.gateway.answer_format import template_variables
from services.gateway.arguments import Notes
from services.gateway.intake import Intake
from services.gateway.token_bodies import DetokenizeRequest, TokenizeRequest
from services.gateway.whole import Pieces

MIN_LIMIT_CHARS = 1024 * 1024
CHARS_PER_TOKEN = 8
"""A model's context in characters is at most about this many times its tokens."""
MIN_LIMIT_TOKENS = 128 * 1024

_INLINE = 8192
_SLICE_IDS = 8192
_SLICE_CHARS = 256 * 1024

_encode = msgspec.json.Encoder().encode
_T = TypeVar("_T")


class Tokenizing:
    """One model's tokens for those who ask for nothing else. `context`: returns how many prompt and answer may have now."""

    def __init__(self, bundle: TextBundle, intake: Intake, context: Callable[[], int]) -> None:
        self._bundle = bundle
        self._context = context
        self._tokenizer = bundle.tokenizer
        self._threads = intake.threads
        self._limit_chars = max(MIN_LIMIT_CHARS, CHARS_PER_TOKEN * bundle.max_context)

    @property
    def max_tokens(self) -> int:
        """Ids that are made text of at a time."""
        return max(MIN_LIMIT_TOKENS, self._bundle.max_context)

    async def tokenize(self, request: TokenizeRequest, notes: Notes) -> Pieces:
        """The body of the answer. `notes`: what of the request's body had no effect.

        :raises InvalidParameter: if the messages can't be rendered, or it is not valid Unicode.
        :raises ContextLengthExceeded: if it is longer than what is tokenized at a time.
        """
        prompt = request.prompt
        if prompt is None:
            size = sum(_size(message) for message in request.messages or ())
            size += tools.size_of(request.chat.offered_tools) + tools.size_of(request.documents or ())
            size += tools.size_of([request.chat_template_kwargs or {}])
            self._check_size(size, "messages")
            ids_of, is_long = self._ids_of_messages, size > _INLINE or len(request.messages or ()) > 64
        else:
            self._check_size(len(prompt), "prompt")
            ids_of, is_long = self._ids_of_prompt, len(prompt) > _INLINE
        return await self._run(
            lambda: self._tokenized(ids_of(request, notes), bool(request.return_token_strs)), in_thread=is_long
        )

    async def detokenize(self, request: DetokenizeRequest) -> Pieces:
        """The body of the answer.

        :raises InvalidParameter: if there is an id that the model does not have.
        :raises ContextLengthExceeded: if there are more ids than are made text of at a time.
        """
        ids = request.tokens
        if len(ids) > self.max_tokens:
            raise ContextLengthExceeded(f"{len(ids)} tokens; at most {self.max_tokens} are taken at a time", param="tokens")
        if ids and max(ids) >= self._tokenizer.vocab_size:
            self._bundle.check_ids(ids, "tokens")
        return await self._run(lambda: self._detokenized(ids), in_thread=len(ids) > _INLINE)

    # -- inside

    def _ids_of_prompt(self, request: TokenizeRequest, _: Notes) -> list[int]:
        return self._bundle.encode_prompt(request.prompt or "", add_special=request.add_special_tokens is not False)

    def _ids_of_messages(self, request: TokenizeRequest, notes: Notes) -> list[int]:
        chat = request.chat
        ids = self._bundle.encode_chat(
            [openai.template_message(message) for message in chat.messages],
            tools=chat.offered_tools,
            continues=chat.continues,
            add_generation_prompt=chat.add_generation_prompt is not False,
            variables=template_variables(self._bundle, chat, notes),
            template=chat.chat_template or "",
        )
        return self._tokenizer.add_special(ids) if request.add_special_tokens else ids

    def _tokenized(self, ids: list[int], with_names: bool) -> Pieces:
        head = b'{"count":%d,"max_model_len":%d,"tokens":[' % (len(ids), self._context())
        parts = [head, *_members(ids)]
        if with_names:
            parts += [b'],"token_strs":[', *_members(ids, self._tokenizer.token_name), b"]}"]
        else:
            parts.append(b'],"token_strs":null}')
        return Pieces(parts)

    def _detokenized(self, ids: list[int]) -> Pieces:
        text = self._tokenizer.decode(ids, skip_special=False)
        slices = [_encode(text[at : at + _SLICE_CHARS])[1:-1] for at in range(0, len(text), _SLICE_CHARS)]
        return Pieces([b'{"prompt":"', *slices, b'"}'])

    def _check_size(self, size: int, param: str) -> None:
        if size > self._limit_chars:
            raise ContextLengthExceeded(
                f"{param} of {size} characters; at most {self._limit_chars} are tokenized at a time", param=param
            )

    async def _run(self, work: Callable[[], _T], *, in_thread: bool) -> _T:
        return await anyio.to_thread.run_sync(work, limiter=self._threads) if in_thread else work()


def tokenizer_info(bundle: TextBundle) -> dict[str, Any]:
    """The chat template, and the special tokens by their names in transformers: for clients that make prompts themselves."""
    template = None if bundle.template is None else bundle.template.source
    named = {"eos_token": None, "bos_token": None, "pad_token": None, **bundle.tokenizer.special_tokens}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": template,
        "model_max_length": bundle.max_context,
        **named,
    }


def _size(message: openai.ChatMessage) -> int:
    """Characters of text in a message."""
    content = message.content or ""
    texts = [content] if isinstance(content, str) else [part.text or part.refusal or "" for part in content]
    texts += [message.reasoning_content or "", message.reasoning or ""]
    return sum(map(len, texts)) + tools.size_of(message.tool_calls or [])


def _members(ids: list[int], value_of: Callable[[int], object] = int) -> Iterator[bytes]:
    """An array's JSON without its brackets, in slices."""
    for at in range(0, len(ids), _SLICE_IDS):
        encoded = _encode([value_of(token) for token in ids[at : at + _SLICE_IDS]])[1:-1]
        yield b"," + encoded if at else encoded
