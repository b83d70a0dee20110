"""The part of a GPU's driver that hands memory from process to process, by ctypes."""

from __future__ import annotations

import ctypes
from typing import Any

from common.protocol.errors import TransportUnavailable

HANDLE_BYTES = 64
_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS


class CudaDriver:
    """libcuda, in the context that torch uses for GPU `index`. Each call may come from another thread."""

    def __init__(self, index: int) -> None:
        self._index = index
        self._context = ctypes.c_void_p()
        try:
            self._cuda = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise TransportUnavailable(f"no CUDA driver: {error}") from error
        self._cuda.cuIpcOpenMemHandle_v2.argtypes = [ctypes.c_void_p, _Handle, ctypes.c_uint]

    def export(self, pointer: int) -> tuple[bytes, int]:
        self._bind()
        handle = _Handle()
        self._call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(pointer))
        return bytes(handle.reserved), pointer - self._range(pointer)[0]

    def open(self, handle: bytes) -> tuple[int, int]:
        self._bind()
        pointer = ctypes.c_uint64()
        self._call("cuIpcOpenMemHandle_v2", ctypes.byref(pointer), _Handle.from_buffer_copy(handle), _PEER_ACCESS)
        return self._range(pointer.value)

    def close(self, pointer: int) -> None:
        self._bind()
        self._call("cuIpcCloseMemHandle", ctypes.c_uint64(pointer))

    def _range(self, pointer: int) -> tuple[int, int]:
        """First address and size of the allocation around `pointer`."""
        first, size = ctypes.c_uint64(), ctypes.c_size_t()
        self._call("cuMemGetAddressRange_v2", ctypes.byref(first), ctypes.byref(size), ctypes.c_uint64(pointer))
        return first.value, size.value

    def _bind(self) -> None:
        """A thread that has not used CUDA yet has no context; this is the one that torch's runtime uses too."""
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
