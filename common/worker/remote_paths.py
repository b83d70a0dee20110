"""Paths to memory of other hosts, of prefill workers and kvstores alike: tried before they are needed, and after failures.

    an owner announces an endpoint ─► DescribeMemory ─► its test pattern is copied and timed ─► the path works
                                       └ no answer, wrong bytes, too slow: an error in the log, tried again after RETRY_PATH_S
    a copy fails                   ─► the path does not work ─► after the transport's pause its pattern is copied again

Paths that don't work are told to gateways in heartbeats, which then pair others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import anyio
import anyio.to_thread

from common.engine.settings import EngineServiceConfig
from common.protocol.errors import PenstockError, ProtocolError, TransportUnavailable, from_wire
from common.protocol.handles import Role, WorkerRef
from common.protocol.messages import Presence, Rejected
from common.protocol.transfer_messages import DescribeMemory, KvEndpoint, MemoryDescribed
from common.runtime import logs
from common.runtime.actor import Actor
from common.transfer.nixl import NixlTransport

log = logs.get("remote_kv")

NIXL = "nixl"
ASK_TIMEOUT_S = 1.0
RETRY_PATH_S = 5.0
MAX_UNREACHABLE = 64
"""Owners that a heartbeat names at most."""


@dataclass(slots=True)
class _Path:
    """To one life of an owner. `gb_per_s`: of its last test that went well. `has_failed`: its last test has not."""

    owner: WorkerRef
    trying: anyio.Lock = field(default_factory=anyio.Lock)
    retry_at: float = 0.0
    gb_per_s: float = 0.0
    has_failed: bool = False


class RemotePaths:
    """Of one reader. `wanted`: which owners it may need to read. `name`: see `path_name`."""

    def __init__(
        self,
        actor: Actor,
        config: EngineServiceConfig,
        transport: NixlTransport,
        *,
        roles: tuple[Role, ...],
        wanted: Callable[[Presence], bool],
    ) -> None:
        self.name = path_name(config)
        self._actor = actor
        self._config = config
        self._transport = transport
        self._roles = roles
        self._wanted = wanted
        self._paths: dict[str, _Path] = {}
        metrics, labels = actor.metrics, ["peer", "path"]
        self._speed = metrics.gauge("kv_path_gb_per_s", "Measured speed of the path to a worker of another host", labels)
        self.failures = metrics.counter("kv_remote_failures_total", "Paths and copies between hosts that failed", ["code"])

    async def reach(self, owner: Presence) -> None:
        """Make `owner`'s memory readable, unless it is already.

        :raises TransportUnavailable: it is not, or the path is slower than `nixl_min_gb_per_s`. After a failure it is raised
            at once for some seconds.
        """
        endpoint = endpoint_of(owner)
        if endpoint is None:
            raise TransportUnavailable(f"{owner.worker.id} announces no way to its KV from other hosts")
        path = self._paths.setdefault(endpoint.agent, _Path(owner.worker))
        if self._transport.knows(endpoint.agent):
            return
        async with path.trying:
            if not self._transport.knows(endpoint.agent):
                if self._actor.clock() < path.retry_at:
                    raise TransportUnavailable(f"the path to {owner.worker.id} failed a moment ago")
                await self._try(endpoint.agent, path)

    def works(self, owner: Presence) -> bool:
        """Whether the path to an owner has been tested, and the last copy over it did not fail."""
        endpoint = endpoint_of(owner)
        return endpoint is not None and self._works(endpoint.agent)

    def agent_of(self, owner: WorkerRef) -> str:
        """Return the agent of an owner in this epoch. :raises TransportUnavailable: the path to it does not work."""
        agent = next((agent for agent, path in self._paths.items() if path.owner == owner), "")
        if not self._works(agent):
            raise TransportUnavailable(f"no path to {owner.id} works")
        return agent

    def gb_per_s(self, owner: WorkerRef) -> float:
        """Return the speed of the path to an owner by its test; 0 where it was not tested."""
        return next((path.gb_per_s for path in self._paths.values() if path.owner == owner), 0.0)

    def unreachable(self, role: Role) -> list[str]:
        """Return the agents of owners of a role whose path was tried and does not work now."""
        failing = [
            agent
            for agent, path in self._paths.items()
            if path.owner.role == role and (path.has_failed or self._transport.is_failing(agent))
        ]
        return sorted(failing)[:MAX_UNREACHABLE]

    def tick(self, now: float, host: str) -> None:
        """After each heartbeat: let go of owners that are gone, try the paths to new ones, and again those that failed."""
        owners = [owner for role in self._roles for owner in self._actor.registry.alive(role, now)]
        remote = {endpoint.agent: owner for owner in owners if owner.host != host and (endpoint := endpoint_of(owner))}
        for agent in self._paths.keys() - remote.keys():
            self._forget(agent)
        for agent, owner in remote.items():
            path = self._paths.get(agent)
            if not self._wanted(owner) or (path is not None and (path.trying.locked() or now < path.retry_at)):
                continue
            if not self._transport.knows(agent):
                self._actor.task_group.start_soon(self._try_soon, owner)
            elif path is not None and not self._works(agent) and self._transport.may_try(agent):
                self._actor.task_group.start_soon(self._test_again, agent, path)

    def _works(self, agent: str) -> bool:
        path = self._paths.get(agent)
        is_tested = path is not None and path.gb_per_s > 0 and not path.has_failed
        return is_tested and self._transport.knows(agent) and not self._transport.is_failing(agent)

    async def _try_soon(self, owner: Presence) -> None:
        try:
            await self.reach(owner)
        except TransportUnavailable:
            return  # logged, and tried again

    async def _try(self, agent: str, path: _Path) -> None:
        try:
            answer = await self._actor.ask(path.owner, DescribeMemory(holder=self._actor.ref), ASK_TIMEOUT_S)
            if isinstance(answer, Rejected):
                raise from_wire(answer.code, answer.message)
            if not isinstance(answer, MemoryDescribed) or answer.worker != path.owner or answer.agent != agent:
                raise ProtocolError(f"{path.owner.id} did not describe the memory that it announces")
            self._measured(path, await anyio.to_thread.run_sync(_added, self._transport, answer))
        except PenstockError as error:
            self._transport.forget(agent)
            path.has_failed, path.retry_at = True, self._actor.clock() + RETRY_PATH_S
            self._log_failure(path, error)
            raise TransportUnavailable(f"no path to {path.owner.id}: {error}") from error

    async def _test_again(self, agent: str, path: _Path) -> None:
        """Copy the pattern over a path on which a copy failed. The transport itself pauses longer after each failure."""
        if path.trying.locked():
            return
        async with path.trying:
            try:
                self._measured(path, await anyio.to_thread.run_sync(self._transport.measure, agent))
            except PenstockError as error:
                path.has_failed = True
                if not self._transport.is_failing(agent):  # too slow: it does not pause by itself
                    path.retry_at = self._actor.clock() + RETRY_PATH_S
                self._log_failure(path, error)

    def _measured(self, path: _Path, gb_per_s: float) -> None:
        """:raises TransportUnavailable: that is slower than promised."""
        if gb_per_s < self._config.nixl_min_gb_per_s:
            raise TransportUnavailable(
                f"{gb_per_s:.3f} GB/s, and nixl_min_gb_per_s promises {self._config.nixl_min_gb_per_s:g}"
            )
        path.gb_per_s, path.has_failed = gb_per_s, False
        self._speed.labels(path.owner.id, self.name).set(round(gb_per_s, 4))
        log.info("kv_path", peer=path.owner.id, path=self.name, gb_per_s=round(gb_per_s, 3))

    def _log_failure(self, path: _Path, error: PenstockError) -> None:
        self.failures.labels(error.code).inc()
        log.error("kv_path_failed", peer=path.owner.id, path=self.name, code=error.code, reason=str(error))

    def _forget(self, agent: str) -> None:
        path = self._paths[agent]
        if path.trying.locked():
            return
        self._transport.forget(agent)
        if path.gb_per_s:
            self._speed.remove(path.owner.id, self.name)
        del self._paths[agent]


def endpoint_of(owner: Presence) -> KvEndpoint | None:
    """Return how an owner's memory is reached over NIXL, if it is."""
    return next((endpoint for endpoint in owner.endpoints if endpoint.transport == NIXL), None)


def path_name(config: EngineServiceConfig) -> str:
    """Return what bytes travel over, as configured."""
    return f"{NIXL}/{config.nixl_transports or 'auto'}"


def _added(transport: NixlTransport, described: MemoryDescribed) -> float:
    """In a thread. Return the measured GB/s of a path."""
    transport.add(described)
    return transport.measure(described.agent)
