"""Device functions of the noise: Philox words, the noise itself, and a cheap float32 neighbour of it.

`rough_noise` is within 5e-5 of `exact_noise`, so whoever leads by more than `slack` needs no double-precision logarithm.
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
from __future__ import annotations

import triton
import triton.language as tl
from triton import knobs

from common.ops.sampling.philox import MULTIPLIERS, ROUNDS, WEYL

_FACTOR0, _FACTOR1 = tl.constexpr(MULTIPLIERS[0]), tl.constexpr(MULTIPLIERS[1])
_WEYL0, _WEYL1 = tl.constexpr(WEYL[0]), tl.constexpr(WEYL[1])
_ROUNDS = tl.constexpr(ROUNDS)
_UNIT = tl.constexpr(2.0**-32)
_INTERPRETED = tl.constexpr(knobs.runtime.interpret)


@triton.jit
def _rough_log(x):
    """x: normal floats. One instruction; its error is 2^-22 of the larger of 1 and log2(x)."""
    if _INTERPRETED:
        binary = tl.log2(x)
    else:
        binary = tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    return binary * 0.6931471805599453


@triton.jit
def noise_words(seed, position, quads):
    """The 32-bit words of tokens 4 · quads + (0, 1, 2, 3), as uint32 [*quads, 2, 2], to be reshaped. seed, position: int64."""
    c0 = quads.to(tl.uint32)
    c2 = c0 * 0
    c1 = c2 + position.to(tl.uint32)
    c3 = c2
    k0 = seed.to(tl.uint32)
    k1 = (seed >> 32).to(tl.uint32)
    for _ in tl.static_range(_ROUNDS):
        # one wide product gives both halves
        product0 = c0.to(tl.uint64) * _FACTOR0
        product1 = c2.to(tl.uint64) * _FACTOR1
        c0 = (product1 >> 32).to(tl.uint32) ^ c1 ^ k0
        c2 = (product0 >> 32).to(tl.uint32) ^ c3 ^ k1
        c1 = product1.to(tl.uint32)
        c3 = product0.to(tl.uint32)
        k0 = tl.add(k0, _WEYL0, sanitize_overflow=False)
        k1 = tl.add(k1, _WEYL1, sanitize_overflow=False)
    return tl.join(tl.join(c0, c2), tl.join(c1, c3))


@triton.jit
def exact_noise(words):
    """float32. The doubles of a GPU's logarithm may differ in the last bit; rounding hides that but for one in 2^28 or so."""
    uniform = (words.to(tl.float64) + 0.5) * _UNIT
    return (-tl.log(-tl.log(uniform))).to(tl.float32)


@triton.jit
def rough_noise(words):
    """float32, within 5e-5 of `exact_noise`.

    With u = 1 - v: -log(u) comes from a series where v < 1/64 (its fourth term is below 1e-6 of the sum), since u, rounded,
    says little there.
    """
    u = (words.to(tl.float32) + 0.5) * _UNIT
    v = ((words ^ 0xFFFFFFFF).to(tl.float32) + 0.5) * _UNIT
    exponential = tl.where(v < 0.015625, v * (1.0 + v * (0.5 + v * 0.33333333)), -_rough_log(u))
    return -_rough_log(exponential)


@triton.jit
def slack(score):
    """A token whose rough score is this far below another's has the lower exact score: ten times the error of the noise,
    and four roundings of the score."""
    return 5e-4 + tl.abs(score) * 4.8e-7
