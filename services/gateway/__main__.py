"""`python -m services.gateway`: wiring only."""

from __future__ import annotations

from common.models.config import load_config, weights_identity
from common.models.source import resolve
from common.runtime.bus import Bus
from common.runtime.service import main
from common.text.bundle import load_bundle
from services.gateway.actor import GatewayActor
from services.gateway.config import GatewayConfig


def make_gateway(bus: Bus, config: GatewayConfig) -> GatewayActor:
    """:raises UnknownModel, ConfigError: if the model's tokenizer and template can't be loaded."""
    files = resolve(config.model, weights=False)
    bundle = load_bundle(files, name=config.served_name, max_model_len=config.max_model_len)
    return GatewayActor(bus=bus, config=config, bundle=bundle, identity=weights_identity(files, load_config(files)))


if __name__ == "__main__":
    main(GatewayConfig, make_gateway, section="gateway")
