"""The mixed run: learn what must be answered, then load, kills, salt checks and batches at once, then the end's checks."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import msgspec

from bench.mixed_load import asks
from bench.mixed_load.batch import Batches
from bench.mixed_load.clients import HttpClient, NatsClient
from bench.mixed_load.outages import Outages
from bench.mixed_load.salts import SaltCheck
from bench.mixed_load.site import SEEDS, TENANTS, Site, Sizes, running
from bench.mixed_load.tally import End, Tally
from bench.mixed_load.traffic import Tenant, Traffic, learn
from bench.mixed_load.watch import MIN_LIFE_S, Grown, Memory, still_held
from common.runtime.nats_bus import connect

SPARED = ("gateway-1", "decode-alpha-1", "decode-beta-1", "prefill-beta-1")
"""Never killed, so that the memory of one process of each kind is seen over the whole run."""
PROGRESS_S = 30.0
QUIET_S = 15.0
"""Seconds without blows before the end, in which what was killed last comes back."""


class MixedOptions(msgspec.Struct, frozen=True, kw_only=True):
    """`think_s`: mean pause of each client between two requests. `kill_every_s`: mean time between two of the `blows`.
    `requests`: the load ends with so many answers, or after its minutes. `disk`, `hosts`: see `Sizes`."""

    minutes: float
    requests: int
    disk: bool
    hosts: int
    clients: int
    think_s: float
    kill_every_s: float
    blows: list[str]
    salt_every_s: float
    batch_lines: int
    per_kind: int
    seed: int


class MixedReport(msgspec.Struct, kw_only=True):
    """What a run came to; `held` and `faults` are empty in one that is right."""

    seconds: float
    known: int
    tally: Tally
    blows: dict[str, int]
    held: dict[str, str]
    memory: list[Grown]

    @property
    def is_right(self) -> bool:
        hits, misses = self.tally.salts["own prefix found"], self.tally.salts["own prefix not found"]
        return (
            not self.held
            and not self.tally.wrong
            and not any(each.grows for each in self.memory)
            and self.tally.num_answered > 0
            and hits > misses
        )


@asynccontextmanager
async def tenants_of(site: Site) -> AsyncIterator[list[Tenant]]:
    """Clients of each tenant, over HTTP with its key, over NATS with its login."""
    found: list[Tenant] = []
    buses = []
    try:
        for name in TENANTS:
            bus = await connect(site.nats_url, name=f"mixed-{name}", login=site.login(name))
            buses.append(bus)
            found.append(Tenant(name, HttpClient(site.url, site.keys[name]), NatsClient(bus, name)))
        yield found
    finally:
        with anyio.CancelScope(shield=True):
            for bus, tenant in zip(buses, found, strict=False):
                await tenant.http.close()
                await bus.close()


async def run(options: MixedOptions, folder: Path) -> MixedReport:
    """:raises ConfigError: the system does not start, or what it answers can't be checked."""
    with running(folder, Sizes(disk=options.disk, hosts=options.hosts)) as site:
        async with tenants_of(site) as tenants:
            return await _under_load(options, site, tenants)


async def _under_load(options: MixedOptions, site: Site, tenants: list[Tenant]) -> MixedReport:
    print(f"logs in {site.folder}", flush=True)
    known = await learn(tenants[0], asks.pool(options.seed, options.per_kind), list(SEEDS))
    print(f"{len(known)} requests known of {len(SEEDS)} models", flush=True)
    tally, memory = Tally(), Memory(site)
    outages = Outages(site, every_s=options.kill_every_s, seed=options.seed, kinds=options.blows, spared=SPARED)
    traffic = Traffic(tenants, known, outages, tally, options.seed)
    salts = SaltCheck(tenants, list(SEEDS), outages, tally, options.seed)
    batches = Batches(site.url, site.keys[""], known, tally, num_lines=options.batch_lines, seed=options.seed)
    began = time.monotonic()
    end = End(tally, began + 60 * options.minutes, options.requests)
    async with anyio.create_task_group() as watchers:
        watchers.start_soon(memory.run)
        watchers.start_soon(_progress, tally, outages)
        watchers.start_soon(_strike, outages, end.until - QUIET_S)
        async with anyio.create_task_group() as load:
            for _ in range(options.clients):
                load.start_soon(traffic.client, options.think_s, end)
            load.start_soon(salts.run, options.salt_every_s, end)
            load.start_soon(batches.run, end)
        watchers.cancel_scope.cancel()
    return MixedReport(
        seconds=time.monotonic() - began,
        known=len(known),
        tally=tally,
        blows=outages.counts(),
        held=await still_held(site),
        memory=memory.grown(min(MIN_LIFE_S, 30 * options.minutes)),
    )


async def _strike(outages: Outages, until: float) -> None:
    with anyio.move_on_after(until - time.monotonic()):
        await outages.run()


async def _progress(tally: Tally, outages: Outages) -> None:
    shown = 0
    while True:
        await anyio.sleep(PROGRESS_S)
        seconds = time.monotonic() - tally.began
        excused, wrong = tally.excused.total(), tally.wrong.total()
        print(
            f"{seconds:6.0f} s: {tally.num_answered} answered, {excused} excused, {wrong} wrong, "
            f"{len(outages.struck)} blows, {tally.batches['lines']} batch lines checked",
            flush=True,
        )
        for fault in tally.faults[shown:]:
            print(f"  {fault}", flush=True)
        shown = len(tally.faults)
