"""What processes hold: their memory while the load runs, and nothing of any request when it is over."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import anyio
import msgspec

from bench.common.stats import slope_per_min
from bench.mixed_load.site import Site
from common.cli.client import watch_presence
from common.protocol.messages import Presence
from common.runtime.nats_bus import connect

SAMPLE_S = 5.0
SETTLED = 0.2
"""The share of a process's life after which its memory should not grow any more."""
MIN_LIFE_S = 240.0
GROWTH_MB = 24.0
GROWTH_SHARE = 0.15
"""Growth beyond both of these, after a process has settled, is one that must not be."""
LISTEN_S = 1.5


@dataclass
class Life:
    """One process from its start to its death. samples: (monotonic seconds, MiB)."""

    name: str
    pid: int
    samples: list[tuple[float, float]] = field(default_factory=list)


class Grown(msgspec.Struct, frozen=True):
    """How one process's memory went. MiB, and minutes."""

    name: str
    minutes: float
    settled_mb: float
    last_mb: float
    mb_per_min: float

    @property
    def grows(self) -> bool:
        """Whether that is a growth that must not be; a process that did not live long enough has not settled."""
        more_mb = max(GROWTH_MB, GROWTH_SHARE * self.settled_mb)
        return 60 * self.minutes >= MIN_LIFE_S and self.last_mb > self.settled_mb + more_mb


def growth(name: str, samples: Sequence[tuple[float, float]], min_life_s: float = MIN_LIFE_S) -> Grown | None:
    """Compare a process's memory once it had settled with the last; None for one that did not live long enough."""
    if len(samples) < 5 or samples[-1][0] - samples[0][0] < min_life_s:
        return None
    begin = samples[0][0] + SETTLED * (samples[-1][0] - samples[0][0])
    after = [sample for sample in samples if sample[0] >= begin]
    minutes = (samples[-1][0] - samples[0][0]) / 60
    return Grown(name, minutes, after[0][1], after[-1][1], slope_per_min(after))


def resident_mb(pid: int) -> float:
    """Return the memory of a process, MiB; 0 for one that is gone."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_bytes().split()[1])
    except (OSError, IndexError):
        return 0.0
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


class Memory:
    """Samples every process of a system."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._lives: dict[int, Life] = {}

    async def run(self) -> None:
        while True:
            found = await anyio.to_thread.run_sync(self._site.processes)
            now = anyio.current_time()
            for name, pid in found.items():
                if size := resident_mb(pid):
                    self._lives.setdefault(pid, Life(name, pid)).samples.append((now, size))
            await anyio.sleep(SAMPLE_S)

    def grown(self, min_life_s: float = MIN_LIFE_S) -> list[Grown]:
        """Return those that lived long enough, the longest life of each name."""
        found: dict[str, Grown] = {}
        for life in self._lives.values():
            grown = growth(life.name, life.samples, min_life_s)
            if grown is not None and (life.name not in found or found[life.name].minutes < grown.minutes):
                found[life.name] = grown
        return sorted(found.values(), key=lambda each: each.name)


def held_by(presence: Presence) -> str:
    """Return what a worker still holds of requests, in words; nothing if that is nothing."""
    kv = presence.kv
    held = {"running": presence.running, "waiting": presence.waiting, "owned": kv.owned, "leased": kv.leased}
    if kv.free + kv.owned + kv.leased + kv.cached != kv.total:
        held["blocks unaccounted for"] = kv.total - kv.free - kv.owned - kv.leased - kv.cached
    return ", ".join(f"{name} {count}" for name, count in held.items() if count)


async def still_held(site: Site, within_s: float = 30.0) -> dict[str, str]:
    """Return what workers hold when nobody asks for anything, once they had this time to give it back."""
    held: dict[str, str] = {"": "no heartbeat"}
    bus = await connect(site.nats_url, name="mixed-load", login=site.login("monitor"))
    try:
        with anyio.move_on_after(within_s):
            while held:
                heard = await watch_presence(bus, LISTEN_S)
                held = {name: what for name, presence in heard.items() if (what := held_by(presence))}
                if not heard:
                    held = {"": "no heartbeat"}
    finally:
        await bus.close()
    return held
