"""Copies blocks of host memory and computes their checksums, many in one call, without the interpreter's lock.

    copy_near            the target stays in a cache: a copy engine reads it next
    copy_past            the target goes past the caches
    copy_changing_past   likewise

The source of `copy_past` is nobody else's. That of the others may change meanwhile: the checksum is of what was written. Bytes
are copied, and their checksums computed, in small pieces, which stay in the first-level cache in between (on the stack, where
the source may change), and the next piece is fetched meanwhile. So they cross the memory bus once for each side that is not in
a cache, where copying a block and computing its checksum afterwards takes four passes: read, read for ownership, write, read
again.
"""

# pyright: reportCallIssue=false, reportArgumentType=false
from __future__ import annotations

import platform
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from common.ops.cpu_int8.address_numba import emit_prefetch
from common.ops.cpu_int8.compiled_numba import compiled

PIECE_BYTES = 2 << 10
LINE_BYTES = 64
MAPPED_BYTES = 64 << 10
"""Linux maps so many bytes of a file for one page that is read and not mapped yet, and one page for each that is written. So a
byte is read before so many are written: that takes a fifth of the time where a mapping is new, and 0.1 us where it is not."""
_ALIGNMENT = 16
_INT32, _INT64 = ir.IntType(32), ir.IntType(64)
_LANES = ir.VectorType(_INT64, 2)
_BYTES = ir.IntType(8).as_pointer()
_FENCES = {"x86_64": "llvm.x86.sse.sfence", "amd64": "llvm.x86.sse.sfence"}


def _emit_call(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    kind = ir.FunctionType(_INT32, [_INT64] * (len(args) - 1))
    return builder.call(builder.inttoptr(args[0], kind.as_pointer()), args[1:])


@intrinsic
def call_1(typing_context, function, a):
    """Call the C function at an address, with integers or pointers as int64; it returns an int32. `call_2` to 4: likewise."""
    return types.int32(*[types.int64] * 2), _emit_call


@intrinsic
def call_2(typing_context, function, a, b):
    return types.int32(*[types.int64] * 3), _emit_call


@intrinsic
def call_3(typing_context, function, a, b, c):
    return types.int32(*[types.int64] * 4), _emit_call


@intrinsic
def call_4(typing_context, function, a, b, c, d):
    return types.int32(*[types.int64] * 5), _emit_call


def _copying_lines(*, past_caches: bool) -> Any:
    """Return what copies whole lines, and fetches as many at `following` meanwhile. Past the caches `target` is a multiple of
    16."""

    @intrinsic
    def copy_lines(typing_context, source, target, num_bytes, following):
        def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            source, target, num_bytes, following = args
            flag = builder.module.add_metadata([ir.Constant(_INT32, 1)])
            entry, zero = builder.block, ir.Constant(_INT64, 0)
            body, done = builder.append_basic_block("lines"), builder.append_basic_block("lines.done")
            builder.cbranch(builder.icmp_signed(">", num_bytes, zero), body, done)
            builder.position_at_end(body)
            offset = builder.phi(_INT64)
            offset.add_incoming(zero, entry)

            def place(start: Any, lane: int) -> Any:
                number = builder.add(start, builder.add(offset, ir.Constant(_INT64, lane)))
                return builder.inttoptr(number, _LANES.as_pointer())

            emit_prefetch(builder, place(following, 0))
            lanes = range(0, LINE_BYTES, _ALIGNMENT)
            for lane, value in [(lane, builder.load(place(source, lane), align=1)) for lane in lanes]:
                stored = builder.store(value, place(target, lane), align=_ALIGNMENT if past_caches else 1)
                if past_caches:
                    stored.set_metadata("nontemporal", flag)
            end = builder.add(offset, ir.Constant(_INT64, LINE_BYTES))
            offset.add_incoming(end, builder.block)
            builder.cbranch(builder.icmp_signed("<", end, num_bytes), body, done)
            builder.position_at_end(done)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64, types.int64, types.int64), emit

    return copy_lines


_copy_lines, _stream_lines = _copying_lines(past_caches=False), _copying_lines(past_caches=True)


