"""`python -m services.gateway`: wiring only."""

from __future__ import annotations

from common.models.config import load_config, weights_identity
from common.models.source import resolve
from common.runtime import logs
from common.runtime.bus import Bus
from common.runtime.http_access import is_loopback
from common.runtime.service import main
from common.text.bundle import load_bundle
from services.gateway.actor import GatewayActor
from services.gateway.config import GatewayConfig
from services.gateway.model_core import Served

log = logs.get("gateway")


def make_gateway(bus: Bus, config: GatewayConfig) -> GatewayActor:
    """:raises UnknownModel, ConfigError: if a model's tokenizer and template can't be loaded, or the settings are wrong."""
    if not (config.key or config.api_keys) and config.http_port >= 0 and not is_loopback(config.http_host):
        log.warning(
            "api_without_key",
            host=config.http_host,
            advice="whoever reaches it may use it: set api_key, api_key_file or api_keys",
        )
    return GatewayActor(bus=bus, config=config, models=[served(each) for each in config.each])


def served(config: GatewayConfig) -> Served:
    """What a gateway needs of one model.

    :raises UnknownModel, ConfigError: if its tokenizer and template can't be loaded.
    """
    files = resolve(config.model, weights=False)
    model = load_config(files)
    bundle = load_bundle(
        files,
        name=config.served_name,
        generation_config=config.generation_config == "auto",
        max_context=model.max_context,
        max_model_len=config.max_model_len,
        vocab_size=model.vocab_size,
        tool_parser=config.tool_parser,
        reasoning_parser=config.reasoning_parser,
    )
    return Served(config, bundle, weights_identity(files, model))


if __name__ == "__main__":
    main(GatewayConfig, make_gateway, section="gateway")
