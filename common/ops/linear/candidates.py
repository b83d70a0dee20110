"""Ways to compute a linear on a GPU, and which of them are worth a measurement for a shape. Torch-free arithmetic.

What the lists aim at, for few rows (memory-bound; see `linear_triton.py`): tiles of 128 or 256 bytes per weight row, so that
every cp.async is 16 bytes and every row's run is whole sectors; as many stages as let two or three programs live on a
multiprocessor (227 KB of shared memory), which keeps 70–200 KB in flight there; splits of K so that all multiprocessors have
work, but no more, since each split writes rows × N float32 and the next op reads them. 1–4 rows: also the kernel without
tensor cores. 64–512 rows: larger tiles, the persistent kernel, the library. More: the library and the persistent kernel.

The first candidate of a list is the default, where nothing was measured.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from common.ops.sizes import cdiv

SCALE_BLOCK = 128
ROW_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
SHARED_BYTES = 227 * 1024
MIN_RUN = 32
"""Inputs of half a step, at least, of weights in groups (as `ops/quant/grouped.py` stores them)."""
INVARIANT_ROWS = 64
"""Activation rows of every tile of a batch-invariant weight, whatever the number of rows."""

_SYNC_STAGES = 1
"""Stages without a buffer: mma.sync has read a tile when the next copy begins, wgmma may still be reading."""

_FEW_ROWS_TILES = ((64, 2, 4), (64, 2, 6), (32, 2, 6), (128, 4, 3), (128, 2, 3))
"""Of weights in groups, up to 32 rows: outputs, warps, and how many programs a multiprocessor should hold."""
_TILES = ((64, 64, 4), (128, 64, 4), (128, 128, 8), (64, 128, 4))
_TALL_TILES = ((128, 128, 8),)
"""Of weights in groups, up to 128 rows and more: outputs, rows, warps."""
_SCALED_TILES = ((128, 128, 8, 64), (64, 64, 4, 64), (128, 64, 4, 64), (64, 128, 4, 64), (128, 128, 4, 32))
_SCALED_TALL_TILES = ((128, 256, 8, 64), (128, 128, 8, 64), (128, 128, 4, 32))
"""Where numbers become weights before the product: the same, and lanes."""

Kind = Literal["gemv", "dot", "persistent", "library", "grouped", "unpacking", "streaming", "specialised"]
Op = Literal["linear", "wide", "split", "gated"]
"""wide: results are float32 in any model. split: may be partial sums. gated: silu(gate) · up, both in one weight."""

Scaling = Literal["none", "channel", "blocks"]


@dataclass(slots=True, frozen=True)
class Candidate:
    """One implementation. quantised: activations are e4m3. ahead: what asks L2 for weights before the kernel's turn comes.

    "library": tensor_scale has scales applied by a kernel of ours instead of row-wise in the library. "persistent": flat
    overlaps a tile's end with the next one's beginning. "grouped": scaled multiplies numbers by their group's scale before the
    product, not after it; lanes of either run of a step are then one product, 0 for all of them. "unpacking": weights in groups
    are unpacked by warps of their own (`unpacking.py`). "streaming": a warp multiplies 16 outputs; parts of their inputs are
    multiplied by as many warps of a program, in_bytes with activations in bytes (`streaming.py`). "specialised": some warps
    load, others multiply (`specialised.py`).
    """

    kind: Kind
    quantised: bool = False
    block_n: int = 0
    block_m: int = 0
    block_k: int = 0
    splits: int = 1
    warps: int = 4
    stages: int = 3
    ahead: Literal["none", "bulk", "lines"] = "bulk"
    tensor_scale: bool = False
    flat: bool = False
    scaled: bool = False
    lanes: int = 0
    parts: int = 1
    in_bytes: bool = False


class Shape(NamedTuple):
    """A weight [n, k] of `item_bytes` an element.

    For weights in groups (group is 0 for others): inputs that share a scale, bits of one of their codes, whether they have
    offsets, bytes of an activation, and whether their codes are integers."""

    op: Op
    n: int
    k: int
    item_bytes: int
    scaling: Scaling
    group: int = 0
    bits: int = 0
    offsets: bool = False
    activation_bytes: int = 2
    integers: bool = False


def grouped_shared_bytes(shape: Shape, candidate: Candidate) -> int:
    """Return at most how much shared memory a program of the kernel for weights in groups asks for, on Hopper and Blackwell.

    Copies ahead have a buffer for each stage but the last. Activations have one more where wgmma may still read the step
    before when the next copy begins: not where their sums are needed as well, for offsets of unscaled products. The numbers of
    both runs go through shared memory without tensor cores (float32) and where a run is two groups; in float32 the results of
    wide tiles do as well, on Blackwell. What is left are sums of activations, two for each row, and barriers.
    """
    run = max(MIN_RUN, shape.group)
    scaled = candidate.scaled or shape.group < MIN_RUN
    lanes = min(candidate.lanes or run, run) if scaled else run
    activations = 2 * candidate.block_m * lanes * shape.activation_bytes
    scales = 4 * candidate.block_n * (2 if shape.group < MIN_RUN else 1) * (1 + shape.offsets)
    step = candidate.block_n * 2 * lanes * shape.bits // 8 + activations + scales
    extra = 0
    without_tensor_cores = shape.activation_bytes == 4
    numbers = 2 * candidate.block_n * lanes * shape.activation_bytes if without_tensor_cores or shape.group < MIN_RUN else 0
    if without_tensor_cores:
        extra = 4 * candidate.block_n * candidate.block_m if candidate.block_m > 128 else 4096 * scaled
    elif candidate.warps >= 4 and (scaled or not shape.offsets):
        extra = activations
    return (candidate.stages - 1) * step + numbers + extra + 8 * candidate.block_m + 64


def grouped_candidates(shape: Shape, rows: int, num_sms: int) -> list[Candidate]:
    """For weights in groups. Up to 32 rows: two warps or tiles of 32 outputs, which make it mma.sync on purpose (see
    `_converting`), and as many stages as keep 40 KB in flight on a multiprocessor. More: wgmma with the weight in registers.
    From 256 rows on the library, too, with a dequantised copy in parts. Stages are fewer, and tiles left out, where they would
    need more shared memory than there is."""
    made = [_fitting(shape, candidate) for candidate in _grouped_tiles(shape, rows, num_sms)]
    found = list(dict.fromkeys(candidate for candidate in made if candidate is not None))
    return [*found, Candidate("library")] if rows > 128 or not found else found


def _fitting(shape: Shape, candidate: Candidate) -> Candidate | None:
    """With as many stages as there is shared memory for; None where two are too many."""
    for stages in range(candidate.stages, 1, -1):
        fewer = replace(candidate, stages=stages)
        if grouped_shared_bytes(shape, fewer) <= SHARED_BYTES:
            return fewer
    return None


def _grouped_tiles(shape: Shape, rows: int, num_sms: int) -> list[Candidate]:
    if rows <= 32:
        return _grouped_few(shape, 8 if rows <= 8 else 16 if rows <= 16 else 32, num_sms)
    run = max(MIN_RUN, shape.group)
    found: list[Candidate] = []
    for block_n, block_m, warps, lanes in _SCALED_TILES if rows <= 128 else _SCALED_TALL_TILES:
        lanes = run if shape.activation_bytes == 4 else min(lanes, run)
        stage_bytes = _stage_bytes(shape, block_n, block_m, lanes)
        stages = max(2, min(4, SHARED_BYTES // stage_bytes))
        splits = _grouped_splits(shape, block_n, num_sms * 2 // cdiv(rows, block_m))[0]
        found.append(Candidate("grouped", False, block_n, block_m, 0, splits, warps, stages, scaled=True, lanes=lanes))
    if shape.offsets or shape.group < MIN_RUN:  # sums of activations, again for each tile, cost more than products
        return found
    for block_n, block_m, warps in _TILES if rows <= 128 else _TALL_TILES:
        stages = max(2, min(4, SHARED_BYTES // _stage_bytes(shape, block_n, block_m, run)))
        splits = _grouped_splits(shape, block_n, num_sms * 2 // cdiv(rows, block_m))[0]
        found.append(Candidate("grouped", False, block_n, block_m, 0, splits, warps, stages))
    return found


def _grouped_few(shape: Shape, block_m: int, num_sms: int) -> list[Candidate]:
    """With offsets numbers become weights before the product, too: sums of activations cost more than that from 16 rows on."""
    run = max(MIN_RUN, shape.group)
    found: list[Candidate] = []
    ways = ((True, 3), (False, 5)) if block_m == 8 else ((True, 5), (False, 3))
    for scaled, tiles in ways if shape.offsets else ((False, 5),):
        lanes = min(run, 64) if scaled and block_m > 8 else run
        for block_n, warps, residents in _FEW_ROWS_TILES[:tiles]:
            stage_bytes = _stage_bytes(shape, block_n, block_m, lanes)
            stages = max(2, min(8, SHARED_BYTES // residents // stage_bytes + _SYNC_STAGES))
            for splits in _grouped_splits(shape, block_n, num_sms * residents):
                chosen = Candidate("grouped", False, block_n, block_m, 0, splits, warps, stages)
                found.append(replace(chosen, scaled=True, lanes=lanes) if scaled else chosen)
    return found


def _stage_bytes(shape: Shape, block_n: int, block_m: int, lanes: int) -> int:
    """Of codes and 16-bit activations that a turn of the loop copies, `lanes` of both runs."""
    return block_n * 2 * lanes * shape.bits // 8 + 2 * block_m * 2 * lanes


def _grouped_splits(shape: Shape, block_n: int, slots: int) -> list[int]:
    """As `_splits`, of steps."""
    return _splits(shape, block_n, 2 * max(MIN_RUN, shape.group), slots)


def bucket(rows: int) -> int:
    """The number of rows that stands for `rows`."""
    return next((size for size in ROW_BUCKETS if rows <= size), ROW_BUCKETS[-1])


def candidates(shape: Shape, rows: int, quantised: bool, num_sms: int) -> list[Candidate]:
    """For `rows`, a bucket. quantised: activations are e4m3 (the weight is then); else they are in the model's dtype."""
    if shape.group:
        return grouped_candidates(shape, rows, num_sms)
    if shape.item_bytes == 4:
        return _exact(shape, rows, num_sms)
    if not blocks_fit(shape):
        return [Candidate("library", quantised)]
    found: list[Candidate] = []
    if rows <= 128:
        found += _few_rows(shape, rows, quantised, num_sms)
    if rows <= 4 and not quantised and shape.scaling != "blocks":
        found += _gemv(shape, rows)
    if rows <= 4 and found:  # asked once, of the default: whether and how asking ahead pays
        found += [_with_ahead(found[0], "none"), _with_ahead(found[0], "lines")]
    if rows > 64:
        found = [*_library(shape, quantised), *found, *_many_rows(shape, rows, quantised, num_sms)]
    elif not (shape.item_bytes == 1 and not quantised):
        found += _library(shape, quantised)
    return found or [Candidate("library", quantised)]  # which widens what it cannot multiply


