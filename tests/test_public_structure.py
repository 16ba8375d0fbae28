"""Heads, widths, segments, buffers: what went wrong elsewhere, by its right value here, one kind of public report a test."""

import numpy as np
import pytest

import streamkl_cupy as skl
from streamkl_cupy.checks import SIDES

from .logits import ROUNDING
from .oracle import DTYPES, NUMPY, check, check_gradients, make, nan_gradients, poisoned, row_weights, run_forward, truth


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_key_that_every_query_chooses(backend, dtype):
    """cudnn-frontend#385: the gradients of one key from many queries were lost or doubled. 24 heads of 40 equal rows share it."""
    case = make(15, dtype, batch=1, heads=1, heads_k=(1, 1), n=(1, 30))
    one = check(backend, case, dtype="float32")
    many = {name: np.broadcast_to(case.arrays[name], (1, 24, 40, case.arrays[name].shape[-1])) for name in ("q1", "q2")}
    all_rows = check(backend, case.with_arrays(**many), dtype="float32")
    for name in ("k1", "k2"):
        got, want = backend.get(getattr(all_rows.grads, name)), 960 * backend.get(getattr(one.grads, name))
        assert np.linalg.norm(got - want) <= ROUNDING[dtype] * np.linalg.norm(want), name


@pytest.mark.parametrize("mask", [{}, {"causal": True}], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_segments_without_rows_or_keys(backend, dtype, mask):
    """flash-attention#2562, #2568, #2421, #1537, #1713: faults, NaN, or gradients that were never written.
    The reported segments, an eighth as long."""
    ends = {"cu_seqlens_q": [0, 0, 1208, 2048, 2048], "cu_seqlens_k": [0, 2538, 4280, 5120, 8192]}
    ends = {name: [n // 8 for n in values] for name, values in ends.items()}
    case = poisoned(make(16, dtype, layout="thd", heads=2, heads_k=(1, 2), n=(256, 1024), **ends, **mask))
    run = check(backend, case)
    for name in ("k1", "k2"):
        grad = backend.get(getattr(run.grads, name)).astype(float)
        assert not grad[:317].any() and not grad[640:].any(), name


@pytest.mark.parametrize("d", [192, 256])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_wide_heads_have_a_backward(backend, d, dtype):
    """flash-attention#2902, #51, #1306: shared memory of the backward overflowed at 192 and 256; results differed at 256."""
    case = make(17, dtype, batch=1, heads=3, heads_k=(1, 3), n=(97, 130), d=(d, d), causal=True)
    check(backend, case, row_weights(case))


def test_heads_that_are_no_power_of_two(backend):
    """PaddleFleet#1938, xformers#1027: 24 heads of 576 columns, one key head ("12 is not a valid Repetition")."""
    case = make(18, "bfloat16", batch=1, heads=24, heads_k=(1, 8), n=(11, 70), d=(576, 128), causal=True)
    check(backend, case, row_weights(case))


def test_image_patches(backend):
    """Attention transfer between vision transformers: 12 heads of 64, 197 patches, no mask, float16."""
    case = make(19, "float16", batch=1, heads=12, heads_k=(12, 12), n=(197, 197), d=(64, 64), reduction="mean")
    check(backend, case)


@pytest.mark.parametrize("wrong", ["float16", "float64", "bfloat16"])
def test_buffers_of_a_wrong_dtype_are_refused_before_anything_is_written(backend, wrong):
    """cudnn-frontend#571, #572: misaligned stores, garbage, NaN, and inputs already overwritten when the error came."""
    case = make(20, "float32")
    run = run_forward(backend, case)
    out = nan_gradients(backend, case)
    out = out._replace(k2=backend.put(np.full(case.arrays["k2"].shape, np.nan, NUMPY[wrong])))
    with pytest.raises(TypeError, match="k2"):
        skl.backward(run.state, wrt=SIDES, out=out)
    assert all(np.isnan(backend.get(array).astype(np.float32)).all() for array in out)
    for name, array in run.inputs.items():
        np.testing.assert_array_equal(backend.get(array), case.arrays[name])


@pytest.mark.parametrize("form", ["rows", "scalar"])
def test_weights_of_zero_give_zeros(backend, form):
    """Megatron-LM#5643: a coefficient of 0 gave no gradient at all, and data-parallel training stopped."""
    case = make(21, "bfloat16")
    grads = check(backend, case, np.zeros((3, 4, 37), np.float32) if form == "rows" else 0.0).grads
    assert all(array is not None and not backend.get(array).any() for array in grads)


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
def test_no_valid_row_at_all(backend, reduction):
    """attention-gym#378, Megatron-LM#6910: the path without valid rows had no gradient, or a mean of NaN."""
    case = poisoned(make(22, "float16", seqlens_k=[0, 0, 0], reduction=reduction))
    run = check(backend, case)
    assert not backend.get(run.kl).any() and not any(backend.get(array).any() for array in run.grads)


def test_gradients_that_nobody_asked_for_are_not_made(backend):
    """Megatron-LM#5099: gigabytes of zeros for a teacher that is never trained."""
    run = run_forward(backend, make(23, "float16"))
    grads = skl.backward(run.state)
    assert grads.q1 is None and grads.k1 is None and grads.q2 is not None and grads.k2 is not None


@pytest.mark.parametrize("d", [(128, 64), (256, 256)], ids=str)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_deterministic_means_the_same_bits(backend, d, dtype):
    """flash-attention#2244, #1306: deterministic=True, and dQ still moved by 1e-4."""
    case = make(24, dtype, batch=1, heads=4, heads_k=(2, 2), n=(130, 200), d=d, causal=True)
    run, weight = run_forward(backend, case), backend.put(row_weights(case))
    first, *others = (skl.backward(run.state, weight, wrt=SIDES, deterministic=True) for _ in range(6))
    check_gradients(backend, case, first, truth(case, row_weights(case), SIDES))
    for other in others:
        for name in SIDES:
            assert backend.get(getattr(other, name)).tobytes() == backend.get(getattr(first, name)).tobytes(), name
