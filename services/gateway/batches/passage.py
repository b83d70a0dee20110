"""Sees one batch through: checks the file, feeds its lines to the queue, counts results, writes the files.

    validate ─► feed a window of lines, count what has come ─► write output and error file

Of two gateways that hold one batch (one was stopped for a while), the one that wrote its name last goes on. Whatever the other
one still does is done twice and counted once: lines that wait, and results, are there once for each line.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

import anyio
import anyio.lowlevel
import msgspec

from common.protocol import subjects
from common.protocol.errors import PenstockError, UnknownModel
from common.runtime import logs
from services.gateway.batches import results
from services.gateway.batches.lines import LineChecker, LineSplitter, WrongLine, custom_id_of, parse_line
from services.gateway.batches.progress import Progress
from services.gateway.batches.records import Batch, BatchError, FileRecord, Status
from services.gateway.batches.results import COMPLETED
from services.gateway.batches.store import FileNotFound, FileWriter, Store
from services.gateway.batches.taking import quietly
from services.gateway.catalog import Catalog

log = logs.get("batches")

WINDOW = 512
"""Lines of one batch that wait for an answer at a time: the rest is in its file."""
LOOK_EVERY_S = 0.1
TELL_EVERY_S = 1.0
LINES_PER_TURN = 32
LONG_LINE_BYTES = 32 * 1024

_END: dict[Status, Status] = {"finalizing": "completed", "cancelling": "cancelled", "in_progress": "expired"}


class Superseded(Exception):
    """Another gateway sees the batch through."""


class Passage:
    """`store`: its owner's. `name`: this gateway's. `tell` is called with the batch whenever it has changed."""

    def __init__(
        self,
        catalog: Catalog,
        store: Store,
        *,
        name: str,
        max_lines: int,
        max_line_bytes: int,
        tell: Callable[[str, Batch], None],
    ) -> None:
        self._catalog = catalog
        self._store = store
        self._name = name
        self._max_lines = max_lines
        self._max_line_bytes = max_line_bytes
        self._tell = tell

    async def see_through(self, id: str) -> None:
        """:raises Superseded: :raises PenstockError: it has to wait."""
        batch = await self._store.batch(id)
        if not batch.has_ended:
            batch = await self._store.change(id, self._claimed)
            self._tell(id, batch)
            log.info("batch_kept", batch=id, status=batch.status)
            batch = await self._ended(batch)
            log.info("batch_ended", batch=id, status=batch.status, completed=batch.completed, failed=batch.failed)
        await self._store.drop_lines(id)
        await self._store.drop_results(id)

    async def _ended(self, batch: Batch) -> Batch:
        """See it to its end."""
        try:
            file = await self._store.file(batch.input_file)
            if batch.status == "validating":
                batch = await self._validated(batch, file)
                if batch.has_ended:
                    return batch
            progress = Progress(batch.total)
            if batch.status == "in_progress" and not batch.expiring:
                batch = await self._answered(batch, file, progress)
            if batch.status == "cancelling" or batch.expiring:
                await self._close_lines(batch, file, progress)
            elif batch.status == "in_progress":
                batch = await self._change(batch.id, _finalizing)
                if batch.status == "cancelling":
                    await self._close_lines(batch, file, progress)
            return await self._written(batch)
        except FileNotFound as error:
            problem = BatchError(code="file_not_found", message=str(error), param="input_file_id")
            return await self._change(batch.id, lambda now: now.moved("failed", time.time(), errors=[problem]))

    async def _validated(self, batch: Batch, file: FileRecord) -> Batch:
        limit = self._max_line_bytes
        checker = LineChecker(batch.endpoint, choose=self._choose, max_lines=self._max_lines, max_line_bytes=limit)
        async with aclosing(self._lines(file)) as lines:
            async for raw in lines:
                if not checker.check(raw):
                    break
        checker.finish()

        def judged(now: Batch) -> Batch:
            if now.status != "validating":  # cancelled meanwhile
                return now
            if checker.errors:
                return now.moved("failed", time.time(), errors=checker.errors)
            return now.moved("in_progress", time.time(), total=checker.num_lines)

        return await self._change(batch.id, judged)

    async def _answered(self, batch: Batch, file: FileRecord, progress: Progress) -> Batch:
        """Until every line has its result, or the batch is not to go on."""
        told_at = 0.0
        fed: set[int] = set()
        number = 0
        more = True
        async with aclosing(self._lines(file)) as lines:
            while True:
                came = await self._count_results(batch.id, progress, fed)
                now = time.monotonic()
                if progress.is_whole or now - told_at >= TELL_EVERY_S:
                    batch = await self._change(batch.id, progress.told)
                    told_at = now
                if progress.is_whole or batch.status != "in_progress":
                    return batch
                if time.time() >= batch.expires_at:
                    return await self._change(batch.id, lambda now: msgspec.structs.replace(now, expiring=True))
                while more and len(fed) < WINDOW:
                    raw = await anext(lines, None)
                    if raw is None:
                        more = False
                        break
                    if not progress.has(number):
                        await self._feed(batch, number, raw)
                        fed.add(number)
                    number += 1
                if not came:
                    await anyio.sleep(LOOK_EVERY_S)

    async def _feed(self, batch: Batch, number: int, raw: bytes) -> None:
        try:
            line = parse_line(raw, choose=self._choose, endpoint=batch.endpoint)
        except WrongLine as error:  # it was right when it was checked; another model is served now
            result = results.refused(custom_id_of(raw), "", UnknownModel(error.message, param=error.param))
            await self._store.add_result(batch.id, str(number), result)
        else:
            await self._store.add_line(subjects.slug(line.model), batch.id, str(number), raw)

    async def _count_results(self, id: str, progress: Progress, fed: set[int]) -> bool:
        """Count what has come since; whether anything has."""
        came = False
        while found := await self._store.results(id, progress.sequence):
            came = True
            for sequence, line, result in found:
                progress.add(int(line), sequence, completed=result.outcome == COMPLETED)
                fed.discard(int(line))
        return came

    async def _close_lines(self, batch: Batch, file: FileRecord, progress: Progress) -> None:
        """Lines without a result get one which says that they were not run. One that is kept meanwhile stays."""
        code = "batch_expired" if batch.expiring else "batch_cancelled"
        await self._store.drop_lines(batch.id)
        await self._count_results(batch.id, progress, set())
        number = 0
        async with aclosing(self._lines(file)) as lines:
            async for raw in lines:
                if number >= batch.total:
                    break
                if not progress.has(number):
                    await self._store.add_result(batch.id, str(number), results.not_run(custom_id_of(raw), code))
                number += 1

    async def _written(self, batch: Batch) -> Batch:
        """Write the files, and end the batch. Files that may be the batch's by now are left, whatever happens."""
        output = self._store.writer(f"{batch.id}_output.jsonl", "batch_output")
        errors = self._store.writer(f"{batch.id}_error.jsonl", "batch_output")
        try:
            completed, failed = await self._write(batch.id, output, errors)
            written = [await writer.finish() if writer.num_bytes else None for writer in (output, errors)]
        except BaseException:
            with anyio.move_on_after(5, shield=True):
                await self._discard(output, errors)
            raise
        output_id, error_id = [None if record is None else record.id for record in written]

        def ended(now: Batch) -> Batch:
            files = {"output_file": output_id, "error_file": error_id}
            return now.moved(_END[now.status], time.time(), completed=completed, failed=failed, **files)

        try:
            return await self._change(batch.id, ended)
        except Superseded:
            now = await self._store.batch(batch.id)
            if now.has_ended and (now.output_file, now.error_file) == (output_id, error_id):
                return now  # it was this gateway's own change, whose answer was lost
            await self._discard(output, errors)
            raise

    async def _discard(self, *writers: FileWriter) -> None:
        for writer in writers:
            await quietly(writer.discard)

    async def _write(self, id: str, output: FileWriter, errors: FileWriter) -> tuple[int, int]:
        """Write every result into its file; returns how many have completed and failed."""
        counts = {True: 0, False: 0}
        after = 0
        while found := await self._store.results(id, after):
            for sequence, _, result in found:
                after = sequence
                is_completed = result.outcome == COMPLETED
                counts[is_completed] += 1
                await (output if is_completed else errors).write(result.data + b"\n")
        return counts[True], counts[False]

    # -- inside

    async def _lines(self, file: FileRecord) -> AsyncGenerator[bytes]:
        """The file's lines; others have a turn of the event loop after every few."""
        splitter = LineSplitter(self._max_line_bytes)
        turn = 0
        async with aclosing(self._store.read(file)) as parts:
            async for part in parts:
                for raw in splitter.push(part):
                    yield raw
                    turn += 1
                    if turn % LINES_PER_TURN == 0 or len(raw) > LONG_LINE_BYTES:
                        await anyio.lowlevel.checkpoint()
        for raw in splitter.finish():
            yield raw

    def _choose(self, name: str | None) -> str | None:
        try:
            return self._catalog.choose(name).name
        except PenstockError:
            return None

    def _claimed(self, batch: Batch) -> Batch:
        return batch if batch.has_ended else msgspec.structs.replace(batch, keeper=self._name)

    async def _change(self, id: str, change: Callable[[Batch], Batch]) -> Batch:
        """:raises Superseded: another gateway has claimed the batch."""

        def ours(batch: Batch) -> Batch:
            if batch.keeper != self._name or batch.has_ended:
                raise Superseded
            return change(batch)

        batch = await self._store.change(id, ours)
        self._tell(id, batch)
        return batch


def _finalizing(batch: Batch) -> Batch:
    return batch.moved("finalizing", time.time()) if batch.status == "in_progress" else batch