def invariant_candidate(shape: Shape, num_sms: int) -> Candidate:
    """The one implementation for every number of rows (batch_invariant): fp8 weights take quantised activations."""
    if shape.group:
        chosen = _fitting(shape, Candidate("grouped", block_n=64, block_m=INVARIANT_ROWS, warps=4, stages=3))
        assert chosen is not None, "groups of 128 inputs, the largest, fit"
        return chosen
    if shape.item_bytes == 4:
        return Candidate("dot", block_n=64, block_m=16, block_k=32, splits=_splits(shape, 64, 32, num_sms)[0])
    block_k = 128 // shape.item_bytes
    return Candidate(
        "dot",
        quantised=shape.item_bytes == 1,
        block_n=128,
        block_m=INVARIANT_ROWS,
        block_k=block_k,
        splits=_splits(shape, 128, block_k, num_sms)[0],
        warps=4 * (3 - shape.item_bytes),
        stages=4,
    )


def default_quantised(shape: Shape, rows: int) -> bool:
    """Before measurement: fp8 weights meet bf16 activations up to 16 rows, which costs nothing there and is closer."""
    return shape.item_bytes == 1 and rows > 16


def blocks_fit(shape: Shape) -> bool:
    """Do 128-block scales, if there are any, begin anew where the up's rows begin?"""
    return shape.scaling != "blocks" or shape.op != "gated" or shape.n % (2 * 64) == 0


