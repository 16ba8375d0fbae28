"""The Hopper backward for few query rows and many keys: what takes it, and its results with rings that wrap and keys that are split."""

import numpy as np
import pytest

import streamkl_cupy as skl

from ..oracle import check, make, poisoned, row_weights
from .test_fused import explained, hopper  # noqa: F401

pytestmark = pytest.mark.gpu

KERNEL = "backward_few_rows_sm90.cu"
SIZES = {"heads": 8, "heads_k": (8, 8), "batch": 2, "n": (5, 12001), "d": (64, 128)}
MASKS = {
    "full": {},
    "causal": {"causal": True},
    "causal from an offset": {"causal": True, "q_offset": 7000},
    "window": {"window": (1500, 40), "q_offset": 5000},
    "rows that see nothing": {"window": (3000, 0), "q_offset": -3},
    "padded": {"seqlens_q": [5, 2], "seqlens_k": [70, 12001]},
    "a batch element without keys": {"seqlens_q": [5, 5], "seqlens_k": [9000, 0]},
}


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_masks(device, dtype, weighted, name):
    """NaN wherever nothing is seen. With a weight for each row float16 takes the separate kernels."""
    case = poisoned(make(51, dtype, **SIZES | MASKS[name]))
    assert KERNEL in explained(device, case)
    check(device, case, row_weights(case) if weighted else None)


@pytest.mark.parametrize("d", [(16, 16), (32, 128), (64, 64), (96, 64), (128, 96), (128, 128), (8, 120)], ids=str)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_columns(device, dtype, d):
    case = make(52, dtype, causal=True, **SIZES | {"d": d})
    assert KERNEL in explained(device, case)
    check(device, case)


@pytest.mark.parametrize("rows", [1, 16, 64])
def test_rows(device, rows):
    case = make(53, "bfloat16", **SIZES | {"batch": 1, "n": (rows, 12001)})
    assert KERNEL in explained(device, case)
    check(device, case, row_weights(case))


@pytest.mark.parametrize("heads_k, wrt", [((2, 2), ("q1", "k1")), ((1, 2), ("q2", "k2")), ((4, 1), ("q1", "k1"))], ids=str)
@pytest.mark.parametrize("layout", ["bhsd", "bshd", "sbhd"])
def test_heads_that_share_keys(device, layout, heads_k, wrt):
    case = make(54, "bfloat16", layout=layout, causal=True, **SIZES | {"heads_k": heads_k})
    assert KERNEL in explained(device, case, wrt)
    check(device, case, row_weights(case))


@pytest.mark.parametrize("weight", [1e-9, -3.0, 1e6])
def test_one_weight_of_any_size_on_float16(device, weight):
    case = make(55, "float16", **SIZES)
    inputs = {n: device.put(a) for n, a in case.arrays.items()}
    _, state = skl.forward(**inputs)
    wide = skl.backward(state, weight, wrt=("q2", "k2"), dtype="float32")
    plain = skl.backward(state, 1.0, wrt=("q2", "k2"), dtype="float32")
    for name in ("q2", "k2"):
        got, want = (device.get(getattr(g, name)).astype(np.float64) for g in (wide, plain))
        assert np.linalg.norm(got / weight - want) <= 1e-3 * np.linalg.norm(want), name
