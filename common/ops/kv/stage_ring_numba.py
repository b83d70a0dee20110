"""Blocks between a kvstore's memory and a GPU, through slots of pinned memory: all that one thread does, in one call.

    send_blocks      memory ─► copied and checked to a slot ─► the copy engine ─► pool
    receive_blocks   pool ─► the copy engine ─► a slot ─► copied and summed up ─► memory
    copy_each        either way, where the memory is pinned: the copy engine alone

Several threads make the call together, and each takes the next block that nobody has taken. A block passes in pieces through
slots of the thread's own, so that the copy engine works on some while the thread works on another; the driver is called by
address. So no thread waits for the interpreter's lock in between, and the copy engine for none of them.

`state`: int64 [STATE_SIZE], of all threads of one call (`new_state`). functions: int64 [4], the addresses of ISA-L's
crc32_gzip_refl, and of the driver's cuMemcpyAsync, cuEventRecord and cuEventSynchronize, or of what takes the same arguments.
When a call returns, nothing that it began uses its slots or the blocks any more; after an error of the driver only what was
begun before the last event that it recorded.
"""

# pyright: reportCallIssue=false, reportArgumentType=false
from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numba
import numpy as np
from numba import types
from numba.extending import intrinsic
from numpy.typing import NDArray

from common.ops.cpu_int8.compiled_numba import compiled
from common.ops.kv.checked_copy_numba import call_1, call_2, call_4, copy_near, copy_past, move

NEXT, FAILED, BAD = 0, 8, 16
"""Indices of `state`, on cache lines of their own: the next block, the driver's first error code, the first bad block."""
STATE_SIZE = 24
CRC32, COPY, RECORD, SYNCHRONIZE = range(4)
"""Indices of `functions`."""

_COUNTERS = types.Array(types.int64, 1, "C")


class Job(NamedTuple):
    """What all threads of a call copy: blocks of a kvstore's memory, one every `stride` bytes, and blocks of the pool.

    blocks, checksums, pool_blocks: int64 [num_blocks]. memory, pool: addresses. piece_bytes: of a slot.
    """

    memory: int
    stride: int
    blocks: NDArray[np.int64]
    checksums: NDArray[np.int64]
    pool: int
    pool_blocks: NDArray[np.int64]
    block_bytes: int
    piece_bytes: int


class Lane(NamedTuple):
    """What is a thread's own. slots, events: int64, addresses and handles, one of each for each slot. stream: a handle."""

    slots: NDArray[np.int64]
    events: NDArray[np.int64]
    stream: int


def new_state(num_blocks: int) -> NDArray[np.int64]:
    """Return the state of a call that has not begun."""
    state = np.zeros(STATE_SIZE, np.int64)
    state[BAD] = num_blocks
    return state


def _combining(operation: str) -> Any:
    """Return what combines counters[index] with a value, atomically, and returns what it was."""

    @intrinsic
    def combine(typing_context, counters, index, value):
        def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            array = context.make_array(signature.args[0])(context, builder, args[0])
            return builder.atomic_rmw(operation, builder.gep(array.data, [args[1]]), args[2], "acq_rel")

        return types.int64(_COUNTERS, types.int64, types.int64), emit

    return combine


_add, _lower, _raise = _combining("add"), _combining("min"), _combining("max")


@intrinsic
def _read(typing_context, counters, index):
    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        array = context.make_array(signature.args[0])(context, builder, args[0])
        return builder.load_atomic(builder.gep(array.data, [args[1]]), "acquire", 8)

    return types.int64(_COUNTERS, types.int64), emit


@compiled()
def _begin(state, lane, functions, turn, target, source, num_bytes):
    """Have the copy engine copy into a slot or out of it; the slot's event tells when it has."""
    _raise(state, FAILED, call_4(functions[COPY], target, source, num_bytes, lane.stream))
    _raise(state, FAILED, call_2(functions[RECORD], lane.events[turn], lane.stream))


@compiled()
def _wait(state, lane, functions, turn):
    _raise(state, FAILED, call_1(functions[SYNCHRONIZE], lane.events[turn]))


