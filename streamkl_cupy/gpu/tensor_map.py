"""Tensor maps: how Hopper's bulk copy engine addresses inputs. Encoded by the driver through ctypes, passed by value."""

from __future__ import annotations

import ctypes
import functools

import numpy as np

from ..arrays import ArrayView
from ..problem import Problem

MAP_BYTES, MAP_ALIGNMENT = 128, 64
COLUMNS = 64
"""Columns of a box: 128 bytes, the widest that the 128-byte swizzle takes."""

DATA_TYPES = {"float16": 6, "bfloat16": 9}
NO_INTERLEAVE, SWIZZLE_128B, L2_PROMOTION_256B, ZERO_FILL = 0, 3, 3, 0


@functools.cache
def _encode():
    function = ctypes.CDLL("libcuda.so.1").cuTensorMapEncodeTiled
    u32, u64, pointer = ctypes.c_uint32, ctypes.c_uint64, ctypes.c_void_p
    many32, many64 = ctypes.POINTER(u32), ctypes.POINTER(u64)
    function.argtypes = [pointer, ctypes.c_int, u32, pointer, many64, many64, many32, many32, *[ctypes.c_int] * 4]
    return function


def addressable(problem: Problem, *views: ArrayView) -> bool:
    """Whether maps can describe these inputs: positive strides of whole 16 bytes below 2^40, on every axis that has a second element."""
    for view in views:
        if 0 in view.shape:
            return False
        for size, stride in zip(view.shape[:-1], view.strides[:-1], strict=True):
            if size > 1 and not (0 < stride * 2 < 1 << 40 and stride % 8 == 0):
                return False
    return problem.dtype in DATA_TYPES


def rows_map(problem: Problem, view: ArrayView, tile_rows: int) -> np.ndarray:
    """The map of an input: boxes of `tile_rows` rows by 64 columns of one head; rows and columns beyond the array read as zero."""
    shape, strides = problem.axis_strides(view.shape), problem.axis_strides(view.strides)
    batch = 1 if problem.packed else shape.batch
    sizes = (view.shape[-1], shape.row, shape.head, batch)
    # An axis of one element never moves: any stride that the driver takes will do.
    steps = [2 * stride if size > 1 else 16 for size, stride in zip(sizes[1:], (strides.row, strides.head, strides.batch), strict=True)]
    return _map(view.pointer, view.dtype, sizes, tuple(steps), tile_rows)


@functools.lru_cache(maxsize=4096)
def _map(pointer: int, dtype: str, sizes, steps, tile_rows: int) -> np.ndarray:
    buffer = np.zeros(MAP_BYTES + MAP_ALIGNMENT, np.uint8)
    start = -buffer.ctypes.data % MAP_ALIGNMENT
    result = buffer[start : start + MAP_BYTES].view(f"V{MAP_BYTES}")
    u32, u64 = ctypes.c_uint32, ctypes.c_uint64
    box = (u32 * 4)(COLUMNS, tile_rows, 1, 1)
    status = _encode()(
        result.ctypes.data,
        DATA_TYPES[dtype],
        4,
        pointer,
        (u64 * 4)(*sizes),
        (u64 * 3)(*steps),
        box,
        (u32 * 4)(1, 1, 1, 1),
        NO_INTERLEAVE,
        SWIZZLE_128B,
        L2_PROMOTION_256B,
        ZERO_FILL,
    )
    if status:
        raise RuntimeError(f"cuTensorMapEncodeTiled failed with {status} for sizes {sizes}, strides {steps} bytes, dtype {dtype}")
    return result
