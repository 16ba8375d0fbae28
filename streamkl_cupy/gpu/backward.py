"""The backward call on a GPU: choose the kernels for the wanted gradients, describe the upstream weights, launch."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..arrays import ArrayView
from ..checks import SIDES
from ..problem import Problem
from . import parameters, plans, tensor_map, tiles, tiles_sm90
from .device import DeviceInfo, device_info
from .forward import reduce_bytes
from .launch import grid_blocks, kernel, launch, zero
from .specialisation import Specialisation, choose


class Launch(NamedTuple):
    spec: Specialisation
    own: str  # "q" or "k": whose rows the blocks own, and whose gradients, unless fused; the others stream by
    grid: tuple[int, ...]
    write_dq: Specialisation | None = None
    """Of a fused launch: what turns its sums into dQ, and in how many blocks."""
    write_blocks: int = 0
    sums_bytes: int = 0


@plans.kept
def plan(problem: Problem, wrt: tuple[str, ...], device_index: int, tensor_maps: bool, fuse: bool) -> tuple[Launch, ...]:
    """The launches that give the wanted gradients. Without `fuse` all are deterministic: every sum has one owner and one order."""
    device = device_info(device_index)
    hopper = tensor_maps and tiles_sm90.takes(problem, device)
    result = []
    if fuse and hopper:
        for side in (1, 2):
            wanted = {f"q{side}", f"k{side}"} <= set(wrt)
            if wanted and (step := _few_rows(problem, side, device) or _fused(problem, side, device)):
                result.append(step)
                wrt = tuple(n for n in wrt if n[1] != str(side))
    for own, sides in tiles.launches(problem, wrt, one_side=hopper):
        spec = tiles.backward(problem, own, sides, device, tensor_maps)
        blocks = _blocks(problem, own, sides[0], spec.tile.rows)
        widest = max((problem.head_dim1, problem.head_dim2)[side - 1] for side in sides)
        column_blocks = -(-widest // spec.tile.result) if spec.tile.result else 1
        if blocks:
            result.append(Launch(spec, own, (blocks, column_blocks)))
    return tuple(result)


def _blocks(problem: Problem, own: str, side: int, rows: int) -> int:
    heads = problem.heads if own == "q" else (problem.heads_k1, problem.heads_k2)[side - 1]
    return grid_blocks(problem, problem.seqlen_q if own == "q" else problem.seqlen_k, heads, rows)


def _fused(problem: Problem, side: int, device: DeviceInfo) -> Launch | None:
    """The fused launch for dQ and dK of a side; None where separate ones are better: where there are too few keys to fill half
    of the card with, and more queries."""
    spec, write = choose(tiles_sm90.fused_rows(problem, side), device), tiles_sm90.write_dq_row(problem, side)
    blocks, dq_tiles = _blocks(problem, "k", side, spec.tile.rows), _blocks(problem, "q", side, tiles_sm90.DQ_ROWS)
    if not blocks or not dq_tiles or (2 * blocks < device.multiprocessors and blocks < dq_tiles):
        return None
    sums = 4 * dq_tiles * tiles_sm90.DQ_ROWS * tiles_sm90.dq_columns(problem, side)
    return Launch(spec, "k", (blocks,), write, dq_tiles, sums)


def _few_rows(problem: Problem, side: int, device: DeviceInfo) -> Launch | None:
    """The fused launch that reads every key once. None where the query rows that share a key head are more than its tile takes or
    differ in the other side's key head, where segments are packed, and where keys are too few to fill a ring."""
    spec = choose(tiles_sm90.fused_few_rows(problem, side), device)
    own, other = (problem.heads_k1, problem.heads_k2)[:: 3 - 2 * side]
    blocks = problem.batch * own
    rows, key_tiles = problem.heads // own * problem.seqlen_q, -(-problem.seqlen_k // spec.tile.streamed)
    if problem.packed or not blocks or not 0 < rows <= spec.tile.rows or own % other or 2 * key_tiles < spec.tile.stages:
        return None
    grid, write = (blocks, tiles_sm90.key_splits(spec, blocks, key_tiles, device)), tiles_sm90.write_dq_rows_row(problem, side)
    sums = 4 * problem.rows * tiles_sm90.dq_columns(problem, side)
    return Launch(spec, "q", grid, write, -(-problem.rows // tiles_sm90.DQ_BLOCK_ROWS), sums)


def workspace_bytes(problem: Problem, wrt, dtype, deterministic: bool, device_index: int) -> int:
    """Bytes of scratch: the float32 sums of dQ of one side at a time where dQ and dK are fused, else what counting the rows of a
    mean takes where the state does not know their number."""
    steps = plan(problem, tuple(wrt), device_index, True, not deterministic)
    return max([reduce_bytes(problem), *(step.sums_bytes for step in steps)])


def warm(problem: Problem, wrt, dtype, deterministic: bool, device_index: int) -> None:
    """Compiles and loads everything that `run` launches."""
    for maps in (False, True):
        for fuse in (False, not deterministic):
            for step in plan(problem, tuple(wrt), device_index, maps, fuse):
                kernel(step.spec, device_index)
                if step.write_dq:
                    kernel(step.write_dq, device_index)


def run(
    problem: Problem, views, rows, weights, reduced, grads, deterministic: bool, workspace: ArrayView | None, stream: int, *, allocate
) -> None:
    """Fills `grads` (names to views) for validated arguments, on `stream`, with q1's device current.

    `weights` is None, a number, a row array, or a device scalar; after a reduction `reduced` holds the factor of every row.
    """
    device_index = views["q1"].device[1]
    maps = tensor_map.addressable(problem, *(views[n] for n in SIDES))
    wrt = tuple(n for n in SIDES if n in grads)
    steps = plan(problem, wrt, device_index, maps, not deterministic and _may_fuse(problem, weights))
    if not steps:
        return
    as_float32 = next(iter(grads.values())).dtype == "float32"
    args = (
        parameters.fill_problem(problem, views, views, rows),
        _row_weights(problem, weights, reduced),
        parameters.gradient_output(problem, grads, as_float32),
    )
    sums_bytes = max(step.sums_bytes for step in steps)
    sums = (np.uint64((workspace or allocate(sums_bytes)).pointer),) if sums_bytes else ()
    for spec, own, grid, write_dq, write_blocks, size in steps:
        streamed = ("k1", "k2") if own == "q" else ("q1", "q2")
        boxes = tuple(tensor_map.rows_map(problem, views[n], spec.tile.streamed) for n in streamed) if spec.accelerated else ()
        if write_dq:
            zero(int(sums[0]), size, stream)
            launch(kernel(spec, device_index), grid, spec.threads, args + sums + boxes, stream, spec.shared_bytes)
            launch(kernel(write_dq, device_index), (write_blocks,), write_dq.threads, args + sums, stream)
        else:
            no_sums = (np.uint64(0),) if spec.accelerated and own == "k" else ()
            launch(kernel(spec, device_index), grid, spec.threads, args + no_sums + boxes, stream, spec.shared_bytes)


def _may_fuse(problem: Problem, weights) -> bool:
    """Fused, dQ and dK share a rounded operand that the weights are part of: float16 takes one weight for all rows there."""
    return problem.dtype == "bfloat16" or _one_weight(problem, weights)


def _one_weight(problem: Problem, weights) -> bool:
    return not isinstance(weights, ArrayView) or len(weights.shape) != len(problem.row_shape)


def _row_weights(problem: Problem, weights, reduced):
    factor = reduced[1].pointer if reduced is not None and problem.reduction == "mean" else 0
    if weights is None or not isinstance(weights, ArrayView):
        return parameters.pack_row_weights(0, factor, 0, 0, 0, 1.0 if weights is None else float(weights), 0)
    strides = (0, 0, 0) if _one_weight(problem, weights) else problem.row_strides(weights.strides)
    return parameters.pack_row_weights(weights.pointer, factor, *strides, 0.0, parameters.WEIGHT_TYPES[weights.dtype])


def explain(problem: Problem, wrt, device_index: int, in_place) -> list[str]:
    """One line a launch, as it is with one weight for all rows. `in_place` are the views that are not copied first."""
    maps = tensor_map.addressable(problem, *in_place.values())
    lines = []
    for spec, own, grid, write_dq, _, size in plan(problem, tuple(wrt), device_index, maps, True):
        sides = dict(spec.defines).get("SIDES", dict(spec.defines).get("SIDE"))
        what = f"dQ and dK of side {sides}, through {size} bytes of float32 sums" if write_dq else f"d{own.upper()} of side {sides}"
        lines.append(
            f"backward: {spec.source} ({what}) on {device_info(device_index).name}, tile {spec.tile.rows} x {spec.tile.streamed} "
            f"({spec.tile.reason}), grid {grid}, {spec.shared_bytes} bytes of shared memory a block"
        )
    return lines
