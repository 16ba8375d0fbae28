"""The forward call on a GPU: choose a kernel and the splits over the keys, launch, merge the splits, reduce."""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np

from ..arrays import ArrayView
from ..problem import Problem
from . import merge, parameters, tensor_map, tiles
from .device import DeviceInfo, device_info
from .launch import grid_blocks, kernel, launch, plain_kernel

ROW_BYTES = 20
"""Five float32 a row: what a split leaves behind until it is merged."""

REDUCE_THREADS, REDUCE_BLOCKS = 256, 256
TOTAL_BYTES = 16
NAMES = ("kl", "ref1", "logsum1", "ref2", "logsum2")


class Plan(NamedTuple):
    spec: tiles.Specialisation
    blocks: int
    splits: int


@functools.lru_cache(maxsize=1024)
def plan(problem: Problem, device_index: int, tensor_maps: bool) -> Plan:
    """The kernel, its grid, and over how many blocks the keys of a row tile are split."""
    device = device_info(device_index)
    spec = tiles.forward(problem, device, tensor_maps)
    blocks = grid_blocks(problem, problem.seqlen_q, problem.heads, spec.tile.rows)
    return Plan(spec, blocks, _splits(problem, spec, blocks, device))


def _splits(problem: Problem, spec: tiles.Specialisation, blocks: int, device: DeviceInfo) -> int:
    """Splits that fill the card when the row tiles alone do not; each keeps two tiles of keys or more.

    More blocks than the card holds at once would be no faster, and every split costs a merge: floor, not ceiling.
    """
    resident = min(spec.tile.min_blocks, device.shared_memory_per_multiprocessor // (spec.shared_bytes + tiles.RESERVED_BYTES))
    capacity = device.multiprocessors * max(resident, 1)
    keys = problem.seqlen_k // max(problem.batch, 1) if problem.packed else problem.seqlen_k
    key_tiles = -(-keys // spec.tile.streamed)
    return max(1, min(capacity // max(blocks, 1), key_tiles // 2))


def workspace_bytes(problem: Problem, device_index: int) -> int:
    """Bytes of scratch: the splits' rows where the keys are split, and the partial sums of a reduction."""
    splits = max(plan(problem, device_index, maps).splits for maps in (False, True))
    parts = ROW_BYTES * splits * problem.rows if splits > 1 else 0
    return max(parts, reduce_bytes(problem))


def reduce_bytes(problem: Problem) -> int:
    return 0 if problem.reduction == "none" else TOTAL_BYTES * REDUCE_BLOCKS


def warm(problem: Problem, device_index: int) -> None:
    """Compiles and loads everything that `run` and `merge` launch."""
    plans = [plan(problem, device_index, maps) for maps in (False, True)]
    for chosen in plans:
        kernel(chosen.spec, device_index)
    plain_kernel("forward_merge.cu", "forward_merge", device_index)
    if problem.reduction != "none":
        _reduce_kernels(device_index)


def run(problem: Problem, views, rows, reduced, workspace: ArrayView | None, stream: int, *, allocate) -> None:
    """Fills `rows` (and `reduced`, a value and a factor) for validated arguments, on `stream`, with q1's device current."""
    device_index = views["q1"].device[1]
    spec, blocks, splits = plan(problem, device_index, tensor_map.addressable(problem, views["k1"], views["k2"]))
    if blocks:
        scratch = workspace
        if splits > 1 and scratch is None:
            scratch = allocate(ROW_BYTES * splits * problem.rows)
        target = rows if splits == 1 else split_rows(scratch.pointer, problem.rows * splits)
        args = (parameters.fill_problem(problem, views, views, rows), parameters.forward_output(target, problem.rows))
        if spec.accelerated:
            args += tuple(tensor_map.keys_map(problem, views[name], spec.tile.streamed) for name in ("k1", "k2"))
        launch(kernel(spec, device_index), (blocks, splits), spec.tile.threads + 128 * spec.accelerated, args, stream, spec.shared_bytes)
        if splits > 1:
            merge.launch_merge(target, (problem.rows,) * 5, splits, rows, problem.rows, device_index, stream)
    if reduced is not None:
        reduce_rows(problem, rows, reduced, workspace, allocate, stream)


class Pointer(NamedTuple):
    pointer: int


def split_rows(base: int, floats: int) -> dict[str, Pointer]:
    """Five float32 arrays one behind the other."""
    return {name: Pointer(base + 4 * floats * i) for i, name in enumerate(NAMES)}


def _reduce_kernels(device_index: int):
    return tuple(plain_kernel("reduce_rows.cu", entry, device_index) for entry in ("reduce_rows", "reduce_partial"))


def reduce_rows(problem: Problem, rows, reduced, workspace: ArrayView | None, allocate, stream: int) -> None:
    """The sum or mean of the rows' KL and the factor that a mean puts on every gradient, both left on the device."""
    value, factor = reduced
    device_index = value.device[1]
    scratch = allocate(TOTAL_BYTES * REDUCE_BLOCKS) if workspace is None else workspace
    blocks = max(1, min(REDUCE_BLOCKS, -(-problem.rows // REDUCE_THREADS)))
    first, second = _reduce_kernels(device_index)
    launch(first, (blocks,), REDUCE_THREADS, (parameters.row_stats(rows), np.int64(problem.rows), np.uint64(scratch.pointer)), stream)
    mean = np.int32(problem.reduction == "mean")
    args = (np.uint64(scratch.pointer), np.int32(blocks), mean, np.uint64(value.pointer), np.uint64(factor.pointer))
    launch(second, (1,), REDUCE_THREADS, args, stream)


def explain(problem: Problem, device_index: int, tensor_maps: bool) -> list[str]:
    """One line on the kernel, one on the grid, one on the memory."""
    spec, blocks, splits = plan(problem, device_index, tensor_maps)
    tile = spec.tile
    return [
        f"forward: {spec.source} on {device_info(device_index).name}, tile {tile.rows} x {tile.streamed} ({tile.reason})",
        f"forward: {blocks} blocks x {splits} splits of {tile.threads} threads, {spec.shared_bytes} bytes of shared memory a block",
        f"forward: {ROW_BYTES * problem.rows} bytes of row statistics, {workspace_bytes(problem, device_index)} bytes of workspace",
    ]
