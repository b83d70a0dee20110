"""`python -m services.decode`: wiring only."""

from __future__ import annotations

from common.engine.engine import Engine
from common.engine.load.head import attach_head
from common.engine.load.lookup import attach_lookup
from common.engine.load.open import Progress, open_engine
from common.engine.settings import check_objectives
from common.runtime.bus import Bus
from common.runtime.service import main
from common.transfer.cuda_ipc import LocalTransport
from services.decode.actor import DecodeActor
from services.decode.config import DecodeConfig


def make_decode(bus: Bus, config: DecodeConfig) -> DecodeActor:
    """:raises ConfigError: two settings that can't both hold."""
    check_objectives(config)
    transport = LocalTransport(config.shm_dir)

    def opened(name: str, on_progress: Progress) -> Engine:
        engine = open_engine(config, name, on_progress, transport=transport)
        max_running = config.limits(on_gpu=engine.on_gpu).max_running
        attach_head(engine, config.head_setting, max_sequences=max_running)
        if config.lookup in ("auto", "on") and config.speculation_tokens:
            attach_lookup(engine, max_sequences=max_running)
        return engine

    return DecodeActor(bus=bus, config=config, open_engine=opened, transport=transport)


if __name__ == "__main__":
    main(DecodeConfig, make_decode, section="decode")
