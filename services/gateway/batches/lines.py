"""The lines of a batch's file: finding them in its bytes, and checking each. Pure.

    {"custom_id": "one", "method": "POST", "url": "/v1/chat/completions", "body": {"model": …, "messages": […]}}

What is wrong with a line's envelope fails the batch, with OpenAI's codes. What is wrong with its `body` is found when it runs,
and is the line's own result.
"""

from __future__ import annotations

import codecs
import hashlib
from collections.abc import Callable, Iterator

import msgspec

from services.gateway.batches.records import ENDPOINTS, BatchError, LineKind

MAX_CUSTOM_ID = 512
MAX_ERRORS = 100
"""Errors that a failed batch lists."""


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """A line that can be run. `model` is a name that is served."""

    custom_id: str
    kind: LineKind
    model: str
    body: bytes


class WrongLine(Exception):
    """What is wrong with one line's envelope."""

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param


_NOTHING, _NULL = msgspec.Raw(), msgspec.Raw(b"null")


class _Envelope(msgspec.Struct):
    custom_id: str | None = None
    method: str | None = None
    url: str | None = None
    body: msgspec.Raw = msgspec.Raw()


class _Body(msgspec.Struct):
    model: str | None = None


_envelope = msgspec.json.Decoder(_Envelope)
_body = msgspec.json.Decoder(_Body)


def parse_line(raw: bytes, *, choose: Callable[[str | None], str | None], endpoint: str | None = None) -> Line:
    """The request in a line. `choose`: the model for a name, or for none; None if it is not served. `endpoint`: the batch's.

    :raises WrongLine:
    """
    try:
        envelope = _envelope.decode(raw)
    except msgspec.ValidationError as error:
        raise WrongLine("invalid_request", f"The line is no request: {error}") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise WrongLine("invalid_json_line", "The line is not valid JSON.") from error
    for name in ("custom_id", "method", "url", "body"):
        if getattr(envelope, name) in (None, _NOTHING, _NULL):
            raise WrongLine("missing_required_parameter", f"The line has no {name}.", name)
    assert envelope.custom_id is not None and envelope.url is not None
    if len(envelope.custom_id) > MAX_CUSTOM_ID:
        raise WrongLine("invalid_request", f"custom_id is longer than {MAX_CUSTOM_ID} characters.", "custom_id")
    if envelope.method != "POST":
        raise WrongLine("invalid_method", "The method of a line is POST.", "method")
    if envelope.url not in ENDPOINTS or (endpoint is not None and envelope.url != endpoint):
        allowed = endpoint or " or ".join(ENDPOINTS)
        raise WrongLine("invalid_url", f"The url of a line here is {allowed}.", "url")
    body = bytes(envelope.body)
    try:
        name = _body.decode(body).model
    except msgspec.DecodeError as error:
        raise WrongLine("invalid_request", "The body of a line is a JSON object with the name of a model.", "body") from error
    model = choose(name)
    if model is None:
        said = "names no model" if name is None else f"is for the model {name[:100]!r}, which is not served here"
        raise WrongLine("model_not_found", f"The line {said}.", "body.model")
    return Line(custom_id=envelope.custom_id, kind=ENDPOINTS[envelope.url], model=model, body=body)


def custom_id_of(raw: bytes) -> str:
    """What a line that was checked before is called."""
    return _envelope.decode(raw).custom_id or ""


class LineSplitter:
    """Lines from the bytes of a file, as they come. Blank lines are no lines, and a byte order mark is no part of the first."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._rest = b""
        self._searched = 0
        self._at_start = True

    def push(self, data: bytes) -> Iterator[bytes]:
        """The lines that `data` completes. One that is too long comes cut off, one byte longer than a line may be."""
        self._rest += data
        if self._at_start and len(self._rest) >= len(codecs.BOM_UTF8):
            self._rest, self._searched, self._at_start = self._rest.removeprefix(codecs.BOM_UTF8), 0, False
        start = 0
        while (end := self._rest.find(b"\n", max(start, self._searched))) >= 0:
            line = self._rest[start:end].strip()
            start = end + 1
            if line:
                yield line[: self._max_bytes + 1]
        self._rest = self._rest[start:]
        if len(self._rest) > 2 * self._max_bytes:  # what is missing of it can't make it shorter
            self._rest = self._rest[: self._max_bytes + 1]
        self._searched = len(self._rest)

    def finish(self) -> Iterator[bytes]:
        """The last line, if it has no end."""
        if line := self._rest.strip():
            yield line[: self._max_bytes + 1]
        self._rest = b""


class LineChecker:
    """Checks the lines of one batch, one after the other. `errors`: the first MAX_ERRORS that are wrong."""

    def __init__(
        self, endpoint: str, *, choose: Callable[[str | None], str | None], max_lines: int, max_line_bytes: int
    ) -> None:
        self.num_lines = 0
        self.errors: list[BatchError] = []
        self._endpoint = endpoint
        self._choose = choose
        self._max_lines = max_lines
        self._max_line_bytes = max_line_bytes
        self._seen: set[bytes] = set()

    def check(self, raw: bytes) -> bool:
        """Whether to go on: False when enough is wrong."""
        self.num_lines += 1
        if self.num_lines > self._max_lines:
            self._say(BatchError(code="too_many_tasks", message=f"A batch has at most {self._max_lines} lines."))
            return False
        try:
            if len(raw) > self._max_line_bytes:
                raise WrongLine("line_too_long", f"A line has at most {self._max_line_bytes} bytes.")
            line = parse_line(raw, choose=self._choose, endpoint=self._endpoint)
            digest = hashlib.blake2b(line.custom_id.encode(errors="surrogatepass"), digest_size=16).digest()
            if digest in self._seen:
                raise WrongLine("duplicate_custom_id", "An earlier line has the same custom_id.", "custom_id")
            self._seen.add(digest)
        except WrongLine as error:
            self._say(BatchError(code=error.code, message=error.message, line=self.num_lines, param=error.param))
        return len(self.errors) < MAX_ERRORS

    def finish(self) -> None:
        if not self.num_lines:
            self._say(BatchError(code="empty_file", message="The file has no line."))

    def _say(self, error: BatchError) -> None:
        self.errors.append(error)
