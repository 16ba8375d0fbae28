"""Backward on both backends: every subset of the gradients, every form of the upstream weights, both dtypes of the result."""

import itertools

import numpy as np
import pytest

import streamkl_cupy as skl
from streamkl_cupy.checks import SIDES

from .oracle import (
    DTYPES,
    NUMPY,
    check,
    check_gradients,
    make,
    nan_gradients,
    offset_case,
    row_weights,
    run_forward,
    truth,
)

SUBSETS = [names for count in range(1, 5) for names in itertools.combinations(SIDES, count)]


@pytest.mark.parametrize("wrt", SUBSETS, ids="-".join)
def test_every_subset(backend, wrt):
    case = make(1, "float16", heads_k=(2, 2), causal=True)
    run = check(backend, case, row_weights(case), wrt=wrt)
    assert [name for name in SIDES if getattr(run.grads, name) is not None] == list(wrt)


@pytest.mark.parametrize("wrt", ["q2", ["k2", "q1"], {"k1"}, ("k2", "k2")], ids=str)
def test_forms_of_wrt(backend, wrt):
    case = make(1, "float32")
    run = run_forward(backend, case)
    grads = skl.backward(run.state, wrt=wrt)
    names = [wrt] if isinstance(wrt, str) else list(dict.fromkeys(wrt))
    check_gradients(backend, case, grads, truth(case, wrt=tuple(n for n in SIDES if n in names)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [(1, 1), (113, 203), (203, 113), (197, 257)], ids=str)
def test_ragged_sizes(backend, n, dtype):
    case = make(sum(n), dtype, batch=2, n=n)
    check(backend, case, row_weights(case))


@pytest.mark.parametrize("dtype", DTYPES)
def test_about_a_thousand(backend, dtype):
    case = make(3, dtype, batch=1, heads=2, heads_k=(1, 2), n=(1023, 1024))
    check(backend, case, row_weights(case))


@pytest.mark.parametrize("n", [(1, 5000), (16, 5000), (3000, 3)], ids=str)
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_long_and_thin(backend, n, dtype):
    check(backend, make(4, dtype, batch=1, heads=2, heads_k=(1, 2), n=n))


@pytest.mark.parametrize("heads", [(4, 1, 1), (4, 4, 1), (4, 1, 4), (6, 3, 2)], ids=str)
def test_grouped_heads(backend, heads):
    """The gradient of a key head is the sum over its query heads."""
    case = make(5, "bfloat16", heads=heads[0], heads_k=heads[1:], causal=True)
    check(backend, case, row_weights(case))


def test_no_weights_mean_one(backend):
    run = check(backend, make(6))
    for number in (1, 1.0, np.float32(1), np.float64(1), np.array(1.0)):
        grads = skl.backward(run.state, number, wrt=SIDES)
        for name in SIDES:
            np.testing.assert_array_equal(backend.get(getattr(grads, name)), backend.get(getattr(run.grads, name)))


@pytest.mark.parametrize("form", ["host", "device", "device of one element"])
@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
def test_scalars(backend, form, reduction):
    case = make(7, "float16", reduction=reduction, seqlens_k=[53, 0, 20])
    weight = {"host": -2.5, "device": np.array(-2.5, np.float32), "device of one element": np.array([-2.5], np.float32)}[form]
    run = run_forward(backend, case)
    on_device = weight if form == "host" else backend.put(weight)
    grads = skl.backward(run.state, on_device, wrt=SIDES, out=nan_gradients(backend, case))
    check_gradients(backend, case, grads, truth(case, -2.5, SIDES), form)


@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_reductions(backend, reduction, dtype):
    check(backend, make(8, dtype, reduction=reduction, causal=True, n=(53, 37)))


def test_a_state_from_saved_parts_knows_its_mean(backend):
    case = make(9, "float16", reduction="mean", causal=True, n=(53, 37))
    state = run_forward(backend, case).state
    grads = skl.backward(skl.KLState(state.rows, state.problem, state.inputs), 3.0, wrt=SIDES)
    check_gradients(backend, case, grads, truth(case, 3.0, SIDES))


@pytest.mark.parametrize("weight_dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_row_weights_of_every_dtype(backend, weight_dtype, dtype):
    case = make(10, dtype)
    check(backend, case, row_weights(case, dtype=weight_dtype))


@pytest.mark.parametrize("form", ["stride 0", "stride 0 along the rows", "permuted", "every other one", "backwards"])
@pytest.mark.parametrize("layout", ["bhsd", "thd"])
def test_strides_of_the_row_weights(backend, form, layout):
    """Autograd sends an expanded scalar, einops a permuted array."""
    extra = {"cu_seqlens_q": [0, 20, 37], "cu_seqlens_k": [0, 30, 53]} if layout == "thd" else {}
    case = make(11, "float16", layout=layout, **extra)
    rows = case.geometry().row_shape
    rng, axes = np.random.default_rng(2), tuple(reversed(range(len(rows))))
    base, look = {
        "stride 0": ((1,) * len(rows), None),
        "stride 0 along the rows": ((*rows[:-1], 1), None),
        "permuted": (tuple(rows[a] for a in axes), lambda a: a.transpose(axes)),
        "every other one": ((*rows[:-1], 2 * rows[-1]), lambda a: a[..., ::2]),
        "backwards": (rows, lambda a: a[..., ::-1]),
    }[form]
    host = rng.normal(size=base).astype(np.float32)
    on_device = backend.put(host)
    if look is None:
        broadcast_to = np.broadcast_to if backend.name == "numpy" else backend.cupy.broadcast_to
        host, on_device = np.broadcast_to(host, rows), broadcast_to(on_device, rows)
    else:
        host, on_device = look(host), look(on_device)
    assert on_device.strides == host.strides
    run = run_forward(backend, case)
    grads = skl.backward(run.state, on_device, wrt=SIDES, out=nan_gradients(backend, case))
    check_gradients(backend, case, grads, truth(case, host, SIDES), form)


@pytest.mark.parametrize("size", [1e-9, 1e-4, 1.0, 1e6])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("form", ["rows", "scalar"])
def test_float32_gradients_do_not_feel_the_size_of_the_weights(backend, size, dtype, form):
    """A gradient scaler's 2^-30, or a sum over 10^6 rows: the relative error of g = 1, also where float16 would underflow."""
    case = make(12, dtype, causal=True)
    weight = (size * row_weights(case)).astype(np.float32) if form == "rows" else size
    run = check(backend, case, weight, dtype="float32")
    assert all(backend.get(getattr(run.grads, name)).dtype == np.float32 for name in SIDES)


def test_weights_of_very_different_sizes(backend):
    """Rows of 1e-9 beside rows of 1e6: each row of dQ keeps its own relative error."""
    case = make(13, "float16", n=(64, 80))
    weight = row_weights(case) * np.float32(10) ** np.random.default_rng(3).integers(-9, 7, size=(3, 4, 64)).astype(np.float32)
    run = check(backend, case, weight.astype(np.float32), dtype="float32")
    unit = truth(case, 1.0, ("q1", "q2"), "float32")
    for name in ("q1", "q2"):
        got = backend.get(getattr(run.grads, name)).astype(np.float64) / weight[..., None]
        off = np.linalg.norm(got - unit.grads[name])
        assert off <= 1.5 * unit.allowed[name], f"d{name} is off by {off:.3e}, allowed are 1.5 * {unit.allowed[name]:.3e}, of {case}"


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_gradients_are_linear_in_the_weights(backend, dtype):
    case = make(14, dtype)
    run, weight = run_forward(backend, case), row_weights(case)
    one, eight = (skl.backward(run.state, backend.put(f * weight), wrt=SIDES, dtype="float32") for f in (np.float32(1), np.float32(8)))
    for name in SIDES:
        np.testing.assert_array_equal(backend.get(getattr(eight, name)), 8 * backend.get(getattr(one, name)), err_msg=name)


@pytest.mark.parametrize("weight", [0.0, "rows"], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_zero_weights_give_zeros(backend, weight, dtype):
    """Zeros that are there, not None."""
    case = make(15, dtype)
    run = check(backend, case, np.zeros((3, 4, 37), np.float32) if weight == "rows" else weight)
    for name in SIDES:
        assert not backend.get(getattr(run.grads, name)).any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_equal_sides_have_zero_gradients(backend, dtype):
    case = make(16, dtype, heads_k=(2, 2), d=(16, 16), n=(130, 300), causal=True)
    case = case.with_arrays(q2=case.arrays["q1"], k2=case.arrays["k1"])
    run = run_forward(backend, case)
    grads = skl.backward(run.state, 1e6, wrt=SIDES, dtype="float32", out=nan_gradients(backend, case, SIDES, "float32"))
    for name in SIDES:
        assert not backend.get(getattr(grads, name)).any(), f"d{name} of {case}"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("offset", [1024.0, 9984.0, 246016.0])
def test_common_offsets_do_no_harm(backend, offset, dtype):
    """Gradients of the coordinates that carry no offset; those of the offset itself are differences of large numbers."""
    case = offset_case(17, offset, dtype, n=(37, 200))
    run = run_forward(backend, case)
    expected = truth(case, wrt=SIDES, dtype="float32", exact_logits=True)
    grads = skl.backward(run.state, wrt=SIDES, dtype="float32")
    plain = [i for i in range(case.arrays["q1"].shape[-1]) if i != 3]
    for name in SIDES:
        columns = plain if name[1] == "1" else [i for i in range(case.arrays["q2"].shape[-1]) if i != 3]
        got, right = backend.get(getattr(grads, name))[..., columns].astype(np.float64), expected.grads[name][..., columns]
        bar = 2e-5 if dtype == "float32" else 2.0 ** (-7 if dtype == "bfloat16" else -10)
        off, norm = np.linalg.norm(got - right), np.linalg.norm(right)
        assert off <= bar * norm, f"d{name} is off by {off / norm:.2e} of its norm, allowed are {bar:.2e}, of {case}"


@pytest.mark.parametrize("dtype", DTYPES)
def test_sharp_distributions(backend, dtype):
    check(backend, make(18, dtype, size=5.0))


@pytest.mark.parametrize("sizes", [{"n": (0, 5)}, {"n": (5, 0)}, {"batch": 0}], ids=str)
def test_nothing_to_do(backend, sizes):
    run = check(backend, make(19, "float16", **sizes))
    assert not any(backend.get(getattr(run.grads, name)).any() for name in SIDES)


@pytest.mark.parametrize("dtype", [None, "float32"])
@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_refilling(backend, dtype, reduction):
    """`out` and `workspace` of an earlier call: the same bits as a fresh call, in the same memory, and nothing else written."""
    case = make(20, "float16", causal=True, reduction=reduction)
    run = run_forward(backend, case)
    workspace = backend.bytes(skl.workspace_size(**run.inputs, **case.options, wrt=SIDES))
    fresh = skl.backward(run.state, 2.0, wrt=SIDES, dtype=dtype)
    out = nan_gradients(backend, case, SIDES, dtype)
    for wrt in (("q1", "k2"), SIDES):
        grads = skl.backward(run.state, 2.0, wrt=wrt, dtype=dtype, out=out, workspace=workspace)
        for name in SIDES:
            values = backend.get(getattr(out, name)).astype(np.float32)
            if name in wrt:
                assert getattr(grads, name) is getattr(out, name)
                np.testing.assert_array_equal(values, backend.get(getattr(fresh, name)).astype(np.float32))
            else:
                assert np.isnan(values).all() and getattr(grads, name) is None


def test_one_state_serves_many_calls(backend):
    """Side 1 today, side 2 tomorrow: in any order, each as if alone."""
    case = make(21, "bfloat16")
    run, weight = run_forward(backend, case), row_weights(case)
    together = skl.backward(run.state, backend.put(weight), wrt=SIDES, dtype="float32")
    for name in ("k2", "q1", "q2", "k1"):
        alone = getattr(skl.backward(run.state, backend.put(weight), wrt=name, dtype="float32"), name)
        np.testing.assert_allclose(backend.get(alone), backend.get(getattr(together, name)), rtol=2e-2, atol=1e-5)
    for array, original in zip(run.inputs.values(), case.arrays.values(), strict=True):
        np.testing.assert_array_equal(backend.get(array).view(np.uint16), original.view(np.uint16))


def test_results_have_the_inputs_dtype(backend):
    for dtype in DTYPES:
        run = run_forward(backend, make(22, dtype))
        assert backend.get(skl.backward(run.state, wrt="k1").k1).dtype == NUMPY[dtype]
