"""`python -m services.draft`: wiring only."""

from __future__ import annotations

from common.runtime.bus import Bus
from common.runtime.service import main
from services.draft.actor import DraftActor
from services.draft.config import DraftConfig


def make_draft(bus: Bus, config: DraftConfig) -> DraftActor:
    if not config.draft_model:
        return DraftActor(bus=bus, config=config)
    from services.draft.model_actor import ModelDraftActor  # n-grams need no engine
    from services.draft.model_engine import open_draft_engine, with_draft_model

    config = with_draft_model(config)
    opening = lambda name, on_progress: open_draft_engine(config, name, on_progress)  # noqa: E731
    return ModelDraftActor(bus=bus, config=config, open_engine=opening)


if __name__ == "__main__":
    main(DraftConfig, make_draft, section="draft")
