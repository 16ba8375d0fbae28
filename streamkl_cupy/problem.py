"""What is to be computed: shapes, layout, dtype and mask, validated once and then trusted.

A `Problem` holds no array. It is hashable (plans and kernels are chosen by it), picklable (a saved state needs it again), and
the same for every backend. `Problem.check` is the only place where shapes and host arguments are validated.
"""

from __future__ import annotations

import math
import numbers
from dataclasses import dataclass
from typing import NamedTuple

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


class AxisStrides(NamedTuple):
    """Element strides of the batch, head and row axes; batch is 0 when packed."""

    batch: int
    head: int
    row: int


@dataclass(frozen=True)
class Problem:
    """One KL problem, without its arrays.

    `batch` counts batch elements, or segments when packed; `seqlen_q` and `seqlen_k` are rows in memory: for each batch element,
    or in all when packed. `q_offset` is None (bottom-right), an int, or "vector" when a device vector gives one per element.
    """

    layout: str
    dtype: str
    batch: int
    heads: int
    heads_k1: int
    heads_k2: int
    seqlen_q: int
    seqlen_k: int
    head_dim1: int
    head_dim2: int
    scale1: float
    scale2: float
    causal: bool = False
    window: tuple[int, int] = (-1, -1)
    q_offset: int | str | None = None
    has_seqlens_q: bool = False
    has_seqlens_k: bool = False
    reduction: str = "none"

    @property
    def packed(self) -> bool:
        return self.layout == "thd"

    @property
    def row_shape(self) -> tuple[int, ...]:
        """Shape of every row output: (B, H, Nq), or (H, total_q) when packed."""
        return (self.heads, self.seqlen_q) if self.packed else (self.batch, self.heads, self.seqlen_q)

    @property
    def rows(self) -> int:
        return math.prod(self.row_shape)

    @property
    def window_left(self) -> int:
        """Keys before `i + q_offset` that row i sees, OPEN for all of them."""
        return OPEN if self.window[0] < 0 else self.window[0]

    @property
    def window_right(self) -> int:
        """Keys after `i + q_offset` that row i sees; causal means none."""
        if self.causal:
            return 0
        return OPEN if self.window[1] < 0 else self.window[1]

    @property
    def masked(self) -> bool:
        """Whether a causal mask or a window hides keys, and so whether `q_offset` matters."""
        return self.window_left != OPEN or self.window_right != OPEN

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of "q1", "k1", "q2" or "k2" in this layout."""
        heads = {"q1": self.heads, "q2": self.heads, "k1": self.heads_k1, "k2": self.heads_k2}[name]
        seqlen = self.seqlen_q if name[0] == "q" else self.seqlen_k
        head_dim = self.head_dim1 if name[1] == "1" else self.head_dim2
        sizes = [0] * (3 if self.packed else 4)
        for axis, size in zip(LAYOUTS[self.layout], (self.batch, heads, seqlen), strict=True):
            if axis is not None:
                sizes[axis] = size
        sizes[-1] = head_dim
        return tuple(sizes)

    def axis_strides(self, strides: tuple[int, ...]) -> AxisStrides:
        """Picks the batch, head and row strides out of an input's strides."""
        batch, head, row = LAYOUTS[self.layout]
        return AxisStrides(0 if batch is None else strides[batch], strides[head], strides[row])

    def row_strides(self, strides: tuple[int, ...]) -> AxisStrides:
        """The same for a row array of shape `row_shape`."""
        return AxisStrides(0, *strides) if self.packed else AxisStrides(*strides)

    @staticmethod
    def check(
        q1,
        k1,
        q2,
        k2,
        *,
        layout="bhsd",
        scale1=None,
        scale2=None,
        causal=False,
        q_offset=None,
        window=(-1, -1),
        seqlens_q=None,
        seqlens_k=None,
        cu_seqlens_q=None,
        cu_seqlens_k=None,
        reduction="none",
    ) -> Problem:
        """Validates everything that can be known without reading an array's values.

        Arrays are `arrays.ArrayView`s or anything else with `shape`, `dtype` (a name) and `device`; `q_offset` may be one of
        them too. Raises TypeError or ValueError naming the argument, what it got and what it takes.
        """
        _check_word("layout", layout, LAYOUTS)
        _check_word("reduction", reduction, REDUCTIONS)
        views = dict(zip(SIDES, (q1, k1, q2, k2), strict=True))
        _check_matrices(views, layout)
        batch_axis, head_axis, row_axis = LAYOUTS[layout]
        heads, heads_k1, heads_k2 = q1.shape[head_axis], k1.shape[head_axis], k2.shape[head_axis]
        packed = batch_axis is None
        if packed:
            batch = _check_packing(cu_seqlens_q, cu_seqlens_k, seqlens_q, seqlens_k, q1.device)
        else:
            batch = q1.shape[batch_axis]
            for name, vector in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
                if vector is not None:
                    raise ValueError(f"{name} goes with layout 'thd', not {layout!r}; use seqlens_q / seqlens_k for padded lengths")
            _check_vector("seqlens_q", seqlens_q, batch, q1.device)
            _check_vector("seqlens_k", seqlens_k, batch, q1.device)
        return Problem(
            layout=layout,
            dtype=q1.dtype,
            batch=batch,
            heads=heads,
            heads_k1=heads_k1,
            heads_k2=heads_k2,
            seqlen_q=q1.shape[row_axis],
            seqlen_k=k1.shape[row_axis],
            head_dim1=q1.shape[-1],
            head_dim2=q2.shape[-1],
            scale1=_check_scale("scale1", scale1, q1.shape[-1]),
            scale2=_check_scale("scale2", scale2, q2.shape[-1]),
            causal=check_flag("causal", causal),
            window=_check_window(window),
            q_offset=_check_q_offset(q_offset, batch, q1.device),
            has_seqlens_q=seqlens_q is not None,
            has_seqlens_k=seqlens_k is not None,
            reduction=reduction,
        )


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


