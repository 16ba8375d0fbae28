"""Element types and head dimensions: every class of width, odd ones that are padded, sides of different widths, on both backends."""

import numpy as np
import pytest

import streamkl_cupy as skl
from streamkl_cupy.checks import SIDES

from .backends import MIXED_DIMS, WIDE_DIMS
from .oracle import DTYPES, NUMPY, check, check_gradients, check_rows, host_rows, make, row_weights, run_forward, truth

SMALL = {"batch": 2, "heads": 4, "heads_k": (2, 1), "n": (21, 45)}
CLASSES = (8, 16, 32, 40, 64, 80, 96, 128, 160, 192, 224, 256)
ODD = (1, 2, 3, 7, 9, 15, 17, 33, 65, 100, 127, 129, 193, 250, 255)


@pytest.mark.parametrize("d", CLASSES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_head_dimensions(backend, d, dtype):
    """Each class that is padded to in shared memory, whole and with columns to spare."""
    case = make(d, dtype, **SMALL, d=(d, d), causal=True)
    check(backend, case, row_weights(case))


@pytest.mark.parametrize("d", ODD)
@pytest.mark.parametrize("dtype", DTYPES)
def test_odd_head_dimensions(backend, d, dtype):
    """No multiple of 8: copied padded on a GPU, gradients copied back; the scale is that of the caller's width."""
    case = make(d, dtype, **SMALL, d=(d, d))
    check(backend, case, row_weights(case))


@pytest.mark.parametrize("d", WIDE_DIMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_wide_head_dimensions(backend, d, dtype):
    """Beyond 256 the kernels loop over chunks of columns; absorbed latent attention has 576."""
    case = make(d, dtype, **SMALL, d=(d, d), causal=True)
    check(backend, case, row_weights(case))


@pytest.mark.parametrize("d", MIXED_DIMS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_sides_of_different_widths(backend, d, dtype):
    case = make(sum(d), dtype, **SMALL, d=d)
    check(backend, case, row_weights(case))


@pytest.mark.parametrize("d", [(64, 128), (256, 256), (192, 192), (320, 320)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_wide_ones_over_many_tiles(backend, d, dtype):
    case = make(1, dtype, batch=1, heads=2, heads_k=(1, 2), n=(150, 290), d=d, window=(120, 3))
    check(backend, case, row_weights(case))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", ["name", "type", "numpy.dtype"])
@pytest.mark.parametrize("wide", [False, True])
def test_gradients_have_the_dtype_asked_for(backend, dtype, form, wide):
    name = "float32" if wide else dtype
    given = {"name": name, "type": NUMPY[name].type, "numpy.dtype": NUMPY[name]}[form]
    case = make(2, dtype, **SMALL)
    run = run_forward(backend, case)
    grads = skl.backward(run.state, wrt=SIDES, dtype=given)
    assert all(getattr(grads, n).dtype == NUMPY[name] for n in SIDES)
    check_gradients(backend, case, grads, truth(case, None, SIDES, name))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
def test_rows_are_float32(backend, dtype, reduction):
    """KL, denominators and reduced values, whatever goes in."""
    run = run_forward(backend, make(3, dtype, **SMALL, reduction=reduction))
    arrays = [run.kl, *run.state.rows, *(run.state.reduced or ()), run.state.lse1, run.state.lse2]
    assert all(array.dtype == np.float32 for array in arrays)


@pytest.mark.parametrize("wrt", [SIDES, ("k1",), ("q1", "q2"), ("k2", "q2")], ids="-".join)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("d", [(16, 24), (64, 128), (20, 31), (300, 320)], ids=str)
def test_float32_gradients_of_narrow_inputs(backend, wrt, dtype, d):
    case = make(4, dtype, **SMALL, d=d, causal=True)
    check(backend, case, row_weights(case), wrt=wrt, dtype="float32")


def test_one_problem_in_every_dtype(backend):
    """Numbers that all three hold exactly: the rows agree, and the narrow gradients are the wide ones, rounded."""
    case = make(5, "float32", **SMALL, causal=True)
    coarse = {name: np.round(array * 8) / 8 for name, array in case.arrays.items()}
    coarse = {name: np.clip(array, -4, 4).astype(np.float32) for name, array in coarse.items()}
    case = case.with_arrays(**coarse)
    right = truth(case, None, SIDES)
    for dtype in DTYPES:
        narrow = case.with_arrays(**{name: array.astype(NUMPY[dtype]) for name, array in coarse.items()})
        assert all(np.array_equal(narrow.arrays[name].astype(np.float32), array) for name, array in coarse.items())
        run = run_forward(backend, narrow)
        check_rows(backend, narrow, run.state, right)
        grads = skl.backward(run.state, wrt=SIDES)
        unit = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float32": 1e-5}[dtype]
        for name in SIDES:
            off = np.linalg.norm(backend.get(getattr(grads, name)).astype(np.float64) - right.grads[name])
            assert off <= unit * np.linalg.norm(right.grads[name]), f"d{name} in {dtype}"


@pytest.mark.parametrize("exponent", [-60, 60])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_whole_range_of_exponents(backend, exponent, dtype):
    """Queries of 2^60 with keys of 2^-60, and the other way round: float16 has no such numbers, and nothing goes through it."""
    case = make(6, dtype, **SMALL)
    size = {"q": NUMPY[dtype].type(2.0**exponent), "k": NUMPY[dtype].type(2.0**-exponent)}
    scaled = case.with_arrays(**{name: array * size[name[0]] for name, array in case.arrays.items()})
    plain, run = run_forward(backend, case), run_forward(backend, scaled)
    for got, want in zip(host_rows(backend, run.state), host_rows(backend, plain.state), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)
    # A gradient has the size of the other factor.
    grads = [skl.backward(r.state, wrt=SIDES, dtype="float32") for r in (plain, run)]
    for name in SIDES:
        factor = 2.0 ** (-exponent if name[0] == "q" else exponent)
        want, got = (backend.get(getattr(g, name)).astype(np.float64) for g in grads)
        np.testing.assert_allclose(got, want * factor, rtol=1e-3, atol=1e-6 * factor, err_msg=name)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_largest_numbers(backend, dtype):
    """Logits near 100 out of inputs near the end of the dtype's range, through a small scale."""
    case = make(7, dtype, **SMALL)
    largest = {"float16": 2.0**13, "bfloat16": 2.0**55, "float32": 2.0**55}[dtype]
    big = case.with_arrays(**{name: (array.astype(np.float64) * largest).astype(NUMPY[dtype]) for name, array in case.arrays.items()})
    check(backend, big.with_options(scale1=4 / largest**2, scale2=2 / largest**2), dtype="float32" if dtype != "float32" else None)


@pytest.mark.parametrize("dtype", DTYPES)
def test_signed_zeros(backend, dtype):
    """All logits 0, half of them negative zeros: uniform rows on both sides."""
    case = make(8, dtype, **SMALL)
    zeros = {name: np.copysign(np.zeros_like(array), array) for name, array in case.arrays.items()}
    run = check(backend, case.with_arrays(**zeros))
    assert not backend.get(run.kl).any()
    np.testing.assert_allclose(backend.get(run.state.lse1), np.log(45), rtol=1e-6)
