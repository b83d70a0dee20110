"""The result of a line, as it is kept and as it stands in a batch's output or error file. Pure."""

from __future__ import annotations

import os
import re
from typing import Any

import msgspec

from common.protocol import headers
from common.protocol.errors import PenstockError
from services.gateway import bodies

_encode = msgspec.json.Encoder().encode

COMPLETED, FAILED = "completed", "failed"
MESSAGES = {
    "batch_expired": "This request could not be executed before the completion window expired.",
    "batch_cancelled": "The batch was cancelled before this request was executed.",
}
LINE_ID_PREFIX = "batch_req_"
OVERHEAD_BYTES = 64 * 1024
"""What stands around an answer in its line, and beside it in its message, at most."""


class Result(msgspec.Struct, frozen=True):
    """`data` is one line of JSON without its end."""

    outcome: str
    data: bytes

    @property
    def headers(self) -> dict[str, str]:
        return {headers.OUTCOME: self.outcome}


def answered(custom_id: str, request: str, body: bytes) -> Result:
    """`body`: the answer, as a client that did not ask for a stream would get it."""
    return Result(COMPLETED, _line(custom_id, _response(200, request, body), None))


def refused(custom_id: str, request: str, error: PenstockError) -> Result:
    return Result(FAILED, _line(custom_id, _response(error.http_status, request, bodies.failure_body(error)), None))


def not_run(custom_id: str, code: str) -> Result:
    """The batch ended before the line was run; `code` is one of `MESSAGES`."""
    return Result(FAILED, _line(custom_id, None, {"code": code, "message": MESSAGES[code]}))


def line_id(request: str) -> str:
    """Return the id of the line whose request is `request`, with the same digits, so that either id leads to the request.

    >>> line_id("chatcmpl-00112233445566778899aabb"), line_id("resp_00112233445566778899aabb")
    ('batch_req_00112233445566778899aabb', 'batch_req_00112233445566778899aabb')
    """
    return f"{LINE_ID_PREFIX}{re.split('[-_]', request)[-1]}"


def _response(status: int, request: str, body: bytes) -> dict[str, Any]:
    return {"status_code": status, "request_id": request, "body": msgspec.Raw(body)}


def _line(custom_id: str, response: dict[str, Any] | None, error: dict[str, str] | None) -> bytes:
    id = line_id(response["request_id"] if response is not None else os.urandom(12).hex())
    return _encode({"id": id, "custom_id": custom_id, "response": response, "error": error})
