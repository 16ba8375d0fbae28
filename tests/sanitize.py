"""Every kernel once or twice on small shapes, for compute-sanitizer:

    compute-sanitizer --tool memcheck --error-exitcode 1 python -m tests.sanitize

CuPy's memory pool is off, so that every array has bounds of its own. Results are compared with the reference as in the tests.
"""

from __future__ import annotations

import sys

import cupy
import numpy as np

import streamkl_cupy as skl

from .backends import CuPyBackend
from .gpu.forcing import LIKE, planned_like
from .oracle import check, make, row_weights

CASES = {
    "plain": {"n": (150, 203), "d": (64, 128)},
    "causal, grouped heads": {"n": (97, 130), "d": (128, 64), "heads": 4, "heads_k": (1, 2), "causal": True},
    "window, padded": {"n": (70, 90), "batch": 2, "d": (32, 128), "window": (20, 5), "seqlens_q": [70, 13], "seqlens_k": [60, 90]},
    "packed": {"layout": "thd", "n": (150, 140), "d": (64, 64), "cu_seqlens_q": [0, 0, 70, 140], "cu_seqlens_k": [0, 40, 130, 130]},
    "fused": {"n": (330, 900), "d": (64, 128), "heads_k": (4, 4), "batch": 1},
    "split over the keys": {"n": (70, 900), "d": (128, 128), "batch": 1},
    "few rows": {"n": (3, 1100), "d": (128, 64), "batch": 1, "heads": 4, "heads_k": (1, 2), "causal": True},
    "few rows, padded": {"n": (3, 1100), "d": (64, 64), "batch": 2, "causal": True, "seqlens_q": [3, 2], "seqlens_k": [1100, 70]},
    "hostile vectors": {"n": (70, 90), "batch": 2, "d": (64, 64), "seqlens_q": [-5, 1 << 30], "seqlens_k": [1 << 30, -1]},
}
WIDE = {"n": (40, 70), "batch": 1, "heads": 2, "heads_k": (1, 2), "causal": True}


def main() -> int:
    cupy.cuda.set_allocator(None)
    backend = CuPyBackend()
    for name, sizes in CASES.items():
        for dtype in ("float16", "bfloat16"):
            one(backend, f"{name}, {dtype}", make(31, dtype, **{"batch": 2, **sizes}), hostile="hostile" in name)
    one(backend, "fused, float16, one weight", make(34, "float16", **{**CASES["fused"]}), weighted=False)
    one(backend, "few rows, float16, one weight", make(36, "float16", **{**CASES["few rows"]}), weighted=False)
    one(backend, "deterministic", make(35, "bfloat16", **{**CASES["fused"]}), deterministic=True)
    for dtype, d in (("float32", (40, 24)), ("float16", (320, 40)), ("float16", (256, 192))):
        one(backend, f"wide, {dtype}, {d}", make(32, dtype, d=d, **WIDE))
    for like in LIKE:
        with planned_like(like):
            for name in ("plain", "causal, grouped heads", "packed"):
                one(backend, f"{name}, {like}", make(33, "float16", **{"batch": 2, **CASES[name]}))
    rows = [
        skl.forward(*(backend.put(a) for a in make(s, "float16", n=(40, 30)).arrays.values()), reduction="mean")[1].rows for s in (1, 2)
    ]
    skl.merge(rows)
    cupy.cuda.runtime.deviceSynchronize()
    print("all kernels ran")
    return 0


def one(backend, name, case, hostile=False, weighted=True, **options) -> None:
    print(name, flush=True)
    if not hostile:
        check(backend, case, row_weights(case) if weighted else None, **options)
        return
    inputs = {n: backend.put(a) for n, a in case.arrays.items()}
    options = {n: backend.put(np.asarray(v)) if isinstance(v, np.ndarray) else v for n, v in case.options.items()}
    skl.backward(skl.forward(**inputs, **options)[1], wrt=("q1", "k1", "q2", "k2"))
    backend.synchronize()


if __name__ == "__main__":
    sys.exit(main())
