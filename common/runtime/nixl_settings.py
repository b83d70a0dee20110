"""The settings of a service whose KV may go between hosts: engines and kvstores."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from common.runtime.settings import ServiceConfig

StagingMb = Annotated[
    int,
    Meta(
        ge=1,
        le=1 << 20,
        description="MiB of memory from which other hosts read blocks of KV stores and of GPUs, with kv_transfer nixl",
    ),
]
"""The setting `staging_mb` of those whose blocks are copied for readers of other hosts."""


class NixlSettings(ServiceConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """KV between hosts."""

    kv_transfer: Annotated[
        Literal["local", "nixl"],
        Meta(
            description="nixl: KV goes to and from workers and KV stores of other hosts, too, over NIXL (penstock[nixl]); a "
            "trusted network"
        ),
    ] = "local"
    nixl_interface: Annotated[
        str, Meta(description="network interfaces for KV, such as eth0 or mlx5_0:1; empty: any (UCX_NET_DEVICES)")
    ] = ""
    nixl_transports: Annotated[
        str, Meta(description="what UCX may use for KV, such as tcp or rc; empty: the fastest it finds (UCX_TLS)")
    ] = ""
