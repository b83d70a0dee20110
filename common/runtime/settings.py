"""The settings that every service has. Each service adds its own in `services/<name>/config.py` and is given one instance."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import msgspec
from msgspec import Meta

from common.models.naming import model_name
from common.protocol.errors import ConfigError
from common.runtime.bus_login import BusLogin
from common.runtime.fields import SECRET


class ModelSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The model."""

    model: Annotated[str, Meta(min_length=1, description="name, folder, .gguf file or Hugging Face id")] = (
        "smollm2-135m-instruct"
    )
    served_model_name: Annotated[str, Meta(description="the model's name on the bus and for clients; empty: its own")] = ""
    max_model_len: Annotated[int, Meta(ge=0, description="tokens of prompt and answer together; 0: the model's context")] = 0

    @property
    def served_name(self) -> str:
        """What clients ask for, and what tells this model's workers from others on the bus."""
        return self.served_model_name or model_name(self.model)


class ServiceConfig(ModelSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Every process. Times are seconds. `config.load` reads it from flags, environment and file."""

    of_all_models: ClassVar[bool] = False
    """Whether such a process serves all models of its file, or one of them."""

    nats_url: Annotated[str, Meta(description="the NATS server, or those of a cluster: a,b,c", extra=SECRET)] = (
        "nats://127.0.0.1:4222"
    )
    nats_credentials_file: Annotated[str, Meta(description="JSON with user and password, or a context of the `nats` tool")] = ""
    nats_creds: Annotated[str, Meta(description="file with a NATS user's JWT and seed")] = ""
    nats_nkey: Annotated[str, Meta(description="file with a NATS user's nkey seed")] = ""
    nats_tls_ca: Annotated[str, Meta(description="file with the authority that signed the NATS server's certificate")] = ""
    nats_tls_cert: Annotated[str, Meta(description="file with the certificate to show to the NATS server")] = ""
    nats_tls_key: Annotated[str, Meta(description="file with the key of nats_tls_cert")] = ""
    worker_id: Annotated[str, Meta(pattern="^[A-Za-z0-9_-]{0,128}$", description="unique name; empty: drawn at start")] = ""
    log_level: Annotated[Literal["debug", "info", "warning", "error"], Meta(description="least severe level logged")] = "info"
    log_format: Annotated[Literal["console", "json"], Meta(description="shape of log lines on stderr")] = "console"
    http_host: Annotated[str, Meta(description="address of the HTTP endpoints")] = "127.0.0.1"
    http_port: Annotated[int, Meta(ge=-1, le=65535, description="0: any free port; -1: no HTTP")] = 0
    allowed_hosts: Annotated[
        tuple[str, ...], Meta(description="names that HTTP clients may use for this host, `*` for any; addresses always may")
    ] = ()
    allowed_origins: Annotated[
        tuple[str, ...], Meta(description="web pages of other hosts that may send requests: https://chat.example.com, or `*`")
    ] = ()
    http_reuse_port: Annotated[bool, Meta(description="the port is shared: connections are spread over its processes")] = False
    slow_reader_timeout_s: Annotated[
        float, Meta(gt=0, le=86400, description="a connection nobody reads for so long is cut off")
    ] = 30.0
    shm_dir: Annotated[str, Meta(description="where shared-memory segments live")] = "/dev/shm"
    heartbeat_s: Annotated[float, Meta(gt=0, le=60, description="between presence heartbeats")] = 0.25
    dead_after_s: Annotated[float, Meta(gt=0, le=600, description="silence after which a worker counts as dead")] = 2.0
    lease_s: Annotated[float, Meta(gt=0, le=3600, description="what nobody renews is freed after this")] = 5.0
    zero_retention: Annotated[
        bool, Meta(description="keep nothing of a prompt or an answer after its request: no cached KV, no text in logs")
    ] = False
    drain_timeout_s: Annotated[float, Meta(ge=0, le=86400, description="after SIGTERM: time to finish requests and end")] = 30.0

    def __post_init__(self) -> None:
        """:raises ConfigError: workers would count as dead between two of their heartbeats."""
        if self.dead_after_s < 2 * self.heartbeat_s:
            raise ConfigError(
                f"--heartbeat-s {self.heartbeat_s:g} is more than half of --dead-after-s {self.dead_after_s:g}: lower the one "
                "or raise the other",
                param="heartbeat_s",
            )

    def check(self) -> None:
        """Look at what these settings name, as a service starts: it does not wait for its bus to say what is wrong.

        :raises ConfigError: the service can't start with them.
        """

    @property
    def page_origins(self) -> tuple[str, ...]:
        """Origins of web pages that may send requests."""
        return self.allowed_origins

    @property
    def bus_login(self) -> BusLogin:
        """What this process logs in to the bus with."""
        return BusLogin(**{name: getattr(self, f"nats_{name}") for name in BusLogin.__struct_fields__})
