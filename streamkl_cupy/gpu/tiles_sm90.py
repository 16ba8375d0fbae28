"""The tile table of the Hopper kernels: TMA and wgmma, 16-bit types, head dimensions up to 128."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

from ..problem import Problem
from .device import DeviceInfo
from .specialisation import ELEMENTS, Specialisation, Tile, choose, head_dim_class

FORWARD = (
    Tile(12, 1, 80, 6, 1, "three warpgroups of 64 rows take turns at products and exponentials; 80 keys are the most that do not spill"),
)
FEW_ROWS = (
    Tile(4, 1, 64, 10, 1, "all rows that see the same keys; two warpgroups take key tiles in turn, 160 KB of them are on their way"),
)
"""Up to 64 query rows, each with all heads that share its keys, against many keys."""

DQ = (
    Tile(
        12,
        1,
        64,
        6,
        1,
        "three warpgroups of 64 query rows take turns at products and exponentials; 64 keys leave registers for logits and result",
    ),
)
DK = (Tile(8, 1, 64, 8, 1, "128 keys; two warpgroups take query tiles in turn, a third keeps dK"),)
"""One side a launch, deterministic."""

FUSED = (Tile(8, 1, 64, 6, 1, "128 keys; two warpgroups take query tiles in turn, a third keeps dK"),)
"""dQ and dK of one side in one launch. On an H200 it wins wherever the order of its sums may be open."""

FUSED_FEW_ROWS = (
    Tile(4, 1, 64, 20, 1, "the query rows of a key head in one tile; two warpgroups take key tiles in turn, the others are on their way"),
    Tile(4, 1, 64, 10, 1, "the same where slices are two chunks of columns wide"),
)
"""dQ and dK of one side in one launch that reads every key once: where few query rows share a key head."""

HEAD_DIM = 128
"""Wider operands would not fit the registers that hold one side's."""
FEW_ROWS_KEYS = 1024
CHUNK_BYTES = 128
"""A row of 64 columns in shared memory."""
BARRIER_BYTES, OWN_TILE_BYTES, SPAN_BYTES, ROW_TERMS_BYTES, UNIT_BYTES = 8, 128, 8, 16, 4
WARPGROUP = 128
DQ_ROWS = 64
"""Rows of a tile of dQ sums: kDqRows in kernels/dq_sums.cuh."""
DQ_BLOCK_ROWS = 4
CONSUMERS = 2
SPILL_BUDGET, DK_SPILL_BUDGET = 32, 224
"""Bytes of spill stores plus loads. The second is for what the warpgroups of dK's kernel keep across their loops, and for the warp
that brings the statistics on the 32 registers that are left for it."""


def takes(problem: Problem, device: DeviceInfo) -> bool:
    """Whether a problem on this device takes these kernels, if the bulk copy engine can address its arrays."""
    return (
        device.capability == (9, 0) and problem.dtype in ("float16", "bfloat16") and max(problem.head_dim1, problem.head_dim2) <= HEAD_DIM
    )


def forward_rows(problem: Problem) -> list[Specialisation]:
    d1, d2 = head_dim_class(problem.head_dim1), head_dim_class(problem.head_dim2)
    return [_forward_row(problem.dtype, d1, d2, t) for t in FORWARD]


def backward_rows(problem: Problem, own: str, side: int) -> list[Specialisation]:
    """For dQ (`own` is "q") or dK ("k") of a side, deterministic."""
    d1, d2 = head_dim_class(problem.head_dim1), head_dim_class(problem.head_dim2)
    if own == "q":
        return [_dq_row(problem.dtype, d1, d2, side, t) for t in DQ]
    return [_dk_row(problem.dtype, d1, d2, side, t, with_dq=False) for t in DK]


def fused_rows(problem: Problem, side: int) -> list[Specialisation]:
    """For dQ, as sums that `write_dq_row` turns into the gradient, and dK of a side."""
    dims = [head_dim_class(problem.head_dim1), head_dim_class(problem.head_dim2)]
    dims[side - 1] = dq_columns(problem, side)
    return [_dk_row(problem.dtype, *dims, side, t, with_dq=True) for t in FUSED]


