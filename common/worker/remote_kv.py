"""KV to and from workers of other hosts, with the setting `kv_transfer nixl`. Without it nothing here does anything.

    prefill  registers its blocks at start ─► announces an endpoint ─► MemoryDescribed to whoever asks
    decode   hears of an endpoint ─► DescribeMemory ─► copies the test pattern, notes the path's speed ─► pulls

A path is tried as soon as its owner is heard, so that no request waits for it. One that is slower than configured, that damages
what it carries or that can't be used at all is an error in the log, counted, and tried again later; prompts that come over it
meanwhile are computed anew.
"""

from __future__ import annotations

from collections.abc import Sequence

import anyio
import anyio.to_thread
import msgspec
import numpy as np

from common.cache.spec import group_name
from common.engine.engine import Engine
from common.engine.settings import EngineServiceConfig
from common.protocol.errors import ConfigError, PenstockError, ProtocolError, TransportUnavailable, from_wire
from common.protocol.handles import GroupBlocks, WorkerRef
from common.protocol.messages import KvReady, Presence, Rejected
from common.protocol.transfer_messages import DescribeMemory, KvEndpoint, MemoryDescribed
from common.runtime import logs
from common.runtime.actor import Actor
from common.transfer.base import Transport
from common.transfer.checksums import crc32
from common.transfer.measured import MeasuredTransport, TransferCounts
from common.transfer.nixl import NixlTransport, SharedMemory
from common.transfer.nixl_agent import NixlAgent
from common.transfer.segment import Segment

log = logs.get("remote_kv")

NIXL = "nixl"
ASK_TIMEOUT_S = 1.0
RETRY_PATH_S = 5.0
SMOOTHING = 0.2
"""Of a pull's time per token in the moving average."""


