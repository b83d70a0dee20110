"""What files and batches are, as they are kept and as OpenAI's API shows them. Pure.

validating ─► in_progress ─► finalizing ─► completed        or failed: not one line was run
     │             ├─────► expired                          its window closed
     └─────────────┴─► cancelling ─► cancelled
"""

from __future__ import annotations

import re
from typing import Any, Final, Literal, get_args

import msgspec

from common.protocol.errors import InvalidParameter

Status = Literal["validating", "in_progress", "finalizing", "completed", "failed", "cancelling", "cancelled", "expired"]
FINAL: Final = frozenset({"completed", "failed", "cancelled", "expired"})
NEXT: dict[Status, frozenset[Status]] = {
    "validating": frozenset({"in_progress", "failed", "cancelling", "expired"}),
    "in_progress": frozenset({"finalizing", "failed", "cancelling", "expired"}),
    "finalizing": frozenset({"completed", "failed"}),
    "cancelling": frozenset({"cancelled", "failed"}),
    "completed": frozenset(),
    "failed": frozenset(),
    "cancelled": frozenset(),
    "expired": frozenset(),
}

LineKind = Literal["chat", "completion", "responses", "embedding"]
ENDPOINTS: dict[str, LineKind] = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "completion",
    "/v1/responses": "responses",
    "/v1/embeddings": "embedding",
}
"""What a line may ask for."""

MAX_WINDOW_S = 7 * 24 * 3600
MAX_METADATA = 16
MAX_KEY_CHARS, MAX_VALUE_CHARS = 64, 512
_WINDOW = re.compile(r"([1-9][0-9]{0,6})([smhd])")
_UNIT_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}


class FileRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A file whose parts are all kept. `created_at` in seconds since 1970."""

    id: str
    filename: str
    purpose: str
    num_bytes: int
    num_parts: int
    created_at: int

    def body(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.num_bytes,
            "created_at": self.created_at,
            "filename": self.filename,
            "purpose": self.purpose,
            "status": "processed",
            "status_details": None,
        }


class BatchError(msgspec.Struct, frozen=True, kw_only=True):
    """Why a batch failed. `line` counts from 1."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """A batch. `at`: when it came into each status, in seconds since 1970. `keeper`: the gateway that sees it through.
    `expiring`: its window has closed, and lines without a result are getting one that says so."""

    id: str
    endpoint: str
    input_file: str
    completion_window: str
    created_at: int
    expires_at: int
    metadata: dict[str, str] | None = None
    status: Status = "validating"
    at: dict[str, int] = {}
    errors: list[BatchError] = []
    output_file: str | None = None
    error_file: str | None = None
    total: int = 0
    completed: int = 0
    failed: int = 0
    keeper: str = ""
    expiring: bool = False

    @property
    def has_ended(self) -> bool:
        return self.status in FINAL

    def moved(self, status: Status, now: float, **changes: Any) -> Batch:
        """The batch in another status.

        :raises AssertionError: it can't come into that one.
        """
        assert status in NEXT[self.status], f"{self.status} → {status}"
        return msgspec.structs.replace(self, status=status, at={**self.at, status: int(now)}, **changes)

    def body(self) -> dict[str, Any]:
        at = self.at
        errors = [{"code": e.code, "line": e.line, "message": e.message, "param": e.param} for e in self.errors]
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "errors": {"object": "list", "data": errors} if errors else None,
            "input_file_id": self.input_file,
            "completion_window": self.completion_window,
            "status": self.status,
            "output_file_id": self.output_file,
            "error_file_id": self.error_file,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
            **{f"{status}_at": at.get(status) for status in get_args(Status) if status != "validating"},
            "request_counts": {"total": self.total, "completed": self.completed, "failed": self.failed},
            "metadata": self.metadata,
        }


class BatchRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of `POST /v1/batches`."""

    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: dict[str, str] | None = None


_request = msgspec.json.Decoder(BatchRequest)


def parse_request(body: bytes) -> tuple[BatchRequest, float]:
    """A request for a batch, and its window in seconds.

    :raises InvalidParameter: naming the argument.
    """
    try:
        request = _request.decode(body)
    except msgspec.ValidationError as error:
        where = re.search(r"`\$\.?(\w+)|(?:missing required|unknown) field `(\w+)", str(error))
        raise InvalidParameter(str(error), param=(where[1] or where[2]) if where else None) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidParameter("the body is not valid JSON") from error
    if request.endpoint not in ENDPOINTS:
        raise InvalidParameter(f"endpoint must be one of {', '.join(ENDPOINTS)}", param="endpoint")
    if not re.fullmatch(r"file-[0-9a-f]{1,64}", request.input_file_id):
        raise InvalidParameter("input_file_id is the id of no file: upload one with purpose `batch`", param="input_file_id")
    found = _WINDOW.fullmatch(request.completion_window)
    window_s = int(found[1]) * _UNIT_S[found[2]] if found else 0
    if not 0 < window_s <= MAX_WINDOW_S:
        raise InvalidParameter("completion_window is a time of up to 7d, such as 24h", param="completion_window")
    metadata = request.metadata or {}
    if len(metadata) > MAX_METADATA or any(len(k) > MAX_KEY_CHARS or len(v) > MAX_VALUE_CHARS for k, v in metadata.items()):
        raise InvalidParameter(
            f"metadata holds up to {MAX_METADATA} keys of {MAX_KEY_CHARS} characters with values of {MAX_VALUE_CHARS}",
            param="metadata",
        )
    return request, window_s
