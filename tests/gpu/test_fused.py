"""The Hopper backward that takes dQ and dK of a side together: sizes at which it is chosen, several query tiles deep."""

import numpy as np
import pytest

import streamkl_cupy as skl

from ..oracle import check, make, row_weights

pytestmark = pytest.mark.gpu

SIZES = {"heads": 4, "heads_k": (4, 4), "batch": 1, "n": (330, 900)}
MASKS = {
    "full": {},
    "causal": {"causal": True},
    "causal from an offset": {"causal": True, "q_offset": 100},
    "window": {"window": (150, 40)},
    "rows that see nothing": {"window": (30, 0), "q_offset": -200},
    "padded": {"batch": 2, "seqlens_q": [330, 17], "seqlens_k": [70, 900]},
}


def explained(device, case, wrt=("q2", "k2")):
    options = {n: device.put(v) if isinstance(v, np.ndarray) else v for n, v in case.options.items()}
    return str(skl.explain(*(device.put(a) for a in case.arrays.values()), wrt=wrt, **options))


@pytest.fixture(autouse=True)
def hopper(device):
    from streamkl_cupy.gpu.device import device_info

    if device_info(0).capability != (9, 0):
        pytest.skip("the fused backward is compiled for Hopper")


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_masks(device, dtype, weighted, name):
    """With a weight for each row float16 takes the separate kernels."""
    case = make(41, dtype, d=(64, 128), **SIZES | MASKS[name])
    assert "backward_sm90.cu" in explained(device, case)
    check(device, case, row_weights(case) if weighted else None)


@pytest.mark.parametrize("d", [(16, 16), (32, 128), (64, 64), (96, 64), (128, 96), (128, 128), (8, 120)], ids=str)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_columns(device, dtype, d):
    case = make(42, dtype, d=d, causal=True, **SIZES)
    assert "backward_sm90.cu" in explained(device, case)
    check(device, case)


@pytest.mark.parametrize("heads_k", [(1, 4), (4, 2), (2, 1)])
def test_heads_that_share_keys(device, heads_k):
    case = make(43, "bfloat16", d=(64, 64), **SIZES | {"heads_k": heads_k, "n": (130, 2000)})
    assert "backward_sm90.cu" in explained(device, case, wrt=("q1", "k1", "q2", "k2"))
    check(device, case, row_weights(case))


def test_packed(device):
    packed = {"layout": "thd", "n": (600, 2000), "cu_seqlens_q": [0, 200, 200, 590], "cu_seqlens_k": [0, 900, 1000, 2000]}
    case = make(44, "bfloat16", d=(64, 128), **SIZES | packed, causal=True)
    assert "backward_sm90.cu" in explained(device, case)
    check(device, case, row_weights(case))


@pytest.mark.parametrize("weight", [1e-9, -3.0, 1e6])
def test_one_weight_of_any_size_on_float16(device, weight):
    case = make(45, "float16", d=(64, 64), **SIZES)
    inputs = {n: device.put(a) for n, a in case.arrays.items()}
    _, state = skl.forward(**inputs)
    wide = skl.backward(state, weight, wrt=("q2", "k2"), dtype="float32")
    plain = skl.backward(state, 1.0, wrt=("q2", "k2"), dtype="float32")
    for name in ("q2", "k2"):
        got, want = (device.get(getattr(g, name)).astype(np.float64) for g in (wide, plain))
        assert np.linalg.norm(got / weight - want) <= 1e-3 * np.linalg.norm(want), name
