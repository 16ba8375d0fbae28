"""Where results go: fresh arrays, or those of an earlier call, checked before anything is written."""

from __future__ import annotations

import functools
from typing import Any

from .arrays import ArrayView, byte_span, check_alignment, is_contiguous, overlap, overlaps_itself, view
from .checks import describe_device
from .frameworks import Framework
from .padding import ALIGNMENT_BYTES, PIECE, misalignment
from .problem import Problem
from .state import Gradients, KLState, RowStats

Views = dict[str, ArrayView]
PER_PROBLEM = "of an earlier call on the same problem"


class Rows:
    """The row statistics of a call and, after a reduction, its value and factor: arrays and their views."""

    def __init__(self, stats: RowStats, views: Views, reduced: tuple | None, reduced_views: tuple[ArrayView, ArrayView] | None):
        self.stats, self.views, self.reduced, self.reduced_views = stats, views, reduced, reduced_views

    def delivered(self, framework: Framework, like) -> tuple[RowStats, tuple | None]:
        stats = RowStats(*(framework.deliver(array, like) for array in self.stats))
        reduced = self.reduced and tuple(framework.deliver(array, like) for array in self.reduced)
        return stats, reduced

    @property
    def all_views(self) -> Views:
        result = named("out.rows", self.views)
        if self.reduced_views:
            result |= zip(("out.reduced[0]", "out.reduced[1]"), self.reduced_views, strict=True)
        return result


def new_rows(problem: Problem, framework: Framework) -> Rows:
    """Uninitialised row statistics."""
    parts = framework.empty_parts(5, problem.row_shape)
    stats = RowStats(*(array for array, _ in parts))
    views = dict(zip(RowStats._fields, (v for _, v in parts), strict=True))
    if problem.reduction == "none":
        return Rows(stats, views, None, None)
    return Rows(stats, views, *new_reduced(framework))


def new_reduced(framework: Framework) -> tuple[tuple, tuple[ArrayView, ArrayView]]:
    """An uninitialised value and factor."""
    (value, value_view), (factor, factor_view) = framework.empty_parts(2, ())
    return (value, factor), (value_view, factor_view)


def given_rows(problem: Problem, framework: Framework, out: Any) -> Rows:
    """The arrays of an earlier state. It may have had other inputs, masks and scales: only what is stored has to fit."""
    if not isinstance(out, KLState):
        raise TypeError(f"out is a {type(out).__name__}; it takes the KLState {PER_PROBLEM}")
    views = row_views("out", problem, framework, out.rows)
    for name, v in views.items():
        _check_writable(f"out.rows.{name}", v, framework)
    if problem.reduction == "none":
        return Rows(out.rows, views, None, None)
    reduced_views = reduced_scalars("out", framework, out.reduced)
    if reduced_views is None:
        raise ValueError(f"out has no reduced value; with reduction={problem.reduction!r} it takes the KLState {PER_PROBLEM}")
    for i, v in enumerate(reduced_views):
        _check_writable(f"out.reduced[{i}]", v, framework)
    return Rows(out.rows, views, out.reduced, reduced_views)


def row_views(owner: str, problem: Problem, framework: Framework, rows: Any, stream: int | None = None) -> Views:
    """Views of a state's row statistics, checked against the problem."""
    if not isinstance(rows, RowStats):
        raise TypeError(f"{owner}.rows is a {type(rows).__name__}; it takes a RowStats")
    shape, device = problem.row_shape, framework.device
    views = {}
    for field, name, array in zip(RowStats._fields, _row_names(f"{owner}.rows"), rows, strict=True):
        views[field] = v = view(name, array, stream)
        check_row_array(name, v, shape, device)
    return views


def named(owner: str, rows: Views) -> Views:
    """The same views under the names that errors call them by."""
    return dict(zip(_row_names(owner), rows.values(), strict=True))


@functools.cache
def _row_names(owner: str) -> tuple[str, ...]:
    return tuple(f"{owner}.{field}" for field in RowStats._fields)


def merge_parts(parts: list[RowStats], first: ArrayView, stream: int) -> list[Views]:
    """Views of the row statistics of several shards; `first` is the first one's kl, which the others have to be like."""
    result = []
    for i, part in enumerate(parts):
        views = {field: view(f"rows_list[{i}].{field}", array, stream) for field, array in zip(RowStats._fields, part, strict=True)}
        for field, v in views.items():
            check_row_array(f"rows_list[{i}].{field}", v, first.shape, first.device)
        result.append(views)
    return result


def check_row_array(name: str, v: ArrayView, shape: tuple[int, ...], device: tuple[str, int]) -> None:
    _check(name, v, shape, "float32", device)
    if not is_contiguous(v):
        raise ValueError(f"{name} has strides {v.strides} for shape {v.shape}; it takes a contiguous array")