def fused_few_rows(problem: Problem, side: int) -> list[Specialisation]:
    """The same where all query rows that share a key head are one tile, and keys are many."""
    dims = [head_dim_class(problem.head_dim1), head_dim_class(problem.head_dim2)]
    dims[side - 1] = dq_columns(problem, side)
    return [_fused_few_rows_row(problem.dtype, *dims, side, t) for t in FUSED_FEW_ROWS]


def dq_columns(problem: Problem, side: int) -> int:
    """Columns of the dQ sums: at most a chunk of them, or two whole ones."""
    columns = head_dim_class((problem.head_dim1, problem.head_dim2)[side - 1])
    return columns if columns <= 64 else HEAD_DIM


def write_dq_row(problem: Problem, side: int) -> Specialisation:
    defines = (("ELEMENT", ELEMENTS[problem.dtype]), ("SIDE", side), ("HEAD_DIM", dq_columns(problem, side)))
    return Specialisation("write_dq.cu", "write_dq", Tile(4, 1, 0, 0, 1, "a tile of sums"), defines, 0, 0)


def write_dq_rows_row(problem: Problem, side: int) -> Specialisation:
    """The same for the sums of `fused_few_rows`: `DQ_BLOCK_ROWS` rows a block."""
    return dataclasses.replace(write_dq_row(problem, side), entry="write_dq_rows")


