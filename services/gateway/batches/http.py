"""`/v1/files` and `/v1/batches` as OpenAI has them, under starlette's routes.

A file goes into its streams as it comes, and from there to who reads it: nothing here holds more than a part of one.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import Any, Protocol, TypeVar

import anyio
import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Scope

from common.protocol.errors import BusError, InvalidParameter, Overloaded, PayloadTooLarge, RateLimited
from services.gateway.batches.multipart import FormParser, Part, boundary_of
from services.gateway.batches.records import FileRecord, parse_request
from services.gateway.batches.service import Batches
from services.gateway.batches.store import FileWriter, StorageUnavailable, Store, TenantStorageFull
from services.gateway.catalog import Catalog
from services.gateway.http_body import BodyTimeout, ClientGone, read_body
from services.gateway.tenants import Tenant

MAX_UPLOADS = 8
"""Files that are uploaded to one gateway at a time."""
MAX_FIELD_BYTES = 1024
MAX_NAME_CHARS = 512
CHUNK_TIMEOUT_S = 30.0
MAX_BATCH_BODY_BYTES = 64 * 1024
DEFAULT_LIMIT = {"files": 10_000, "batches": 20}
MAX_LIMIT = {"files": 10_000, "batches": 100}

RECORD_BYTES = 1024
"""What a file counts in its tenant's storage besides its bytes."""
MAX_TENANT_UPLOADS = 2
"""Of these, one tenant's."""
UPLOAD_RETRY_S = 1.0

Authorize = Callable[[Scope], Tenant | None]


class _Listed(Protocol):
    @property
    def id(self) -> str: ...

    def body(self) -> dict[str, Any]: ...


_L = TypeVar("_L", bound=_Listed)


def batch_routes(batches: Batches, catalog: Catalog, authorize: Authorize) -> list[Route]:
    """What a gateway's HTTP port serves of files and batches."""
    api = _Api(batches, catalog, authorize)
    return [
        Route("/v1/files", _reached(api.upload), methods=["POST"]),
        Route("/v1/files", _reached(api.files), methods=["GET"]),
        Route("/v1/files/{id}", _reached(api.file), methods=["GET"]),
        Route("/v1/files/{id}", _reached(api.delete_file), methods=["DELETE"]),
        Route("/v1/files/{id}/content", _reached(api.content), methods=["GET"]),
        Route("/v1/batches", _reached(api.create), methods=["POST"]),
        Route("/v1/batches", _reached(api.batches), methods=["GET"]),
        Route("/v1/batches/{id}", _reached(api.batch), methods=["GET"]),
        Route("/v1/batches/{id}/cancel", _reached(api.cancel), methods=["POST"]),
    ]


