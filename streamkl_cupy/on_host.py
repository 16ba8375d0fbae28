"""Validated calls on CPU arrays: the NumPy backend, with the reductions around it."""

from __future__ import annotations

import numpy as np

from . import numpy_backend
from .arrays import ArrayView, as_numpy
from .problem import Problem
from .state import RowStats


def check_values(problem: Problem, views) -> None:
    """Here the values of the vectors are at hand, so they are checked."""
    numpy_backend.check_vectors(problem, _arrays(views))


def forward_bytes(problem, views) -> int:
    """NumPy allocates its tiles by itself."""
    return 0


def backward_bytes(problem, views, wrt, dtype, deterministic) -> int:
    return 0


def forward(call, rows, reduced) -> None:
    stats = _row_stats(rows)
    numpy_backend.forward(call.problem, _arrays(call.views), stats)
    if reduced is not None:
        _reduce(call.problem, stats, reduced)


def backward(call, rows, weights, reduced, grads, deterministic, recompute) -> None:
    """`recompute` says that `reduced` is still to be filled from the rows."""
    problem, stats = call.problem, _row_stats(rows)
    if recompute:
        _reduce(problem, stats, reduced)
    weight = as_numpy(weights) if isinstance(weights, ArrayView) else weights
    if isinstance(weights, ArrayView) and len(weights.shape) < 2:
        weight = float(weight.reshape(()))
    if reduced is not None:
        weight = (1.0 if weight is None else weight) * float(as_numpy(reduced[1]).reshape(()))
    numpy_backend.backward(problem, _arrays(call.views), stats, weight, _arrays(grads))


def merge(parts, out, shape, stream: int) -> None:
    numpy_backend.merge([_row_stats(part) for part in parts], _row_stats(out))


def warm(call, wrt, dtype) -> None:
    """Nothing to compile."""


def explain(call, wrt, dtype) -> list[str]:
    """Lines on what runs and the memory it takes."""
    return [
        "forward and backward: the streaming algorithm in NumPy, tile by tile, in float32",
        f"forward: {20 * call.problem.rows} bytes of row statistics",
        f"backward: gradients of {', '.join(wrt)} in {dtype}",
    ]


def _arrays(views) -> dict[str, np.ndarray]:
    return {name: as_numpy(view) for name, view in views.items()}


def _row_stats(rows) -> RowStats:
    return RowStats(**_arrays(rows))


def _reduce(problem: Problem, stats: RowStats, reduced) -> None:
    value, factor = (as_numpy(view) for view in reduced)
    divisor = max(int(np.count_nonzero(stats.logsum1 > -np.inf)), 1) if problem.reduction == "mean" else 1
    value[...] = stats.kl.sum(dtype=np.float64) / divisor
    factor[...] = 1 / divisor
