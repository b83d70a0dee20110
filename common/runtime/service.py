"""`main` of every service: settings, logs, bus, HTTP, signals, and the one actor that does the work.

    main(DecodeConfig, lambda bus, config: DecodeActor(bus=bus, config=config), section="decode")

SIGTERM or SIGINT: drain for at most `drain_timeout_s`, then exit 0. While a model loads, which nothing interrupts, the kernel
ends the process after `FORCED_EXIT_S`. A second one, or SIGHUP (the supervisor died): clean up and exit at once. A mistake in
the settings, or a model that can't be loaded: one line on stderr and exit 2. Anything else that ends the actor: a traceback in
the log and exit 1, for the supervisor to start it again. Nothing is written to stdout.
"""

from __future__ import annotations

import functools
import gc
import logging
import os
import resource
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn, TypeVar

import anyio
import msgspec
from anyio.abc import TaskStatus

from common.protocol.errors import BusError, PenstockError
from common.runtime import endpoints, logs, model_tables, nats_bus, parent_death
from common.runtime.actor import Actor
from common.runtime.bus import Bus, ServiceInfo
from common.runtime.file_limit import FileLimit, raise_file_limit
from common.runtime.http_access import HttpAccess
from common.runtime.settings import ServiceConfig
from common.runtime.tracing import open_tracing
from common.runtime.version import version

C = TypeVar("C", bound=ServiceConfig)
MakeActor = Callable[[Bus, C], Actor]

CONNECT_ATTEMPT_S = 2.0
FORCED_EXIT_S = 5
"""An exit at once may take so long to clean up before the kernel ends the process."""
OVERTIME_S = 1.0
"""After the drain's time is over, before the kernel ends the process."""
THREADS_END_S = 1.0
"""What threads get to end once nothing is left to do."""
SWITCH_INTERVAL_S = 0.0005
"""How soon a thread that has Python's interpreter gives way to another one that waits for it: one that tokenizes, or submits a
step, to the event loop. With Python's 5 ms every callback might wait that long."""
YOUNG_OBJECTS = 5_000
"""How many new objects set off a garbage collection in a worker. A step of 256 rows makes and drops thousands, hardly any of
them in a cycle: with Python's 700, collections took a twelfth of a decode worker's processor time. A gateway keeps 700, since
going through 5,000 of its objects would stop all streams for 20 ms."""
WAIT_POLICY = "PASSIVE"
"""Of OpenMP, where OMP_WAIT_POLICY names no other: torch's threads sleep while they wait. Where a machine has more workers than
cores, spinning ones slow all of them tenfold and more. Torch reads it when imported: late in a worker, never in a gateway."""

log = logs.get("service")


def main(config_type: type[C], make_actor: MakeActor[C], *, section: str, argv: Sequence[str] | None = None) -> NoReturn:
    """Run the service until it is told to stop; ends the process."""
    parent_death.guard()
    os.environ.setdefault("OMP_WAIT_POLICY", WAIT_POLICY)
    try:
        given = sys.argv[1:] if argv is None else argv
        config = model_tables.load(config_type, section=section, argv=given, environ=os.environ)
        # settled once: whether `owner/name` is a folder of this machine may change while the process lives
        config = msgspec.structs.replace(config, served_model_name=config.served_name)
        config.check()
        logs.configure(config.log_level, config.log_format, with_messages=not config.zero_retention)
        if config.zero_retention:
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # no memory of a crashed process on a disk
        raise_file_limit()
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        serve = functools.partial(_serve, make_actor, config, section)
        status = anyio.run(serve, backend_options={"use_uvloop": True})
    except (Exception, BaseExceptionGroup) as error:
        status = _report(error, section)
    _end(status)


def _end(status: int) -> NoReturn:
    """End the process, even if a thread hangs for which the interpreter would wait."""

    def end_without_it() -> None:
        log.warning("threads_left_behind", threads=[thread.name for thread in threading.enumerate()])
        logging.shutdown()
        os._exit(status)

    impatient = threading.Timer(THREADS_END_S, end_without_it)
    impatient.daemon = True
    impatient.start()
    sys.exit(status)


def _report(error: BaseException, section: str) -> int:
    """Errors raised on purpose are one line each; the rest are ours to mend and show where they come from."""
    causes = list(_leaves(error))
    if all(isinstance(cause, PenstockError) for cause in causes):
        for line in dict.fromkeys(str(cause) for cause in causes):
            sys.stderr.write(f"penstock {section}: {line}\n")
        return 2
    log.error("service_failed", section=section, exc_info=error)
    return 1


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from _leaves(inner)
    else:
        yield error


