"""Settings of a kvstore worker."""

from __future__ import annotations

from typing import Annotated, ClassVar

from msgspec import Meta

from common.protocol.errors import ConfigError
from common.runtime.nixl_settings import NixlSettings, StagingMb


class KvstoreConfig(NixlSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """KV stores."""

    of_all_models: ClassVar[bool] = True

    capacity_mb: Annotated[
        int,
        Meta(
            ge=0,
            le=1 << 30,
            description="MiB of shared memory for KV blocks, at most; 0: a quarter of what is free, without GPUs 1024 at most",
        ),
    ] = 0
    max_fingerprints: Annotated[
        int, Meta(ge=1, le=64, description="models or layouts kept at once; all share the capacity, by what is used")
    ] = 16
    forget_after_s: Annotated[
        float, Meta(gt=0, description="the memory of a model that nobody asked for this long goes back to the system")
    ] = 3600.0
    kv_disk: Annotated[
        str, Meta(description="folder on a disk that keeps KV blocks over restarts, for one KV store; empty: none")
    ] = ""
    kv_disk_gb: Annotated[int, Meta(ge=1, le=1 << 20, description="GiB of that disk for KV blocks, at most")] = 16
    staging_mb: StagingMb = 128

    def check(self) -> None:
        """:raises ConfigError: nothing may be kept."""
        if self.zero_retention:
            raise ConfigError("a kvstore keeps KV after its request, and zero_retention forbids that: start none")
