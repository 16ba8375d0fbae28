"""The Hopper forward for few rows against many keys: all rows that see the same keys are one tile."""

import numpy as np
import pytest

import streamkl_cupy as skl

from ..oracle import check, make

pytestmark = pytest.mark.gpu

KERNEL = "forward_few_rows_sm90.cu"
CASES = {
    "one row": {"n": (1, 5000)},
    "sixteen": {"n": (16, 3001), "heads": 8, "heads_k": (2, 8)},
    "a group of heads is one tile": {"n": (7, 2500), "heads": 8, "heads_k": (1, 1), "causal": True},
    "groups of unequal size": {"n": (5, 1100), "heads": 12, "heads_k": (3, 2), "causal": True, "q_offset": 700},
    "a whole tile": {"n": (64, 1031), "causal": True},
    "window": {"n": (20, 2000), "window": (500, 20)},
    "padded": {"n": (30, 1500), "batch": 3, "seqlens_q": [30, 0, 7], "seqlens_k": [1500, 12, 700], "causal": True},
    "rows that see nothing": {"n": (6, 1100), "window": (5, 0), "q_offset": -3},
    "more sequences than multiprocessors": {"n": (2, 1024), "batch": 150, "heads": 2, "heads_k": (1, 2)},
}


@pytest.fixture(autouse=True)
def hopper(device):
    from streamkl_cupy.gpu.device import device_info

    if device_info(0).capability != (9, 0):
        pytest.skip("the kernel for few rows is compiled for Hopper")


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_right_and_the_same_each_time(device, dtype, name):
    case = make(51, dtype, **{"batch": 1, "d": (64, 128), **CASES[name]})
    options = {n: device.put(v) if isinstance(v, np.ndarray) else v for n, v in case.options.items()}
    inputs = {n: device.put(a) for n, a in case.arrays.items()}
    assert KERNEL in str(skl.explain(*inputs.values(), **options))
    check(device, case)
    first, again = (device.get(skl.forward(**inputs, **options)[0]) for _ in range(2))
    np.testing.assert_array_equal(first, again)


@pytest.mark.parametrize("d", [(16, 16), (32, 128), (96, 64), (128, 128), (8, 120)], ids=str)
def test_columns(device, d):
    check(device, make(52, "bfloat16", batch=1, n=(9, 1500), d=d))
