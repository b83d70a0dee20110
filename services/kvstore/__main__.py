"""`python -m services.kvstore`: wiring only."""

from __future__ import annotations

from common.runtime.bus import Bus
from common.runtime.service import main
from services.kvstore.actor import KvstoreActor
from services.kvstore.config import KvstoreConfig


def make_kvstore(bus: Bus, config: KvstoreConfig) -> KvstoreActor:
    return KvstoreActor(bus=bus, config=config)


if __name__ == "__main__":
    main(KvstoreConfig, make_kvstore, section="kvstore")
