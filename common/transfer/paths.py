"""The names of the ways that KV takes: values of the label `path` in metrics, and names in heartbeats. Pure."""

from __future__ import annotations

from typing import Literal

KvPath = Literal["shm", "cuda_ipc", "nixl", "kvstore", "kvstore_nixl", "device", "disk", "memory"]
"""`shm`: another worker's shared memory. `cuda_ipc`: another worker's GPU memory, on one host. `nixl`: another host's memory.
`kvstore`: a kvstore's shared memory. `kvstore_nixl`: a kvstore of another host. `device`: this worker's own GPU memory, read
into host memory or written from there. `disk`: a kvstore's disk. `memory`: one process's memory, in tests."""

Operation = Literal["read", "write"]
