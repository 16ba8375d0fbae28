"""The parameter structs of kernels/problem.cuh as NumPy dtypes, and how they are filled.

`layout_checks` makes static_asserts of the structs below; every kernel is compiled with them, so the two sides cannot drift.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from ..problem import SIDES, Problem

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
STRUCTS = {"Matrix": MATRIX, "RowStatsArrays": ROW_STATS, "RowWeights": ROW_WEIGHTS, "Problem": PROBLEM}

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


def fill_problem(problem: Problem, matrices, vectors, rows, out=None) -> np.ndarray:
    """A PROBLEM record. `matrices`, `vectors` and `rows` map names to `ArrayView`s; vectors may lack names."""
    p = np.zeros((), PROBLEM) if out is None else out
    for name in SIDES:
        view = matrices[name]
        p[name] = (view.pointer, *problem.axis_strides(view.strides))
    p["rows"] = tuple(rows[n].pointer for n in ROW_STATS.names)
    p["row_batch_stride"] = 0 if problem.packed else problem.heads * problem.seqlen_q
    p["row_head_stride"] = problem.seqlen_q
    p["seqlen_q"], p["seqlen_k"] = problem.seqlen_q, problem.seqlen_k
    for name in ("cu_seqlens_q", "cu_seqlens_k", "seqlens_q", "seqlens_k"):
        p[name] = vectors[name].pointer if vectors.get(name) is not None else 0
    p["q_offset_mode"] = {None: BOTTOM_RIGHT, "vector": OFFSET_VECTOR}.get(problem.q_offset, ONE_OFFSET)
    p["q_offset"] = problem.q_offset if isinstance(problem.q_offset, int) else 0
    p["q_offsets"] = vectors["q_offset"].pointer if problem.q_offset == "vector" else 0
    p["window_left"], p["window_right"] = problem.window_left, problem.window_right
    p["batch"], p["heads"], p["heads_k1"], p["heads_k2"] = problem.batch, problem.heads, problem.heads_k1, problem.heads_k2
    p["head_dim1"], p["head_dim2"] = problem.head_dim1, problem.head_dim2
    p["scale1"], p["scale2"] = problem.scale1, problem.scale2
    p["log2_scale1"], p["log2_scale2"] = problem.scale1 * LOG2_E, problem.scale2 * LOG2_E
    return p