@intrinsic
def move(typing_context, source, target, num_bytes):
    """memcpy."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [_BYTES, _BYTES, _INT64, ir.IntType(1)])
        function = builder.module.declare_intrinsic("llvm.memcpy", [_BYTES, _BYTES, _INT64], kind)
        places = [builder.inttoptr(args[1], _BYTES), builder.inttoptr(args[0], _BYTES)]
        builder.call(function, [*places, args[2], ir.Constant(ir.IntType(1), 0)])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), emit


@intrinsic
def _streamed(typing_context):
    """What was written past the caches is seen before what this thread writes next."""

    def emit(context: Any, builder: Any, _: Any, args: Any) -> Any:
        if name := _FENCES.get(platform.machine().lower()):
            builder.call(builder.module.declare_intrinsic(name, (), ir.FunctionType(ir.VoidType(), ())), ())
        else:
            builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), emit


@intrinsic
def _touch(typing_context, place):
    """Read a byte that nobody needs."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.load_atomic(builder.inttoptr(args[0], _BYTES), "monotonic", 1)  # which the compiler keeps
        return context.get_dummy_value()

    return types.void(types.int64), emit


@intrinsic
def _room(typing_context):
    """Return the address of a piece's bytes on the stack of the function that calls this."""

    def emit(context: Any, builder: Any, _: Any, args: Any) -> Any:
        room = cgutils.alloca_once(builder, ir.ArrayType(ir.IntType(8), PIECE_BYTES))
        room.align = LINE_BYTES
        return builder.ptrtoint(room, _INT64)

    return types.int64(), emit


@compiled()
def _past(source, target, size, following):
    lines = size // LINE_BYTES * LINE_BYTES if target % _ALIGNMENT == 0 else 0
    _stream_lines(source, target, lines, following)
    if lines < size:
        move(source + lines, target + lines, size - lines)


@compiled()
def copy_near(source, target, num_bytes, checksum, crc32):
    """Copy bytes from one address to another; return the CRC-32 of what was written. checksum: of what comes before it.
    crc32: address of ISA-L's `crc32_gzip_refl`."""
    offset, piece = 0, _room()
    while offset < num_bytes:
        size = min(PIECE_BYTES, num_bytes - offset)
        lines = size // LINE_BYTES * LINE_BYTES
        move(source + offset, piece, size)
        checksum = call_3(crc32, checksum, piece, size) & 0xFFFFFFFF
        _copy_lines(piece, target + offset, lines, source + offset + PIECE_BYTES)
        if lines < size:
            move(piece + lines, target + offset + lines, size - lines)
        offset += size
    return checksum


@compiled()
def copy_past(source, target, num_bytes, checksum, crc32):
    """See `copy_near`."""
    offset = 0
    while offset < num_bytes:
        if offset % MAPPED_BYTES == 0:
            _touch(target + offset)
        size = min(PIECE_BYTES, num_bytes - offset)
        checksum = call_3(crc32, checksum, source + offset, size) & 0xFFFFFFFF
        _past(source + offset, target + offset, size, source + offset + PIECE_BYTES)
        offset += size
    _streamed()
    return checksum


@compiled()
def copy_changing_past(source, target, num_bytes, checksum, crc32):
    """See `copy_near`."""
    offset, piece = 0, _room()
    while offset < num_bytes:
        if offset % MAPPED_BYTES == 0:
            _touch(target + offset)
        size = min(PIECE_BYTES, num_bytes - offset)
        move(source + offset, piece, size)
        checksum = call_3(crc32, checksum, piece, size) & 0xFFFFFFFF
        _past(piece, target + offset, size, source + offset + PIECE_BYTES)
        offset += size
    _streamed()
    return checksum


@compiled(kept=True)
def checked_copies(
    source, source_stride, source_blocks, target, target_stride, target_blocks, num_bytes, checksums, crc32, changes
):
    """Copy source_blocks to target_blocks, the first `num_bytes` of each, and write their checksums; all int64 [num_blocks].

    source, target: addresses of rows that are so many bytes apart. changes: whether others may write to the source.
    """
    for i in range(len(source_blocks)):
        from_, to = source + source_blocks[i] * source_stride, target + target_blocks[i] * target_stride
        if changes:
            checksums[i] = copy_changing_past(from_, to, num_bytes, 0, crc32)
        else:
            checksums[i] = copy_past(from_, to, num_bytes, 0, crc32)
