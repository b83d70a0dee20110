"""Results of products, [weight rows, activation rows] as wgmma leaves them, to rows of outputs in memory, in Gluon."""

# pyright: basic, reportGeneralTypeIssues=false, reportIndexIssue=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportArgumentType=false, reportAssignmentType=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

PART = gl.constexpr(64)
"""Activation rows that are stored at once."""


@gluon.jit
def activated(gate, up, alpha, limit, ACTIVATION: gl.constexpr):
    """As `moe/grouped_triton.activated`."""
    if ACTIVATION == "clamped_swiglu":
        gate = gl.minimum(gate, limit)
        up = gl.maximum(gl.minimum(up, limit), -limit)
        answer = (up + 1.0) * gate / (1.0 + gl.exp(-alpha * gate))
    elif ACTIVATION == "silu":
        answer = gate / (1.0 + gl.exp(-gate)) * up
    else:
        answer = gate / (1.0 + gl.exp(-1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))) * up
    return answer


@gluon.jit
def _halves(value, R: gl.constexpr, T: gl.constexpr):
    return gl.split(value.reshape([R, 2, T // 2]).permute((0, 2, 1)))


@gluon.jit
def _store_part(value, out, first_column, width, first, token, count, R: gl.constexpr):
    """value: [R, 64], outputs from `first_column` on of activation rows from `first` + `token` on. The tile has `count`."""
    EACH: gl.constexpr = 16 // (out.dtype.element_ty.primitive_bitwidth // 8)
    STORED: gl.constexpr = gl.BlockedLayout([EACH, 1], [R // EACH, 32 * EACH // R], [1, 4], [0, 1])
    value = gl.convert_layout(value.to(out.dtype.element_ty), STORED)
    column = gl.expand_dims(first_column + gl.arange(0, R, gl.SliceLayout(1, STORED)), 1)
    row = gl.expand_dims(token + gl.arange(0, PART, gl.SliceLayout(0, STORED)), 0)
    place = (first + row).to(gl.int64) * width + column
    gl.store(out + place, value, mask=(row < count) & (column < width))


@gluon.jit
def store_results(value, out, first_column, width, first, count, R: gl.constexpr, T: gl.constexpr):
    """value: [R, T], outputs from `first_column` on of activation rows from `first` on. The first `count` are stored."""
    if T == 64:
        _store_part(value, out, first_column, width, first, 0, count, R)
    elif T == 128:
        left, right = _halves(value, R, 128)
        _store_part(left, out, first_column, width, first, 0, count, R)
        _store_part(right, out, first_column, width, first, 64, count, R)
    else:
        low, high = _halves(value, R, 256)
        left, right = _halves(low, R, 128)
        _store_part(left, out, first_column, width, first, 0, count, R)
        _store_part(right, out, first_column, width, first, 64, count, R)
        left, right = _halves(high, R, 128)
        _store_part(left, out, first_column, width, first, 128, count, R)
        _store_part(right, out, first_column, width, first, 192, count, R)
