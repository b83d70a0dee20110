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
from common.models.families.wrappers import unwrapped
from common.models.json_files import read_object_if_any
from common.models.source import ModelFiles
from common.models.weights.gguf_metadata import read_metadata
from common.protocol.errors import ConfigError, ContextLengthExceeded, InvalidParameter
from common.text.detokenize import Detokenizer, WindowDetokenizer, detokenizer
from common.text.generation_config import SamplingDefaults, load_sampling_defaults
from common.text.model_templates import DEFAULT, TOOL_USE, load_templates
from common.text.output.call_ids import with_short_ids
from common.text.output.formats import Dialect, ReasoningParser, ToolParser, dialect_of
from common.text.template import ChatTemplate, Message, guard_messages, normalize_messages
from common.text.tokenizer import Tokenizer, load_tokenizer

_CONTINUED = "\ue000continued\ue001"
"""Put behind the last message where the model is to go on with it: what the template writes behind that is cut off."""


class TextBundle(msgspec.Struct, frozen=True, kw_only=True):
    """`max_context` is in tokens, prompt and output together. `vocab_size`: of the model's logits; 0: the tokenizer's.
    `eos_ids` end a turn (the stop ids of a request). `template` is the default one, `named_templates` are the model's others.
    `sampling` is what a request gets that does not say. `tool_parser` and `reasoning_parser` say how answers are read; `auto`:
    as the template says."""

    name: str
    files: ModelFiles
    tokenizer: Tokenizer
    template: ChatTemplate | None
    eos_ids: list[int]
    max_context: int
    vocab_size: int = 0
    named_templates: dict[str, ChatTemplate] = {}
    sampling: SamplingDefaults = SamplingDefaults()
    tool_parser: ToolParser = "auto"
    reasoning_parser: ReasoningParser = "auto"

    def dialect_of(self, template: ChatTemplate) -> Dialect:
        """How answers to prompts of `template` write reasoning and calls."""
        return dialect_of(template.source, self.tool_parser, self.reasoning_parser)

    @property
    def num_ids(self) -> int:
        """Token ids that the model takes: fewer than the tokenizer's where tokens were added and the model was not enlarged."""
        return self.vocab_size or self.tokenizer.vocab_size

    def check_ids(self, ids: Sequence[int], param: str) -> None:
        """:raises InvalidParameter: naming the first of `ids` that the model does not have."""
        if ids and (min(ids) < 0 or max(ids) >= self.num_ids):
            found = next(token for token in ids if not 0 <= token < self.num_ids)
            name = f" ({self.tokenizer.token_name(found)!r})" if 0 <= found < self.tokenizer.vocab_size else ""
            raise InvalidParameter(f"token id {found}{name} is past the vocabulary of {self.num_ids}", param=param)

    def template_called(self, name: str, *, tools: bool = False) -> ChatTemplate:
        """The default template for an empty name; with `tools`, the one for tools if the model has one of its own for them.

        :raises InvalidParameter: if the model has no such template.
        """
        if name and name != DEFAULT:
            if name not in self.named_templates:
                known = ", ".join(sorted(self.named_templates)) or "it has none besides its default"
                raise InvalidParameter(
                    f"{self.name} has no chat template of that name ({known}), and templates of clients are not taken",
                    param="chat_template",
                )
            return self.named_templates[name]
        if tools and not name and TOOL_USE in self.named_templates:
            return self.named_templates[TOOL_USE]
        if self.template is None:
            names = f"; name one of its own in chat_template: {', '.join(sorted(self.named_templates))}"
            raise InvalidParameter(
                f"{self.name} has no chat template"
                + (names if self.named_templates else "; use completions with a prompt of your own"),
                param="model",
            )
        return self.template

    def encode_chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
        max_tokens: int | None = None,
        template: str = "",
        continues: bool = False,
    ) -> list[int]:
        """Token ids of a conversation. Special tokens come from the template only; in messages their text is plain text.
        `template` names another than the default one. The role `developer` is `system` for templates that don't know it.
        `continues`: the model goes on with the last message, so the prompt ends with its content.

        Takes about half a second per megabyte: from 20 kB on, call it in a thread.

        :raises InvalidParameter: if the model has no chat template, it can't render these messages, or the model lacks a token
            of theirs.
        :raises ContextLengthExceeded: if the prompt is longer than `max_tokens`.
        """
        chat_template = self.template_called(template, tools=bool(tools))
        normal = normalize_messages(messages)
        if length := self.dialect_of(chat_template).id_length:
            normal = with_short_ids(normal, length)
        if not chat_template.mentions("developer"):
            normal = [{**m, "role": "system"} if m["role"] == "developer" else m for m in normal]
        if max_tokens is not None:
            self._check_size(normal, max_tokens)
        if continues:
            normal = [*normal[:-1], {**normal[-1], "content": (normal[-1]["content"] or "") + _CONTINUED}]
        (safe, safe_tools, safe_variables), guard = guard_messages((normal, tools, variables), self.tokenizer)
        text = chat_template.render(
            safe,
            tools=safe_tools,
            add_generation_prompt=add_generation_prompt and not continues,
            variables=safe_variables,
        )
        if continues:
            text = _up_to_mark(text)
        ids = self.tokenizer.encode(text, parse_special=True, guard=guard, max_tokens=max_tokens, param="messages")
        return self._checked(ids, "messages")

    def encode_prompt(self, prompt: str, *, add_special: bool = True, max_tokens: int | None = None) -> list[int]:
        """Token ids of a completion's prompt. The prompt is wholly the client's, so special tokens in it are meant.

        :raises InvalidParameter: if it is not valid Unicode, or holds a token that the model does not have.
        :raises ContextLengthExceeded: if it is longer than `max_tokens`.
        """
        ids = self.tokenizer.encode(prompt, add_special=add_special, parse_special=True, max_tokens=max_tokens)
        return self._checked(ids, "prompt")

    def _checked(self, ids: list[int], param: str) -> list[int]:
        """`ids`, which the tokenizer made."""
        if self.num_ids < self.tokenizer.vocab_size:
            self.check_ids(ids, param)
        return ids

    def detokenizer(self, *, skip_special: bool = True, continues: bool = False) -> Detokenizer | WindowDetokenizer:
        return detokenizer(self.tokenizer, skip_special=skip_special, continues=continues)

    def _check_size(self, messages: Sequence[Message], max_tokens: int) -> None:
        """Refuses messages that can't fit before a template copies them around."""
        size = sum(len(message["content"] or "") for message in messages)
        if size > max_tokens * self.tokenizer.longest_token_bytes or len(messages) > max_tokens:
            raise ContextLengthExceeded(f"messages of {size} characters can't fit {max_tokens} tokens", param="messages")


