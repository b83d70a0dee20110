"""KV to and from workers and kvstores of other hosts, with the setting `kv_transfer nixl`; without it nothing is done.

    prefill  registers its blocks at start ─► announces an endpoint ─► MemoryDescribed to whoever asks
             └ those of a GPU: memory for copies of them instead (`staged_handoffs.py`)
    decode   hears of an endpoint ─► tries the path (`remote_paths.py`) ─► pulls (`staged_pulls.py`)
    both     hear of kvstores of other hosts ─► try the paths ─► read prefixes there (`remote_stores.py`)

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
from common.protocol.errors import ConfigError, PenstockError, TransportUnavailable
from common.protocol.handles import GroupBlocks, Role
from common.protocol.messages import Presence, Rejected
from common.protocol.transfer_messages import KvEndpoint, StageLeased
from common.runtime import logs
from common.runtime.actor import Actor
from common.transfer.base import Transport
from common.transfer.block_memory import BlockMemory
from common.transfer.checksums import crc32
from common.transfer.measured import MeasuredTransport, TransferCounts
from common.transfer.nixl import NixlTransport, SharedMemory
from common.transfer.nixl_agent import NixlAgent
from common.transfer.segment import Segment
from common.transfer.staging import Staging
from common.worker.remote_paths import NIXL, RemotePaths, endpoint_of, path_name
from common.worker.remote_stores import RemoteStores
from common.worker.staged_handoffs import Owner, StagedHandoffs
from common.worker.staged_pulls import GroupMemory, Handoff, StagedPulls
from common.worker.staged_reads import StagedReads
from common.worker.store_client import StoreClient

log = logs.get("remote_kv")

SMOOTHING = 0.2
"""Of a pull's time per token in the moving average."""


