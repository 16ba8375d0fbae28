"""The arguments of a call, one by one: each check raises TypeError or ValueError that names the argument, what it got and what it
takes. Arrays are `arrays.ArrayView`s or anything else with `shape`, `dtype` (a name) and `device`.
"""

from __future__ import annotations

import math
import numbers

import numpy as np

LAYOUTS = {"bhsd": (0, 1, 2), "bshd": (0, 2, 1), "sbhd": (1, 2, 0), "thd": (None, 1, 0)}
"""Positions of the batch, head and row axes; the head dimension always comes last."""

REDUCTIONS = ("none", "sum", "mean")
SIDES = ("q1", "k1", "q2", "k2")
INPUT_DTYPES = ("float16", "bfloat16", "float32")
MAX_HEAD_DIM = 576
OPEN = 1 << 40
"""A window side without a bound; `kOpen` in kernels/problem.cuh."""

MAX_SEQLEN = (1 << 30) - 1
"""Rows or keys of one array's sequence axis; `kMostRows` in kernels/problem.cuh lies beyond."""

FLOAT32_MIN = float(np.finfo(np.float32).tiny)
FLOAT32_MAX = float(np.finfo(np.float32).max)
MAX_SCALE = FLOAT32_MAX / math.log2(math.e)
"""Kernels are handed a scale, and its product with log2(e), as normal float32 numbers."""

VECTORS = ("cu_seqlens_q", "cu_seqlens_k", "seqlens_q", "seqlens_k", "q_offset")


def check_wrt(wrt) -> tuple[str, ...]:
    """The requested gradients in the order q1, k1, q2, k2."""
    names = (wrt,) if isinstance(wrt, str) else tuple(wrt)
    for name in names:
        if not isinstance(name, str) or name not in SIDES:
            error = ValueError if isinstance(name, str) else TypeError
            raise error(f"wrt has {name!r}; it takes any of {', '.join(map(repr, SIDES))}")
    if not names:
        raise ValueError(f"wrt is empty; it takes any of {', '.join(map(repr, SIDES))}")
    return tuple(side for side in SIDES if side in names)


def check_word(name, word, words) -> None:
    if not isinstance(word, str) or word not in words:
        error = ValueError if isinstance(word, str) else TypeError
        raise error(f"{name} is {word!r}; it takes one of {', '.join(map(repr, words))}")


def check_matrices(views, layout) -> None:
    batch_axis, head_axis, row_axis = LAYOUTS[layout]
    rank = 3 if batch_axis is None else 4
    form = {"bhsd": "(B, H, N, D)", "bshd": "(B, N, H, D)", "sbhd": "(N, B, H, D)", "thd": "(total, H, D)"}[layout]
    q1 = views["q1"]
    for name, view in views.items():
        if view.dtype not in INPUT_DTYPES:
            raise TypeError(f"{name} has dtype {view.dtype}; it takes {', '.join(INPUT_DTYPES)}")
        if len(view.shape) != rank:
            raise ValueError(f"{name} has shape {view.shape}; layout {layout!r} takes {form}")
    for name, view in views.items():
        if view.dtype != q1.dtype:
            raise TypeError(f"{name} has dtype {view.dtype} and q1 {q1.dtype}; all four take one dtype")
        if view.device != q1.device:
            raise ValueError(
                f"{name} is on {describe_device(view.device)} and q1 on {describe_device(q1.device)}; all arrays take one device"
            )
        if not 1 <= view.shape[-1] <= MAX_HEAD_DIM:
            raise ValueError(f"{name} has head dimension {view.shape[-1]}; it takes 1 to {MAX_HEAD_DIM}")
        if view.shape[row_axis] > MAX_SEQLEN:
            raise ValueError(f"{name} has {view.shape[row_axis]} rows; it takes at most {MAX_SEQLEN}")
        if view.shape[head_axis] < 1:
            raise ValueError(f"{name} has shape {view.shape}, no heads in layout {layout!r}; it takes at least one")
        if batch_axis is not None and view.shape[batch_axis] != q1.shape[batch_axis]:
            raise ValueError(f"{name} has batch {view.shape[batch_axis]} and q1 {q1.shape[batch_axis]}; all four take one batch")
    for side in "12":
        q, k = views[f"q{side}"], views[f"k{side}"]
        if q.shape[-1] != k.shape[-1]:
            raise ValueError(f"q{side} has head dimension {q.shape[-1]} and k{side} {k.shape[-1]}; the two take the same")
        if q1.shape[head_axis] % k.shape[head_axis]:
            raise ValueError(f"k{side} has {k.shape[head_axis]} heads and q1 {q1.shape[head_axis]}; it takes a number that divides them")
    q2, k1, k2 = views["q2"], views["k1"], views["k2"]
    if q2.shape[head_axis] != q1.shape[head_axis]:
        raise ValueError(f"q2 has {q2.shape[head_axis]} heads and q1 {q1.shape[head_axis]}; both sides take the same number of query heads")
    if q2.shape[row_axis] != q1.shape[row_axis]:
        raise ValueError(f"q2 has {q2.shape[row_axis]} rows and q1 {q1.shape[row_axis]}; both sides take the same query rows")
    if k2.shape[row_axis] != k1.shape[row_axis]:
        raise ValueError(f"k2 has {k2.shape[row_axis]} rows and k1 {k1.shape[row_axis]}; both sides take the same keys")


