"""The chat templates that come with a model: the default one, and others by name (`tool_use`, `rag`).

A folder has them in `chat_template.jinja` and `additional_chat_templates/NAME.jinja`, in `chat_template.json`, or in
`tokenizer_config.json` as a text or a list of named ones, in transformers' order of precedence. A GGUF header has
`tokenizer.chat_template` and `tokenizer.chat_template.NAME`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from common.models.json_files import read_object_if_any
from common.models.source import ModelFiles
from common.models.weights.gguf_metadata import read_metadata
from common.protocol.errors import ConfigError
from common.runtime import logs
from common.text.special_tokens import SpecialTokens
from common.text.template import ChatTemplate

log = logs.get(__name__)

DEFAULT = "default"
TOOL_USE = "tool_use"
"""The template for requests with tools, in models that have several (transformers' name for it)."""
_GGUF_KEY = "tokenizer.chat_template"


def load_templates(
    files: ModelFiles, special_tokens: SpecialTokens, *, metadata: Mapping[str, Any] | None = None
) -> dict[str, ChatTemplate]:
    """The templates of `files` by name; without any, it is a base model, which completes and does not chat.

    One that can't be read or compiled is left out, unless it is the default.

    :raises ConfigError: if the default one can't be read or compiled.
    """
    if files.format == "gguf":
        found = _in_gguf(read_metadata(files.path) if metadata is None else metadata)
    else:
        found = _in_folder(files.path)
    templates: dict[str, ChatTemplate] = {}
    for name, source in found:
        try:
            templates[name] = ChatTemplate(source, special_tokens)
        except ConfigError as error:
            if name == DEFAULT:
                raise
            log.warning("chat_template_left_out", template=name, reason=str(error))
    return templates


def _in_gguf(metadata: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for key, source in metadata.items():
        if isinstance(source, str) and source and (key == _GGUF_KEY or key.startswith(f"{_GGUF_KEY}.")):
            yield key[len(_GGUF_KEY) + 1 :] or DEFAULT, source


def _in_folder(folder: Path) -> Iterator[tuple[str, str]]:
    named = {path.stem: path for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    for name, path in named.items():
        if name == DEFAULT:
            continue
        try:
            yield name, _text(path)
        except ConfigError as error:
            log.warning("chat_template_left_out", template=name, reason=str(error))
    own = folder / "chat_template.jinja"
    if own.is_file():
        yield DEFAULT, _text(own)
        return
    for file in ("chat_template.json", "tokenizer_config.json"):
        source = read_object_if_any(folder / file).get("chat_template")
        if isinstance(source, str) and source:
            yield DEFAULT, source
            return
        if isinstance(source, list):
            source = {entry.get("name"): entry.get("template") for entry in source if isinstance(entry, dict)}
        if isinstance(source, dict) and source:
            yield from ((name, text) for name, text in source.items() if isinstance(name, str) and isinstance(text, str))
            return


def _text(path: Path) -> str:
    """:raises ConfigError: if the file can't be read, or is no UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} can't be read: {error}") from error
