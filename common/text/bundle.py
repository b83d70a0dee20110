"""Everything a gateway needs of a model to go from requests to token ids and back. Loads in a fraction of a second.

bundle = load_bundle(resolve("smollm2-135m-instruct"))
prompt = bundle.encode_chat([{"role": "user", "content": "Hi"}], max_tokens=bundle.max_context)
detokenizer = bundle.detokenizer()
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from common.models.config import context_of
from common.models.source import ModelFiles
from common.models.weights.gguf_metadata import read_metadata
from common.protocol.errors import ConfigError, ContextLengthExceeded, InvalidParameter
from common.text.detokenize import Detokenizer
from common.text.template import ChatTemplate, Message, guard_messages, load_template, normalize_messages
from common.text.tokenizer import Tokenizer, load_tokenizer, read_json


class TextBundle(msgspec.Struct, frozen=True, kw_only=True):
    """`max_context` is in tokens, prompt and output together. `eos_ids` end a turn (the stop ids of a request)."""

    name: str
    files: ModelFiles
    tokenizer: Tokenizer
    template: ChatTemplate | None
    eos_ids: list[int]
    max_context: int

    def encode_chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
        max_tokens: int | None = None,
    ) -> list[int]:
        """Token ids of a conversation. Special tokens come from the template only; in messages their text is plain text.

        Takes about half a second per megabyte: from 20 kB on, call it in a thread.

        :raises InvalidParameter: if the model has no chat template, or it can't render these messages.
        :raises ContextLengthExceeded: if the prompt is longer than `max_tokens`.
        """
        if self.template is None:
            raise InvalidParameter(
                f"{self.name} has no chat template; use completions with a prompt of your own", param="model"
            )
        normal = normalize_messages(messages)
        if max_tokens is not None:
            self._check_size(normal, max_tokens)
        (safe, safe_tools, safe_variables), guard = guard_messages((normal, tools, variables), self.tokenizer)
        text = self.template.render(
            safe, tools=safe_tools, add_generation_prompt=add_generation_prompt, variables=safe_variables
        )
        return self.tokenizer.encode(text, parse_special=True, guard=guard, max_tokens=max_tokens)

    def encode_prompt(self, prompt: str, *, max_tokens: int | None = None) -> list[int]:
        """Token ids of a completion's prompt. The prompt is wholly the client's, so special tokens in it are meant.

        :raises InvalidParameter: if it is not valid Unicode.
        :raises ContextLengthExceeded: if it is longer than `max_tokens`.
        """
        return self.tokenizer.encode(prompt, add_special=True, parse_special=True, max_tokens=max_tokens)

    def detokenizer(self, *, skip_special: bool = True, continues: bool = False) -> Detokenizer:
        return Detokenizer(self.tokenizer, skip_special=skip_special, continues=continues)

    def _check_size(self, messages: Sequence[Message], max_tokens: int) -> None:
        """Refuses messages that can't fit before a template copies them around."""
        size = sum(len(message["content"] or "") for message in messages)
        if size > max_tokens * self.tokenizer.longest_token_bytes or len(messages) > max_tokens:
            raise ContextLengthExceeded(f"messages of {size} characters can't fit {max_tokens} tokens", param="messages")


def load_bundle(files: ModelFiles, *, name: str = "", max_model_len: int = 0) -> TextBundle:
    """Reads tokenizer, template and limits of `files`; `name` is what clients call the model (default: its own).
    `max_model_len` limits the context (0: what the model takes).

    :raises ConfigError: if any of them is missing, damaged or not supported, or the model takes less than `max_model_len`.
    """
    metadata = read_metadata(files.path) if files.format == "gguf" else None
    tokenizer = load_tokenizer(files, metadata=metadata)
    return TextBundle(
        name=name or files.name,
        files=files,
        tokenizer=tokenizer,
        template=load_template(files, tokenizer.special_tokens, metadata=metadata),
        eos_ids=tokenizer.eos_ids,
        max_context=context_of(_max_context(files, metadata), max_model_len),
    )


def _max_context(files: ModelFiles, metadata: Mapping[str, Any] | None) -> int:
    if metadata is not None:
        value = metadata.get(f"{metadata.get('general.architecture')}.context_length")
    else:
        value = read_json(files.path / "config.json").get("max_position_embeddings")
    if not isinstance(value, int) or value < 1:
        raise ConfigError(f"{files.path} does not say how long a context the model takes")
    return value
