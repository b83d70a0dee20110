"""Work shared among threads inside compiled code: without the interpreter, and without anybody who has to come.

A step is a sequence of phases, and a phase is a number of parts that any thread may claim. Threads go on to the next phase once
every part is complete, whoever did it. So a thread that the system lets run late, or not at all, costs only its help, unless
it is stopped within a part.
"""

# pyright: reportCallIssue=false, reportArgumentType=false
from __future__ import annotations

import platform
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from numpy.typing import NDArray

from common.ops.cpu_int8.compiled_numba import compiled

_LINE = 8
"""Counters in a cache line."""

_LOOKS = 10_000
"""At a counter, before the core is offered to others: some tenths of a millisecond, longer than a part takes. To whom one
offers it, Linux gives it for milliseconds."""

_PAUSES = {"x86_64": "llvm.x86.sse2.pause", "amd64": "llvm.x86.sse2.pause"}
"""What tells a CPU that this is a loop that waits."""

_COUNTERS = types.Array(types.int64, 1, "C")
_yield = types.ExternalFunction("sched_yield", types.int32())


def new_counters(phases: int) -> NDArray[np.int64]:
    """For one step: how many parts of each phase are claimed, and how many complete."""
    return np.zeros(2 * _LINE * phases, np.int64)


@intrinsic
def _add_one(typing_context, counters, index):
    """Adds 1 to counters[index]. Returns what it was. What this thread wrote before is seen by who reads the sum."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        place = _place(context, builder, signature, args)
        return builder.atomic_rmw("add", place, ir.Constant(ir.IntType(64), 1), "acq_rel")

    return types.int64(_COUNTERS, types.int64), generate


@intrinsic
def _read(typing_context, counters, index):
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load_atomic(_place(context, builder, signature, args), "acquire", 8)

    return types.int64(_COUNTERS, types.int64), generate


@intrinsic
def _pause(typing_context):
    def generate(context: Any, builder: Any, _: Any, args: Any) -> Any:
        if name := _PAUSES.get(platform.machine().lower()):
            builder.call(builder.module.declare_intrinsic(name, (), ir.FunctionType(ir.VoidType(), ())), ())
        return context.get_dummy_value()

    return types.void(), generate


def _place(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    array = context.make_array(signature.args[0])(context, builder, args[0])
    return builder.gep(array.data, [args[1]])


def shared(work: Any) -> Any:
    """work(part, *arguments) as share(counters, phase, parts, arguments): calls it for every part in range(parts), once in all
    threads together. Returns the next phase."""

    @compiled()
    def share(counters, phase, parts, arguments):
        claimed, complete = 2 * _LINE * phase, 2 * _LINE * phase + _LINE
        while True:
            part = _add_one(counters, claimed)
            if part >= parts:
                break
            work(part, *arguments)
            _add_one(counters, complete)
        looks = 0
        while _read(counters, complete) < parts:
            looks += 1
            _pause()
            if looks > _LOOKS:
                _yield()
        return phase + 1

    return share