@compiled(kept=True)
def send_blocks(state, job, lane, functions):
    """Copy blocks of the memory to blocks of the pool, as long as their checksums are those.

    Afterwards all before `state[BAD]` are there, unless `state[FAILED]`.
    """
    num_blocks, num_slots, used = len(job.blocks), len(lane.slots), 0
    while _read(state, FAILED) == 0 and _read(state, BAD) == num_blocks:
        block = _add(state, NEXT, 1)
        if block >= num_blocks:
            break
        source = job.memory + job.blocks[block] * job.stride
        target, offset, checksum = job.pool + job.pool_blocks[block] * job.block_bytes, 0, 0
        while offset < job.block_bytes and _read(state, FAILED) == 0:
            size, turn = min(job.piece_bytes, job.block_bytes - offset), used % num_slots
            if used >= num_slots:
                _wait(state, lane, functions, turn)
            checksum = copy_near(source + offset, lane.slots[turn], size, checksum, functions[CRC32])
            _begin(state, lane, functions, turn, target + offset, lane.slots[turn], size)
            offset += size
            used += 1
        if checksum != job.checksums[block]:
            _lower(state, BAD, block)
    for turn in range(min(used, num_slots)):  # also after an error
        _wait(state, lane, functions, turn)


@compiled(kept=True)
def receive_blocks(state, job, lane, functions, paused):
    """Copy blocks of the pool to blocks of the memory, and write their checksums.

    paused: int64 [1]; while it is not 0 no further block is taken. Afterwards all that were taken are there, unless
    `state[FAILED]`.
    """
    num_blocks, num_slots = len(job.blocks), len(lane.slots)
    pieces = -(-job.block_bytes // job.piece_bytes)
    of_slot = np.empty(num_slots, np.int64)  # the block of the piece that is in it
    begun, done, block, checksum, more = 0, 0, 0, 0, True
    while True:
        while more and begun - done < num_slots:
            if begun % pieces == 0:
                more = _read(state, FAILED) == 0 and _read(paused, 0) == 0
                if more:
                    block = _add(state, NEXT, 1)
                    more = block < num_blocks
            if more:
                offset, turn = begun % pieces * job.piece_bytes, begun % num_slots
                source = job.pool + job.pool_blocks[block] * job.block_bytes + offset
                size = min(job.piece_bytes, job.block_bytes - offset)
                _begin(state, lane, functions, turn, lane.slots[turn], source, size)
                of_slot[turn] = block
                begun += 1
        if done == begun:
            break
        offset, turn = done % pieces * job.piece_bytes, done % num_slots
        _wait(state, lane, functions, turn)
        if _read(state, FAILED) == 0:
            current = of_slot[turn]
            target = job.memory + job.blocks[current] * job.stride + offset
            size = min(job.piece_bytes, job.block_bytes - offset)
            checksum = copy_past(lane.slots[turn], target, size, checksum if offset else 0, functions[CRC32])
            job.checksums[current] = checksum
        done += 1


@compiled(kept=True)
def copy_each(targets, sources, num_bytes, stream, functions):
    """Begin a copy of so many bytes from each address to another; return the driver's first error code, or 0.

    targets, sources: int64 [copies].
    """
    for copy in range(len(targets)):
        failed = call_4(functions[COPY], targets[copy], sources[copy], num_bytes, stream)
        if failed:
            return failed
    return 0


@functools.cache
def host_functions() -> tuple[int, int, int]:
    """Return addresses of what takes the driver's place where the pool is in host memory."""

    @numba.cfunc(types.int32(types.int64, types.int64, types.int64, types.int64))
    def copy(target, source, num_bytes, stream):
        move(source, target, num_bytes)
        return 0

    @numba.cfunc(types.int32(types.int64, types.int64))
    def record(event, stream):
        return 0

    @numba.cfunc(types.int32(types.int64))
    def synchronize(event):
        return 0

    addresses: Any = (copy.address, record.address, synchronize.address)
    return addresses
