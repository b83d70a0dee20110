"""A process in the NATS micro framework: what `$SRV.PING`, `$SRV.INFO` and `$SRV.STATS` answer for it."""

from __future__ import annotations

from collections.abc import Sequence

from nats.aio.client import Client
from nats.micro.service import EndpointInfo, EndpointStats, Service, ServiceConfig, ServiceStats
from nats.micro.service import ServiceInfo as MicroInfo

from common.protocol import subjects
from common.runtime.bus import Endpoint, ServiceInfo


class MicroService(Service):
    """A process's inbox and public subjects. Requests don't pass through nats-py's own endpoints, which run one handler after
    another and show `repr(error)` to clients."""

    def __init__(self, client: Client, service: ServiceInfo) -> None:
        super().__init__(
            client,
            ServiceConfig(
                name=service.name, version=service.version, description=service.description, metadata=service.metadata
            ),
        )
        self._service = service
        role, worker = service.metadata.get("role", ""), service.metadata.get("worker", "")
        self._inbox = subjects.inbox(role, worker) if role and worker else ""

    def stats(self) -> ServiceStats:
        stats = super().stats()
        data = self._service.stats() if self._service.stats is not None else {}
        stats.endpoints = [
            EndpointStats(
                name="inbox",
                subject=self._inbox,
                queue_group="",
                num_requests=int(data.get("num_requests", 0)),
                num_errors=int(data.get("num_errors", 0)),
                processing_time=0,
                average_processing_time=0,
                data=data,
            ),
            *(
                EndpointStats(
                    name=endpoint.name,
                    subject=endpoint.subject,
                    queue_group=endpoint.queue,
                    num_requests=endpoint.num_requests,
                    num_errors=endpoint.num_errors,
                    processing_time=endpoint.processing_ns,
                    average_processing_time=endpoint.processing_ns // max(1, endpoint.num_requests),
                    last_error=endpoint.last_error,
                )
                for endpoint in self._public()
            ),
        ]
        return stats

    def info(self) -> MicroInfo:
        info = super().info()
        info.endpoints = [
            EndpointInfo(name="inbox", subject=self._inbox, queue_group=""),
            *(EndpointInfo(name=known.name, subject=known.subject, queue_group=known.queue) for known in self._public()),
        ]
        return info

    def _public(self) -> Sequence[Endpoint]:
        return self._service.endpoints() if self._service.endpoints is not None else ()
