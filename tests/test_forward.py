"""Forward on both backends: KL, both denominators and reductions against the float64 reference."""

import numpy as np
import pytest

import streamkl_cupy as skl

from .oracle import (
    DTYPES,
    check,
    check_forward,
    check_rows,
    host_rows,
    make,
    nan_state,
    offset_case,
    run_forward,
    truth,
)

RAGGED = [(1, 1), (2, 7), (113, 203), (203, 113), (197, 257), (257, 197)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", RAGGED, ids=str)
def test_ragged_sizes(backend, n, dtype):
    check_forward(backend, make(sum(n), dtype, batch=2, n=n))


@pytest.mark.parametrize("dtype", DTYPES)
def test_about_a_thousand(backend, dtype):
    check_forward(backend, make(3, dtype, batch=1, heads=2, heads_k=(1, 2), n=(1023, 1024)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n_q", [1, 7, 16])
@pytest.mark.parametrize("masked", [False, True])
def test_few_rows_and_many_keys(backend, n_q, dtype, masked):
    """On a GPU the keys of a row are then split over blocks, and merged."""
    options = {"causal": True, "window": (3000, -1)} if masked else {}
    check_forward(backend, make(n_q, dtype, batch=1, heads=2, heads_k=(1, 2), n=(n_q, 5000), **options))


@pytest.mark.parametrize("heads", [(4, 1, 1), (4, 4, 1), (4, 1, 4), (6, 3, 2), (5, 5, 5)], ids=str)
def test_grouped_heads(backend, heads):
    check_forward(backend, make(4, "float16", heads=heads[0], heads_k=heads[1:]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("lengths", [None, [53, 0, 9], [0, 0, 0]], ids=str)
def test_reductions(backend, reduction, lengths, dtype):
    """A mean goes over the rows that see a key; with none of them it is 0."""
    case = make(5, dtype, reduction=reduction, seqlens_k=lengths)
    run = check_forward(backend, case)
    value = float(backend.get(run.kl))
    assert np.isfinite(value) and backend.get(run.kl).shape == ()
    if lengths == [0, 0, 0]:
        assert value == 0
    assert backend.get(run.state.kl).shape == (3, 4, 37)


@pytest.mark.parametrize("scales", [(0.125, 1.0), (3.0, 0.01), (1e-6, 1e-6)], ids=str)
def test_scales(backend, scales):
    check_forward(backend, make(6, "float16", scale1=scales[0], scale2=scales[1]))


def test_scales_and_offsets_that_change_at_every_step(backend):
    """What is planned for one step serves the next, with its own numbers."""
    case = make(14, "float16", causal=True)
    for step in range(4):
        check(backend, case.with_options(scale1=0.25 / (1 + step), scale2=0.1 * (1 + step), q_offset=16 - 9 * step))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [(37, 53), (300, 513)], ids=str)
def test_equal_sides_are_exactly_zero(backend, n, dtype):
    case = make(7, dtype, heads_k=(2, 2), d=(16, 16), n=n, causal=True)
    case = case.with_arrays(q2=case.arrays["q1"], k2=case.arrays["k1"])
    run = check_forward(backend, case)
    assert not backend.get(run.kl).any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("offset", [1024.0, 9984.0, 246016.0])
def test_common_offsets_do_no_harm(backend, offset, dtype):
    """The KL has its usual error, whatever all logits of a row have in common."""
    case = offset_case(8, offset, dtype, n=(37, 300))
    run = run_forward(backend, case)
    want = truth(case)
    check_rows(backend, case, run.state, want)
    np.testing.assert_allclose(backend.get(run.kl), want.rows.kl, rtol=1e-5, atol=5e-6, err_msg=str(case))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("offset", [0.0, 9984.0])
def test_a_converged_student_is_never_far_below_zero(backend, dtype, offset):
    case = make(9, dtype, n=(200, 400), heads_k=(2, 2), d=(16, 16)) if not offset else offset_case(9, offset, dtype, n=(200, 400))
    if not offset:
        nearly = {f"{x}2": case.arrays[f"{x}1"] * case.arrays["q1"].dtype.type(1 + 2**-7) for x in "qk"}
        case = case.with_arrays(**nearly)
    kl = backend.get(check_forward(backend, case).kl)
    assert kl.min() >= -5e-6, str(case)


def test_denormal_inputs(backend):
    """Products of denormals vanish; a denormal times a large number does not."""
    case = make(10, "float16", n=(20, 30))
    tiny = {name: a * np.float16(2.0**-22) if name[0] == "q" else a * np.float16(4096) for name, a in case.arrays.items()}
    run = check_forward(backend, case.with_arrays(**tiny).with_options(scale1=100.0, scale2=100.0))
    assert backend.get(run.kl).max() > 1e-3


def test_denormal_float32_inputs(backend):
    case = make(10, "float32", n=(20, 30))
    tiny = {name: a * np.float32(2.0**-132) if name[0] == "q" else a * np.float32(2.0**120) for name, a in case.arrays.items()}
    check_forward(backend, case.with_arrays(**tiny).with_options(scale1=2.0**12, scale2=2.0**12))


def test_products_beyond_float16(backend):
    case = make(11, "float16", n=(20, 30))
    big = {name: (a * np.float16(300)) for name, a in case.arrays.items()}
    run = check_forward(backend, case.with_arrays(**big).with_options(scale1=2.0**-12, scale2=2.0**-12))
    assert backend.get(run.kl).max() > 1


@pytest.mark.parametrize("dtype", DTYPES)
def test_sharp_distributions(backend, dtype):
    """Logits of a hundred and more: one key takes it all, and the KL is as large as the logits."""
    run = check_forward(backend, make(12, dtype, size=6.0))
    assert backend.get(run.kl).max() > 30


@pytest.mark.parametrize("sizes", [{"n": (0, 5)}, {"n": (5, 0)}, {"n": (0, 0)}, {"batch": 0}], ids=str)
@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_nothing_to_do(backend, sizes, reduction):
    run = check_forward(backend, make(13, "float16", reduction=reduction, **sizes))
    assert not backend.get(run.kl).any()


def test_denominators_are_properties_of_the_state(backend):
    case = make(14, "float16", seqlens_k=[53, 0, 7])
    run, want = run_forward(backend, case), truth(case).rows
    for name in ("lse1", "lse2"):
        for holder in (run.state, run.state.rows):
            np.testing.assert_allclose(backend.get(getattr(holder, name)), getattr(want, name), rtol=1e-5, atol=5e-6)


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize("n", [(37, 53), (3, 4000)], ids=str)
def test_refilling(backend, n, reduction):
    """`out` and `workspace` of an earlier call, with other numbers in between: the same bits as a fresh call, in the same memory."""
    first, second = (make(seed, "float16", n=n, causal=True, reduction=reduction) for seed in (15, 16))
    inputs = [{name: backend.put(a) for name, a in case.arrays.items()} for case in (first, second)]
    options = first.options
    workspace = backend.bytes(skl.workspace_size(**inputs[0], **options))
    fresh = [skl.forward(**arrays, **options) for arrays in inputs]
    out = nan_state(backend, first)
    for i in (0, 1, 0):
        kl, state = skl.forward(**inputs[i], **options, out=out, workspace=workspace)
        assert state.rows.kl is out.rows.kl
        np.testing.assert_array_equal(backend.get(kl), backend.get(fresh[i][0]))
        for got, want in zip(host_rows(backend, state), host_rows(backend, fresh[i][1]), strict=True):
            np.testing.assert_array_equal(got, want)


def test_inputs_are_never_written(backend):
    case = make(17, "bfloat16", causal=True)
    run = check_forward(backend, case)
    for name, array in run.inputs.items():
        np.testing.assert_array_equal(backend.get(array).view(np.uint16), case.arrays[name].view(np.uint16))


def test_rows_do_not_depend_on_each_other(backend):
    """Half of the rows in a call of their own give the same numbers, up to the order of a sum."""
    case = make(18, "float16", n=(64, 300))
    whole = backend.get(check_forward(backend, case).kl)
    part = case.with_arrays(q1=case.arrays["q1"][:, :, 32:], q2=case.arrays["q2"][:, :, 32:])
    np.testing.assert_allclose(backend.get(check_forward(backend, part).kl), whole[:, :, 32:], rtol=1e-5, atol=1e-6)
