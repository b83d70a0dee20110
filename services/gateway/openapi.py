"""`/openapi.json`: the HTTP API as an OpenAPI 3.1 document, and `/docs`, a page that shows it. Both load without an API key.

The document is put together from what the gateway works with: bodies from the types that the parser decodes, errors from their
classes, routes from `api_operations.py`. Why: docs/decisions/0033-the-api-describes-itself.md.
"""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from common.protocol.errors import PenstockError
from common.runtime.version import version
from services.gateway.api_answers import ANSWERS, STRING, Schema, either, record, reference
from services.gateway.api_batches import BATCH_ANSWERS, BATCH_OPERATIONS
from services.gateway.api_bodies import body_schemas
from services.gateway.api_operation import EVERYWHERE, JSON, Operation
from services.gateway.api_operations import OPERATIONS
from services.gateway.api_view_answers import VIEW_ANSWERS
from services.gateway.bodies import error_type
from services.gateway.config import GatewayConfig
from services.gateway.http_io import error_headers
from services.gateway.page_files import page_file
from services.gateway.views import messages_answer

_ABOUT = (
    "OpenAI's API, what vLLM has besides, and Anthropic's Messages. Arguments that are not listed have no effect, and the "
    "answer's `warning` header names them. All but prompts, messages and tools take 64 KiB together at most. A connection that "
    "takes longer than 10 s for its headers gets an empty 408, one with more than 64 KiB of them an empty 431, and one too "
    "many an empty 503. All bodies but those of files and batches are taken over NATS, too."
)
_HEADERS: dict[str, Schema] = {
    "retry-after": {"description": "Seconds to wait before the next attempt.", "schema": STRING},
    "www-authenticate": {"description": "How to send the API key.", "schema": STRING},
    "warning": {"description": "Arguments that had no effect.", "schema": STRING},
    "x-should-retry": {"description": "`false`: another attempt would end as this one.", "schema": STRING},
    "x-request-id": {"description": "The client's, or one that was made for the request.", "schema": STRING},
}


def document(config: GatewayConfig) -> dict[str, Any]:
    """Return the OpenAPI document of a gateway with these settings: of the routes that it has."""
    paths: dict[str, dict[str, Any]] = {}
    for operation in OPERATIONS:
        if config.zero_retention and operation in BATCH_OPERATIONS:
            continue
        paths.setdefault(operation.path, {})[operation.method.lower()] = _operation(operation)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Penstock", "version": version(), "description": _ABOUT},
        "paths": paths,
        "components": {
            "schemas": {
                **body_schemas(max_n=config.max_n),
                **ANSWERS,
                **VIEW_ANSWERS,
                **BATCH_ANSWERS,
                "Error": error_schema([]),
            },
            "securitySchemes": {
                "key": {"type": "http", "scheme": "bearer"},
                "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
        "security": [],
    }


def openapi_routes(config: GatewayConfig) -> list[Route]:
    """The routes of the document and of its page."""
    encoded = b""

    async def serve_document(request: Request) -> Response:
        nonlocal encoded
        encoded = encoded or msgspec.json.encode(document(config))
        return Response(encoded, media_type=JSON, headers={"cache-control": "no-cache"})

    async def serve_page(request: Request) -> Response:
        return page_file("docs.html", request)

    return [Route("/openapi.json", serve_document, methods=["GET"]), Route("/docs", serve_page, methods=["GET"])]


def error_schema(errors: list[type[PenstockError]]) -> Schema:
    """OpenAI's error object; with `errors`, one of these."""
    kinds = sorted({error_type(error.http_status) for error in errors})
    codes = sorted({error.code for error in errors})
    return record(
        {
            "error": record(
                {
                    "message": STRING,
                    "type": {"enum": kinds} if kinds else STRING,
                    "param": either(STRING, {"type": "null"}),
                    "code": {"enum": codes} if codes else STRING,
                }
            )
        }
    )


def anthropic_error_schema(errors: list[type[PenstockError]]) -> Schema:
    """Anthropic's error object; one of these."""
    kinds = sorted({messages_answer.error_type(error.http_status) for error in errors})
    codes = sorted({error.code for error in errors})
    told = record({"type": {"enum": kinds}, "message": STRING, "code": {"enum": codes}})
    return record({"type": {"const": "error"}, "error": told})


def _error_schema(operation: Operation, errors: list[type[PenstockError]]) -> Schema:
    """Those of EVERYWHERE come before the route is known, in OpenAI's form."""
    if not operation.anthropic:
        return error_schema(errors)
    early = [error for error in errors if error in EVERYWHERE]
    own = [error for error in errors if error not in EVERYWHERE]
    forms = [form(those) for form, those in ((anthropic_error_schema, own), (error_schema, early)) if those]
    return forms[0] if len(forms) == 1 else either(*forms)


def _operation(operation: Operation) -> dict[str, Any]:
    name = operation.path.strip("/").replace("/", "_").replace("{", "").replace("}", "").replace(".", "_") or "page"
    described: dict[str, Any] = {
        "operationId": f"{operation.method.lower()}_{name}",
        "summary": operation.summary,
        "tags": [operation.tag],
        "security": [{"key": []}, {"x-api-key": []}, {}] if operation.keyed else [],
        "responses": _responses(operation),
    }
    if operation.parameters:
        described["parameters"] = [
            {
                "name": parameter.name,
                "in": parameter.place,
                "required": parameter.place == "path",
                "description": parameter.description,
                "schema": parameter.schema,
            }
            for parameter in operation.parameters
        ]
    if operation.body is not None:
        content = {JSON: {"schema": reference(operation.body.__name__)}}
        described["requestBody"] = {"required": True, "content": content}
    if operation.form is not None:
        described["requestBody"] = {"required": True, "content": {"multipart/form-data": {"schema": operation.form}}}
    return described


def _responses(operation: Operation) -> dict[str, Any]:
    responses: dict[str, Any] = {}
    for status, media in operation.answers.items():
        response: dict[str, Any] = {"description": "The answer." if status < 300 else "See the summary."}
        if media:
            response["content"] = {kind: {"schema": schema} for kind, schema in media.items()}
        if operation.body is not None:
            response["headers"] = {name: _HEADERS[name] for name in ("x-request-id", "warning")}
        responses[str(status)] = response
    by_status: dict[int, list[type[PenstockError]]] = {}
    for error in operation.all_errors:
        by_status.setdefault(error.http_status, []).append(error)
    for status, errors in sorted(by_status.items()):
        headers = {name.decode() for error in errors for name, _ in error_headers(error())}
        responses[str(status)] = {
            "description": ", ".join(f"`{code}`" for code in sorted({error.code for error in errors})),
            "content": {JSON: {"schema": _error_schema(operation, errors)}},
            **({"headers": {name: _HEADERS[name] for name in sorted(headers)}} if headers else {}),
        }
    return responses
