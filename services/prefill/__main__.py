"""`python -m services.prefill`: wiring only."""

from __future__ import annotations

from common.engine.open import open_engine
from common.runtime.service import main
from services.prefill.actor import PrefillActor
from services.prefill.config import PrefillConfig

if __name__ == "__main__":
    main(
        PrefillConfig,
        lambda bus, config: PrefillActor(bus=bus, config=config, open_engine=lambda name: open_engine(config, name)),
        section="prefill",
    )