def _reached(endpoint: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
    """Return the endpoint with an error for clients where the bus does not answer."""

    async def answered(request: Request) -> Response:
        """:raises PenstockError: what `endpoint` raises. :raises StorageUnavailable: in place of a `BusError`."""
        try:
            return await endpoint(request)
        except BusError as error:
            raise StorageUnavailable from error

    return answered


class _Api:
    def __init__(self, batches: Batches, catalog: Catalog, authorize: Authorize) -> None:
        self._batches = batches
        self._intake = catalog.intake
        self._authorize = authorize
        self._uploads: list[_Form] = []

    async def upload(self, request: Request) -> Response:
        """:raises InvalidParameter, PayloadTooLarge, BodyTimeout, Overloaded, RateLimited, StorageFull, TenantStorageFull:
        nothing is kept then."""
        tenant = self._authorize(request.scope)
        form = _Form(await self._batches.store(tenant), self._batches.config.max_file_bytes, self._others)
        if len(self._uploads) >= MAX_UPLOADS:
            raise Overloaded(f"{MAX_UPLOADS} files are being uploaded: try again in a moment")
        if tenant is not None and len(self._others(form)) >= MAX_TENANT_UPLOADS:
            raise RateLimited(
                f"{tenant.name} uploads {MAX_TENANT_UPLOADS} files, as many as it may at a time", retry_after_s=UPLOAD_RETRY_S
            )
        self._uploads.append(form)
        try:
            if tenant is not None and tenant.settings.max_files_mb:
                await form.limit(tenant.settings.max_files_mb << 20)
            try:
                record = await form.read(request)
            except BaseException:
                with anyio.move_on_after(5, shield=True):
                    await form.discard()
                raise
        finally:
            self._uploads.remove(form)
        return _json(record.body())

    async def files(self, request: Request) -> Response:
        records = await (await self._store(request)).files()
        purpose = request.query_params.get("purpose")
        return _page(request, "files", [record for record in records if purpose in (None, record.purpose)])

    async def file(self, request: Request) -> Response:
        return _json((await (await self._store(request)).file(request.path_params["id"])).body())

    async def delete_file(self, request: Request) -> Response:
        id = request.path_params["id"]
        await (await self._store(request)).delete_file(id)
        return _json({"id": id, "object": "file", "deleted": True})

    async def content(self, request: Request) -> Response:
        store = await self._store(request)
        record = await store.file(request.path_params["id"])
        return StreamingResponse(
            _parts(store, record),
            media_type="application/octet-stream",
            headers={"content-length": str(record.num_bytes), "x-content-type-options": "nosniff"},
        )

    async def create(self, request: Request) -> Response:
        tenant = self._authorize(request.scope)
        store = await self._batches.store(tenant)
        with self._intake.room() as room:
            body = await read_body(request.scope, request.receive, MAX_BATCH_BODY_BYTES, room)
        asked, window_s = parse_request(body)
        max_batches = 0 if tenant is None else tenant.settings.max_batches
        return _json((await self._batches.create(store, asked, window_s, max_batches=max_batches)).body())

    async def batches(self, request: Request) -> Response:
        return _page(request, "batches", await (await self._store(request)).batches(), newest_first=True)

    async def batch(self, request: Request) -> Response:
        return _json((await (await self._store(request)).batch(request.path_params["id"])).body())

    async def cancel(self, request: Request) -> Response:
        store = await self._store(request)
        return _json((await self._batches.cancel(store, request.path_params["id"])).body())

    async def _store(self, request: Request) -> Store:
        """:raises Unauthorized, JetStreamOff:"""
        return await self._batches.store(self._authorize(request.scope))

    def _others(self, form: _Form) -> list[_Form]:
        """The other uploads of whose `form` is."""
        return [other for other in self._uploads if other is not form and other.owner == form.owner]


class _Form:
    """The form of an upload, read as it comes. `others`: what else its owner uploads now."""

    def __init__(self, store: Store, max_bytes: int, others: Callable[[_Form], list[_Form]]) -> None:
        self.owner = store.owner
        self._store = store
        self._others = others
        self._limit = 0
        self._kept = 0
        self._max_bytes = max_bytes
        self._writer: FileWriter | None = None
        self._fields: dict[str, bytes] = {}

    @property
    def num_bytes(self) -> int:
        return 0 if self._writer is None else self._writer.num_bytes

    async def limit(self, max_bytes: int) -> None:
        """All files of the owner have at most so many bytes.

        :raises TenantStorageFull: they have them already.
        """
        self._limit = max_bytes
        self._kept = sum(record.num_bytes + RECORD_BYTES for record in await self._store.files())
        self._check_room(RECORD_BYTES)

    async def read(self, request: Request) -> FileRecord:
        announced = request.headers.get("content-length", "")
        if announced.isdigit() and int(announced) > self._max_bytes + 64 * 1024:
            raise self._too_large()
        parser = FormParser(boundary_of(request.headers.get("content-type", "").encode("latin-1")))
        part = Part("")
        try:
            async with aclosing(_chunks(request)) as chunks:
                async for chunk in chunks:
                    for event in parser.push(chunk):
                        if isinstance(event, Part):
                            part = event
                            self._begin(part)
                        else:
                            await self._take(part, event)
        except ClientDisconnect as error:
            raise ClientGone("the client left") from error
        parser.finish()
        self._check_purpose()
        if self._writer is None:
            raise InvalidParameter("the form has no file", param="file")
        return await self._writer.finish()

    async def discard(self) -> None:
        if self._writer is not None:
            await self._writer.discard()

    def _begin(self, part: Part) -> None:
        if part.name == "file":
            if self._writer is not None:
                raise InvalidParameter("the form has several files: upload one at a time", param="file")
            if "purpose" in self._fields:
                self._check_purpose()
            self._writer = self._store.writer(part.filename[:MAX_NAME_CHARS] or "file.jsonl", "batch")
        elif part.name != "purpose":
            raise InvalidParameter(f"the field {part.name[:64]!r} is not supported: send `purpose` and `file`", param="file")
        else:
            self._fields[part.name] = b""

    async def _take(self, part: Part, data: bytes) -> None:
        if part.name != "file":
            self._fields[part.name] += data
            if len(self._fields[part.name]) > MAX_FIELD_BYTES:
                raise InvalidParameter(f"the field {part.name} is too long", param=part.name)
            return
        assert self._writer is not None
        if self._writer.num_bytes + len(data) > self._max_bytes:
            raise self._too_large()
        self._check_room(len(data))
        await self._writer.write(data)

    def _check_room(self, size: int) -> None:
        held = self._kept + self.num_bytes + sum(other.num_bytes for other in self._others(self))
        if self._limit and held + size > self._limit:
            raise TenantStorageFull(
                f"files of {self.owner} may have {self._limit >> 20} MiB together: delete some that are not needed",
                param="file",
            )

    def _check_purpose(self) -> None:
        if self._fields.get("purpose") != b"batch":
            raise InvalidParameter("purpose must be `batch`", param="purpose")

    def _too_large(self) -> PayloadTooLarge:
        return PayloadTooLarge(f"a file can have at most {self._max_bytes} bytes", param="file")


async def _chunks(request: Request) -> AsyncGenerator[bytes]:
    """:raises BodyTimeout: the client sends nothing for too long."""
    async with aclosing(request.stream()) as stream:
        while True:
            chunk: bytes | None = None
            with anyio.move_on_after(CHUNK_TIMEOUT_S) as waiting:
                chunk = await anext(stream, None)
            if waiting.cancelled_caught:
                raise BodyTimeout("the file did not arrive in time")
            if chunk is None:
                return
            yield chunk


async def _parts(store: Store, record: FileRecord) -> AsyncGenerator[bytes]:
    async with aclosing(store.read(record)) as parts:
        async for part in parts:
            yield part


def _page(request: Request, what: str, records: Sequence[_L], *, newest_first: bool = False) -> Response:
    """A page of a list, as OpenAI's clients turn them.

    :raises InvalidParameter: for a `limit`, `order` or `after` that is none.
    """
    query = request.query_params
    order = query.get("order", "desc")
    if order not in ("asc", "desc") or (newest_first and order != "desc"):
        raise InvalidParameter("order is asc or desc", param="order")
    limit_text = query.get("limit", str(DEFAULT_LIMIT[what]))
    if not (limit_text.isascii() and limit_text.isdigit() and 1 <= int(limit_text[:9]) <= MAX_LIMIT[what]):
        raise InvalidParameter(f"limit is a number from 1 to {MAX_LIMIT[what]}", param="limit")
    ordered = list(records) if order == "asc" else list(reversed(records))
    if (after := query.get("after")) is not None:
        at = next((index for index, record in enumerate(ordered) if record.id == after), None)
        if at is None:
            raise InvalidParameter("after is the id of nothing in this list", param="after")
        ordered = ordered[at + 1 :]
    page = ordered[: int(limit_text)]
    return _json(
        {
            "object": "list",
            "data": [record.body() for record in page],
            "first_id": page[0].id if page else None,
            "last_id": page[-1].id if page else None,
            "has_more": len(ordered) > len(page),
        }
    )


def _json(body: object) -> Response:
    return Response(msgspec.json.encode(body), media_type="application/json")
