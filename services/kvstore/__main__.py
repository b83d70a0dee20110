"""`python -m services.kvstore`: wiring only."""

from __future__ import annotations

from common.runtime.service import main
from services.kvstore.actor import KvstoreActor
from services.kvstore.config import KvstoreConfig

if __name__ == "__main__":
    main(KvstoreConfig, lambda bus, config: KvstoreActor(bus=bus, config=config), section="kvstore")
