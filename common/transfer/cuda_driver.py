"""The part of a GPU's driver that hands memory from process to process, pins it and copies it, by ctypes."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.protocol.errors import TransportUnavailable

HANDLE_BYTES = 64
_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
_IN_STREAM_ORDER = 1  # CU_MEMCPY_SRC_ACCESS_ORDER_STREAM


class CudaDriver:
    """libcuda, in the context that torch uses for GPU `index`. Each call may come from another thread."""

    def __init__(self, index: int) -> None:
        """:raises TransportUnavailable: there is none."""
        self._index = index
        self._context = ctypes.c_void_p()
        try:
            self._cuda = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise TransportUnavailable(f"no CUDA driver: {error}") from error
        self._cuda.cuIpcOpenMemHandle_v2.argtypes = [ctypes.c_void_p, _Handle, ctypes.c_uint]

    def addresses(self) -> tuple[int, int, int]:
        """Return those of the calls that compiled code makes: cuMemcpyAsync, cuEventRecord, cuEventSynchronize."""
        names = ("cuMemcpyAsync", "cuEventRecord", "cuEventSynchronize")
        copy, record, synchronize = (ctypes.cast(getattr(self._cuda, name), ctypes.c_void_p).value or 0 for name in names)
        return copy, record, synchronize

    def copy_batch(self, targets: NDArray[np.int64], sources: NDArray[np.int64], num_bytes: int, stream: int) -> bool:
        """Submit copies of num_bytes each, sources[i] to targets[i], as one batch; return whether the driver took it.

        The copy engine makes no pause between the copies of a batch. False: the driver is older than CUDA 12.8, or refuses.
        stream: a handle; the default stream takes no batches.
        """
        newer, older = (getattr(self._cuda, name, None) for name in ("cuMemcpyBatchAsync_v2", "cuMemcpyBatchAsync"))
        self.bind()
        places = [np.ascontiguousarray(addresses, np.uint64) for addresses in (targets, sources)]
        sizes, count = np.full(len(targets), num_bytes, np.uint64), ctypes.c_size_t(len(targets))
        of_all, first, failed = _CopyAttributes(order=_IN_STREAM_ORDER), ctypes.c_size_t(0), ctypes.c_size_t()
        arrays = [ctypes.c_void_p(array.ctypes.data) for array in (*places, sizes)]
        attributes = ctypes.byref(of_all), ctypes.byref(first), ctypes.c_size_t(1)
        if newer is not None:  # since CUDA 13
            return not newer(*arrays, count, *attributes, ctypes.c_void_p(stream))
        return older is not None and not older(*arrays, count, *attributes, ctypes.byref(failed), ctypes.c_void_p(stream))

    def register(self, address: int, num_bytes: int) -> None:
        """Pin memory of this process for the copy engine. :raises TransportUnavailable: the driver or the system refuses."""
        self.bind()
        self._call("cuMemHostRegister_v2", ctypes.c_void_p(address), ctypes.c_size_t(num_bytes), ctypes.c_uint(0))

    def unregister(self, address: int) -> None:
        """End what `register` began at an address. :raises TransportUnavailable: the driver fails."""
        self.bind()
        self._call("cuMemHostUnregister", ctypes.c_void_p(address))

    def export(self, pointer: int) -> tuple[bytes, int]:
        self.bind()
        handle = _Handle()
        self._call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(pointer))
        return bytes(handle.reserved), pointer - self._range(pointer)[0]

    def open(self, handle: bytes) -> tuple[int, int]:
        self.bind()
        pointer = ctypes.c_uint64()
        self._call("cuIpcOpenMemHandle_v2", ctypes.byref(pointer), _Handle.from_buffer_copy(handle), _PEER_ACCESS)
        return self._range(pointer.value)

    def close(self, pointer: int) -> None:
        self.bind()
        self._call("cuIpcCloseMemHandle", ctypes.c_uint64(pointer))

    def _range(self, pointer: int) -> tuple[int, int]:
        """First address and size of the allocation around `pointer`."""
        first, size = ctypes.c_uint64(), ctypes.c_size_t()
        self._call("cuMemGetAddressRange_v2", ctypes.byref(first), ctypes.byref(size), ctypes.c_uint64(pointer))
        return first.value, size.value

    def bind(self) -> None:
        """Make the context this thread's: one that has not used CUDA yet has none."""
        if not self._context:
            device = ctypes.c_int()
            self._call("cuDeviceGet", ctypes.byref(device), ctypes.c_int(self._index))
            self._call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), device)
        self._call("cuCtxSetCurrent", self._context)

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._cuda, name)(*arguments)
        if code:
            text = ctypes.c_char_p()
            self._cuda.cuGetErrorName(code, ctypes.byref(text))
            raise TransportUnavailable(f"{name}: {(text.value or str(code).encode()).decode()}")


class _Handle(ctypes.Structure):
    """CUipcMemHandle; passed by value."""

    _fields_ = (("reserved", ctypes.c_ubyte * HANDLE_BYTES),)


class _Location(ctypes.Structure):
    """CUmemLocation; all 0: as the addresses say."""

    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _CopyAttributes(ctypes.Structure):
    """CUmemcpyAttributes, of all copies of a batch."""

    _fields_ = (("order", ctypes.c_int), ("source", _Location), ("target", _Location), ("flags", ctypes.c_uint))
