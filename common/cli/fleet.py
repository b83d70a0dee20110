"""Which processes `penstock up` starts, with which flags. Pure: no process is started here."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from common.protocol.handles import Role
from common.runtime.settings import ServiceConfig

Dtype = Literal["", "auto", "float32", "bfloat16", "float16"]

MAX_THREADS = 8
"""Decoding is bound by memory: more threads than this make a small model slower, not faster."""


class UpConfig(ServiceConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the operator asked for: flags, environment, `[common]` and `[up]` of the file. Empty or 0: not said.

    Children read environment and file themselves; as flags they get what `up` alone knows.
    """

    nats_url: Annotated[str, Meta(description="a bus that runs already; empty: start one")] = ""
    nats_port: Annotated[int, Meta(ge=0, le=65535, description="port of the bus that is started; 0: any free one")] = 4222
    http_port: Annotated[int, Meta(ge=0, le=65535, description="port of the OpenAI API; 0: any free one")] = 8000
    prefill: Annotated[int, Meta(ge=0, le=256, description="prefill workers")] = 1
    decode: Annotated[int, Meta(ge=0, le=256, description="decode workers")] = 1
    draft: Annotated[int, Meta(ge=0, le=256, description="draft workers")] = 1
    kvstore: Annotated[int, Meta(ge=0, le=256, description="KV stores")] = 1
    dtype: Annotated[Dtype, Meta(description="auto, float32, bfloat16 or float16")] = ""
    threads: Annotated[int, Meta(ge=0, description="CPU threads per prefill and decode worker; 0: share the cores out")] = 0
    kv_cache_mb: Annotated[int, Meta(ge=0, description="KV blocks of each prefill and decode worker, MiB")] = 0
    log_dir: Annotated[str, Meta(description="keep the processes' logs here")] = ""


class ProcessSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One process: `python -m module arguments`. `threads`: what its engine computes with, 0 where there is none."""

    name: str
    role: Role
    module: str
    arguments: list[str]
    threads: int = 0


def threads_per_worker(cores: int, num_engines: int) -> int:
    """CPU threads of each prefill and decode worker: the cores shared out, one kept for the rest when there are many.

    >>> threads_per_worker(2, 2), threads_per_worker(8, 2), threads_per_worker(16, 3), threads_per_worker(2, 5)
    (1, 3, 5, 1)
    """
    spare = 1 if cores > 4 else 0
    return max(1, min(MAX_THREADS, (cores - spare) // max(1, num_engines)))


def processes(config: UpConfig, *, cores: int, config_file: str = "") -> list[ProcessSpec]:
    """Every process, the gateway first. Ports and the bus's URL in `config` must be real ones by now."""
    common = ["--nats-url", config.nats_url, "--model", config.model, "--shm-dir", config.shm_dir]
    common += ["--log-level", config.log_level]
    if config_file:
        common += ["--config", config_file]

    threads = config.threads or threads_per_worker(cores, config.prefill + config.decode)
    engine = ["--threads", str(threads)]
    if config.dtype:
        engine += ["--dtype", config.dtype]
    if config.kv_cache_mb:
        engine += ["--kv-cache-mb", str(config.kv_cache_mb)]

    def pool(role: Role, count: int, arguments: list[str], threads: int = 0) -> list[ProcessSpec]:
        module, flags = f"services.{role}", [*common, "--http-port", "0", *arguments]
        return [
            ProcessSpec(name=f"{role}-{i}", role=role, module=module, arguments=flags, threads=threads) for i in range(count)
        ]

    api = [*common, "--http-host", config.http_host, "--http-port", str(config.http_port)]
    return [
        ProcessSpec(name="gateway", role="gateway", module="services.gateway", arguments=api),
        *pool("prefill", config.prefill, engine, threads),
        *pool("decode", config.decode, engine, threads),
        *pool("draft", config.draft, []),
        *pool("kvstore", config.kvstore, []),
    ]
