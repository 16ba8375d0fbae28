"""The forward call on a GPU: choose a kernel and the splits over the keys, launch, merge the splits, reduce."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..arrays import ArrayView
from ..problem import Problem
from . import merge, parameters, plans, tensor_map, tiles, tiles_sm90
from .device import DeviceInfo, device_info
from .launch import grid_blocks, kernel, launch, plain_kernel
from .specialisation import RESERVED_BYTES, Specialisation

ROW_BYTES = 20
"""Five float32 a row: what a split leaves behind until it is merged."""

LEAST_KEY_TILES, MOST_TAIL_SPLITS = 8, 8
SPLIT_COST = 0.01
"""Waves that one more split costs: blocks that start, and rows that are merged."""

REDUCE_THREADS, REDUCE_BLOCKS = 256, 256
TOTAL_BYTES = 16
NAMES = ("kl", "ref1", "logsum1", "ref2", "logsum2")


class Plan(NamedTuple):
    """`whole` row tiles have a block each, the other `split` ones `splits` blocks each over a part of the keys."""

    spec: Specialisation
    whole: int
    split: int
    splits: int
    partial_rows: int = 0
    """Rows that are merged after."""
    heads: int = 0
    """Of few rows: how many heads share a tile."""


@plans.kept
def plan(problem: Problem, device_index: int, tensor_maps: bool) -> Plan:
    """The kernel, its grid, and which row tiles are split over the keys."""
    device = device_info(device_index)
    few_rows = tiles_sm90.few_rows(problem, device) if tensor_maps else None
    if few_rows:
        return split_few_rows(problem, *few_rows, device)
    spec = tiles.forward(problem, device, tensor_maps)
    return split_tail(problem, spec, grid_blocks(problem, problem.seqlen_q, problem.heads, spec.tile.rows), device)


def split_tail(problem: Problem, spec: Specialisation, blocks: int, device: DeviceInfo) -> Plan:
    """Splits the row tiles that are left over after whole waves of blocks, so that the last wave, too, fills the card.

    `splits` blocks for each of r left tiles take ceil(r * splits / capacity) / splits waves. Each keeps some tiles of keys, so
    that it is worth its start. Under a mask the last tiles are the lightest and fill the gaps themselves, unless there are no
    others.
    """
    resident = min(spec.tile.min_blocks, device.shared_memory_per_multiprocessor // (spec.shared_bytes + RESERVED_BYTES))
    capacity = device.multiprocessors * max(resident, 1)
    whole = blocks // capacity * capacity
    left = blocks - whole
    keys = problem.seqlen_k // max(problem.batch, 1) if problem.packed else problem.seqlen_k
    most = -(-keys // spec.tile.streamed) // (LEAST_KEY_TILES if whole else 2)
    if not left or most < 2 or (whole and (problem.masked or problem.packed)):
        return Plan(spec, blocks, 0, 1)
    most = min(most, max(1, capacity // left) if not whole else MOST_TAIL_SPLITS)
    splits = min(range(1, most + 1), key=lambda n: -(-left * n // capacity) / n + SPLIT_COST * n)
    return Plan(spec, whole, left, splits, left * spec.tile.rows * splits) if splits > 1 else Plan(spec, blocks, 0, 1)


def split_few_rows(problem: Problem, spec: Specialisation, heads: int, device: DeviceInfo) -> Plan:
    """Splits every tile of few rows, so that all multiprocessors read keys; each consumer warpgroup leaves its own part of the rows."""
    blocks = problem.rows // (problem.seqlen_q * heads)
    splits = tiles_sm90.key_splits(spec, blocks, -(-problem.seqlen_k // spec.tile.streamed), device)
    return Plan(spec, 0, blocks, splits, problem.rows * splits * tiles_sm90.CONSUMERS, heads)


def workspace_bytes(problem: Problem, device_index: int) -> int:
    """Bytes of scratch: the splits' rows where tiles are split over the keys, and the partial sums of a reduction."""
    parts = max(plan(problem, device_index, maps).partial_rows for maps in (False, True))
    return max(ROW_BYTES * parts, reduce_bytes(problem))


