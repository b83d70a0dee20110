"""4-bit codes: from memory to shared memory, and to pairs of bf16 weights in registers; in Gluon, as `unpack_triton.py`."""

# pyright: basic, reportGeneralTypeIssues=false, reportIndexIssue=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportArgumentType=false, reportAssignmentType=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy

from common.ops.linear.unpack_code import FLOATS, INTEGERS, NORMAL_FLOATS, SCALED_FLOATS
from common.ops.linear.unpacking_sizes import BLOCK_N, STEP

copy_ahead = async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared
"""Triton 3.9 has it under another name."""
M = gl.constexpr(BLOCK_N)
K = gl.constexpr(STEP)
TIMES = gl.constexpr("mul.bf16x2 $0, $1, $2;")
TIMES_PLUS = gl.constexpr("fma.rn.bf16x2 $0, $1, $2, $3;")


@gluon.jit
def weight_row(lane, tile, N, GATED: gl.constexpr):
    """The weight row of a tile's row. Gated: of each 16, of which a consumer's thread has two, 8 are the gate's, 8 the up's."""
    if GATED:
        size = N // 2
        column = tile * (M // 2) + lane // 16 * 8 + lane % 8
        row = gl.minimum(column, size - 1) + gl.where(lane % 16 < 8, 0, size)
    else:
        row = gl.minimum(tile * M + lane, N - 1)
    return row


@gluon.jit
def copy_chunk(
    code_rows, scale_rows, offset_rows, is_right, chunk, code_steps, N, code_rings, slot,
    RUN: gl.constexpr, EXPONENTS: gl.constexpr, WORDS: gl.constexpr,
):  # fmt: skip
    """Ask for two runs of 32 bytes of each weight row, and for their words of scales and of offsets.

    Runs of 32: those of two steps. Longer ones: neighbours in one step."""
    PARTS: gl.constexpr = RUN // 64 if RUN > 32 else 1
    code_ring, scale_ring, offset_ring = code_rings
    size = N.to(gl.int64) * (RUN // 4)
    if RUN == 32:
        first = 2 * chunk
        second = gl.minimum(first + 1, code_steps - 1)
        pointers = code_rows + gl.where(is_right, second, first) * size
    else:
        first = chunk // PARTS
        second = first
        pointers = code_rows + (first * size + chunk % PARTS * 16)
    copy_ahead(code_ring.index(slot), pointers)
    for word in gl.static_range(WORDS):
        at = chunk if EXPONENTS else first if word == 0 else second
        skipped = at * N.to(gl.int64)
        copy_ahead(scale_ring.index(slot * WORDS + word), scale_rows + skipped)
        if offset_rows is not None:
            copy_ahead(offset_ring.index(slot * WORDS + word), offset_rows + skipped)


@gluon.jit
def _bf16_pair(word):
    """word: int32 [M]. The float16 in its low half as bf16, in both halves of an int32, [M, 8] with equal columns."""
    value = (word & 0xFFFF).to(gl.int16).to(gl.float16, bitcast=True).to(gl.bfloat16)
    pair = (value.to(gl.int16, bitcast=True).to(gl.int32) & 0xFFFF) * 0x10001
    return gl.expand_dims(pair, 1).broadcast_to([M, 8])


@gluon.jit
def _power_pair(exponent):
    """Two to an E8M0 exponent of at most 127, as `_bf16_pair`, times what a code's bits in a bf16's place lack: 2¹²⁶."""
    pair = (((exponent & 0xFF) + 126) << 7) * 0x10001
    return gl.expand_dims(pair, 1).broadcast_to([M, 8])


@gluon.jit
def weights_of(codes, word, offset, CODE: gl.constexpr, EXPONENTS: gl.constexpr, OFFSETS: gl.constexpr):
    """codes: int32 [M, 8]. Returns the bf16 weights of the bytes' low halves and those of their high ones, two in each int32:
    [M, 16] each. Not as numbers of 8 and 16 bits: a compiler takes them apart and joins them again.

    Exponents are in the word's low half."""
    if EXPONENTS:
        low_scale = _power_pair(word)
        high_scale = _power_pair(word >> 8)
        a, b, c, d = gl.inline_asm_elementwise(
            SCALED_FLOATS, "=&r,=&r,=&r,=&r,r,r,r,r,r", [codes, low_scale, low_scale, high_scale, high_scale],
            dtype=(gl.int32, gl.int32, gl.int32, gl.int32), is_pure=True, pack=1,
        )  # fmt: skip
    else:
        text: gl.constexpr = INTEGERS if CODE == 0 else FLOATS if CODE == 1 else NORMAL_FLOATS
        a, b, c, d = gl.inline_asm_elementwise(
            text, "=&r,=&r,=&r,=&r,r", [codes], dtype=(gl.int32, gl.int32, gl.int32, gl.int32), is_pure=True, pack=1
        )
        low_scale = _bf16_pair(word)
        high_scale = _bf16_pair(word >> 16)
        if OFFSETS:
            low_offset = _bf16_pair(offset)
            high_offset = _bf16_pair(offset >> 16)
            a = gl.inline_asm_elementwise(TIMES_PLUS, "=r,r,r,r", [a, low_scale, low_offset], gl.int32, is_pure=True, pack=1)
            b = gl.inline_asm_elementwise(TIMES_PLUS, "=r,r,r,r", [b, low_scale, low_offset], gl.int32, is_pure=True, pack=1)
            c = gl.inline_asm_elementwise(TIMES_PLUS, "=r,r,r,r", [c, high_scale, high_offset], gl.int32, is_pure=True, pack=1)
            d = gl.inline_asm_elementwise(TIMES_PLUS, "=r,r,r,r", [d, high_scale, high_offset], gl.int32, is_pure=True, pack=1)
        else:
            a = gl.inline_asm_elementwise(TIMES, "=r,r,r", [a, low_scale], gl.int32, is_pure=True, pack=1)
            b = gl.inline_asm_elementwise(TIMES, "=r,r,r", [b, low_scale], gl.int32, is_pure=True, pack=1)
            c = gl.inline_asm_elementwise(TIMES, "=r,r,r", [c, high_scale], gl.int32, is_pure=True, pack=1)
            d = gl.inline_asm_elementwise(TIMES, "=r,r,r", [d, high_scale], gl.int32, is_pure=True, pack=1)
    return gl.join(a, b).reshape([M, 16]), gl.join(c, d).reshape([M, 16])


@gluon.jit
def side_by_side(left, right):
    """int32 [M, 16] each. Returns [M, K / 2]."""
    return gl.join(left, right).permute((0, 2, 1)).reshape([M, K // 2])
