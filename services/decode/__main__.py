"""`python -m services.decode`: wiring only."""

from __future__ import annotations

from common.engine.open import open_engine
from common.runtime.service import main
from common.transfer.shm import ShmTransport
from services.decode.actor import DecodeActor
from services.decode.config import DecodeConfig

if __name__ == "__main__":
    main(
        DecodeConfig,
        lambda bus, config: DecodeActor(
            bus=bus,
            config=config,
            open_engine=lambda name: open_engine(config, name),
            transport=ShmTransport(config.shm_dir),
        ),
        section="decode",
    )