def _up_to_mark(text: str) -> str:
    """:raises InvalidParameter: if the template does not show the last message's content as it is."""
    at = text.rfind(_CONTINUED)
    if at < 0:
        raise InvalidParameter("the model's chat template can't show a message that is to be continued", param="messages")
    return text[:at]


def load_bundle(
    files: ModelFiles,
    *,
    name: str = "",
    generation_config: bool = True,
    max_context: int = 0,
    max_model_len: int = 0,
    vocab_size: int = 0,
    tool_parser: ToolParser = "auto",
    reasoning_parser: ReasoningParser = "auto",
) -> TextBundle:
    """Read tokenizer, templates, limits and (with `generation_config`) recommended sampling of `files`.

    `name` is what clients call the model (default: its own). `max_context` is what its configuration says (`load_config`),
    which YaRN may stretch; 0: what the files say as they are. `max_model_len` limits it (0: no limit).
    `vocab_size`: of the model's logits (0: the tokenizer's).
    `tool_parser` and `reasoning_parser`: see `TextBundle`.

    :raises ConfigError: if any of them is missing, damaged or not supported, or the model takes less than `max_model_len`.
    """
    metadata = read_metadata(files.path) if files.format == "gguf" else None
    tokenizer = load_tokenizer(files, metadata=metadata)
    templates = load_templates(files, tokenizer.special_tokens, metadata=metadata)
    stated = _max_context(files, metadata)
    return TextBundle(
        name=name or files.name,
        files=files,
        tokenizer=tokenizer,
        template=templates.pop(DEFAULT, None),
        named_templates=templates,
        eos_ids=tokenizer.eos_ids,
        max_context=context_of(max_context or stated, max_model_len),
        vocab_size=vocab_size,
        sampling=load_sampling_defaults(files, metadata=metadata) if generation_config else SamplingDefaults(),
        tool_parser=tool_parser,
        reasoning_parser=reasoning_parser,
    )


def _max_context(files: ModelFiles, metadata: Mapping[str, Any] | None) -> int:
    if metadata is not None:
        value = metadata.get(f"{metadata.get('general.architecture')}.context_length")
    else:
        value = unwrapped(read_object_if_any(files.path / "config.json")).get("max_position_embeddings")
    if not isinstance(value, int) or value < 1:
        raise ConfigError(f"{files.path} does not say how long a context the model takes")
    return value