class RemoteKv:
    def __init__(self, actor: Actor, config: EngineServiceConfig, counts: TransferCounts) -> None:
        self._actor = actor
        self._config = config
        self._counts = counts
        self._agent: NixlAgent | None = None
        self._shared: SharedMemory | None = None
        self.handoffs: StagedHandoffs | None = None
        self._pulls: StagedPulls | None = None
        self._paths: RemotePaths | None = None
        self._us_per_token = 0.0
        self._blocks: list[np.ndarray] = []

    async def open(self, engine: Engine, store: StoreClient) -> None:
        """Register a prefill worker's blocks, and get ready to read those of other hosts: of their kvstores, with `store`, and
        as a decode worker of their prefill workers.

        Blocks in a GPU's memory pass through its stage; where it has none, this worker is not read and reads nothing.

        :raises ConfigError: NIXL is missing, can't be used as configured, or a GPU is to have no stage.
        """
        if self._config.kv_transfer != NIXL:
            return
        if engine.on_gpu and engine.stage is None:
            if not self._config.kv_stage_mb:
                raise ConfigError(
                    "kv_transfer nixl reaches a GPU's KV through its stage: kv_stage_mb is 0", param="kv_stage_mb"
                )
            log.warning("kv_endpoint_unavailable", reason="the GPU has no stage", consequence="no KV goes between hosts")
            return
        fingerprint = engine.runner.fingerprint
        self._blocks = [group.segment.blocks for group in engine.groups]
        memories = [group.blocks for group in engine.groups]
        segments = [(group.segment, group_name(fingerprint, index)) for index, group in enumerate(engine.groups)]
        roles: tuple[Role, ...] = tuple(role for role in self._owners if role in self._actor.hears)
        transport = await anyio.to_thread.run_sync(
            self._open, engine.segment.name, segments, bool(roles), memories if engine.stage is not None else []
        )
        if transport is not None:
            self._pulls = StagedPulls(
                self._actor,
                transport,
                MeasuredTransport(transport, self._counts),
                StagedReads(self._actor, transport, self._counts, "nixl"),
                {
                    name: GroupMemory(index, memory)
                    for index, (memory, (_, name)) in enumerate(zip(memories, segments, strict=True))
                },
                timeout_s=self._config.nixl_timeout_s,
            )
            self._paths = RemotePaths(
                self._actor,
                self._config,
                transport,
                roles=roles,
                wanted=lambda owner: owner.worker.role == "kvstore" or owner.fingerprint == fingerprint,
            )
            store.remote = RemoteStores(
                self._actor,
                store.lookups,
                self._paths,
                transport,
                choice=store.choice,
                counts=self._counts,
            )
        log.info("kv_endpoint", worker=self._actor.ref.id, path=path_name(self._config), agent=engine.segment.name)

    @property
    def _owners(self) -> tuple[Role, ...]:
        """Whose memory may be worth reading."""
        return ("prefill",) if self._config.zero_retention else ("prefill", "kvstore")

    def _open(
        self, name: str, segments: Sequence[tuple[Segment, str]], reads: bool, staged: Sequence[BlockMemory]
    ) -> NixlTransport | None:
        """In a thread. `staged`: the blocks of each cache group, where they must be copied for others."""
        agent = NixlAgent(name, interface=self._config.nixl_interface, transports=self._config.nixl_transports)
        transport = NixlTransport(agent, timeout_s=self._config.nixl_timeout_s) if reads else None
        if self._actor.role == "prefill" and staged:
            self.handoffs = StagedHandoffs(self._staging(agent, staged), staged)
        elif self._actor.role == "prefill":
            self._shared = SharedMemory(agent, segments)
        self._agent = agent  # announced from now on
        return transport

    def _staging(self, agent: NixlAgent, staged: Sequence[BlockMemory]) -> Staging:
        """:raises ConfigError: the buffer can't be registered, or has no room for a block."""
        num_bytes, largest = getattr(self._config, "staging_mb", 0) << 20, max(memory.block_bytes for memory in staged)
        if num_bytes < largest:
            raise ConfigError(f"staging_mb has no room for a block of {largest} bytes", param="staging_mb")
        return Staging(agent, num_bytes, self._actor.metrics, "kv")

    @property
    def endpoints(self) -> list[KvEndpoint]:
        """What the heartbeat says of this."""
        if self._agent is None:
            return []
        unreachable = [] if self._paths is None else self._paths.unreachable("prefill")
        return [KvEndpoint(NIXL, self._agent.name, round(self._us_per_token, 3), unreachable)]

    def describe(self, reply: str) -> None:
        """Answer DescribeMemory."""
        if self.handoffs is not None:
            self._actor.answer(reply, self.handoffs.staging.describe(self._actor.ref))
        elif self._shared is None:
            code, message = TransportUnavailable.code, "this worker's KV can't be read from other hosts"
            self._actor.answer(reply, Rejected(worker=self._actor.ref, code=code, message=message))
        else:
            self._actor.answer(reply, self._shared.describe(self._actor.ref))

    def stage(self, worker: Owner, question: StageLeased, leased: Sequence[Sequence[int]] | None, reply: str) -> None:
        """Answer StageLeased: see `StagedHandoffs.stage`."""
        if self.handoffs is None:
            code, message = TransportUnavailable.code, "this worker copies no blocks for other hosts"
            self._actor.answer(reply, Rejected(worker=self._actor.ref, code=code, message=message))
        else:
            self.handoffs.stage(worker, question, leased, reply)

    def unstage(self, names: Sequence[str]) -> None:
        """Nobody reads these copies any more. Harmless twice."""
        if self.handoffs is not None:
            self.handoffs.end(names)

    def lease_ended(self, lease: str) -> None:
        """A hand-off's lease has ended: so do the copies of its blocks."""
        if self.handoffs is not None:
            self.handoffs.lease_ended(lease)

    @property
    def has_checksums(self) -> bool:
        """Whether blocks that are told to others need checksums: other hosts may read them where they are."""
        return self._shared is not None

    async def with_checksums(self, groups: list[GroupBlocks], known: Sequence[dict[int, int]] = ()) -> list[GroupBlocks]:
        """Return blocks with their CRC-32s, where other hosts may read them. They must be leased.

        known: of each cache group of the layout, checksums of full blocks, by block; those that are computed now are added.
        """
        if self._shared is None:
            return groups
        return await anyio.to_thread.run_sync(_with_checksums, self._blocks, groups, known)

    def transport_to(self, owner: Presence, local: Transport, host: str, lease: str) -> Transport:
        """Return what reads those of `owner`'s blocks that a lease covers: `local` on this host, and where there is no other
        way."""
        endpoint = endpoint_of(owner)
        if self._pulls is None or owner.host == host or endpoint is None:
            return local
        return Handoff(self._pulls, owner.worker, endpoint.agent, lease)

    async def reach(self, owner: Presence) -> None:
        """Make `owner`'s blocks readable: see `RemotePaths.reach`. :raises TransportUnavailable: they are not."""
        if self._paths is None:
            raise TransportUnavailable("this worker does not read KV of other hosts")
        await self._paths.reach(owner)

    def pulled(self, num_tokens: int, elapsed_s: float) -> None:
        """Note how long it took to copy the KV of so many tokens from another host."""
        if num_tokens > 0:
            us_per_token = 1e6 * elapsed_s / num_tokens
            self._us_per_token += (us_per_token - self._us_per_token) * (SMOOTHING if self._us_per_token else 1.0)

    def failed(self, error: PenstockError) -> None:
        """Count a copy that failed."""
        if self._paths is not None:
            self._paths.failures.labels(error.code).inc()

    def tick(self, now: float, host: str) -> None:
        """After each heartbeat: see `RemotePaths.tick`."""
        if self._paths is not None:
            self._paths.tick(now, host)


def _with_checksums(
    memories: list[np.ndarray], groups: list[GroupBlocks], known: Sequence[dict[int, int]]
) -> list[GroupBlocks]:
    """In a thread. Another one may add to `known` at the same time: the same block has the same checksum."""
    told: list[GroupBlocks] = []
    for group in groups:
        memory, mine = memories[group.group], known[group.group] if known else {}
        for block in group.blocks:
            if block not in mine:
                mine[block] = crc32(memory[block])
        told.append(msgspec.structs.replace(group, checksums=[mine[block] for block in group.blocks]))
    return told