def reduce_bytes(problem: Problem) -> int:
    return 0 if problem.reduction == "none" else TOTAL_BYTES * REDUCE_BLOCKS


def warm(problem: Problem, device_index: int) -> None:
    """Compiles and loads everything that `run` and `merge` launch."""
    plans = [plan(problem, device_index, maps) for maps in (False, True)]
    for chosen in plans:
        kernel(chosen.spec, device_index)
    for entry in ("forward_merge", "forward_merge_splits"):
        plain_kernel("forward_merge.cu", entry, device_index)
    if problem.reduction != "none":
        _reduce_kernels(device_index)


def run(problem: Problem, views, rows, reduced, workspace: ArrayView | None, stream: int, *, allocate) -> None:
    """Fills `rows` (and `reduced`, a value and a factor) for validated arguments, on `stream`, with q1's device current."""
    device_index = views["q1"].device[1]
    chosen = plan(problem, device_index, tensor_map.addressable(problem, views["k1"], views["k2"]))
    spec, partial = chosen.spec, rows
    if chosen.partial_rows:
        scratch = workspace or allocate(ROW_BYTES * chosen.partial_rows)
        partial = split_rows(scratch.pointer, chosen.partial_rows)
    if chosen.heads:
        _run_few_rows(problem, views, rows, partial, chosen, stream)
    elif chosen.whole or chosen.split:
        stride = chosen.split * spec.tile.rows
        args = (
            parameters.fill_problem(problem, views, views, rows),
            parameters.forward_output(rows, partial, stride, chosen.whole, chosen.splits),
        )
        maps = tuple(tensor_map.rows_map(problem, views[name], spec.tile.streamed) for name in ("k1", "k2")) if spec.accelerated else ()
        blocks = chosen.whole + chosen.split * chosen.splits
        launch(kernel(spec, device_index), (blocks,), spec.threads, args + maps, stream, spec.shared_bytes)
        if chosen.split:
            merge_splits = plain_kernel("forward_merge.cu", "forward_merge_splits", device_index)
            launch(merge_splits, (chosen.split,), merge.THREADS, (*args, np.int32(spec.tile.rows)), stream)
    if reduced is not None:
        reduce_rows(problem, rows, reduced, workspace, allocate, stream)


def _run_few_rows(problem: Problem, views, rows, partial, chosen: Plan, stream: int) -> None:
    spec, device_index = chosen.spec, views["q1"].device[1]
    args = (
        parameters.fill_problem(problem, views, views, rows),
        parameters.few_rows(problem.rows, chosen.heads, chosen.splits),
        parameters.row_stats(partial),
        *(tensor_map.rows_map(problem, views[name], spec.tile.streamed) for name in ("k1", "k2")),
    )
    launch(kernel(spec, device_index), (chosen.split * chosen.splits,), spec.threads, args, stream, spec.shared_bytes)
    parts = chosen.partial_rows // problem.rows
    merge.launch_merge(partial, [problem.rows] * len(NAMES), parts, rows, problem.rows, device_index, stream)


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


def explain(problem: Problem, device_index: int, in_place) -> list[str]:
    """One line on the kernel, one on the grid, one on the memory. `in_place` are the views that are not copied first."""
    chosen = plan(problem, device_index, tensor_map.addressable(problem, *(v for n, v in in_place.items() if n in ("k1", "k2"))))
    spec, tile = chosen.spec, chosen.spec.tile
    return [
        f"forward: {spec.source} on {device_info(device_index).name}, tile {tile.rows} x {tile.streamed} ({tile.reason})",
        f"forward: {chosen.whole} blocks on whole rows, {chosen.split} x {chosen.splits} on a part of the keys, "
        f"{spec.shared_bytes} bytes of shared memory a block",
        f"forward: {ROW_BYTES * problem.rows} bytes of row statistics, {workspace_bytes(problem, device_index)} bytes of workspace",
    ]
