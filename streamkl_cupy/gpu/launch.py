"""Grids, streams and the launch itself."""

from __future__ import annotations

import functools

import cupy

from ..problem import Problem
from .compile import load
from .device import arch_for, device_info
from .specialisation import Specialisation

LARGEST_GRID = 2**31 - 1


def tiles_per_head(problem: Problem, rows: int, tile_rows: int) -> int:
    """Blocks that cover one head's rows; the twin of `locate` in kernels/problem.cuh.

    Packed segments are counted without reading their lengths: segment b starts at slot begin[b] // tile_rows + b.
    """
    return rows // tile_rows + problem.batch + 1 if problem.packed else -(-rows // tile_rows)


def grid_blocks(problem: Problem, rows: int, heads: int, tile_rows: int) -> int:
    blocks = tiles_per_head(problem, rows, tile_rows) * heads * (1 if problem.packed else problem.batch)
    if blocks > LARGEST_GRID:
        raise ValueError(f"the inputs need {blocks} blocks of {tile_rows} rows; a launch takes {LARGEST_GRID}: split the batch")
    return blocks


@functools.lru_cache(maxsize=1024)
def kernel(spec: Specialisation, device_index: int):
    """The loaded kernel of a specialisation on a device."""
    info = device_info(device_index)
    arch = arch_for(info.capability, accelerated=True) if spec.accelerated else info.arch
    return load(spec.source, spec.entry, spec.defines, arch, device_index, spec.shared_bytes)


@functools.lru_cache(maxsize=64)
def plain_kernel(source: str, entry: str, device_index: int):
    """A kernel that is not specialised."""
    return load(source, entry, (), device_info(device_index).arch, device_index)


class StreamPointer:
    """A stream given by its pointer, as CuPy's launch wants it."""

    __slots__ = ("ptr",)

    def __init__(self, ptr: int):
        self.ptr = ptr


def launch(function, grid: tuple[int, ...], threads: int, args, stream: int, shared_bytes: int = 0) -> None:
    """Launches on the current device, without waiting. 2 (the per-thread default stream) and 1 (the legacy one) are the driver's."""
    function(grid, (threads,), args, shared_mem=shared_bytes, stream=cupy.cuda.Stream.null if stream == 0 else StreamPointer(stream))


def zero(pointer: int, size: int, stream: int) -> None:
    """Zeroes `size` bytes of the current device, without waiting."""
    cupy.cuda.runtime.memsetAsync(pointer, 0, size, stream)
