"""What is to be computed: shapes, layout, dtype and mask, validated once and then trusted.

A `Problem` holds no array. It is hashable (plans and kernels are chosen by it), picklable (a saved state needs it again), and
the same for every backend. `Problem.check` is the only place where shapes and host arguments are validated.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from .checks import (
    LAYOUTS,
    OPEN,
    REDUCTIONS,
    SIDES,
    check_flag,
    check_matrices,
    check_packing,
    check_q_offset,
    check_scale,
    check_vector,
    check_window,
    check_word,
)


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
        check_word("layout", layout, LAYOUTS)
        check_word("reduction", reduction, REDUCTIONS)
        views = dict(zip(SIDES, (q1, k1, q2, k2), strict=True))
        check_matrices(views, layout)
        batch_axis, head_axis, row_axis = LAYOUTS[layout]
        heads, heads_k1, heads_k2 = q1.shape[head_axis], k1.shape[head_axis], k2.shape[head_axis]
        packed = batch_axis is None
        if packed:
            batch = check_packing(cu_seqlens_q, cu_seqlens_k, seqlens_q, seqlens_k, q1.device)
        else:
            batch = q1.shape[batch_axis]
            for name, vector in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
                if vector is not None:
                    raise ValueError(f"{name} goes with layout 'thd', not {layout!r}; use seqlens_q / seqlens_k for padded lengths")
            check_vector("seqlens_q", seqlens_q, batch, q1.device)
            check_vector("seqlens_k", seqlens_k, batch, q1.device)
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
            scale1=check_scale("scale1", scale1, q1.shape[-1]),
            scale2=check_scale("scale2", scale2, q2.shape[-1]),
            causal=check_flag("causal", causal),
            window=check_window(window),
            q_offset=check_q_offset(q_offset, batch, q1.device),
            has_seqlens_q=seqlens_q is not None,
            has_seqlens_k=seqlens_k is not None,
            reduction=reduction,
        )