class _Signals:
    """What the operator asked for so far."""

    def __init__(self) -> None:
        self.actor: Actor | None = None
        self.status = 0
        self._asked = False

    async def watch(self, everything: anyio.CancelScope, *, task_status: TaskStatus[None]) -> None:
        with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT, signal.SIGHUP) as received:
            task_status.started()
            async for number in received:
                if number == signal.SIGHUP or self._asked or self.actor is None or not self.actor.running:
                    log.warning("exiting_at_once", signal=number.name)
                    self.status = 128 + number if self._asked else 0
                    parent_death.unguard()  # while this still catches signals: the next SIGHUP would end the clean-up
                    signal.alarm(FORCED_EXIT_S)
                    everything.cancel()
                    return
                self._asked = True
                log.info("stopping", signal=number.name)
                # whatever hangs, even this loop, the kernel ends the process then
                limit_s = self.actor.config.drain_timeout_s + OVERTIME_S
                starting = self.actor.state == "starting"  # it loads in a thread, and holds nothing that others wait for
                signal.setitimer(signal.ITIMER_REAL, min(limit_s, FORCED_EXIT_S) if starting else limit_s)
                self.actor.begin_drain()


async def _serve(make_actor: MakeActor[C], config: C, section: str) -> int:
    """The exit status."""
    signals = _Signals()
    async with anyio.create_task_group() as group:
        await group.start(signals.watch, group.cancel_scope)
        log.info("starting", service=section, pid=os.getpid(), nats=nats_bus.redacted(config.nats_url))
        bus = await _connect(config, section)
        try:
            actor = make_actor(bus, config)
            actor.tracing = open_tracing(actor.role, actor.ref.id, actor.metrics, os.environ)
            signals.actor = actor
            try:
                await _run(actor, config)
            finally:
                await actor.tracing.close()
        finally:
            with anyio.CancelScope(shield=True):
                await bus.close()
        log.info("stopped", worker=actor.ref.id)
        group.cancel_scope.cancel()
    return signals.status


async def _connect(config: ServiceConfig, section: str) -> Bus:
    """Waits for the server for ever: in a cluster, nobody says that it starts first."""
    while True:
        try:
            return await nats_bus.connect(
                config.nats_url,
                name=f"penstock-{section}",
                user=section,
                login=config.bus_login,
                connect_timeout_s=CONNECT_ATTEMPT_S,
            )
        except BusError as error:
            log.warning("waiting_for_nats", reason=str(error))


async def _run(actor: Actor, config: ServiceConfig) -> None:
    listener = None
    if config.http_port >= 0:
        listener = endpoints.bind(
            config.http_host,
            config.http_port,
            reuse_port=config.http_reuse_port,
            stall_timeout_s=config.slow_reader_timeout_s,
        )
    try:
        actor.metrics.observe_process()
        young_objects = None if actor.role == "gateway" else YOUNG_OBJECTS
        actor.on_ready = functools.partial(spare_what_is_loaded, young_objects)
        await actor.bus.register(_describe(actor))
        async with anyio.create_task_group() as group:
            if listener is None:
                await actor.run()
                return
            actor.http_port = listener.getsockname()[1]
            app = actor.http_app() or endpoints.worker_app(actor)
            access = HttpAccess(config.http_host, allowed_hosts=config.allowed_hosts, allowed_origins=config.page_origins)
            server = endpoints.HttpServer(
                endpoints.guarded(app, access, actor.metrics.http_refused),
                stall_timeout_s=config.slow_reader_timeout_s,
                files=FileLimit(actor.metrics),
            )
            group.start_soon(server.run_until_finished, listener)
            log.info("serving_http", host=config.http_host, port=actor.http_port, worker=actor.ref.id)
            drained = False
            try:
                await actor.run()
                drained = True
            finally:
                server.finish(at_once=not drained)
    finally:
        if listener is not None:
            listener.close()


def spare_what_is_loaded(young_objects: int | None = None) -> None:
    """From here on the garbage collector leaves alone what there is: libraries and a model, hundreds of thousands of objects.
    To go through them takes 100 ms, and nothing is planned meanwhile.

    young_objects: how many new ones set off a collection; None: as many as Python has it.
    """
    gc.collect()
    gc.freeze()
    if young_objects is not None:
        gc.set_threshold(young_objects, *gc.get_threshold()[1:])


def _describe(actor: Actor) -> ServiceInfo:
    return ServiceInfo(
        name=f"penstock-{actor.role}",
        version=version(),
        description=f"Penstock {actor.role} worker",
        metadata={
            "model": actor.config.served_name,
            "role": actor.role,
            "worker": actor.ref.id,
            "epoch": str(actor.ref.epoch),
        },
        stats=lambda: _stats(actor),
        endpoints=actor.endpoints,
    )


def _stats(actor: Actor) -> dict[str, Any]:
    presence = msgspec.to_builtins(actor.presence(actor.state))
    return {"num_requests": actor.num_handled, "num_errors": actor.num_failed, **presence}