def _check_word(name, word, words) -> None:
    if not isinstance(word, str) or word not in words:
        error = ValueError if isinstance(word, str) else TypeError
        raise error(f"{name} is {word!r}; it takes one of {', '.join(map(repr, words))}")


def _check_matrices(views, layout) -> None:
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


def _check_packing(cu_seqlens_q, cu_seqlens_k, seqlens_q, seqlens_k, device) -> int:
    for name, vector in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        if vector is None:
            raise ValueError(f"{name} is missing; layout 'thd' takes an int32 vector of segment starts with a final end, B + 1 entries")
        if len(vector.shape) != 1 or vector.shape[0] < 1:
            raise ValueError(f"{name} has shape {vector.shape}; it takes (B + 1,)")
        _check_vector(name, vector, vector.shape[0], device)
    for name, vector in (("seqlens_q", seqlens_q), ("seqlens_k", seqlens_k)):
        if vector is not None:
            raise ValueError(f"{name} goes with the padded layouts; with layout 'thd' the lengths are in cu_seqlens_q and cu_seqlens_k")
    if cu_seqlens_q.shape != cu_seqlens_k.shape:
        raise ValueError(f"cu_seqlens_k has {cu_seqlens_k.shape[0]} entries and cu_seqlens_q {cu_seqlens_q.shape[0]}; both take B + 1")
    return cu_seqlens_q.shape[0] - 1


def _check_vector(name, vector, entries, device) -> None:
    if vector is None:
        return
    if vector.dtype != "int32":
        raise TypeError(f"{name} has dtype {vector.dtype}; it takes int32")
    if tuple(vector.shape) != (entries,):
        raise ValueError(f"{name} has shape {tuple(vector.shape)}; it takes ({entries},)")
    if vector.device != device:
        raise ValueError(f"{name} is on {describe_device(vector.device)} and q1 on {describe_device(device)}; all arrays take one device")


def _check_scale(name, scale, head_dim) -> float:
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


def _check_window(window) -> tuple[int, int]:
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


def _check_q_offset(q_offset, batch, device) -> int | str | None:
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
    _check_vector("q_offset", q_offset, batch, device)
    return "vector"


def describe_device(device: tuple[str, int]) -> str:
    kind, index = device
    return kind if kind == "cpu" else f"{kind}:{index}"
