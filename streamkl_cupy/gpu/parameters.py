"""The parameter structs of kernels/problem.cuh as NumPy dtypes, and how they are filled.

`layout_checks` makes static_asserts of the structs below; every kernel is compiled with them, so the two sides cannot drift.
"""

from __future__ import annotations

import struct
from itertools import pairwise

import numpy as np

from ..checks import SIDES
from ..problem import Problem

POINTER, I64, I32, F32 = np.uint64, np.int64, np.int32, np.float32
MATRIX = np.dtype([("data", POINTER), ("batch_stride", I64), ("head_stride", I64), ("row_stride", I64)], align=True)
ROW_STATS = np.dtype([(n, POINTER) for n in ("kl", "ref1", "logsum1", "ref2", "logsum2")], align=True)
ROW_WEIGHTS = np.dtype(
    [
        ("data", POINTER),
        ("factor", POINTER),
        ("batch_stride", I64),
        ("head_stride", I64),
        ("row_stride", I64),
        ("value", F32),
        ("data_type", I32),
    ],
    align=True,
)
PROBLEM = np.dtype(
    [(n, MATRIX) for n in SIDES]
    + [("rows", ROW_STATS)]
    + [(n, I64) for n in ("row_batch_stride", "row_head_stride", "seqlen_q", "seqlen_k")]
    + [(n, POINTER) for n in ("cu_seqlens_q", "cu_seqlens_k", "seqlens_q", "seqlens_k", "q_offsets")]
    + [(n, I64) for n in ("q_offset", "window_left", "window_right")]
    + [(n, I32) for n in ("batch", "heads", "heads_k1", "heads_k2", "head_dim1", "head_dim2", "q_offset_mode")]
    + [(n, F32) for n in ("scale1", "scale2", "log2_scale1", "log2_scale2")]
    + [("padding", I32)],
    align=True,
)
FORWARD_OUTPUT = np.dtype(
    [("rows", ROW_STATS), ("partial", ROW_STATS), ("partial_stride", I64), ("whole_tiles", I32), ("splits", I32)], align=True
)
GRADIENT_OUTPUT = np.dtype([(n, MATRIX) for n in SIDES] + [("as_float32", I32), ("padding", I32)], align=True)
FEW_ROWS = np.dtype([("all_rows", I64), ("heads", I32), ("splits", I32)], align=True)
MERGE_INPUT = np.dtype(
    [("first", ROW_STATS)]
    + [(f"{n}_stride", I64) for n in ("kl", "ref1", "logsum1", "ref2", "logsum2")]
    + [(n, I64) for n in ("rows", "parts")],
    align=True,
)
STRUCTS = {
    "Matrix": MATRIX,
    "RowStatsArrays": ROW_STATS,
    "RowWeights": ROW_WEIGHTS,
    "Problem": PROBLEM,
    "ForwardOutput": FORWARD_OUTPUT,
    "GradientOutput": GRADIENT_OUTPUT,
    "FewRows": FEW_ROWS,
    "MergeInput": MERGE_INPUT,
}

BOTTOM_RIGHT, ONE_OFFSET, OFFSET_VECTOR = 0, 1, 2
WEIGHT_TYPES = {"float32": 0, "float64": 1, "float16": 2, "bfloat16": 3}
LOG2_E = 1.4426950408889634


def layout_checks(source: str) -> str:
    """CUDA source that fails to compile where a struct that `source` declares differs from its dtype here.

    NVRTC has no offsetof; the order of the fields, the size and alignment of each, and the size of the whole say the same.
    """
    lines = []
    for name, dtype in STRUCTS.items():
        if f"struct {name} {{" not in source:
            continue
        lines.append(f'static_assert(sizeof({name}) == {dtype.itemsize}, "{name} has another size in parameters.py");')
        for field in dtype.names:
            size, alignment = dtype[field].itemsize, dtype[field].alignment
            lines.append(
                f"static_assert(sizeof({name}::{field}) == {size} && alignof(decltype({name}::{field})) == {alignment}, "
                f'"{name}.{field} is another type in parameters.py");'
            )
        addresses = [f"static_cast<const void*>(&s.{field})" for field in dtype.names]
        ordered = " && ".join(f"{a} < {b}" for a, b in pairwise(addresses))
        lines.append(f"constexpr bool in_order(const {name}& s) {{ return {ordered}; }}")
        lines.append(f'static_assert(in_order({name}{{}}), "the fields of {name} have another order in parameters.py");')
    return "\n".join(lines) + "\n"


