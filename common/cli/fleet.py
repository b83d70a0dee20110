"""Which processes `penstock up` starts, with which flags, on which GPU. Pure: no process is started here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from common.protocol.handles import Role
from common.runtime.settings import ServiceConfig

Dtype = Literal["", "auto", "float32", "bfloat16", "float16"]

MAX_THREADS = 8
"""Decoding is bound by memory: more threads than this make a small model slower, not faster."""


_Count = Annotated[int, Meta(ge=0, le=256)]


class UpConfig(ServiceConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the operator asked for: flags, environment, `[common]` and `[up]` of the file. Empty, 0 or None: not said.

    Children read environment and file themselves; as flags they get what `up` alone knows.
    """

    nats_url: Annotated[str, Meta(description="a bus that runs already; empty: start one")] = ""
    nats_port: Annotated[int, Meta(ge=0, le=65535, description="port of the bus that is started; 0: any free one")] = 4222
    http_port: Annotated[int, Meta(ge=0, le=65535, description="port of the OpenAI API; 0: any free one")] = 8000
    gateway: Annotated[int, Meta(ge=1, le=64, description="gateways; several share the port")] = 1
    prefill: Annotated[_Count | None, Meta(description="prefill workers; by default 1, on a machine of one GPU 0")] = None
    decode: Annotated[int, Meta(ge=0, le=256, description="decode workers")] = 1
    draft: Annotated[int, Meta(ge=0, le=256, description="draft workers")] = 1
    kvstore: Annotated[_Count | None, Meta(description="KV stores; by default 1, where KV is on GPUs 0")] = None
    device: Annotated[str, Meta(description="auto: GPUs if there are any; cpu; cuda: every GPU; cuda:N: that one")] = "auto"
    dtype: Annotated[Dtype, Meta(description="auto, float32, bfloat16 or float16")] = ""
    quantization: Annotated[str, Meta(description="auto, none, int8 (CPU) or fp8 (GPU)")] = ""
    kv_cache_dtype: Annotated[str, Meta(description="auto, or fp8 on a GPU")] = ""
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
    """CPU threads of each prefill and decode worker that computes with a library whose threads wait by spinning, or slowly: the
    cores shared out, one kept for the rest when there are many. 8-bit kernels (dtype auto) may have every core.

    >>> threads_per_worker(2, 2), threads_per_worker(8, 2), threads_per_worker(16, 3), threads_per_worker(2, 5)
    (1, 3, 5, 1)
    """
    spare = 1 if cores > 4 else 0
    return max(1, min(MAX_THREADS, (cores - spare) // max(1, num_engines)))


class Placement(msgspec.Struct, frozen=True):
    """Where an engine runs; `share` of a GPU's memory is its own."""

    device: str
    share: float = 0.0


def placements(count: int, gpus: list[int]) -> list[Placement]:
    """`count` engines over `gpus`, in turns; without GPUs wherever their own settings say.

    >>> [(place.device, place.share) for place in placements(3, [0, 1])]
    [('cuda:0', 0.45), ('cuda:1', 0.9), ('cuda:0', 0.45)]
    """
    if not gpus:
        return [Placement("")] * count
    chosen = [gpus[index % len(gpus)] for index in range(count)]
    return [Placement(f"cuda:{gpu}", int(90 / chosen.count(gpu)) / 100) for gpu in chosen]


def settled(config: UpConfig, num_gpus: int) -> UpConfig:
    """`config` with the sizes of pools that nobody named."""
    prefill = 0 if num_gpus == 1 else 1
    return msgspec.structs.replace(
        config,
        prefill=prefill if config.prefill is None else config.prefill,
        kvstore=int(not num_gpus) if config.kvstore is None else config.kvstore,
    )


def processes(config: UpConfig, *, cores: int, gpus: Sequence[int] = (), config_file: str = "") -> list[ProcessSpec]:
    """Every process, the gateway first. `config` is `settled`, and its ports and the bus's URL are real ones by now."""
    common = ["--nats-url", config.nats_url, "--model", config.model, "--shm-dir", config.shm_dir]
    common += ["--log-level", config.log_level]
    if config_file:
        common += ["--config", config_file]

    prefill, kvstore = config.prefill or 0, config.kvstore or 0
    exact = config.dtype not in ("", "auto")
    threads = config.threads or (threads_per_worker(cores, prefill + config.decode) if exact else min(cores, MAX_THREADS))
    engine = ["--threads", str(threads)]
    for name in ("dtype", "quantization", "kv_cache_dtype", "kv_cache_mb"):
        if value := getattr(config, name):
            engine += [f"--{name.replace('_', '-')}", str(value)]
    if config.device == "cpu":
        engine += ["--device", "cpu"]
    places = iter(placements(prefill + config.decode, list(gpus)))

    def process(role: Role, index: int, arguments: list[str], threads: int = 0) -> ProcessSpec:
        flags = [*common, "--http-port", "0", *arguments]
        return ProcessSpec(name=f"{role}-{index}", role=role, module=f"services.{role}", arguments=flags, threads=threads)

    def engines(role: Role, count: int) -> list[ProcessSpec]:
        specs: list[ProcessSpec] = []
        for index in range(count):
            place = next(places)
            on_gpu = ["--device", place.device, "--gpu-memory-utilization", str(place.share)] if place.device else []
            specs.append(process(role, index, [*engine, *on_gpu], threads))
        return specs

    api = [*common, "--http-host", config.http_host, "--http-port", str(config.http_port)]
    if config.gateway > 1:
        api.append("--http-reuse-port")
    return [
        *(
            ProcessSpec(name=f"gateway-{index}", role="gateway", module="services.gateway", arguments=api)
            for index in range(config.gateway)
        ),
        *engines("prefill", prefill),
        *engines("decode", config.decode),
        *(process("draft", index, []) for index in range(config.draft)),
        *(process("kvstore", index, []) for index in range(kvstore)),
    ]
