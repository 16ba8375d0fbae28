"""Properties that hold for any problem, over drawn shapes, dtypes, layouts and masks, on both backends.

Draws are the same on every run; `--hypothesis-profile explore` draws others.
"""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import streamkl_cupy as skl
from streamkl_cupy.checks import LAYOUTS, SIDES

from .oracle import (
    DTYPES,
    EPSILON,
    KL_FLOOR,
    NUMPY,
    Case,
    check,
    check_gradients,
    check_rows,
    host_rows,
    make,
    poisoned,
    row_weights,
    run_forward,
    truth,
)
from .problems import shard

PADDED = ("bhsd", "bshd", "sbhd")
DIMS = [(16, 24), (5, 32), (8, 17), (12, 20)]
"""One pair of classes: on a GPU few kernels are compiled, and none for a single draw."""

MASKS = st.fixed_dictionaries(
    {
        "causal": st.booleans(),
        "window": st.sampled_from([(-1, -1), (-1, -1), (0, 0), (3, -1), (-1, 2), (4, 5), (40, 17)]),
        "q_offset": st.sampled_from([None, 0, 5, -4, 100, "vector"]),
    }
)
LENGTHS = st.one_of(st.integers(1, 20), st.sampled_from([1, 31, 32, 33, 64, 65, 129]))
DIVISORS = {heads: [h for h in range(1, heads + 1) if heads % h == 0] for heads in (1, 2, 3, 6)}


