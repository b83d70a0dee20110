"""A conversation as `penstock chat` keeps it: the turns so far, the system prompt, and files for the next message."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

import msgspec

from common.protocol.errors import InvalidParameter

MAX_FILE_BYTES = 256 << 10
"""Largest file of a message: some 60,000 tokens of English."""
MAX_FILES_BYTES = 1 << 20
"""What the files of one message may have in all."""


class TextFile(msgspec.Struct, frozen=True):
    name: str
    text: str

    @property
    def num_bytes(self) -> int:
        return len(self.text.encode())


class Conversation(msgspec.Struct):
    """`turns`: messages of user and assistant in turn, all of them answered. `files` go with the next message."""

    system: str = ""
    turns: list[dict[str, str]] = []
    files: list[TextFile] = []

    def with_prompt(self, prompt: str) -> list[dict[str, str]]:
        """The messages of a request that asks `prompt` next."""
        start = [{"role": "system", "content": self.system}] if self.system else []
        return [*start, *self.turns, {"role": "user", "content": self._with_files(prompt)}]

    def answered(self, prompt: str, answer: str) -> None:
        """Keep a turn; its files are part of it from now on."""
        self.turns += [{"role": "user", "content": self._with_files(prompt)}, {"role": "assistant", "content": answer}]
        self.files = []

    def attach(self, path: Path) -> TextFile:
        """Add a file to the next message.

        :raises InvalidParameter: as `read_text_file`; or if the message's files are too large together.
        """
        file = read_text_file(path)
        if sum(other.num_bytes for other in self.files) + file.num_bytes > MAX_FILES_BYTES:
            raise InvalidParameter(f"the files of one message may have {MAX_FILES_BYTES >> 10} KiB in all", param="file")
        self.files.append(file)
        return file

    def clear(self) -> None:
        """Forget everything but the system prompt."""
        self.turns, self.files = [], []

    def save(self, path: Path) -> None:
        """Write the messages as JSON to a new file.

        :raises InvalidParameter: if the file exists, or can't be written.
        """
        start = [{"role": "system", "content": self.system}] if self.system else []
        text = msgspec.json.format(msgspec.json.encode([*start, *self.turns]))
        try:
            with path.open("xb") as file:
                file.write(text + b"\n")
        except OSError as error:
            raise InvalidParameter(f"can't write {path}: {error.strerror}", param="file") from error

    def _with_files(self, prompt: str) -> str:
        return "\n\n".join([*map(_quoted, self.files), prompt])


def _quoted(file: TextFile) -> str:
    """The file in a block of Markdown, whose fence is longer than any in the text."""
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", file.text)), default=0))
    return f"{file.name}:\n{fence}\n{file.text.rstrip()}\n{fence}"


def read_text_file(path: Path) -> TextFile:
    """A file of UTF-8 text.

    :raises InvalidParameter: if it can't be read, is empty, too large, or is not text.
    """
    try:
        # not to wait for a writer if it is a named pipe
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise InvalidParameter(f"{path} is no regular file: name a text file", param="file")
            data = file.read(MAX_FILE_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: a path with a null byte
        raise InvalidParameter(f"can't read {path}: {getattr(error, 'strerror', '') or error}", param="file") from error
    if len(data) > MAX_FILE_BYTES:
        raise InvalidParameter(f"{path} is larger than {MAX_FILE_BYTES >> 10} KiB", param="file")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text:
        raise InvalidParameter(f"{path} is not UTF-8 text", param="file")
    if not text.strip():
        raise InvalidParameter(f"{path} is empty", param="file")
    return TextFile(path.name, text)
