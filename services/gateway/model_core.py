"""One model of a gateway: whose workers are its own, and every request for it. Models share nothing that could mix them up.

The gateway's actor owns one `ModelCore` for each model, tells it what it hears, and carries out what its dispatcher decides.
Frames, heartbeats, the inbox, flow control and the epoch are the actor's: there is one of each, however many models there are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import msgspec

from common.models.naming import model_name
from common.protocol.handles import WorkerRef
from common.protocol.messages import Presence, ServedModel
from common.runtime import logs
from common.runtime.metrics import Metrics
from common.runtime.peers import SUSPECT_AFTER_HEARTBEATS
from common.runtime.registry import Registry
from common.runtime.tracing import Tracing
from common.text.bundle import TextBundle
from services.gateway.actions import Limits, Path
from services.gateway.canary import Canary
from services.gateway.catalog import Catalog, OfferedModel
from services.gateway.config import GatewayConfig
from services.gateway.dispatch import Dispatcher
from services.gateway.health import Health
from services.gateway.intake import Intake
from services.gateway.membership import Membership
from services.gateway.placement import Placement
from services.gateway.requests import GenerationRequest
from services.gateway.router import Router
from services.gateway.stream import Stream
from services.gateway.telemetry import Telemetry
from services.gateway.windows import Windows

log = logs.get("gateway")

RESERVED_SHARE = 4
"""Of a pool's places, one in so many is kept free of lines of batches."""


class Served(msgspec.Struct, frozen=True):
    """A model to serve. `config`: the settings of a gateway that serves it alone. `bundle`: its tokenizer and template; without
    them there are no edges. `identity`: what its weights are here, empty if they are not (see `membership`)."""

    config: GatewayConfig
    bundle: TextBundle | None = None
    identity: str = ""

    @property
    def name(self) -> str:
        """What clients call it."""
        return self.bundle.name if self.bundle is not None else self.config.served_name


class Host(Protocol):
    """What a model's core needs of the gateway's actor. `begin` raises what `ModelCore.generate` does."""

    windows: Windows
    telemetry: Telemetry
    registry: Registry

    @property
    def ref(self) -> WorkerRef: ...

    @property
    def serving(self) -> bool: ...

    @property
    def metrics(self) -> Metrics: ...

    @property
    def tracing(self) -> Tracing: ...

    def begin(self, core: ModelCore, request: GenerationRequest, path: Path, only: WorkerRef | None) -> Stream: ...