def check_packing(cu_seqlens_q, cu_seqlens_k, seqlens_q, seqlens_k, device) -> int:
    for name, vector in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        if vector is None:
            raise ValueError(f"{name} is missing; layout 'thd' takes an int32 vector of segment starts with a final end, B + 1 entries")
        if len(vector.shape) != 1 or vector.shape[0] < 1:
            raise ValueError(f"{name} has shape {vector.shape}; it takes (B + 1,)")
        check_vector(name, vector, vector.shape[0], device)
    for name, vector in (("seqlens_q", seqlens_q), ("seqlens_k", seqlens_k)):
        if vector is not None:
            raise ValueError(f"{name} goes with the padded layouts; with layout 'thd' the lengths are in cu_seqlens_q and cu_seqlens_k")
    if cu_seqlens_q.shape != cu_seqlens_k.shape:
        raise ValueError(f"cu_seqlens_k has {cu_seqlens_k.shape[0]} entries and cu_seqlens_q {cu_seqlens_q.shape[0]}; both take B + 1")
    return cu_seqlens_q.shape[0] - 1


def check_vector(name, vector, entries, device) -> None:
    if vector is None:
        return
    if vector.dtype != "int32":
        raise TypeError(f"{name} has dtype {vector.dtype}; it takes int32")
    if tuple(vector.shape) != (entries,):
        raise ValueError(f"{name} has shape {tuple(vector.shape)}; it takes ({entries},)")
    if vector.device != device:
        raise ValueError(f"{name} is on {describe_device(vector.device)} and q1 on {describe_device(device)}; all arrays take one device")


def check_scale(name, scale, head_dim) -> float:
    if scale is None:
        return float(head_dim) ** -0.5
    if isinstance(scale, (bool, np.timedelta64)) or not isinstance(scale, numbers.Real):
        raise TypeError(f"{name} is a {type(scale).__name__}; it takes a positive host number")
    number = host_float(name, scale)
    if not FLOAT32_MIN <= number <= MAX_SCALE:
        raise ValueError(f"{name} is {number}; it takes a finite positive number from {FLOAT32_MIN:.3g} to {MAX_SCALE:.3g}")
    return number


def host_float(name, number) -> float:
    """A host number as a float. ValueError for integers and fractions that no float holds."""
    try:
        return float(number)
    except OverflowError:
        raise ValueError(f"{name} is a {type(number).__name__} beyond float64; it takes a number in the range of float32") from None


def check_flag(name, flag) -> bool:
    """TypeError for anything but True and False: an integer there is most often an argument in the wrong place."""
    if not isinstance(flag, (bool, np.bool_)):
        raise TypeError(f"{name} is a {type(flag).__name__}; it takes True or False")
    return bool(flag)


def check_window(window) -> tuple[int, int]:
    if window is None:
        return (-1, -1)
    try:
        left, right = window
    except (TypeError, ValueError):
        raise TypeError(f"window is {window!r}; it takes (left, right) in keys, -1 for an open side") from None
    for side in (left, right):
        if isinstance(side, bool) or not isinstance(side, numbers.Integral):
            raise TypeError(f"window is {window!r}; it takes two integers, -1 for an open side")
        if side < -1 or side >= OPEN:
            raise ValueError(f"window is {window!r}; each side takes -1 (open) or a number of keys from 0 on")
    return (int(left), int(right))


def check_q_offset(q_offset, batch, device) -> int | str | None:
    if q_offset is None:
        return None
    if isinstance(q_offset, numbers.Integral) and not isinstance(q_offset, bool):
        if not -OPEN < q_offset < OPEN:
            raise ValueError(f"q_offset is {q_offset}; it takes an integer of at most 40 bits")
        return int(q_offset)
    if not hasattr(q_offset, "shape"):
        raise TypeError(
            f"q_offset is a {type(q_offset).__name__}; it takes None, an int, or an int32 vector with one entry per batch element"
        )
    check_vector("q_offset", q_offset, batch, device)
    return "vector"


def describe_device(device: tuple[str, int]) -> str:
    kind, index = device
    return kind if kind == "cpu" else f"{kind}:{index}"