def key_splits(spec: Specialisation, blocks: int, key_tiles: int, device: DeviceInfo) -> int:
    """Into how many blocks each is split over the keys, so that whole waves of one block a multiprocessor are full. A block starts
    with an empty ring and ends with results that others add to: as if it had twice as many tiles more as the ring takes. Each of its
    warpgroups has a tile."""
    candidates = range(1, max(1, min(key_tiles // CONSUMERS, device.multiprocessors)) + 1)
    return min(candidates, key=lambda n: -(-blocks * n // device.multiprocessors) * (-(-key_tiles // n) + spec.tile.stages))


def few_rows(problem: Problem, device: DeviceInfo) -> tuple[Specialisation, int] | None:
    """The kernel for few query rows against many keys, and how many heads are one tile of it; None where rows or keys are others.

    Fewer keys than that do not hide the launch that merges what was left of them.
    """
    rows = FEW_ROWS[0].rows
    if not takes(problem, device) or problem.packed or not problem.rows or problem.seqlen_q > rows or problem.seqlen_k < FEW_ROWS_KEYS:
        return None
    sharing = math.gcd(problem.heads // problem.heads_k1, problem.heads // problem.heads_k2)
    heads = max(n for n in range(1, sharing + 1) if sharing % n == 0 and n * problem.seqlen_q <= rows)
    d1, d2 = head_dim_class(problem.head_dim1), head_dim_class(problem.head_dim2)
    return choose([_few_rows_row(problem.dtype, d1, d2, t) for t in FEW_ROWS], device), heads


def every_row(dtype: str, d1: int, d2: int) -> Iterator[Specialisation]:
    if max(d1, d2) > HEAD_DIM:
        return
    problem = Problem("bhsd", dtype, 1, 1, 1, 1, 1, 1, d1, d2, 1.0, 1.0)
    yield from forward_rows(problem)
    yield from (_few_rows_row(dtype, head_dim_class(d1), head_dim_class(d2), t) for t in FEW_ROWS)
    for side in (1, 2):
        for own in "qk":
            yield from backward_rows(problem, own, side)
        yield from fused_rows(problem, side)
        yield from fused_few_rows(problem, side)
        yield write_dq_row(problem, side)
        yield write_dq_rows_row(problem, side)


def _forward_row(dtype: str, d1: int, d2: int, tile: Tile) -> Specialisation:
    defines = (("ELEMENT", ELEMENTS[dtype]), ("HEAD_DIM1", d1), ("HEAD_DIM2", d2), ("KEYS", tile.streamed), ("STAGES", tile.stages))
    shared = _ring_bytes(tile, d1, d2) + _slice_bytes(tile.rows, d2) + OWN_TILE_BYTES
    return Specialisation("forward_sm90.cu", "forward_sm90", tile, defines, shared, 0, True, WARPGROUP)


def _few_rows_row(dtype: str, d1: int, d2: int, tile: Tile) -> Specialisation:
    defines = (("ELEMENT", ELEMENTS[dtype]), ("HEAD_DIM1", d1), ("HEAD_DIM2", d2), ("KEYS", tile.streamed), ("STAGES", tile.stages))
    shared = _ring_bytes(tile, d1, d2) + _slice_bytes(tile.rows, d1) + _slice_bytes(tile.rows, d2)
    return Specialisation("forward_few_rows_sm90.cu", "forward_few_rows_sm90", tile, defines, shared, 0, True, 2 * WARPGROUP)


def _dq_row(dtype: str, d1: int, d2: int, side: int, tile: Tile) -> Specialisation:
    defines = (("ELEMENT", ELEMENTS[dtype]), ("SIDE", side), ("HEAD_DIM1", d1), ("HEAD_DIM2", d2))
    defines += (("KEYS", tile.streamed), ("STAGES", tile.stages))
    shared = (
        _ring_bytes(tile, d1, d2) + _slice_bytes(tile.rows, d1) + _slice_bytes(tile.rows, d2) + OWN_TILE_BYTES + ROW_TERMS_BYTES * tile.rows
    )
    return Specialisation("backward_dq_sm90.cu", "backward_dq_sm90", tile, defines, shared, SPILL_BUDGET, True, WARPGROUP)


def _dk_row(dtype: str, d1: int, d2: int, side: int, tile: Tile, with_dq: bool) -> Specialisation:
    defines = (
        ("ELEMENT", ELEMENTS[dtype]),
        ("SIDE", side),
        ("DQ", int(with_dq)),
        ("HEAD_DIM1", d1),
        ("HEAD_DIM2", d2),
        ("STAGES", tile.stages),
    )
    shared = _ring_bytes(tile, d1, d2) + _slice_bytes(tile.rows, d1) + _slice_bytes(tile.rows, d2) + OWN_TILE_BYTES + 2 * SPAN_BYTES
    staging = 4 * DQ_ROWS * min((d1, d2)[side - 1], 64) if with_dq else 0
    shared += CONSUMERS * (_slice_bytes(DQ_ROWS, tile.rows) + staging + DQ_ROWS * ROW_TERMS_BYTES + 2 * UNIT_BYTES + 4 * BARRIER_BYTES)
    return Specialisation("backward_sm90.cu", "backward_sm90", tile, defines, shared, DK_SPILL_BUDGET, True, 2 * WARPGROUP)


def _fused_few_rows_row(dtype: str, d1: int, d2: int, side: int, tile: Tile) -> Specialisation:
    defines = (("ELEMENT", ELEMENTS[dtype]), ("SIDE", side), ("HEAD_DIM1", d1), ("HEAD_DIM2", d2), ("STAGES", tile.stages))
    shared = _ring_bytes(tile, d1, d2) + _slice_bytes(tile.rows, d1) + _slice_bytes(tile.rows, d2)
    shared += CONSUMERS * _slice_bytes(tile.rows, tile.streamed)
    return Specialisation("backward_few_rows_sm90.cu", "backward_few_rows_sm90", tile, defines, shared, SPILL_BUDGET, True, 2 * WARPGROUP)


def _slice_bytes(rows: int, columns: int) -> int:
    return rows * CHUNK_BYTES * -(-columns // 64)


def _ring_bytes(tile: Tile, d1: int, d2: int) -> int:
    return tile.stages * (_slice_bytes(tile.streamed, max(d1, d2)) + 2 * BARRIER_BYTES)
