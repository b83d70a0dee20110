"""`python -m services.decode`: wiring only."""

from __future__ import annotations

from common.engine.load.open import open_engine
from common.runtime.bus import Bus
from common.runtime.service import main
from common.transfer.cuda_ipc import LocalTransport
from services.decode.actor import DecodeActor
from services.decode.config import DecodeConfig


def make_decode(bus: Bus, config: DecodeConfig) -> DecodeActor:
    transport = LocalTransport(config.shm_dir)
    return DecodeActor(
        bus=bus,
        config=config,
        open_engine=lambda name, on_progress: open_engine(config, name, on_progress, transport=transport),
        transport=transport,
    )


if __name__ == "__main__":
    main(DecodeConfig, make_decode, section="decode")
