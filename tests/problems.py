"""Problems of every kind on the host: arrays, options, and which numbers of them count."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from streamkl_cupy import reference
from streamkl_cupy.arrays import BFLOAT16
from streamkl_cupy.checks import LAYOUTS, SIDES, VECTORS

from .backends import COMMON_DIMS

DTYPES = ("float16", "bfloat16", "float32")
NUMPY = {"float16": np.dtype(np.float16), "bfloat16": BFLOAT16, "float32": np.dtype(np.float32), "float64": np.dtype(np.float64)}


@dataclass(frozen=True)
class Case:
    """Host arrays by name, the options of `forward` with vectors as int32 arrays, and what to say when it fails."""

    arrays: dict[str, np.ndarray]
    options: dict[str, Any] = field(default_factory=dict)
    note: str = ""

    @property
    def dtype(self) -> str:
        return self.arrays["q1"].dtype.name

    def with_options(self, **options) -> Case:
        return replace(self, options=self.options | options)

    def with_arrays(self, **arrays) -> Case:
        return replace(self, arrays=self.arrays | arrays)

    def geometry(self) -> reference._Case:
        """The reference's own view of the problem: which rows see which keys, one (sequence, head) after the other."""
        return reference._Case(**self.arrays, **self.options)

    def __str__(self) -> str:
        shapes = ", ".join(f"{name} {array.shape}" for name, array in self.arrays.items())
        options = {name: v.tolist() if isinstance(v, np.ndarray) else v for name, v in self.options.items()}
        return f"{self.dtype}, {shapes}, {options}, {self.note}"


def shape(layout: str, batch: int, heads: int, rows: int, dim: int) -> tuple[int, ...]:
    """The shape of an input in a layout.

    >>> shape("sbhd", 2, 3, 5, 8)
    (5, 2, 3, 8)
    """
    sizes = {axis: size for axis, size in zip(LAYOUTS[layout], (batch, heads, rows), strict=True) if axis is not None}
    return (*(sizes[axis] for axis in sorted(sizes)), dim)


def make(
    seed: int,
    dtype: str = "float32",
    *,
    layout: str = "bhsd",
    batch: int = 3,
    heads: int = 4,
    heads_k: tuple[int, int] = (2, 1),
    n: tuple[int, int] = (37, 53),
    d: tuple[int, int] = COMMON_DIMS,
    size: float = 1.0,
    **options,
) -> Case:
    """Normal inputs. As it stands, every size differs from every other one: a mixed-up axis cannot hide."""
    rng = np.random.default_rng(seed)
    arrays = {}
    for name in SIDES:
        side = int(name[1]) - 1
        dims = (batch, heads, n[0], d[side]) if name[0] == "q" else (batch, heads_k[side], n[1], d[side])
        arrays[name] = (size * rng.normal(size=shape(layout, *dims))).astype(np.float32).astype(NUMPY[dtype])
    options = {name: np.asarray(v, np.int32) if name in VECTORS and np.ndim(v) else v for name, v in options.items()}
    return Case(arrays, {"layout": layout} | options, f"seed {seed}, size {size}")


def touched(case: Case, names=SIDES) -> dict[str, np.ndarray]:
    """Which rows see a key, and which keys a row sees, as booleans in the shapes of the inputs."""
    marks = {name: np.zeros(case.arrays[name].shape, bool) for name in names}
    for block in case.geometry().blocks():
        for name in names:
            marks[name][block.at[name]] |= block.visible.any(axis=1 if name[0] == "q" else 0)[:, None]
    return marks


def poisoned(case: Case, value: float = np.nan) -> Case:
    """The case with NaN (or another value) wherever no row may look."""
    arrays = {name: array.copy() for name, array in case.arrays.items()}
    for name, mark in touched(case).items():
        arrays[name][~mark] = value
    return replace(case, arrays=arrays, note=f"{case.note}, {value} where no row may look")


def row_weights(case: Case, seed: int = 1, dtype="float32") -> np.ndarray:
    """A weight for every row."""
    return np.random.default_rng(seed).normal(size=case.geometry().row_shape).astype(NUMPY[dtype])


def offset_case(seed: int, offset: float, dtype: str, **sizes) -> Case:
    """Logits that float32 holds exactly: one coordinate carries a common offset on side 1 and its negative on side 2; the rest
    are multiples of 2^-5. The scale is 1."""
    case = make(seed, dtype, **sizes)
    rng = np.random.default_rng(seed)
    left, right = {1024.0: (32, 32), 9984.0: (96, 104), 246016.0: (496, 496)}[offset]
    arrays = {}
    for name, array in case.arrays.items():
        step = 0.25 if name[0] == "q" else 0.125
        values = np.clip(np.round(rng.normal(size=array.shape) * 2), -4, 4) * step
        values[..., 3] = left * (1 if name[1] == "1" else -1) if name[0] == "q" else right
        arrays[name] = values.astype(array.dtype)
    return replace(case, arrays=arrays, note=f"{case.note}, offset {offset}").with_options(scale1=1.0, scale2=1.0)


def shard(case: Case, begin: int, end: int) -> Case:
    """The keys from `begin` to `end` of a case, as a call of their own: offsets move, lengths or segments are clipped."""
    batch_axis, _, axis = LAYOUTS[case.options["layout"]]
    if batch_axis is None:
        ends = {x: case.options[f"cu_seqlens_{x}"].astype(np.int64) for x in "qk"}
        q_lengths, k_lengths = np.diff(ends["q"]), np.diff(ends["k"])
        gone = np.clip(begin - ends["k"][:-1], 0, k_lengths)  # keys of each segment that lie before this shard
        options = {"cu_seqlens_k": np.clip(ends["k"] - begin, 0, end - begin).astype(np.int32)}
    else:
        batch, n_q = (case.arrays["q1"].shape[a] for a in (batch_axis, axis))
        n_k = case.arrays["k1"].shape[axis]
        q_lengths, k_lengths = (case.options.get(f"seqlens_{x}", np.full(batch, n, np.int32)) for x, n in (("q", n_q), ("k", n_k)))
        gone = begin
        options = {"seqlens_k": np.clip(k_lengths - begin, 0, end - begin).astype(np.int32)}
    offset, limits = case.options.get("q_offset"), np.iinfo(np.int32)
    offset = (k_lengths - q_lengths if offset is None else np.asarray(offset, np.int64)) - gone
    # An offset beyond int32 can only be one number for all; clipped ones lie beyond any sequence as well.
    options["q_offset"] = np.clip(offset, limits.min, limits.max).astype(np.int32) if offset.ndim else int(offset)
    at = (*(slice(None),) * axis, slice(begin, end))
    return case.with_arrays(**{name: case.arrays[name][at] for name in ("k1", "k2")}).with_options(**options)
