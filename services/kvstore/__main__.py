"""`python -m services.kvstore`: wiring only."""

from __future__ import annotations

from common.protocol.errors import ConfigError
from common.runtime.bus import Bus
from common.runtime.service import main
from services.kvstore.actor import KvstoreActor
from services.kvstore.config import KvstoreConfig


def make_kvstore(bus: Bus, config: KvstoreConfig) -> KvstoreActor:
    """:raises ConfigError: nothing may be kept."""
    if config.zero_retention:
        raise ConfigError("a kvstore keeps KV after its request, and zero_retention forbids that: start none")
    return KvstoreActor(bus=bus, config=config)


if __name__ == "__main__":
    main(KvstoreConfig, make_kvstore, section="kvstore")
