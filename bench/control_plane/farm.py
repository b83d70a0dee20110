"""Many simulated workers in one process, each on a connection of its own: what the control plane sees of a large fleet.

`python -m bench.control_plane.farm --role decode --ids decode-farm-0,decode-farm-1 …`; further flags are the service's own.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence

import anyio
import msgspec

from bench.common.request import parser
from common.engine.load.open import open_engine
from common.runtime import logs, nats_bus, parent_death
from common.runtime.actor import Actor
from common.runtime.bus import Bus
from common.runtime.config import load
from common.transfer.shm import ShmTransport
from services.decode.actor import DecodeActor
from services.decode.config import DecodeConfig
from services.prefill.actor import PrefillActor
from services.prefill.config import PrefillConfig


def make_decode(bus: Bus, config: DecodeConfig) -> Actor:
    return DecodeActor(
        bus=bus,
        config=config,
        open_engine=lambda name, on_progress: open_engine(config, name, on_progress),
        transport=ShmTransport(config.shm_dir),
    )


def make_prefill(bus: Bus, config: PrefillConfig) -> Actor:
    return PrefillActor(bus=bus, config=config, open_engine=lambda name, on_progress: open_engine(config, name, on_progress))


async def main(role: str, ids: Sequence[str], flags: Sequence[str]) -> None:
    """Run until SIGTERM. A worker that fails ends all of them."""
    buses: list[nats_bus.NatsBus] = []
    try:
        async with anyio.create_task_group() as group:
            for worker_id in ids:
                arguments = [*flags, f"--worker-id={worker_id}"]
                if role == "decode":
                    config = load(DecodeConfig, section="decode", argv=arguments, environ=os.environ)
                else:
                    config = load(PrefillConfig, section="prefill", argv=arguments, environ=os.environ)
                config = msgspec.structs.replace(config, http_port=-1)
                bus = await nats_bus.connect(config.nats_url, name=worker_id)
                buses.append(bus)
                actor = make_decode(bus, config) if isinstance(config, DecodeConfig) else make_prefill(bus, config)
                await group.start(actor.run)
            with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
                async for _ in signals:
                    group.cancel_scope.cancel()
                    break
    finally:
        with anyio.CancelScope(shield=True):
            for bus in buses:
                await bus.close()


if __name__ == "__main__":
    parent_death.guard()
    logs.configure("warning", "console")
    accepted = parser("bench.control_plane.farm", __doc__)
    accepted.add_argument("--role", choices=("prefill", "decode"), required=True)
    accepted.add_argument("--ids", required=True, help="the workers' ids, comma-separated")
    given, flags = accepted.parse_known_args()
    anyio.run(main, given.role, given.ids.split(","), flags, backend_options={"use_uvloop": True})