class RemoteKv:
    """`fingerprint`: of the worker's own model and layout, known once `open` was called."""

    def __init__(self, actor: Actor, config: EngineServiceConfig, counts: TransferCounts) -> None:
        self._actor = actor
        self._config = config
        self._counts = counts
        self._measured: Transport | None = None
        self._agent: NixlAgent | None = None
        self._shared: SharedMemory | None = None
        self._transport: NixlTransport | None = None
        self._owners: dict[str, WorkerRef] = {}
        self._retry_at: dict[str, float] = {}
        self._trying: dict[str, anyio.Lock] = {}
        self._us_per_token = 0.0
        self._blocks: list[np.ndarray] = []
        self._fingerprint = ""

    async def open(self, engine: Engine) -> None:
        """Register this worker's blocks if it is a prefill worker; get ready to read others' if it is not.

        :raises ConfigError: NIXL is missing, can't be used as configured, or the blocks are in a GPU's memory.
        """
        if self._config.kv_transfer != NIXL:
            return
        if engine.on_gpu:
            raise ConfigError(
                "kv_transfer nixl does not reach KV in a GPU's memory yet: use device cpu, or kv_transfer local",
                param="kv_transfer",
            )
        self._fingerprint = engine.runner.fingerprint
        self._blocks = [group.segment.blocks for group in engine.groups]
        segments = [(group.segment, group_name(self._fingerprint, index)) for index, group in enumerate(engine.groups)]
        await anyio.to_thread.run_sync(self._open, engine.segment.name, segments)
        metrics = self._actor.metrics
        labels = ["peer", "path"]
        self._speed = metrics.gauge("kv_path_gb_per_s", "Measured speed of the path to a worker of another host", labels)
        self._failures = metrics.counter("kv_remote_failures_total", "Paths and copies between hosts that failed", ["code"])
        log.info("kv_endpoint", worker=self._actor.ref.id, path=self.path, agent=engine.segment.name)

    def _open(self, name: str, segments: Sequence[tuple[Segment, str]]) -> None:
        agent = NixlAgent(name, interface=self._config.nixl_interface, transports=self._config.nixl_transports)
        if self._actor.role == "prefill":
            self._shared = SharedMemory(agent, segments)
        else:
            self._transport = NixlTransport(agent, timeout_s=self._config.nixl_timeout_s)
            self._measured = MeasuredTransport(self._transport, self._counts)
        self._agent = agent  # announced from now on

    @property
    def path(self) -> str:
        """What bytes travel over, as configured."""
        return f"{NIXL}/{self._config.nixl_transports or 'auto'}"

    @property
    def endpoints(self) -> list[KvEndpoint]:
        """What the heartbeat says of this."""
        return [] if self._agent is None else [KvEndpoint(NIXL, self._agent.name, round(self._us_per_token, 3))]

    def describe(self, reply: str) -> None:
        """Answer DescribeMemory."""
        if self._shared is None:
            code, message = TransportUnavailable.code, "this worker's KV can't be read from other hosts"
            self._actor.answer(reply, Rejected(worker=self._actor.ref, code=code, message=message))
        else:
            self._actor.answer(reply, self._shared.describe(self._actor.ref))

    async def with_checksums(self, ready: KvReady) -> KvReady:
        """Return the hand-off with its blocks' CRC-32s, where other hosts may read them. The blocks must be leased."""
        if self._shared is None:
            return ready
        groups = await anyio.to_thread.run_sync(_with_checksums, self._blocks, ready.handle.groups)
        return msgspec.structs.replace(ready, handle=msgspec.structs.replace(ready.handle, groups=groups))

    def transport_to(self, owner: Presence, local: Transport, host: str) -> Transport:
        """Return what reads `owner`'s blocks: `local` on this host, and where there is no other way."""
        return local if self._measured is None or owner.host == host or not _endpoint(owner) else self._measured

    async def reach(self, owner: Presence) -> None:
        """Make `owner`'s blocks readable, unless they are already.

        :raises TransportUnavailable: they are not, or the path is slower than `nixl_min_gb_per_s`. After a failure it is
            raised at once for some seconds.
        """
        endpoint, transport = _endpoint(owner), self._transport
        if endpoint is None or transport is None:
            raise TransportUnavailable(f"{owner.worker.id} announces no way to its KV from other hosts")
        agent = endpoint.agent
        async with self._trying.setdefault(agent, anyio.Lock()):
            if transport.knows(agent):
                return
            if self._actor.clock() < self._retry_at.get(agent, 0.0):
                raise TransportUnavailable(f"the path to {owner.worker.id} failed a moment ago")
            try:
                await self._try_path(owner.worker, agent, transport)
            except PenstockError as error:
                transport.forget(agent)
                self._retry_at[agent] = self._actor.clock() + RETRY_PATH_S
                self._failures.labels(error.code).inc()
                log.error("kv_path_failed", peer=owner.worker.id, path=self.path, code=error.code, reason=str(error))
                raise TransportUnavailable(f"no path to {owner.worker.id}: {error}") from error

    async def _try_path(self, owner: WorkerRef, agent: str, transport: NixlTransport) -> None:
        answer = await self._actor.ask(owner, DescribeMemory(holder=self._actor.ref), ASK_TIMEOUT_S)
        if isinstance(answer, Rejected):
            raise from_wire(answer.code, answer.message)
        if not isinstance(answer, MemoryDescribed) or answer.worker != owner or answer.agent != agent:
            raise ProtocolError(f"{owner.id} did not describe the memory that it announces")
        speed = await anyio.to_thread.run_sync(_added, transport, answer)
        if speed < self._config.nixl_min_gb_per_s:
            raise TransportUnavailable(f"{speed:.3f} GB/s, and nixl_min_gb_per_s promises {self._config.nixl_min_gb_per_s:g}")
        self._owners[agent] = owner
        self._speed.labels(owner.id, self.path).set(round(speed, 4))
        log.info("kv_path", peer=owner.id, path=self.path, gb_per_s=round(speed, 3))

    def pulled(self, num_tokens: int, elapsed_s: float) -> None:
        """Note how long it took to copy the KV of so many tokens from another host."""
        if num_tokens > 0:
            us_per_token = 1e6 * elapsed_s / num_tokens
            self._us_per_token += (us_per_token - self._us_per_token) * (SMOOTHING if self._us_per_token else 1.0)

    def failed(self, error: PenstockError) -> None:
        """Count a copy that failed."""
        if self._transport is not None:
            self._failures.labels(error.code).inc()

    def tick(self, now: float, host: str) -> None:
        """After each heartbeat: let go of prefill workers of other hosts that are gone, and try the paths to new ones."""
        transport = self._transport
        if transport is None:
            return
        owners = self._actor.registry.alive("prefill", now)
        remote = {endpoint.agent: owner for owner in owners if owner.host != host and (endpoint := _endpoint(owner))}
        for agent in self._trying.keys() - remote.keys():
            self._forget(agent, transport)
        for agent, owner in remote.items():
            is_ours = owner.fingerprint == self._fingerprint and now >= self._retry_at.get(agent, 0.0)
            if is_ours and not transport.knows(agent) and not self._is_trying(agent):
                self._actor.task_group.start_soon(self._try_soon, owner)

    async def _try_soon(self, owner: Presence) -> None:
        try:
            await self.reach(owner)
        except TransportUnavailable:
            return  # logged, and tried again

    def _is_trying(self, agent: str) -> bool:
        lock = self._trying.get(agent)
        return lock is not None and lock.locked()

    def _forget(self, agent: str, transport: NixlTransport) -> None:
        if self._is_trying(agent):
            return
        transport.forget(agent)
        owner = self._owners.pop(agent, None)
        if owner is not None:
            self._speed.remove(owner.id, self.path)
        self._retry_at.pop(agent, None)
        del self._trying[agent]


def _added(transport: NixlTransport, described: MemoryDescribed) -> float:
    """In a thread. Return the measured GB/s of a path."""
    transport.add(described)
    return transport.measure(described.agent)


def _with_checksums(memories: list[np.ndarray], groups: list[GroupBlocks]) -> list[GroupBlocks]:
    """In a thread."""
    return [
        msgspec.structs.replace(group, checksums=[crc32(memory[block]) for block in group.blocks])
        for memory, group in zip(memories, groups, strict=True)
    ]


def _endpoint(owner: Presence) -> KvEndpoint | None:
    return next((endpoint for endpoint in owner.endpoints if endpoint.transport == NIXL), None)
