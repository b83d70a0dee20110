"""Copies of rows, written as loops: for an assignment to a slice Numba compiles a check of its shape, for two seconds."""

# pyright: reportCallIssue=false, reportArgumentType=false
from __future__ import annotations

from common.ops.cpu_int8.compiled_numba import compiled


@compiled()
def copy(source, target):
    """target[: len(source)] = source"""
    for i in range(len(source)):
        target[i] = source[i]
