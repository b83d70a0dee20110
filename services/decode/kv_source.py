"""Whom KV is copied from: what a copy needs of its worker, and the way to a prefill worker's blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from anyio.abc import TaskGroup

from common.engine.engine import Engine
from common.engine.sequence_cache import SequenceCache
from common.protocol.errors import StaleHandle, TransportUnavailable
from common.protocol.handles import WorkerRef
from common.protocol.messages import Message, Presence
from common.runtime.registry import Registry
from common.transfer.base import Transport
from common.worker.kv_counts import KvCounts
from common.worker.remote_kv import RemoteKv
from common.worker.traces import WorkerTraces
from services.decode.scheduler import DecodeScheduler


class Reader(Protocol):
    """What copies need of their worker. `transport`: to workers of the same host."""

    ref: WorkerRef
    host: str
    task_group: TaskGroup
    registry: Registry
    remote: RemoteKv
    engine: Engine
    cache: SequenceCache
    scheduler: DecodeScheduler
    kv: KvCounts
    traces: WorkerTraces
    clock: Callable[[], float]

    @property
    def transport(self) -> Transport: ...
    def send(self, to: WorkerRef | str, message: Message) -> None: ...
    def wake(self) -> None: ...


def is_known(worker: Reader, ref: WorkerRef) -> bool:
    """Return whether this life of a prefill worker has been heard, and not been followed by another."""
    owner = worker.registry.get(ref.id)
    return owner is not None and owner.worker == ref


async def way_to(worker: Reader, ref: WorkerRef, fingerprint: str, lease: str) -> tuple[Presence, Transport]:
    """Return what a prefill worker said of itself last, and what reads those of its blocks that a lease covers.

    :raises TransportUnavailable: its KV has another layout, or can't be reached.
    :raises StaleHandle: this life of it is not known, or over.
    """
    if fingerprint != worker.engine.runner.fingerprint:
        raise TransportUnavailable("the handle's model or KV layout is not ours")
    owner = worker.registry.get(ref.id)
    if owner is None or owner.worker != ref:
        raise StaleHandle(f"{ref.id} is not known in this epoch")
    transport = worker.remote.transport_to(owner, worker.transport, worker.host, lease)
    if transport is not worker.transport:
        await worker.remote.reach(owner)
    return owner, transport
