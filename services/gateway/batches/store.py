"""Files and batches, as streams keep them.

    PENSTOCK_RECORDS   record.file.<id>, record.batch.<id>    the newest state of each; a tenant's are record.file-<tenant>.<id>
    PENSTOCK_FILES     file.<id>.<part>                       bytes; the record is written when all parts are there
    PENSTOCK_LINES     line.<model>.<batch>.<n>, keep.…       what waits for somebody to work on it
    PENSTOCK_RESULTS   result.<batch>.<n>                     one for each line, whoever ran it how often

Whose a file or a batch is stands in its record's subject, so nobody finds what is another one's. A record is changed by whoever
saw its newest state, so of two gateways that change one, the later looks again.
"""

from __future__ import annotations

import os
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Literal, TypeVar

import anyio
import msgspec

from common.protocol import headers, subjects
from common.protocol.errors import BusClosed, BusError, InvalidParameter, RequestError, ServiceError, StreamConflict
from common.runtime.streams import Streams, StreamSpec
from services.gateway.batches.records import Batch, FileRecord
from services.gateway.batches.results import Result

PART_BYTES = 256 * 1024
RECORD_SHARE, LINE_SHARE, RESULT_SHARE = 16, 8, 4
"""Of the space for everything: one part in so many. Files have the rest."""
RETRY_S = (0.1, 0.25, 0.5, 1.0)
MAX_LISTED = 100_000

RecordKind = Literal["file", "batch"]

_T = TypeVar("_T")


class StorageUnavailable(ServiceError):
    """The bus does not answer. What was to be written may be there."""

    code = "storage_unavailable"
    http_status = 503

    def __init__(self) -> None:
        super().__init__("files and batches can't be reached: the NATS server does not answer; try again in a moment")


class FileNotFound(RequestError):
    code = "file_not_found"
    http_status = 404


class BatchNotFound(RequestError):
    code = "batch_not_found"
    http_status = 404


class TooManyBatches(RequestError):
    """A tenant has as many as it may."""

    code = "too_many_batches"
    http_status = 429


class TenantStorageFull(RequestError):
    """A tenant's files have as many bytes as they may."""

    code = "tenant_storage_full"
    http_status = 413


class BatchEnded(RequestError):
    """It has ended, or is about to, in another way than was asked for."""

    code = "batch_ended"
    http_status = 409