class ModelCore:
    """`worker_names`: under which workers may announce the model, its own name first (see `names_of_workers`)."""

    def __init__(self, host: Host, served: Served, worker_names: Iterable[str], clock: Callable[[], float]) -> None:
        config = served.config
        self.config = config
        self.limits = Limits(
            stall_s=config.stall_s,
            max_fetches=config.max_fetches,
            max_attempts=config.max_attempts,
            max_losses=config.max_losses,
            placing_timeout_s=2 * config.task_timeout_s + 1,
            prefill_timeout_s=config.prefill_timeout_s,
            slow_reader_timeout_s=config.slow_reader_timeout_s,
            first_token_s=config.slo_ttft_ms / 1000,
        )
        self.bundle = served.bundle
        self.name = served.name
        self._host = host
        self.membership = Membership(tuple(worker_names), served.identity)
        self.router = Router(
            direct_max_tokens=config.direct_max_tokens,
            affinity_blocks=0 if config.zero_retention else config.affinity_blocks,
            index_blocks=0 if config.zero_retention else config.kv_index_blocks,
            ttft_s=config.slo_ttft_ms / 1000,
            grace_s=config.no_workers_grace_s,
        )
        self.health = Health(trusting=not config.canary)
        self.placement = Placement(self.router, self.health, windows=host.windows)
        self.dispatcher = Dispatcher(
            placement=self.placement,
            max_queue=config.max_queue,
            max_requests=config.max_requests,
            no_workers_grace_s=config.no_workers_grace_s,
            now=clock(),
        )
        self.placement.on_placed = host.telemetry.watch(self.name, self.dispatcher)
        self.canary = Canary(
            router=self.router,
            health=self.health,
            generate=self._start,
            clock=clock,
            timeout_s=config.canary_timeout_s,
            interval_s=config.canary_interval_s,
            enabled=config.canary,
            model=self.name,
        )

    # -- for the edges

    @property
    def ref(self) -> WorkerRef:
        return self._host.ref

    @property
    def metrics(self) -> Metrics:
        return self._host.metrics

    @property
    def tracing(self) -> Tracing:
        return self._host.tracing

    @property
    def ready(self) -> bool:
        """Whether a request for this model would be answered now."""
        return self._host.serving and self.canary.passed

    @property
    def obstacle(self) -> str:
        """Why a request would not be answered now, as far as a canary has shown."""
        return "" if self.canary.passed else self.canary.failure

    @property
    def longest(self) -> int:
        """Tokens that a prompt and its answer may have on some worker that is alive; 0: unknown."""
        return self.router.longest

    @property
    def longest_read(self) -> int:
        """Tokens that a prompt may have which is read, not continued; 0: unknown."""
        return self.router.longest_read

    @property
    def room_behind(self) -> int:
        """How many more requests decode workers would take now that nobody waits for: a quarter of their places stays free for
        those who do."""
        if self.dispatcher.num_waiting:
            return 0
        free = places = 0
        for worker in self.router.decode.members.values():
            if worker.usable:
                places += worker.places
                # a heartbeat that had not heard of what is on its way there tells of room that is taken
                free += max(0, min(worker.spare, worker.places - worker.load))
        return max(0, free - places // RESERVED_SHARE)

    def generate(self, request: GenerationRequest) -> Stream:
        """:raises GatewayBusy, Overloaded, ShuttingDown, DuplicateRequest: nothing has been taken then."""
        return self._start(request, "read" if request.is_read else "auto", None)

    def said(self) -> ServedModel:
        """This model in the gateway's heartbeat."""
        return ServedModel(
            self.name,
            list(self.config.aliases),
            self.ready,
            self.dispatcher.num_running,
            self.dispatcher.num_waiting,
            self.membership.identity,
        )

    # -- for the actor

    def look_around(self, own: Iterable[Presence], others: Sequence[Presence], now: float) -> list[Presence]:
        """Take note of workers that announce this model, and of `others`, which announce none of this gateway's. Return those
        of the others that this model does not use either: no worker is used by two."""
        silent = self._host.registry.suspects(now, SUSPECT_AFTER_HEARTBEATS * self.config.heartbeat_s)
        members = self.membership.members([*own, *others])
        self.dispatcher.refresh(members, now, silent={worker.worker.id for worker in silent})
        for stranger in self.membership.take_strangers():
            log.warning("worker_left_alone", worker=stranger.worker.id, reason=stranger.reason, advice=stranger.advice)
        used = {member.worker for member in members}
        return [other for other in others if other.worker not in used]

    def _start(self, request: GenerationRequest, path: Path, only: WorkerRef | None) -> Stream:
        return self._host.begin(self, request, path, only)


def room_behind(model: OfferedModel) -> int:
    """See `ModelCore.room_behind`."""
    return model.core.room_behind if isinstance(model.core, ModelCore) else 0


def names_of_workers(models: Iterable[Served]) -> list[tuple[str, ...]]:
    """For each model the names under which workers may announce it, no name twice: its name, its aliases, and what it would be
    called without a name, unless several would be called so."""
    models = list(models)
    given = [dict.fromkeys((served.config.served_name, *served.config.aliases)) for served in models]
    plain = [model_name(served.config.model) for served in models]
    taken = {name for names in given for name in names}
    return [
        tuple(names) if own in taken or plain.count(own) > 1 else (*names, own) for names, own in zip(given, plain, strict=True)
    ]


def catalog_of(cores: Sequence[ModelCore], config: GatewayConfig, intake: Intake) -> Catalog | None:
    """What both edges serve; None where a model has no text."""
    offered = [OfferedModel(core, core.bundle, core.config, intake) for core in cores if core.bundle is not None]
    return Catalog(offered, config, intake) if len(offered) == len(cores) else None
