"""The tile table of the Hopper kernels: TMA and wgmma, 16-bit types, head dimensions up to 128."""

from __future__ import annotations

from collections.abc import Iterator

from ..problem import Problem
from .device import DeviceInfo
from .specialisation import ELEMENTS, Specialisation, Tile, head_dim_class

FORWARD = (
    Tile(12, 1, 80, 6, 1, "three warpgroups of 64 rows take turns at products and exponentials; 80 keys are the most that do not spill"),
)
BACKWARD = (Tile(8, 1, 64, 8, 1, "two warpgroups of 64 rows; 64 of the other side leave registers for logits, result and operands"),)
"""dQ and dK, one side a launch."""

FUSED = (Tile(8, 1, 64, 6, 1, "two warpgroups of 64 keys, which do not wait for each other, and one that adds up dQ"),)
"""dQ and dK of one side in one launch. On an H200 it wins wherever the order of its sums may be open."""

HEAD_DIM = 128
"""Wider operands would not fit the registers that hold one side's."""
CHUNK_BYTES = 128
"""A row of 64 columns in shared memory."""
BARRIER_BYTES, OWN_TILE_BYTES, ROW_TERMS_BYTES = 8, 128, 16
WARPGROUP = 128
DQ_ROWS = 64
"""Rows of a tile of dQ sums: kDqRows in kernels/dq_sums.cuh."""
WEIGHT_BUFFERS = 2
SPILL_BUDGET, PRODUCER_SPILL_BUDGET = 32, 640
"""Bytes of spill stores plus loads. The second is for the warp that brings the statistics on the 32 registers that are left for it,
tiles ahead of the products, whose warpgroups spill nothing: NVRTC 13.0 needs 50, 13.5 needs 550."""


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
    return [_backward_row(own, problem.dtype, d1, d2, side, t) for t in BACKWARD]


def fused_rows(problem: Problem, side: int) -> list[Specialisation]:
    """For dQ, as sums that `write_dq_row` turns into the gradient, and dK of a side."""
    dims = [head_dim_class(problem.head_dim1), head_dim_class(problem.head_dim2)]
    dims[side - 1] = dq_columns(problem, side)
    return [_fused_row(problem.dtype, *dims, side, t) for t in FUSED]


def dq_columns(problem: Problem, side: int) -> int:
    """Columns of the dQ sums: at most a chunk of them, or two whole ones."""
    columns = head_dim_class((problem.head_dim1, problem.head_dim2)[side - 1])
    return columns if columns <= 64 else HEAD_DIM


def write_dq_row(problem: Problem, side: int) -> Specialisation:
    defines = (("ELEMENT", ELEMENTS[problem.dtype]), ("SIDE", side), ("HEAD_DIM", dq_columns(problem, side)))
    return Specialisation("write_dq.cu", "write_dq", Tile(4, 1, 0, 0, 1, "a tile of sums"), defines, 0, 0)


def every_row(dtype: str, d1: int, d2: int) -> Iterator[Specialisation]:
    if max(d1, d2) > HEAD_DIM:
        return
    problem = Problem("bhsd", dtype, 1, 1, 1, 1, 1, 1, d1, d2, 1.0, 1.0)
    yield from forward_rows(problem)
    for side in (1, 2):
        for own in "qk":
            yield from backward_rows(problem, own, side)
        yield from fused_rows(problem, side)
        yield write_dq_row(problem, side)


def _forward_row(dtype: str, d1: int, d2: int, tile: Tile) -> Specialisation:
    defines = (("ELEMENT", ELEMENTS[dtype]), ("HEAD_DIM1", d1), ("HEAD_DIM2", d2), ("KEYS", tile.streamed), ("STAGES", tile.stages))
    shared = _ring_bytes(tile, d1, d2) + _slice_bytes(tile.rows, d2) + OWN_TILE_BYTES
    return Specialisation("forward_sm90.cu", "forward_sm90", tile, defines, shared, 0, True, WARPGROUP)


def _backward_row(own: str, dtype: str, d1: int, d2: int, side: int, tile: Tile) -> Specialisation:
    defines = (("ELEMENT", ELEMENTS[dtype]), ("SIDE", side), ("HEAD_DIM1", d1), ("HEAD_DIM2", d2))
    defines += (("KEYS" if own == "q" else "QUERIES", tile.streamed), ("STAGES", tile.stages))
    shared = _ring_bytes(tile, d1, d2) + _slice_bytes(tile.rows, (d1, d2)[side - 1]) + OWN_TILE_BYTES
    shared += ROW_TERMS_BYTES * (tile.rows if own == "q" else tile.stages // 2 * tile.streamed) + (
        0 if own == "q" else 4 * tile.stages // 2 + _terms_ring_bytes(tile)
    )
    return Specialisation(f"backward_d{own}_sm90.cu", f"backward_d{own}_sm90", tile, defines, shared, SPILL_BUDGET, True, WARPGROUP)


def _fused_row(dtype: str, d1: int, d2: int, side: int, tile: Tile) -> Specialisation:
    defines = (("ELEMENT", ELEMENTS[dtype]), ("SIDE", side), ("HEAD_DIM1", d1), ("HEAD_DIM2", d2), ("STAGES", tile.stages))
    shared = _ring_bytes(tile, d1, d2) + _slice_bytes(tile.rows, (d1, d2)[side - 1]) + OWN_TILE_BYTES
    shared += WEIGHT_BUFFERS * (tile.rows * CHUNK_BYTES + 2 * BARRIER_BYTES) + 2 * BARRIER_BYTES
    shared += _terms_ring_bytes(tile) + 2 * 4 * DQ_ROWS * min((d1, d2)[side - 1], 64) + tile.stages // 2 * tile.streamed * ROW_TERMS_BYTES
    return Specialisation("backward_sm90.cu", "backward_sm90", tile, defines, shared, PRODUCER_SPILL_BUDGET, True, 2 * WARPGROUP)


def _slice_bytes(rows: int, columns: int) -> int:
    return rows * CHUNK_BYTES * -(-columns // 64)


def _terms_ring_bytes(tile: Tile) -> int:
    return -(-tile.stages // 2 * BARRIER_BYTES // 16) * 16


def _ring_bytes(tile: Tile, d1: int, d2: int) -> int:
    return tile.stages * (_slice_bytes(tile.streamed, max(d1, d2)) + 2 * BARRIER_BYTES)