def _packer(dtype: np.dtype):
    """A function from the flat list of a struct's values to a size-1 array of it: field by field NumPy takes ten times as long."""
    codes = {"u8": "Q", "i8": "q", "i4": "i", "f4": "f"}

    def flat(d: np.dtype) -> str:
        return "".join(flat(d[n]) for n in d.names) if d.names else codes[d.str[1:]]

    layout = struct.Struct("=" + flat(dtype))
    assert layout.size == dtype.itemsize, "no struct here has padding between its fields"
    return lambda *values: np.frombuffer(layout.pack(*values), dtype)


_pack_problem, pack_row_weights = _packer(PROBLEM), _packer(ROW_WEIGHTS)
_pack_forward_output, _pack_gradient_output = _packer(FORWARD_OUTPUT), _packer(GRADIENT_OUTPUT)
_pack_merge_input, _pack_row_stats, _pack_few_rows = _packer(MERGE_INPUT), _packer(ROW_STATS), _packer(FEW_ROWS)


def _pointers(rows) -> tuple[int, ...]:
    return tuple(rows[n].pointer for n in ROW_STATS.names)


def fill_problem(problem: Problem, matrices, vectors, rows) -> np.ndarray:
    """A PROBLEM record. `matrices`, `vectors` and `rows` map names to `ArrayView`s; vectors may lack names."""
    q_offset = problem.q_offset
    return _pack_problem(
        *(v for name in SIDES for v in (matrices[name].pointer, *problem.axis_strides(matrices[name].strides))),
        *_pointers(rows),
        0 if problem.packed else problem.heads * problem.seqlen_q,
        problem.seqlen_q,
        problem.seqlen_q,
        problem.seqlen_k,
        *(vectors[n].pointer if vectors.get(n) is not None else 0 for n in ("cu_seqlens_q", "cu_seqlens_k", "seqlens_q", "seqlens_k")),
        vectors["q_offset"].pointer if q_offset == "vector" else 0,
        q_offset if isinstance(q_offset, int) else 0,
        problem.window_left,
        problem.window_right,
        problem.batch,
        problem.heads,
        problem.heads_k1,
        problem.heads_k2,
        problem.head_dim1,
        problem.head_dim2,
        BOTTOM_RIGHT if q_offset is None else OFFSET_VECTOR if q_offset == "vector" else ONE_OFFSET,
        problem.scale1,
        problem.scale2,
        problem.scale1 * LOG2_E,
        problem.scale2 * LOG2_E,
        0,
    )


def forward_output(rows, partial, partial_stride: int, whole_tiles: int, splits: int) -> np.ndarray:
    """A FORWARD_OUTPUT record: where the row statistics go, and where those of tiles that are split over the keys go first."""
    return _pack_forward_output(*_pointers(rows), *_pointers(partial), partial_stride, whole_tiles, splits)


def few_rows(all_rows: int, heads: int, splits: int) -> np.ndarray:
    """A FEW_ROWS record: query rows in all, heads of a tile, and blocks of a tile."""
    return _pack_few_rows(all_rows, heads, splits)


def row_stats(rows) -> np.ndarray:
    """A ROW_STATS record."""
    return _pack_row_stats(*_pointers(rows))


def merge_input(rows, strides, count: int, parts: int) -> np.ndarray:
    """A MERGE_INPUT record: part i of each array lies i of its stride (in elements) from `rows`."""
    return _pack_merge_input(*_pointers(rows), *strides, count, parts)


def gradient_output(problem: Problem, grads, as_float32: bool) -> np.ndarray:
    """A GRADIENT_OUTPUT record; `grads` maps the wanted names to `ArrayView`s."""
    values = []
    for name in SIDES:
        view = grads.get(name)
        values += (0, 0, 0, 0) if view is None else (view.pointer, *problem.axis_strides(view.strides))
    return _pack_gradient_output(*values, int(as_float32), 0)