@st.composite
def cases(draw, layouts=tuple(LAYOUTS), dtypes=DTYPES, masks=MASKS, equal_dims=False) -> Case:
    """A problem of few rows and keys, masked in any way."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    layout, batch, heads = draw(st.sampled_from(layouts)), draw(st.integers(1, 3)), draw(st.sampled_from(list(DIVISORS)))
    n, options = (draw(LENGTHS), draw(LENGTHS)), dict(draw(masks))
    if options.get("q_offset") == "vector":
        options["q_offset"] = rng.integers(-6, 9, batch)
    if layout == "thd":
        # Ends in any order of sizes: segments of length zero are common, and so are tails that belong to none.
        options |= {f"cu_seqlens_{side}": [0, *np.sort(rng.integers(0, size + 1, batch))] for side, size in zip("qk", n, strict=True)}
    else:
        for side, size in zip("qk", n, strict=True):
            if draw(st.booleans()):
                options[f"seqlens_{side}"] = rng.integers(0, size + 1, batch)
    for side in "12":
        if draw(st.booleans()):
            options[f"scale{side}"] = draw(st.sampled_from([0.07, 0.25, 1.0]))
    heads_k = tuple(draw(st.sampled_from(DIVISORS[heads])) for _ in SIDES[::2])
    d = (16, 16) if equal_dims else draw(st.sampled_from(DIMS))
    sizes = {"batch": batch, "heads": heads, "heads_k": heads_k, "n": n, "d": d, "size": draw(st.sampled_from([0.3, 1.0, 2.0]))}
    return make(int(rng.integers(2**31)), draw(st.sampled_from(dtypes)), layout=layout, **sizes, **options)


WEIGHTS = st.sampled_from(["none", "rows", "rows", -2.5])
WANTED = st.sets(st.sampled_from(SIDES), min_size=1).map(lambda names: tuple(n for n in SIDES if n in names))


def weights_of(case: Case, kind):
    return None if kind == "none" else row_weights(case) if kind == "rows" else kind


@settings(max_examples=100)
@given(case=cases(), hidden=st.booleans(), weight=WEIGHTS, wanted=WANTED, wide=st.booleans())
def test_against_the_reference(backend, case, hidden, weight, wanted, wide):
    """Forward and backward; with `hidden`, NaN wherever no row may look."""
    case = poisoned(case) if hidden else case
    check(backend, case, weights_of(case, weight), wrt=wanted, dtype="float32" if wide else None)


@settings(max_examples=30)
@given(case=cases(), reduction=st.sampled_from(["sum", "mean"]), weight=st.sampled_from([None, 0.25, -3.0]))
def test_reductions(backend, case, reduction, weight):
    check(backend, case.with_options(reduction=reduction), weight)


@settings(max_examples=30)
@given(case=cases(), deterministic=st.booleans())
def test_reverse_kl(backend, case, deterministic):
    """With the sides exchanged: the reverse KL, the same denominators, and a sum of both that is nowhere negative."""
    swapped = case.with_arrays(q1=case.arrays["q2"], k1=case.arrays["k2"], q2=case.arrays["q1"], k2=case.arrays["k1"])
    scales = {f"scale{3 - side}": case.options[f"scale{side}"] for side in (1, 2) if f"scale{side}" in case.options}
    plain = {name: value for name, value in case.options.items() if not name.startswith("scale")}
    swapped = replace(swapped, options=plain | scales)
    largest = truth(case).largest
    there, back = run_forward(backend, case), check(backend, swapped, row_weights(case), deterministic=deterministic)
    for mine, other in (("lse1", "lse2"), ("lse2", "lse1")):
        left, right = (backend.get(getattr(state, name)) for state, name in ((there.state, mine), (back.state, other)))
        np.testing.assert_allclose(left, right, rtol=1e-5, atol=5e-6 + EPSILON * largest)
    assert (backend.get(there.kl) + backend.get(back.kl)).min(initial=0) >= 2 * KL_FLOOR


@settings(max_examples=30)
@given(case=cases(equal_dims=True), weight=WEIGHTS)
def test_equal_sides_give_exactly_nothing(backend, case, weight):
    """Also where the second side lies elsewhere, in another order of axes."""
    options = {name: value for name, value in case.options.items() if not name.startswith("scale")}
    case = replace(case, options=options).with_arrays(q2=case.arrays["q1"], k2=case.arrays["k1"])
    inputs = {name: backend.put(array) for name, array in case.arrays.items()}
    for name in ("q2", "k2"):
        turned = np.ascontiguousarray(case.arrays[name].swapaxes(0, 1))
        inputs[name] = backend.put(turned).swapaxes(0, 1)
    run = run_forward(backend, case, inputs)
    assert not backend.get(run.kl).any()
    weight = weights_of(case, weight)
    grads = skl.backward(run.state, backend.put(weight) if isinstance(weight, np.ndarray) else weight, wrt=SIDES, dtype="float32")
    assert not any(backend.get(array).any() for array in grads)


@settings(max_examples=30)
@given(case=cases(), factor=st.sampled_from([-1.0, 0.3, 7.0, 2.0**-20, 1e5]))
def test_weights_scale_gradients(backend, case, factor):
    run, weight = run_forward(backend, case), row_weights(case)
    scaled = (np.float32(factor) * weight).astype(np.float32)
    one, other = (skl.backward(run.state, backend.put(w), wrt=SIDES, dtype="float32", deterministic=True) for w in (weight, scaled))
    for name in SIDES:
        got, want = (backend.get(getattr(g, name)).astype(np.float64) for g in (other, one))
        allowed = truth(case, weight, (name,), "float32").allowed[name]
        off = np.linalg.norm(got / factor - want)
        assert off <= 2 * allowed + 1e-6 * np.linalg.norm(want), f"d{name} is off by {off:.2e}, of {case}, factor {factor}"


@settings(max_examples=30)
@given(case=cases(layouts=PADDED, masks=st.just({})), seed=st.integers(0, 99))
def test_the_order_of_keys_does_not_matter(backend, case, seed):
    """Without a mask, keys in another order give the same rows, and their gradients in that order."""
    case = replace(case, options={name: v for name, v in case.options.items() if name != "seqlens_k"})
    axis = LAYOUTS[case.options["layout"]][2]
    order = np.random.default_rng(seed).permutation(case.arrays["k1"].shape[axis])
    turned = case.with_arrays(**{name: np.take(case.arrays[name], order, axis) for name in ("k1", "k2")})
    first, second = (run_forward(backend, c) for c in (case, turned))
    expected = truth(case)
    np.testing.assert_allclose(
        backend.get(first.kl),
        backend.get(second.kl),
        rtol=2e-5,
        atol=1e-5 + 2 * float(expected.logit_slack.max(initial=0)),
        err_msg=str(case),
    )
    grads = skl.backward(second.state, wrt=("k1", "k2"))
    back = skl.Gradients(**{n: np.take(backend.get(getattr(grads, n)), np.argsort(order), axis) for n in ("k1", "k2")})
    check_gradients(backend, case, back, truth(case, None, ("k1", "k2")), "keys in another order")


@settings(max_examples=50)
@given(case=cases(layouts=PADDED), cuts=st.lists(st.floats(0, 1), max_size=4), backwards=st.booleans())
def test_key_shards_merge_into_the_whole(backend, case, cuts, backwards):
    """Any number of shards, empty ones among them, in either order: the rows of the whole, dK side by side, dQ as a sum."""
    axis = LAYOUTS[case.options["layout"]][2]
    n_k = case.arrays["k1"].shape[axis]
    ends = [0, *sorted(round(cut * n_k) for cut in cuts), n_k]
    runs = [run_forward(backend, shard(case, begin, end)) for begin, end in itertools.pairwise(ends)]
    rows = [run.state.rows for run in runs]
    merged = skl.merge(rows[::-1] if backwards else rows)
    weight = row_weights(case)
    expected = truth(case, weight, SIDES)
    check_rows(backend, case, replace(runs[0].state, rows=merged), expected)
    parts = [skl.backward(run.state.with_rows(merged), backend.put(weight), wrt=SIDES, dtype="float32") for run in runs]
    arrays = {name: [backend.get(getattr(part, name)) for part in parts] for name in SIDES}
    whole = {name: sum(a) if name[0] == "q" else np.concatenate(a, axis=axis) for name, a in arrays.items()}
    check_gradients(backend, case, skl.Gradients(**whole), expected, f"shards {ends}")


@settings(max_examples=30)
@given(case=cases(layouts=PADDED), cut=st.floats(0, 1))
def test_merging_in_steps(backend, case, cut):
    """One alone stays as it is; the order and the grouping matter to the last bits only."""
    n_k = case.arrays["k1"].shape[LAYOUTS[case.options["layout"]][2]]
    cut = round(cut * n_k)
    ends = sorted({0, cut // 2, cut, n_k})
    rows = [run_forward(backend, shard(case, begin, end)).state.rows for begin, end in itertools.pairwise(ends)]
    expected = truth(case)
    alone = skl.RowStats(*(backend.get(array) for array in skl.merge(rows[:1])))
    np.testing.assert_allclose(alone.kl, backend.get(rows[0].kl), rtol=5e-6, atol=5e-6)
    np.testing.assert_allclose(alone.lse2, backend.get(rows[0].lse2), rtol=5e-6, atol=5e-6)
    in_steps = rows[0]
    for part in rows[1:]:
        in_steps = skl.merge([part, in_steps])
    for merged in (in_steps, skl.merge(rows)):
        check_rows(backend, case, run_forward(backend, case).state.with_rows(merged), expected)


@settings(max_examples=30)
@given(case=cases(layouts=("bhsd",), masks=st.just({})), copies=st.integers(2, 3))
def test_repeated_keys(backend, case, copies):
    """Every key twice: the same KL, denominators larger by log 2, and the gradient shared among the copies."""
    case = replace(case, options={name: v for name, v in case.options.items() if name != "seqlens_k"})
    repeated = case.with_arrays(**{name: np.repeat(case.arrays[name], copies, axis=2) for name in ("k1", "k2")})
    run, expected = check(backend, repeated, dtype="float32"), truth(case, None, ("k1", "k2"))
    rows = host_rows(backend, run.state)
    np.testing.assert_allclose(rows.lse1, expected.rows.lse1 + np.log(copies), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(
        rows.kl, expected.rows.kl, rtol=1e-5, atol=5e-6 + expected.logit_slack.max(initial=0) + 2**-22 * expected.largest
    )
    sums = {n: backend.get(getattr(run.grads, n)) for n in ("k1", "k2")}
    sums = {n: g.reshape(*g.shape[:2], -1, copies, g.shape[-1]).sum(axis=3) for n, g in sums.items()}
    check_gradients(backend, case, skl.Gradients(**sums), expected, f"{copies} copies of every key")


@pytest.mark.parametrize("dtype", DTYPES)
def test_scales_are_factors_of_the_queries(backend, dtype):
    """A power of two in the scale or in the queries: the same bits."""
    case = make(1, dtype, causal=True)
    scaled = case.with_options(scale1=2 * 16**-0.5, scale2=4 * 24**-0.5)
    larger = case.with_arrays(q1=case.arrays["q1"] * NUMPY[dtype].type(2), q2=case.arrays["q2"] * NUMPY[dtype].type(4))
    for first, second in zip(*(host_rows(backend, run_forward(backend, c).state) for c in (scaled, larger)), strict=True):
        np.testing.assert_array_equal(first, second)
