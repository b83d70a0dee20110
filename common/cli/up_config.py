"""The settings of `penstock up` itself: which processes it starts, and where. Pure."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from common.runtime.fields import SECRET
from common.runtime.settings import ServiceConfig

MAX_THREADS = 8
"""Decoding is bound by memory: more threads than this make a small model slower, not faster."""

_Count = Annotated[int, Meta(ge=0, le=256)]


class UpConfig(ServiceConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is started. The settings of `penstock up` itself; its help has the first sentence as a heading."""

    gateway: Annotated[int, Meta(ge=1, le=64, description="gateways; several share the port")] = 1
    prefill: Annotated[
        _Count | None,
        Meta(description=f"prefill workers; by default 1 if there are two GPUs, or {2 * MAX_THREADS} cores and none, else 0"),
    ] = None
    decode: Annotated[int, Meta(ge=0, le=256, description="decode workers; they compute prompts too")] = 1
    draft: Annotated[
        int, Meta(ge=0, le=256, description="draft workers, which guess tokens from the text so far, or with --draft-model")
    ] = 0
    kvstore: Annotated[_Count | None, Meta(description="KV stores; by default 1, where KV is on GPUs 0")] = None
    device: Annotated[str, Meta(description="auto: GPUs if there are any; cpu; cuda: every GPU; cuda:N: that one")] = "auto"
    http_host: Annotated[str, Meta(description="address of the OpenAI API")] = "127.0.0.1"
    http_port: Annotated[int, Meta(ge=0, le=65535, description="port of the OpenAI API; 0: any free one")] = 8000
    nats_url: Annotated[
        str, Meta(description="a bus that runs already, or a,b,c of a cluster; empty: start one", extra=SECRET)
    ] = ""
    nats_port: Annotated[int, Meta(ge=0, le=65535, description="port of the bus that is started; 0: any free one")] = 4222
    nats_clients: Annotated[
        tuple[str, ...], Meta(description="further users of the bus that is started, who may send requests, each with a file")
    ] = ()
    data_dir: Annotated[
        str, Meta(description="folder where the bus that is started keeps files and batches; empty: one for its port")
    ] = ""
    log_dir: Annotated[str, Meta(description="folder for the processes' logs; empty: one of /tmp, removed in the end")] = ""
