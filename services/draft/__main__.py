"""`python -m services.draft`: wiring only."""

from __future__ import annotations

from common.runtime.service import main
from services.draft.actor import DraftActor
from services.draft.config import DraftConfig

if __name__ == "__main__":
    main(DraftConfig, lambda bus, config: DraftActor(bus=bus, config=config), section="draft")
