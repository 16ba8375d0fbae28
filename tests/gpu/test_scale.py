"""Sizes at which indices overflow: a hundred thousand heads, a million keys, more than 2^31 elements in one tensor."""

import numpy as np
import pytest

import streamkl_cupy as skl
from streamkl_cupy.arrays import BFLOAT16

from ..oracle import SIDES, Case, check_gradients, check_rows, make, row_weights, truth

pytestmark = pytest.mark.gpu

PERIOD, DIM, WINDOW, LAST = 4099, 128, 64, 300
"""A prime number of random rows, repeated; a window makes the problem local; so many of the last rows are looked at."""


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("layout", ["bhsd", "sbhd"])
def test_a_hundred_thousand_heads(device, dtype, layout):
    """All of them finite, and sequences at either end and in the middle right."""
    case = make(601, dtype, layout=layout, batch=25_000, heads=4, n=(5, 9), causal=True)
    axis = 0 if layout == "bhsd" else 1
    some = np.r_[0:10, 12_345:12_355, 24_990:25_000]
    weights = row_weights(case)
    _, state = skl.forward(**{n: device.put(a) for n, a in case.arrays.items()}, **case.options)
    grads = skl.backward(state, device.put(weights), wrt=SIDES)
    part = Case({n: a.take(some, axis) for n, a in case.arrays.items()}, case.options, f"{case.note}, some sequences")
    expected = truth(part, weights[some], SIDES)
    host = {n: device.get(g) for n, g in zip(SIDES, grads, strict=True)}
    rows = skl.RowStats(*(device.get(a) for a in state.rows))
    assert all(np.isfinite(a).all() for a in (rows.kl, *host.values())) and rows.kl.shape == (25_000, 4, 5)
    check_rows(device, part, state.with_rows(skl.RowStats(*(a[some] for a in rows))), expected)
    check_gradients(device, part, skl.Gradients(**{n: g.take(some, axis) for n, g in host.items()}), expected)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_million_keys(device, dtype):
    case = make(602, dtype, batch=1, heads=1, heads_k=(1, 1), n=(3, 1_000_003), d=(16, 24))
    _, state = skl.forward(**{n: device.put(a) for n, a in case.arrays.items()})
    grads = skl.backward(state, wrt=SIDES)
    expected = truth(case, None, SIDES)
    check_rows(device, case, state, expected)
    check_gradients(device, case, grads, expected)


@pytest.mark.alone
def test_a_million_rows_and_keys_in_tensors_beyond_2_to_the_31(device):
    """17 heads of 2^20 rows and 128 columns. A window of 64 keys: what the last rows of the last head make is known from them alone."""
    heads, n, cp = 17, 1 << 20, device.cupy
    if cp.cuda.runtime.memGetInfo()[1] < 70e9:
        pytest.skip("needs 70 GB of device memory")
    rng = np.random.default_rng(603)
    bases = {name: rng.normal(size=(PERIOD, DIM)).astype(np.float32).astype(BFLOAT16) for name in SIDES}
    at = cp.arange(heads * n) % PERIOD
    inputs = {m: device.put(b.view(np.uint16))[at].view(BFLOAT16).reshape(1, heads, n, DIM) for m, b in bases.items()}
    del at
    assert inputs["q1"].size > 2**31
    options = {"window": (WINDOW, 0)}
    _, state = skl.forward(**inputs, **options)
    grads = skl.backward(state, wrt=SIDES)
    for head, begin in ((0, 0), (8, 12_345), (heads - 1, n - LAST)):
        before = min(begin, WINDOW)  # keys ahead of these rows that they see
        places = {"q": (head * n + begin + np.arange(LAST)) % PERIOD, "k": (head * n + begin - before + np.arange(LAST + before)) % PERIOD}
        arrays = {m: b[places[m[0]]][None, None] for m, b in bases.items()}
        case = Case(arrays, options | {"q_offset": before}, f"rows from {begin} of head {head}")
        rows = skl.RowStats(*(device.get(a[:1, head : head + 1, begin : begin + LAST]) for a in state.rows))
        check_rows(device, case, state.with_rows(rows), truth(case))
        right = truth(case, None, SIDES)
        for name in SIDES:
            got = device.get(getattr(grads, name)[0, head, begin : begin + LAST]).astype(np.float64)
            want = right.grads[name][0, 0] if name[0] == "q" else right.grads[name][0, 0, before:]
            if name[0] == "k" and begin + LAST < n:  # rows beyond these see their last keys too
                got, want = got[: LAST - WINDOW], want[: LAST - WINDOW]
            assert np.linalg.norm(got - want) <= 0.02 * np.linalg.norm(want), f"d{name} of {case.note}"
    del inputs, state, grads
    cp.get_default_memory_pool().free_all_blocks()
