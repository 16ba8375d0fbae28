"""The Hopper forward in clusters of two row tiles that bring keys to each other, where they read the same ones."""

import numpy as np
import pytest

import streamkl_cupy as skl

from ..oracle import check_forward, make

pytestmark = pytest.mark.gpu

CASES = {
    "full": {"n": (1000, 900)},
    "causal": {"n": (1300, 1300), "causal": True},
    "causal from an offset": {"n": (500, 300), "causal": True, "q_offset": 30},
    "window": {"n": (800, 1700), "window": (150, 20)},
    "two heads of other keys in a cluster": {"n": (550, 700), "heads": 4, "heads_k": (4, 4)},
    "two heads that share keys in a cluster": {"n": (550, 700), "heads": 8, "heads_k": (2, 1), "causal": True},
    "few blocks, split": {"n": (330, 3000), "heads": 1, "heads_k": (1, 1), "batch": 1},
    "the last blocks split": {"n": (300, 1500), "heads": 70, "heads_k": (35, 70), "batch": 1},
    "padded": {"n": (400, 800), "batch": 4, "seqlens_q": [400, 0, 31, 200], "seqlens_k": [800, 12, 161, 0], "causal": True},
}


@pytest.fixture(autouse=True)
def hopper(device):
    from streamkl_cupy.gpu.device import device_info

    if device_info(0).capability != (9, 0):
        pytest.skip("clusters are Hopper's")


def same_bits_each_time(device, case):
    options = {n: device.put(v) if isinstance(v, np.ndarray) else v for n, v in case.options.items()}
    inputs = {n: device.put(a) for n, a in case.arrays.items()}
    assert "in clusters of 2" in str(skl.explain(*inputs.values(), **options))
    first, *others = (device.get(skl.forward(**inputs, **options)[0]) for _ in range(5))
    for again in others:
        np.testing.assert_array_equal(first, again)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("d", [(64, 128), (128, 128), (16, 96)], ids=str)
def test_right_and_the_same_each_time(device, name, d):
    case = make(61, "bfloat16", d=d, **{"batch": 2, "heads": 2, **CASES[name]})
    check_forward(device, case)
    same_bits_each_time(device, case)


def test_packed(device):
    packed = {"layout": "thd", "n": (1411, 1500), "cu_seqlens_q": [0, 0, 640, 650, 1405], "cu_seqlens_k": [0, 30, 700, 700, 1500]}
    case = make(62, "float16", d=(64, 128), heads=2, causal=True, **packed)
    check_forward(device, case)
    same_bits_each_time(device, case)
