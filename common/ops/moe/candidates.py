"""Ways to compute a mixture of experts on a GPU, and which are worth a measurement for a number of rows. Torch-free arithmetic.

Few rows are bound by memory: tiles of 32 or 64 weight rows and as many stages as let several programs live on an SM (of plain
weights short steps and many of them), splits of K for the second linear where its tiles are too few. Eight pairs a tile and two
warps make the compiler use mma.sync, whose operand is unpacked in registers. Many rows: the largest tiles for wgmma that there
are registers for, the scales multiplied into the weights; and the library. Where an expert fills few tiles, those that are not
full are computed narrower.

The first candidate of a list is the default, where nothing was measured.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

SHARED_BYTES = 227 * 1024
DIRECT_PAIRS = 64
"""Most pairs of token and expert that a program looks through by itself, without a sort before."""
SCALE_COLUMNS = 128
"""Columns whose scales of mxfp4 are one word, and of a block of fp8."""
ROW_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_FEW_PAIRS_PER_EXPERT = 16
_NARROWEST = 8
_HALVES_TILES = ((128, 64, 4, 4), (256, 64, 8, 4), (128, 128, 8, 4))
_FEW_TILES = ((64, 2, 6, 256), (64, 2, 4, 256), (64, 2, 9, 256), (32, 2, 8, 256), (128, 4, 3, 256))
_FEW_PLAIN_TILES = ((64, 2, 3, 128), (64, 4, 3, 128), (128, 4, 2, 128), (64, 4, 4, 256))
_FEW_FP8_TILES = ((64, 2, 6, 128), (64, 2, 3, 128), (64, 4, 3, 128), (64, 4, 4, 128))
"""Weight rows, warps, programs that shall share a multiprocessor, and bytes of a weight row in a step (plain weights)."""

LANES = 64
"""Of int4: how many columns of either run are multiplied at once, at most, where numbers become weights before the product."""
Values = Literal["plain", "fp8", "fp8_blocks", "mxfp4", "int4"]


@dataclass(slots=True, frozen=True)
class ExpertCandidate:
    """One implementation.

    block_n: weight rows of a tile (of the first linear: half gate, half up).
    block_m: pairs of a tile.
    block_k: columns of a step; 0 for 4-bit codes, whose layout says it.
    splits: parts of the second linear's columns.
    direct: programs find their pairs in the routing; else a launch before them sorts the pairs.
    scaled: scales of 4-bit codes are multiplied into the weights, not into the products.
    quantised: activations become float8_e4m3fn with a scale for each 128 columns.
    halvings: how often the width of a tile that has few pairs may be halved, at most 2; sorted pairs only.
    neighbours: tiles of pairs whose programs run side by side on the same weights.
    rounded: an expert's answers are kept in the activations' dtype until they are added, half as many bytes as float32.
    halves: two accumulators with a scale each, of float8 weights in blocks and quantised activations; sorted, without splits.
    unpacking: 4-bit weights are unpacked by warps of their own, on copies of the tokens in the order of experts.
    library: the library's grouped products, on copies of the tokens in the order of experts; nothing else of this counts.
    """

    block_n: int
    block_m: int
    block_k: int = 0
    splits: int = 1
    warps: int = 4
    stages: int = 3
    direct: bool = False
    scaled: bool = False
    quantised: bool = False
    halvings: int = 0
    neighbours: int = 1
    rounded: bool = False
    library: bool = False
    halves: bool = False
    unpacking: bool = False


LIBRARY = ExpertCandidate(0, 0, library=True)


class ExpertShape(NamedTuple):
    """run: columns of half a byte of 4-bit codes; 0 for other formats. item_bytes: of activations, and of plain weights."""

    experts: int
    hidden: int
    intermediate: int
    top_k: int
    values: Values
    run: int = 0
    item_bytes: int = 2


def bucket(rows: int) -> int:
    """Return the number of rows that stands for `rows`."""
    return next((size for size in ROW_BUCKETS if rows <= size), ROW_BUCKETS[-1])


def candidates(shape: ExpertShape, rows: int, num_sms: int) -> list[ExpertCandidate]:
    """Return what may be chosen from for `rows`, a bucket; the default first."""
    pairs = rows * shape.top_k
    if pairs <= DIRECT_PAIRS or pairs <= _FEW_PAIRS_PER_EXPERT * shape.experts:
        return _few(shape, pairs, num_sms)
    return _many(shape, pairs)


def unpacking_candidates(shape: ExpertShape, rows: int) -> list[ExpertCandidate]:
    """Return what Hopper may choose from besides, where experts have so many pairs that multiplying takes the time."""
    each = rows * shape.top_k / shape.experts
    fits = shape.values in ("mxfp4", "int4") and shape.item_bytes == 2 and not (shape.hidden % 8 or shape.intermediate % 8)
    if each <= _FEW_PAIRS_PER_EXPERT or not fits:
        return []
    sizes = (64,) if each <= 32 else (64, 128) if each <= 64 else (64, 128, 256) if each <= 256 else (128, 256)
    return [ExpertCandidate(128, size, warps=12, scaled=True, rounded=True, unpacking=True) for size in sizes]


def invariant_candidate(shape: ExpertShape) -> ExpertCandidate:
    """Return the one implementation for every number of rows (batch_invariant)."""
    if shape.run:
        return ExpertCandidate(64, 32, warps=4, stages=3)
    return ExpertCandidate(64, 32, 64 if shape.item_bytes == 2 else 32, warps=4, stages=4)


def _few(shape: ExpertShape, pairs: int, num_sms: int) -> list[ExpertCandidate]:
    """A tile of one expert's pairs is mostly padding: 8 or 16 of them."""
    direct = pairs <= DIRECT_PAIRS
    distinct = min(pairs, shape.experts)
    sizes = (8, 16) if pairs > 8 else (8,)
    if pairs > 4 * shape.experts:
        sizes = (16, 32)
    tiles = _FEW_PLAIN_TILES if shape.values == "plain" else _FEW_FP8_TILES if shape.values.startswith("fp8") else _FEW_TILES
    found: list[ExpertCandidate] = []
    for block_m in sizes:
        for block_n, warps, residents, run_bytes in tiles:
            block_k = _block_k(shape, run_bytes)
            stages = _stages(shape, block_n, block_m, block_k, residents, 6 if block_n == 128 else 8)
            slots = num_sms * residents
            splits = _splits(shape, block_n, distinct, slots)
            chosen = ExpertCandidate(block_n, block_m, block_k, splits, warps, stages, direct, scaled=shape.values == "mxfp4")
            found.append(chosen)
            if (block_n, warps, residents, run_bytes) == tiles[0]:
                if chosen.scaled:
                    found.append(replace(chosen, scaled=False))
                if direct and _steps(shape) // (splits * 2) >= 2:
                    found.append(replace(chosen, splits=splits * 2))
    each = pairs / shape.experts
    return list(dict.fromkeys(one if direct else replace(one, halvings=_halvings(one.block_m, each)) for one in found))