def reduced_scalars(owner: str, framework: Framework, reduced: Any, stream: int | None = None) -> tuple[ArrayView, ArrayView] | None:
    """Views of a state's value and factor; None where it has none."""
    if reduced is None:
        return None
    if not isinstance(reduced, (tuple, list)) or len(reduced) != 2:
        raise TypeError(f"{owner}.reduced is {reduced!r}; it takes None or (value, factor), as forward made them")
    views = tuple(view(f"{owner}.reduced[{i}]", array, stream) for i, array in enumerate(reduced))
    for i, v in enumerate(views):
        _check(f"{owner}.reduced[{i}]", v, (), "float32", framework.device)
    return views


def new_gradients(problem: Problem, framework: Framework, wrt, dtype: str) -> tuple[Gradients, Views]:
    """Uninitialised gradients in the shapes of the inputs."""
    arrays = {name: framework.empty(problem.shape(name), dtype) for name in wrt}
    return Gradients(**arrays), {name: view(name, array) for name, array in arrays.items()}


def given_gradients(problem: Problem, framework: Framework, wrt, dtype: str, out: Any) -> tuple[Gradients, Views]:
    """The wanted arrays of earlier gradients; others in `out` are left alone."""
    if not isinstance(out, Gradients):
        raise TypeError(f"out is a {type(out).__name__}; it takes the Gradients {PER_PROBLEM}")
    views = {}
    for name in wrt:
        array = getattr(out, name)
        if array is None:
            raise ValueError(f"out.{name} is None; wrt asks for {', '.join(wrt)}")
        v = views[name] = view(f"out.{name}", array)
        _check(f"out.{name}", v, problem.shape(name), dtype, framework.device)
        _check_writable(f"out.{name}", v, framework)
        if overlaps_itself(v):
            raise ValueError(f"out.{name} has strides {v.strides} for shape {v.shape}, which overlap; it takes one place for each element")
        if framework.device[0] == "cuda" and 0 not in v.shape and v.shape[-1] % PIECE == 0 and (reason := misalignment(v)):
            raise ValueError(f"out.{name} has strides {v.strides} at address {v.pointer:#x} and cannot be written in place: {reason}")
    return Gradients(**{name: getattr(out, name) for name in wrt}), views


def workspace_view(workspace: Any, framework: Framework, needed: int) -> ArrayView | None:
    """The caller's scratch buffer as a flat view; None without one."""
    if workspace is None:
        return None
    v = view("workspace", workspace)
    if v.dtype != "uint8":
        raise TypeError(f"workspace has dtype {v.dtype}; it takes uint8")
    if v.device != framework.device:
        raise _other_device("workspace", v, framework.device)
    if v.readonly:
        raise ValueError(f"workspace is read-only{_jax_note(v)}; it takes a buffer to write to")
    if not is_contiguous(v):
        raise ValueError(f"workspace has strides {v.strides} for shape {v.shape}; it takes a contiguous buffer")
    size = 1
    for n in v.shape:
        size *= n
    if size < needed:
        raise ValueError(f"workspace has {size} bytes; this call takes {needed} (streamkl_cupy.workspace_size)")
    if size and v.pointer % ALIGNMENT_BYTES:
        raise ValueError(f"workspace starts at address {v.pointer:#x}; it takes a multiple of {ALIGNMENT_BYTES}")
    return v._replace(shape=(size,), strides=(1,))


def check_overlaps(written: Views, read: Views) -> None:
    """ValueError where an array that is written shares memory with an input or with another one that is written."""
    spans = [(name, v, *byte_span(v)) for name, v in (*written.items(), *read.items())]
    for i in range(len(written)):
        name, v, low, high = spans[i]
        for other, w, other_low, other_high in spans[i + 1 :]:
            if low < other_high and other_low < high and overlap(v, w):
                raise ValueError(f"{name} overlaps {other}; it takes memory of its own")


def _check(name: str, v: ArrayView, shape, dtype: str, device) -> None:
    if v.dtype != dtype:
        raise TypeError(f"{name} has dtype {v.dtype}; it takes {dtype}")
    if v.shape != shape:
        raise ValueError(f"{name} has shape {v.shape}; it takes {shape}")
    if v.device != device:
        raise _other_device(name, v, device)
    check_alignment(name, v)


def _other_device(name: str, v: ArrayView, device) -> ValueError:
    return ValueError(f"{name} is on {describe_device(v.device)} and q1 on {describe_device(device)}; all arrays take one device")


def _check_writable(name: str, v: ArrayView, framework: Framework) -> None:
    if v.readonly:
        raise ValueError(f"{name} is read-only{_jax_note(v)}; it takes an array to write to")
    if v.framework != framework.name:
        raise ValueError(f"{name} is an array of {v.framework}; with q1 of this kind it takes one of {framework.name}")


def _jax_note(v: ArrayView) -> str:
    return ", as all arrays of JAX are: leave it out" if v.framework == "jax" else ""
