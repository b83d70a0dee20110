"""`penstock status`: every worker on the bus, its load and its KV use, from its own heartbeats."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Annotated, get_args

import anyio
import msgspec
import typer
from rich.live import Live
from rich.table import Table

from common.cli.client import connected, decode_presence, watch_presence
from common.cli.console import DEFAULT_NATS_URL, NatsUrl, err, out, run
from common.protocol import subjects
from common.protocol.errors import NoWorkers
from common.protocol.handles import Role
from common.protocol.messages import Presence
from common.runtime.bus import Bus, BusMessage
from common.runtime.registry import Registry

LISTEN_S = 0.8
"""Three heartbeats: who is alive was heard by then."""
DEAD_AFTER_S = 2.0
REFRESH_S = 0.5

_STATE_STYLES = {"ready": "green", "starting": "yellow", "draining": "magenta"}


def command(
    once: Annotated[bool, typer.Option("--once", help="Print one table and end.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON list and end.")] = False,
    nats_url: NatsUrl = DEFAULT_NATS_URL,
) -> None:
    """A live table of workers; Ctrl-C ends it."""

    async def show() -> None:
        async with connected(nats_url, "status") as bus:
            if once or as_json:
                heard = await watch_presence(bus, LISTEN_S)
                _print_once(heard.values(), as_json=as_json)
            else:
                await _live(bus)

    run(show)


def _print_once(workers: Iterable[Presence], *, as_json: bool) -> None:
    ordered = in_order(workers)
    if as_json:
        out.print(msgspec.json.format(msgspec.json.encode([as_fields(worker) for worker in ordered])).decode(), markup=False)
    elif ordered:
        out.print(table(ordered))
    else:
        raise NoWorkers("no worker on this bus: start some with `penstock up`, or name another bus with --nats-url")


async def _live(bus: Bus) -> None:
    registry = Registry(DEAD_AFTER_S)

    def arrived(message: BusMessage) -> None:
        if presence := decode_presence(message):
            registry.observe(presence, time.monotonic())

    subscription = await bus.subscribe(subjects.any_presence(), arrived)
    with Live(table([]), console=out, refresh_per_second=4, screen=False) as live:
        try:
            while True:
                await anyio.sleep(REFRESH_S)
                now = time.monotonic()
                for lost in registry.lost(now):
                    err.print(f"[red]lost[/] {lost.worker.id}")
                live.update(table(in_order(registry.alive(None, now))))
        finally:
            with anyio.CancelScope(shield=True):
                await subscription.unsubscribe()


def in_order(workers: Iterable[Presence]) -> list[Presence]:
    """Along the way of a request: gateways, prefill, decode, draft, kvstore."""
    rank = {role: number for number, role in enumerate(get_args(Role))}
    return sorted(workers, key=lambda presence: (rank.get(presence.worker.role, len(rank)), presence.worker.id))


def table(workers: list[Presence]) -> Table:
    """One row per worker."""
    shown = Table(box=None, header_style="bold", pad_edge=False)
    for title in ("worker", "state"):
        shown.add_column(title, no_wrap=True)
    for title in ("running", "waiting", "credits", "KV blocks in use", "cached", "step", "tok/s"):
        shown.add_column(title, justify="right", no_wrap=True)
    for presence in workers:
        kv = presence.kv
        in_use = kv.owned + kv.leased
        style = _STATE_STYLES.get(presence.state, "")
        state = f"loading {100 * presence.loaded:.0f}%" if presence.loaded < 1 else presence.state
        shown.add_row(
            presence.worker.id,
            f"[{style}]{state}[/]" if style else state,
            str(presence.running),
            str(presence.waiting),
            str(presence.credits),
            f"{in_use}/{kv.total} {100 * in_use / kv.total:3.0f}%" if kv.total else "-",
            str(kv.cached) if kv.total else "-",
            f"{presence.step_ms:.1f} ms" if presence.step_ms else "-",
            f"{presence.tokens_per_s:.0f}" if presence.tokens_per_s else "-",
        )
    return shown


def as_fields(presence: Presence) -> dict[str, object]:
    """A heartbeat with named fields, for --json (on the wire some of it is positional)."""
    fields = {name: getattr(presence, name) for name in presence.__struct_fields__}
    worker, kv = presence.worker, presence.kv
    fields["worker"] = {"role": worker.role, "id": worker.id, "epoch": worker.epoch}
    fields["kv"] = {name: getattr(kv, name) for name in kv.__struct_fields__}
    return fields