def _many(shape: ExpertShape, pairs: int) -> list[ExpertCandidate]:
    """Float8 activations are left to be measured: the default is what is closest to the weights."""
    each = pairs / shape.experts
    tiles: tuple[tuple[int, int, int], ...] = ((128, 64, 4), (128, 128, 8), (64, 64, 4), (64, 128, 4))
    if each <= 48:
        tiles = ((128, 32, 4), (64, 32, 2), (64, 64, 4), (128, 64, 4))
    elif shape.values == "plain" and shape.item_bytes == 2:
        tiles = ((256, 128, 8), (256, 64, 8), (128, 128, 8), (128, 64, 4))
    elif shape.values == "mxfp4":
        tiles = ((64, 128, 4), (128, 128, 4), (128, 256, 8))
    elif each >= 256 or shape.values.startswith("fp8"):
        tiles = ((128, 128, 8), (128, 64, 4))
    if shape.values == "int4":  # for the registers that a turn's weights take
        tiles = tuple((block_n, block_m, 8 if block_n == 128 else warps) for block_n, block_m, warps in sorted(tiles))
    if shape.item_bytes == 4:
        tiles = ((64, 64, 4), (64, 32, 4))
    sizes = [(*tile, 0 if shape.run else 64 if shape.item_bytes == 2 else 32, False) for tile in tiles]
    if shape.values.startswith("fp8") and shape.item_bytes == 2:
        sizes += [(*tile, SCALE_COLUMNS, True) for tile in ((128, 64, 4), (256, 64, 8), (64, 64, 4), (64, 128, 8))]
    halves = [
        ExpertCandidate(block_n, block_m, SCALE_COLUMNS, warps=warps, stages=stages, quantised=True, rounded=True, halves=True)
        for block_n, block_m, warps, stages in _HALVES_TILES
        if each > 48 and shape.values == "fp8_blocks" and shape.item_bytes == 2 and not shape.intermediate % (block_n // 2)
    ]
    found: list[ExpertCandidate] = [LIBRARY] if _library_fits(shape) else []
    for block_n, block_m, warps, block_k, quantised in sizes:
        residents = 1 if warps == 8 else 3 if block_n * block_m <= 128 * 32 else 2
        stages = _stages(shape, block_n, block_m, block_k, residents, 4, quantised=quantised, scaled=bool(shape.run))
        for neighbours in (1, 4) if each >= block_m and not quantised else (1,):
            found.append(
                ExpertCandidate(
                    block_n,
                    block_m,
                    block_k,
                    1,
                    warps,
                    stages,
                    scaled=bool(shape.run),
                    quantised=quantised,
                    neighbours=neighbours,
                    rounded=True,
                )
            )
    found += halves
    return [replace(one, halvings=_halvings(one.block_m, each)) for one in found]


def _halvings(block_m: int, each: float) -> int:
    """An expert's last tile is half full, on average: that counts where it has few. each: pairs of an expert."""
    return 0 if each > 8 * block_m else max(0, min(2, block_m.bit_length() - _NARROWEST.bit_length()))


def _library_fits(shape: ExpertShape) -> bool:
    """Rows of 16 bytes, which it wants."""
    return shape.values == "plain" and shape.item_bytes == 2 and not (shape.hidden % 8 or shape.intermediate % 8)


def _block_k(shape: ExpertShape, run_bytes: int) -> int:
    """Columns of a step whose weight rows are `run_bytes` long; at most one block of scales."""
    if shape.run:
        return 0
    if shape.values == "plain":
        return run_bytes // shape.item_bytes
    return 128


def _stages(
    shape: ExpertShape,
    block_n: int,
    block_m: int,
    block_k: int,
    residents: int,
    most: int,
    *,
    quantised: bool = False,
    scaled: bool = False,
) -> int:
    """As many as `residents` programs of an SM have shared memory for. Without tensor cores (float32) operands that were
    converted go through it as well."""
    columns = block_k or (128 if shape.values == "mxfp4" else 2 * (min(shape.run, LANES) if scaled else shape.run))
    weight_bytes = columns // 2 if shape.run else columns * (shape.item_bytes if shape.values == "plain" else 1)
    stage_bytes = block_n * (weight_bytes + 4) + block_m * columns * (1 if quantised else shape.item_bytes)
    converted = (block_n + block_m) * columns * 4 if shape.item_bytes == 4 else 0
    return max(2, min(most, (SHARED_BYTES // residents - converted) // stage_bytes))


def _steps(shape: ExpertShape) -> int:
    """Of the second linear."""
    columns = 128 if shape.values == "mxfp4" else 2 * shape.run if shape.run else 128
    return -(-shape.intermediate // columns)


def _splits(shape: ExpertShape, block_n: int, distinct: int, slots: int) -> int:
    """Enough that half the places of a GPU have work."""
    splits = 1
    while -(-shape.hidden // block_n) * distinct * splits * 2 < slots and splits < 4 and _steps(shape) // (splits * 2) >= 3:
        splits *= 2
    return splits
