"""`/v1/files` and `/v1/batches` as `/openapi.json` describes them: routes and answers."""

from __future__ import annotations

from typing import Any, get_args

from common.protocol.errors import (
    InternalError,
    InvalidParameter,
    JetStreamOff,
    Overloaded,
    PayloadTooLarge,
    RateLimited,
    StorageFull,
)
from services.gateway.api_answers import COUNT, NULL, STRING, Schema, array, const, either, record, reference
from services.gateway.api_operation import Errors, Operation, Parameter, answer
from services.gateway.batches.http import DEFAULT_LIMIT, MAX_FIELD_BYTES, MAX_LIMIT
from services.gateway.batches.records import ENDPOINTS, BatchRequest, Status
from services.gateway.batches.store import (
    BatchEnded,
    BatchNotFound,
    FileNotFound,
    StorageUnavailable,
    TenantStorageFull,
    TooManyBatches,
)
from services.gateway.http_body import BodyTimeout, WrongContentType

_STORED: Errors = (JetStreamOff, StorageFull, StorageUnavailable, InternalError)
_STATUSES: tuple[str, ...] = get_args(Status)
_TIME = either(COUNT, NULL)
_NAME = either(STRING, NULL)


def _page(name: str) -> Schema:
    return record(
        {
            "object": const("list"),
            "data": array(reference(name)),
            "first_id": _NAME,
            "last_id": _NAME,
            "has_more": {"type": "boolean"},
        }
    )


BATCH_ANSWERS: dict[str, Schema] = {
    "File": record(
        {
            "id": STRING,
            "object": const("file"),
            "bytes": COUNT,
            "created_at": COUNT,
            "filename": STRING,
            "purpose": STRING,
            "status": const("processed"),
            "status_details": NULL,
        }
    ),
    "FileList": _page("File"),
    "FileDeleted": record({"id": STRING, "object": const("file"), "deleted": {"const": True}}),
    "Batch": record(
        {
            "id": STRING,
            "object": const("batch"),
            "endpoint": {"enum": list(ENDPOINTS)},
            "errors": either(
                NULL,
                record(
                    {
                        "object": const("list"),
                        "data": array(record({"code": STRING, "line": either(COUNT, NULL), "message": STRING, "param": _NAME})),
                    }
                ),
            ),
            "input_file_id": STRING,
            "completion_window": STRING,
            "status": {"enum": list(_STATUSES)},
            "output_file_id": _NAME,
            "error_file_id": _NAME,
            "created_at": COUNT,
            "expires_at": COUNT,
            **{f"{status}_at": _TIME for status in _STATUSES if status != "validating"},
            "request_counts": record({"total": COUNT, "completed": COUNT, "failed": COUNT}),
            "metadata": either(NULL, {"type": "object", "additionalProperties": STRING}),
        }
    ),
    "BatchList": _page("Batch"),
}

_FORM: Schema = {
    "type": "object",
    "required": ["purpose", "file"],
    "properties": {
        "purpose": {"const": "batch", "maxLength": MAX_FIELD_BYTES},
        "file": {"type": "string", "contentMediaType": "application/octet-stream"},
    },
    "additionalProperties": False,
}


def _paging(what: str, *orders: str) -> tuple[Parameter, ...]:
    limit = f"How many at most: from 1 to {MAX_LIMIT[what]}, by default {DEFAULT_LIMIT[what]}."
    return (
        Parameter("limit", "query", limit, {"type": "integer", "minimum": 1, "maximum": MAX_LIMIT[what]}),
        Parameter("after", "query", "What comes behind the one of this id."),
        Parameter("order", "query", "By when they were made.", {"enum": list(orders)}),
    )


_FILE = Parameter("id", "path", "A file's id.")
_BATCH = Parameter("id", "path", "A batch's id.")


def _operation(method: Any, path: str, summary: str, name: str, *errors: Any, **more: Any) -> Operation:
    return Operation(
        method=method,
        path=path,
        summary=summary,
        tag="batches",
        answers=more.pop("answers", None) or answer(name),
        errors=(*_STORED, *errors),
        keyed=True,
        **more,
    )


BATCH_OPERATIONS: tuple[Operation, ...] = (
    _operation(
        "POST",
        "/v1/files",
        "Upload a batch's lines.",
        "File",
        InvalidParameter,
        PayloadTooLarge,
        BodyTimeout,
        Overloaded,
        RateLimited,
        TenantStorageFull,
        form=_FORM,
    ),
    _operation(
        "GET",
        "/v1/files",
        "List files.",
        "FileList",
        InvalidParameter,
        parameters=(*_paging("files", "asc", "desc"), Parameter("purpose", "query", "Only those for this.")),
    ),
    _operation("GET", "/v1/files/{id}", "Describe a file.", "File", FileNotFound, parameters=(_FILE,)),
    _operation("DELETE", "/v1/files/{id}", "Delete a file.", "FileDeleted", FileNotFound, parameters=(_FILE,)),
    _operation(
        "GET",
        "/v1/files/{id}/content",
        "Download a file.",
        "",
        FileNotFound,
        parameters=(_FILE,),
        answers={200: {"application/octet-stream": STRING}},
    ),
    _operation(
        "POST",
        "/v1/batches",
        "Have the lines of a file answered.",
        "Batch",
        InvalidParameter,
        PayloadTooLarge,
        BodyTimeout,
        WrongContentType,
        Overloaded,
        FileNotFound,
        TooManyBatches,
        body=BatchRequest,
    ),
    _operation(
        "GET",
        "/v1/batches",
        "List batches, the newest first.",
        "BatchList",
        InvalidParameter,
        parameters=_paging("batches", "desc"),
    ),
    _operation("GET", "/v1/batches/{id}", "Describe a batch.", "Batch", BatchNotFound, parameters=(_BATCH,)),
    _operation("POST", "/v1/batches/{id}/cancel", "Cancel a batch.", "Batch", BatchNotFound, BatchEnded, parameters=(_BATCH,)),
)
