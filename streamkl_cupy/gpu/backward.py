"""The backward call on a GPU: choose the kernels for the wanted gradients, describe the upstream weights, launch."""

from __future__ import annotations

import functools
from typing import NamedTuple

from ..arrays import ArrayView
from ..problem import SIDES, Problem
from . import parameters, tensor_map, tiles
from .device import device_info
from .forward import reduce_bytes
from .launch import grid_blocks, kernel, launch


class Launch(NamedTuple):
    spec: tiles.Specialisation
    own: str  # "q" or "k": whose gradients; the other side streams by
    grid: tuple[int, ...]


@functools.lru_cache(maxsize=1024)
def plan(problem: Problem, wrt: tuple[str, ...], device_index: int, tensor_maps: bool) -> tuple[Launch, ...]:
    """The launches that give the wanted gradients. All of them are deterministic: every sum has one owner and one order."""
    device = device_info(device_index)
    result = []
    for own, sides in tiles.launches(problem, wrt, one_side=tensor_maps and tiles.hopper(problem, device)):
        spec = tiles.backward(problem, own, sides, device, tensor_maps)
        heads = problem.heads if own == "q" else (problem.heads_k1, problem.heads_k2)[sides[0] - 1]
        blocks = grid_blocks(problem, problem.seqlen_q if own == "q" else problem.seqlen_k, heads, spec.tile.rows)
        widest = max((problem.head_dim1, problem.head_dim2)[side - 1] for side in sides)
        column_blocks = -(-widest // spec.tile.result) if spec.tile.result else 1
        if blocks:
            result.append(Launch(spec, own, (blocks, column_blocks)))
    return tuple(result)


def workspace_bytes(problem: Problem, wrt, dtype, device_index: int) -> int:
    """Bytes of scratch: only what counting the rows of a mean takes, where the state does not know their number."""
    return reduce_bytes(problem)


def warm(problem: Problem, wrt, dtype, deterministic: bool, device_index: int) -> None:
    """Compiles and loads everything that `run` launches."""
    for maps in (False, True):
        for step in plan(problem, tuple(wrt), device_index, maps):
            kernel(step.spec, device_index)


def run(
    problem: Problem, views, rows, weights, reduced, grads, deterministic: bool, workspace: ArrayView | None, stream: int, *, allocate
) -> None:
    """Fills `grads` (names to views) for validated arguments, on `stream`, with q1's device current.

    `weights` is None, a number, a row array, or a device scalar; after a reduction `reduced` holds the factor of every row.
    """
    device_index = views["q1"].device[1]
    maps = tensor_map.addressable(problem, *(views[n] for n in SIDES))
    steps = plan(problem, tuple(n for n in SIDES if n in grads), device_index, maps)
    if not steps:
        return
    as_float32 = next(iter(grads.values())).dtype == "float32"
    args = (
        parameters.fill_problem(problem, views, views, rows),
        _row_weights(problem, weights, reduced),
        parameters.gradient_output(problem, grads, as_float32),
    )
    for spec, own, grid in steps:
        streamed = ("k1", "k2") if own == "q" else ("q1", "q2")
        boxes = tuple(tensor_map.rows_map(problem, views[n], spec.tile.streamed) for n in streamed) if spec.accelerated else ()
        threads = spec.tile.threads + 128 * spec.accelerated
        launch(kernel(spec, device_index), grid, threads, args + boxes, stream, spec.shared_bytes)


def _row_weights(problem: Problem, weights, reduced):
    factor = reduced[1].pointer if reduced is not None and problem.reduction == "mean" else 0
    if weights is None or not isinstance(weights, ArrayView):
        return parameters.pack_row_weights(0, factor, 0, 0, 0, 1.0 if weights is None else float(weights), 0)
    one = len(weights.shape) != len(problem.row_shape)  # a device scalar: the same for every row
    strides = (0, 0, 0) if one else problem.row_strides(weights.strides)
    return parameters.pack_row_weights(weights.pointer, factor, *strides, 0.0, parameters.WEIGHT_TYPES[weights.dtype])


def explain(problem: Problem, wrt, device_index: int, in_place) -> list[str]:
    """One line a launch. `in_place` are the views that are not copied first."""
    maps = tensor_map.addressable(problem, *in_place.values())
    return [
        f"backward: {spec.source} ({spec.entry}, side {dict(spec.defines).get('SIDES', dict(spec.defines).get('SIDE'))}) on {device_info(device_index).name}, "
        f"tile {spec.tile.rows} x {spec.tile.streamed} ({spec.tile.reason}), grid {grid}, {spec.shared_bytes} bytes of shared memory a block"
        for spec, _, grid in plan(problem, tuple(wrt), device_index, maps)
    ]