def stream_specs(total_bytes: int, max_age_s: float, replicas: int) -> list[StreamSpec]:
    """The streams, which together keep up to `total_bytes`, none of them for longer than `max_age_s`."""
    shares = {name: total_bytes // part for name, part in _SHARES.items()}
    shares[subjects.FILES] = total_bytes - sum(shares.values())
    of_stream = {
        subjects.RECORDS: (subjects.any_record(),),
        subjects.FILES: (subjects.any_file_part(),),
        subjects.LINES: (subjects.any_line(), subjects.any_keep()),
        subjects.RESULTS: (subjects.any_line_result(),),
    }
    return [
        StreamSpec(
            name=name,
            subjects=taken,
            max_bytes=shares[name],
            max_age_s=max_age_s,
            latest_only=name == subjects.RECORDS,
            is_queue=name == subjects.LINES,
            replicas=replicas,
        )
        for name, taken in of_stream.items()
    ]


_SHARES = {subjects.RECORDS: RECORD_SHARE, subjects.LINES: LINE_SHARE, subjects.RESULTS: RESULT_SHARE}


async def insist(ask: Callable[[], Awaitable[_T]], *, within_s: float | None = None) -> _T:
    """Ask again for as long as the bus is away or does not answer. `within_s`: and no longer.

    :raises BusError: what was wrong last. :raises BusClosed, StreamConflict: at once.
    """
    ends_at = None if within_s is None else time.monotonic() + within_s
    attempt = 0
    while True:
        try:
            return await ask()
        except (BusClosed, StreamConflict):
            raise
        except BusError:
            if ends_at is not None and time.monotonic() > ends_at:
                raise
        await anyio.sleep(RETRY_S[min(attempt, len(RETRY_S) - 1)])
        attempt += 1


class FileWriter:
    """A file that comes in pieces of any size. Nobody sees it before `finish`."""

    def __init__(self, store: Store, filename: str, purpose: str) -> None:
        self._store = store
        self._filename = filename
        self._purpose = purpose
        self._id = f"file-{os.urandom(16).hex()}"
        self._held = bytearray()
        self._num_parts = 0
        self.num_bytes = 0

    async def write(self, data: bytes) -> None:
        """:raises StorageFull, BusError: call `discard` then."""
        self._held += data
        self.num_bytes += len(data)
        while len(self._held) >= PART_BYTES:
            await self._flush(PART_BYTES)

    async def finish(self) -> FileRecord:
        if self._held:
            await self._flush(len(self._held))
        record = FileRecord(
            id=self._id,
            filename=self._filename,
            purpose=self._purpose,
            num_bytes=self.num_bytes,
            num_parts=self._num_parts,
            created_at=int(time.time()),
        )
        await self._store.add(self._store.record("file", self._id), msgspec.json.encode(record))
        return record

    async def discard(self) -> None:
        """Remove what was written."""
        if self._num_parts:
            streams, record = self._store.streams, self._store.record("file", self._id)
            await insist(lambda: streams.purge(subjects.RECORDS, record), within_s=5)
            await insist(lambda: streams.purge(subjects.FILES, subjects.parts_of(self._id)), within_s=5)

    async def _flush(self, size: int) -> None:
        await self._store.add(subjects.file_part(self._id, self._num_parts), bytes(self._held[:size]))
        del self._held[:size]
        self._num_parts += 1


class Store:
    """`patience_s`: how long the bus may be away before a question fails; None: for ever. `owner`: the tenant whose files and
    batches these are; empty: nobody's in particular."""

    def __init__(self, streams: Streams, *, patience_s: float | None, owner: str = "") -> None:
        self.streams = streams
        self.owner = owner
        self._patience_s = patience_s

    def of(self, owner: str) -> Store:
        """The files and batches of a tenant."""
        return Store(self.streams, patience_s=self._patience_s, owner=owner)

    def record(self, kind: RecordKind, id: str) -> str:
        return subjects.record(self._kind(kind), id)

    # -- files

    def writer(self, filename: str, purpose: str) -> FileWriter:
        return FileWriter(self, filename, purpose)

    async def file(self, id: str) -> FileRecord:
        """:raises FileNotFound:"""
        found = await self._last(self.record("file", _checked(id, "file", FileNotFound)))
        if found is None:
            raise FileNotFound(f"there is no file {id}", param="file_id")
        return msgspec.json.decode(found[0], type=FileRecord)

    async def files(self) -> list[FileRecord]:
        """The oldest first."""
        return [msgspec.json.decode(data, type=FileRecord) for data in await self._records("file")]

    async def read(self, record: FileRecord) -> AsyncGenerator[bytes]:
        """Its bytes, part by part.

        :raises FileNotFound: a part is gone.
        """
        for number in range(record.num_parts):
            part = subjects.file_part(record.id, number)
            stored = await self._insist(lambda part=part: self.streams.last(subjects.FILES, part))
            if stored is None:
                raise FileNotFound(f"the file {record.id} was deleted", param="file_id")
            yield stored.data

    async def delete_file(self, id: str) -> None:
        """:raises FileNotFound:"""
        await self.file(id)
        await self._insist(lambda: self.streams.purge(subjects.RECORDS, self.record("file", id)))
        await self._insist(lambda: self.streams.purge(subjects.FILES, subjects.parts_of(id)))

    # -- batches

    async def add_batch(self, batch: Batch, slug: str) -> None:
        """Once this returns, some gateway will see it through. The note that one has to is there first, so that no batch is
        without it."""
        await self.add(subjects.keep(slug, batch.id), b"", fields=self._owned())
        await self.add(self.record("batch", batch.id), msgspec.json.encode(batch))

    async def batch(self, id: str) -> Batch:
        """:raises BatchNotFound:"""
        return (await self._batch(id))[0]

    async def batches(self) -> list[Batch]:
        """The oldest first."""
        found = [msgspec.json.decode(data, type=Batch) for data in await self._records("batch")]
        return sorted(found, key=lambda batch: batch.id)

    async def change(self, id: str, change: Callable[[Batch], Batch]) -> Batch:
        """The batch after `change`, which is called with its newest state, again if somebody else changes it meanwhile.

        :raises BatchNotFound: :raises: what `change` raises; then nothing is changed.
        """
        while True:
            batch, sequence = await self._batch(id)
            changed = change(batch)
            if changed == batch:
                return batch
            try:
                subject, data = self.record("batch", id), msgspec.json.encode(changed)
                await self._insist(
                    lambda subject=subject, data=data, last=sequence: self.streams.append(subject, data, expected_last=last)
                )
            except StreamConflict:
                continue
            return changed

    # -- lines and results

    async def add_line(self, slug: str, batch: str, id: str, raw: bytes) -> int:
        """The line's sequence in the queue; 0 for one that waits already."""
        return await self.add(subjects.line(slug, batch, id), raw, fields=self._owned())

    async def add_result(self, batch: str, id: str, result: Result) -> bool:
        """False: the line has a result, and keeps it."""
        return bool(await self.add(subjects.line_result(batch, id), result.data, fields=result.headers))

    async def result(self, batch: str, id: str) -> Result | None:
        subject = subjects.line_result(batch, id)
        stored = await self._insist(lambda: self.streams.last(subjects.RESULTS, subject))
        return None if stored is None else Result(stored.headers.get(headers.OUTCOME, ""), stored.data)

    async def results(self, batch: str, after: int) -> list[tuple[int, str, Result]]:
        """(sequence, line, result) of the next results behind a sequence; empty when there are no more yet."""
        pattern = subjects.results_of(batch)
        found = await self._insist(lambda: self.streams.read(subjects.RESULTS, pattern, after=after))
        return [
            (
                stored.sequence,
                subjects.last_token(stored.subject),
                Result(stored.headers.get(headers.OUTCOME, ""), stored.data),
            )
            for stored in found
        ]

    async def drop_lines(self, batch: str) -> None:
        await self._insist(lambda: self.streams.purge(subjects.LINES, subjects.lines_of_batch(batch)))

    async def drop_results(self, batch: str) -> None:
        await self._insist(lambda: self.streams.purge(subjects.RESULTS, subjects.results_of(batch)))

    # -- inside

    async def add(self, subject: str, data: bytes, *, fields: dict[str, str] | None = None) -> int:
        """Keep a message where none is, and return its sequence; 0 where one is."""
        try:
            return await self._insist(lambda: self.streams.append(subject, data, headers=fields, expected_last=0))
        except StreamConflict:
            return 0

    async def _insist(self, ask: Callable[[], Awaitable[_T]]) -> _T:
        return await insist(ask, within_s=self._patience_s)

    async def _last(self, subject: str) -> tuple[bytes, int] | None:
        stored = await self._insist(lambda: self.streams.last(subjects.RECORDS, subject))
        return None if stored is None else (stored.data, stored.sequence)

    async def _batch(self, id: str) -> tuple[Batch, int]:
        found = await self._last(self.record("batch", _checked(id, "batch", BatchNotFound)))
        if found is None:
            raise BatchNotFound(f"there is no batch {id}", param="batch_id")
        return msgspec.json.decode(found[0], type=Batch), found[1]

    def _kind(self, kind: RecordKind) -> str:
        return f"{kind}-{self.owner}" if self.owner else kind

    def _owned(self) -> dict[str, str]:
        return {headers.TENANT: self.owner} if self.owner else {}

    async def _records(self, kind: RecordKind) -> list[bytes]:
        found: list[bytes] = []
        after = 0
        while len(found) < MAX_LISTED:
            some = await self._insist(
                lambda after=after: self.streams.read(subjects.RECORDS, subjects.records_of(self._kind(kind)), after=after)
            )
            if not some:
                break
            found += [stored.data for stored in some]
            after = some[-1].sequence
        return found


def _checked(id: str, what: str, error: type[RequestError]) -> str:
    try:
        return subjects.token(id, what=what)
    except InvalidParameter:
        raise error(f"there is no {what} {id[:100]!r}", param=f"{what}_id") from None
