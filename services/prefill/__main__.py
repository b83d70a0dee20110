"""`python -m services.prefill`: wiring only."""

from __future__ import annotations

from common.engine.load.open import open_engine
from common.runtime.bus import Bus
from common.runtime.service import main
from services.prefill.actor import PrefillActor
from services.prefill.config import PrefillConfig


def make_prefill(bus: Bus, config: PrefillConfig) -> PrefillActor:
    return PrefillActor(bus=bus, config=config, open_engine=lambda name, on_progress: open_engine(config, name, on_progress))


if __name__ == "__main__":
    main(PrefillConfig, make_prefill, section="prefill")