def library_scales(shape: Shape) -> bool:
    """Can the library multiply 8-bit floats of this shape, scaled by row and column?"""
    return shape.scaling == "channel" and shape.n % 16 == 0 and shape.k % 16 == 0


# ── few rows ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def _few_rows(shape: Shape, rows: int, quantised: bool, num_sms: int) -> list[Candidate]:
    if shape.item_bytes == 1 and not quantised:
        return _converting(shape, rows, num_sms)
    block_m = max(16, rows)
    block_k = (256 if block_m <= 32 else 128) // shape.item_bytes
    if shape.scaling == "blocks":
        block_k = min(block_k, SCALE_BLOCK)
    found: list[Candidate] = []
    # 32 rows go through mma.sync: small tiles leave a short tail where K is not cut
    tiles = [(64, block_k, 2), (64, block_k, 3), (128, block_k, 2), (32, block_k, _all_at_once(shape, 32, num_sms, 4, 7))]
    if rows > 4:  # one program a multiprocessor, with as many stages as fit, needs fewer splits
        tiles.append((64, block_k, 1))
    if block_m == 64 and shape.scaling != "blocks":
        tiles.append((128, 2 * block_k, 1))
    for block_n, depth, residents in tiles:
        if block_n == 32 and (quantised or block_m > 32):
            continue
        stage_bytes = (block_n + block_m) * depth * shape.item_bytes
        stages = min(8, SHARED_BYTES // residents // stage_bytes + _SYNC_STAGES * (block_n == 32))
        if stages < 2 or (block_m > 64 and block_n == 64 and residents > 1):
            continue
        warps = 8 if block_n * block_m >= 128 * 128 else 4
        for splits in _splits(shape, block_n, depth, num_sms * (2 if block_n == 32 else residents)):
            found.append(Candidate("dot", quantised, block_n, block_m, depth, splits, warps, stages))
    if rows <= 8 and not quantised:  # eight rows are enough for mma.sync: less shared memory
        splits = _splits(shape, 64, block_k, num_sms * 2)[0]
        residents = _all_at_once(shape, 64, num_sms, 2, 4)
        stages = min(6, SHARED_BYTES // residents // ((64 + 8) * block_k * shape.item_bytes) + _SYNC_STAGES)
        found.append(Candidate("dot", False, 64, 8, block_k, splits, 4, stages))
    return list(dict.fromkeys(found))


def _converting(shape: Shape, rows: int, num_sms: int) -> list[Candidate]:
    """fp8 weights for bf16 activations. Two warps, or 32 weight rows, are too few for wgmma and make it mma.sync on purpose:
    there the compiler orders K so that a thread's fp8 lie side by side, 8 bytes a read and 16 a copy. For wgmma it is 2 and 8.
    With more warps than the tile has 16 weight rows, two would convert the same ones. Converting takes half the time of
    reading: several programs of two warps fill each other's gaps.
    Above 32 rows the conversion costs more than it is worth."""
    if rows > 32:
        return []
    block_m = 8 if rows <= 8 else 16 if rows <= 16 else 32
    found: list[Candidate] = []
    other = (32, 128, 6) if rows <= 16 else (64, 256, 3)
    for block_n, block_k, residents in ((64, 128, 4), (64, 128, 3), other, (128, 128, 3)):
        depth = min(block_k, SCALE_BLOCK) if shape.scaling == "blocks" else block_k
        stages = min(8, SHARED_BYTES // residents // ((block_n + 2 * block_m) * depth) + _SYNC_STAGES)
        for splits in _splits(shape, block_n, depth, num_sms * (2 if block_n == 32 else 3)):
            found.append(Candidate("dot", False, block_n, block_m, depth, splits, 2, stages))
    return list(dict.fromkeys(found))


def _gemv(shape: Shape, rows: int) -> list[Candidate]:
    found: list[Candidate] = []
    for block_n, block_k in ((2, 4096), (4, 4096), (4, 2048), (8, 2048)):
        splits = cdiv(shape.k, block_k)
        if block_n == 2 and shape.item_bytes == 1:  # 20 bytes a cycle, as fast as memory at best
            continue
        if shape.op == "gated" and splits > 1:
            block_k, splits = 1 << (shape.k - 1).bit_length(), 1
        if block_k > 8192 or (rows > 1 and block_n > 4):
            continue
        block_k = max(256, min(block_k, 1 << (shape.k - 1).bit_length()))
        tile_bytes = block_n * block_k * shape.item_bytes
        stages = max(2, min(5, SHARED_BYTES // 2 // tile_bytes))
        found.append(Candidate("gemv", False, block_n, rows, block_k, splits, 8, stages))
    return list(dict.fromkeys(found))


def _splits(shape: Shape, block_n: int, block_k: int, slots: int) -> list[int]:
    """One or two numbers of splits: the first that gives half the slots work, and twice that. No more: a norm reads a row's
    partial sums through one multiprocessor, at 100 GB/s."""
    if shape.op == "gated":
        return [1]
    tiles, depth = cdiv(shape.n, block_n), cdiv(shape.k, block_k)
    splits = 1
    while tiles * splits * 2 < slots and splits < 16 and depth // (splits * 2) >= 4:
        splits *= 2
    doubled = splits * 2
    return [splits, doubled] if tiles * doubled <= slots * 2 and depth // doubled >= 4 and doubled <= 16 else [splits]


def _all_at_once(shape: Shape, block_n: int, num_sms: int, fewest: int, most: int) -> int:
    """Programs on a multiprocessor: all there are, if K is not cut and there are few enough, so that none begins late."""
    needed = cdiv(cdiv(shape.n, block_n), num_sms)
    return max(fewest, needed) if shape.op == "gated" and needed <= most else fewest


def _with_ahead(candidate: Candidate, ahead: Literal["none", "bulk", "lines"]) -> Candidate:
    return replace(candidate, ahead=ahead)


# ── many rows ────────────────────────────────────────────────────────────────────────────────────────────────────────


def _library(shape: Shape, quantised: bool) -> list[Candidate]:
    if not quantised:  # an fp8 weight is widened first, which many rows pay for
        return [Candidate("library")]
    if not library_scales(shape):
        return []
    return [Candidate("library", True), Candidate("library", True, tensor_scale=True)]


def _many_rows(shape: Shape, rows: int, quantised: bool, num_sms: int) -> list[Candidate]:
    if shape.item_bytes == 1 and not quantised:
        return []
    block_k = 128 // shape.item_bytes
    found: list[Candidate] = []
    if rows <= 512:
        for block_m in (128, 256):
            splits = _splits(shape, 128, block_k, num_sms // cdiv(rows, block_m))[:1]
            if block_m <= rows and not (block_m == 256 and shape.scaling == "blocks"):
                found += [Candidate("dot", quantised, 128, block_m, block_k, count, 8, 4) for count in splits]
    if shape.k * shape.item_bytes % 16:  # what TMA can read
        return found
    if shape.scaling != "blocks":  # a tile may not reach into two blocks
        # the gate and the up of fp8 need more registers than there are on Blackwell unless tiles overlap
        # so many float32 results spill there, and do not fit into Hopper's shared memory beside copies of the next tile
        flats = (True,) if quantised and shape.op == "gated" else () if shape.op == "wide" else (True, False)
        found += [Candidate("persistent", quantised, 256, 128, block_k, 1, 8, 3, flat=flat) for flat in flats]
    found.append(Candidate("persistent", quantised, 128, 128, block_k, 1, 8, 4, flat=True))
    return found


def _exact(shape: Shape, rows: int, num_sms: int) -> list[Candidate]:
    """float32: for comparisons, so the library unless rows are few."""
    found = _gemv(shape, rows)[:1] if rows <= 4 else []
    return [*found, Candidate("library")]
