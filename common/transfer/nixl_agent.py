"""NIXL's agent as this project uses it: one UCX backend, reads only, of host memory. The only import of nixl.

NIXL's own Python class fixes the pause of its progress thread at 0, so that every agent keeps a core busy for life. Its
bindings take the pause, so they are used here, at the version that `pyproject.toml` names.
"""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Any

import numpy as np

from common.protocol.errors import ConfigError, TransportUnavailable

PROGRESS_EVERY_US = 1000
"""Pause of the progress thread between two looks at its connections when nothing moves."""
TCP_SEGMENT = "64k"
"""What UCX sends at once over TCP; its own is 8 KiB. No more than every receiver takes: one with less room would wait for ever
(docs/decisions/0104)."""
_BACKEND = "UCX"
_NVIDIA, _DISPLAY = 0x10DE, 0x03
"""A vendor, and a class of devices, of PCI."""


class NixlAgent:
    """Reads registered memory of other agents. Safe to call from several threads."""

    def __init__(self, name: str, *, interface: str = "", transports: str = "") -> None:
        """`interface`: the network interfaces that UCX may use (UCX_NET_DEVICES). `transports`: UCX's names of those it may use
        (UCX_TLS), for example `tcp` or `rc`. Empty: UCX chooses. Beside an NVIDIA GPU `cuda_copy` is added to them.

        :raises ConfigError: nixl is not installed, or UCX has no such interface or transport here.
        """
        self.name = name
        self._bindings = _bindings()
        for variable, value in (("UCX_NET_DEVICES", interface), ("UCX_TLS", ucx_transports(transports))):
            if value:
                os.environ[variable] = value
        os.environ.setdefault("UCX_TCP_TX_SEG_SIZE", TCP_SEGMENT)
        self._registered: list[np.ndarray] = []
        config = self._bindings.nixlAgentConfig()
        config.useProgThread = True
        config.useListenThread = False
        config.syncMode = self._bindings.NIXL_THREAD_SYNC_STRICT
        config.pthrDelay = PROGRESS_EVERY_US
        try:
            self._agent = self._bindings.nixlAgent(name, config)
            self._backend = self._agent.createBackend(_BACKEND, {})
        except Exception as error:  # its exceptions have no common base
            raise ConfigError(
                f"NIXL can't use UCX with nixl_interface {interface or 'any'} and nixl_transports {transports or 'any'} "
                f"on this machine: {error} (with NIXL_LOG_LEVEL=info it says more)",
                param="kv_transfer",
            ) from error

    def register(self, memory: np.ndarray) -> None:
        """Let other agents read `memory`, or this one read into it. It is kept as long as the agent: who reads may come at any
        time, and a mapping that is gone would end this process.

        :raises ConfigError: the system does not let this memory be registered.
        """
        self._registered.append(memory)
        region = [(memory.ctypes.data, memory.nbytes, 0, "")]
        try:
            self._agent.registerMem(self._bindings.nixlRegDList(self._bindings.DRAM_SEG, region), [self._backend])
        except Exception as error:
            raise ConfigError(
                f"NIXL can't register {memory.nbytes >> 20} MiB of memory: {error}", param="kv_transfer"
            ) from error

    def metadata(self) -> bytes:
        """Return how to reach this agent and what it has registered."""
        return self._agent.getLocalMD()

    def connect(self, metadata: bytes) -> str:
        """Learn how to reach another agent; returns its name. :raises TransportUnavailable: the metadata is not usable here."""
        try:
            name = self._agent.loadRemoteMD(metadata)
        except Exception as error:
            raise TransportUnavailable(f"NIXL does not take the other side's metadata: {error}") from error
        return name.decode() if isinstance(name, bytes) else name

    def disconnect(self, peer: str) -> None:
        """Harmless for one that is not connected."""
        try:
            self._agent.invalidateRemoteMD(peer)
        except Exception:
            return

    def begin_read(self, peer: str, local: np.ndarray, remote: np.ndarray) -> int:
        """Begin to copy remote stretches to local ones, both [n, 3] uint64 of (address, bytes, 0); returns the operation.

        :raises TransportUnavailable: the peer is gone, or has no such memory; nothing is copied.
        """
        nixl = self._bindings
        operation = None
        try:
            lists = (nixl.nixlXferDList(nixl.DRAM_SEG, stretches) for stretches in (local, remote))
            operation = self._agent.createXferReq(nixl.NIXL_READ, *lists, peer, "", [self._backend])
            self._agent.postXferReq(operation, "")
        except Exception as error:
            if operation is not None:
                self.release(operation)
            raise TransportUnavailable(f"{peer} can't be read: {error}") from error
        return operation

    def is_done(self, operation: int) -> bool:
        """False while it runs. :raises TransportUnavailable: it has failed, and touches memory no longer."""
        try:
            status = self._agent.getXferStatus(operation)
        except Exception as error:
            raise TransportUnavailable(f"a copy has failed: {error}") from error
        if status == self._bindings.NIXL_SUCCESS:
            return True
        if status == self._bindings.NIXL_IN_PROG:
            return False
        raise TransportUnavailable(f"a copy has failed with status {status}")

    def release(self, operation: int) -> None:
        """Forget an operation that has ended. One that runs must not be released: it would write all the same."""
        try:
            self._agent.releaseXferReq(operation)
        except Exception:
            return


def ucx_transports(transports: str, pci: Path = Path("/sys/bus/pci/devices")) -> str:
    """Return UCX_TLS for a setting: NIXL refuses one without `cuda_copy` on a machine with an NVIDIA GPU, also for copies of
    host memory alone. pci: the machine's devices."""
    names = transports.split(",")
    knows = not transports or transports.startswith("^") or "all" in names or any(name.startswith("cuda") for name in names)
    return transports if knows or not _has_gpu(pci) else f"{transports},cuda_copy"


def _has_gpu(pci: Path) -> bool:
    """Return whether NIXL sees one: a display controller of NVIDIA's."""
    for device in pci.glob("*"):
        try:
            vendor, kind = (int((device / name).read_text(), 16) for name in ("vendor", "class"))
        except (OSError, ValueError):
            continue
        if vendor == _NVIDIA and kind >> 16 == _DISPLAY:
            return True
    return False


def _bindings() -> Any:
    for variable in ("NIXL_LOG_LEVEL", "UCX_LOG_LEVEL"):  # a peer that is gone is logged by us
        os.environ.setdefault(variable, "FATAL")
    try:
        importlib.import_module("nixl")
        return importlib.import_module("nixl._bindings")
    except ImportError as error:
        raise ConfigError(
            f"kv_transfer nixl needs NIXL, which can't be imported ({error}): pip install 'penstock[nixl]'", param="kv_transfer"
        ) from error
