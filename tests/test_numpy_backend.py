"""The NumPy backend against the dense float64 reference, without the public surface in between."""

import json
import pathlib
import tracemalloc
from typing import NamedTuple

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamkl_cupy import numpy_backend, numpy_tiles, reference
from streamkl_cupy.checks import LAYOUTS, SIDES
from streamkl_cupy.problem import Problem
from streamkl_cupy.state import RowStats

CASES = json.loads((pathlib.Path(__file__).parent / "cases" / "open_cases.json").read_text())
DTYPES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32}
VECTORS = ("cu_seqlens_q", "cu_seqlens_k", "seqlens_q", "seqlens_k", "q_offset")


class View(NamedTuple):
    shape: tuple
    dtype: str
    device: tuple = ("cpu", 0)


class Case:
    """Arrays and options as a caller gives them, and as the backend takes them."""

    def __init__(self, q1, k1, q2, k2, **options):
        self.inputs, self.options = (q1, k1, q2, k2), options
        self.arrays = dict(zip(SIDES, self.inputs, strict=True))
        self.arrays |= {n: v for n, v in options.items() if n in VECTORS and isinstance(v, np.ndarray)}
        views = {n: View(a.shape, a.dtype.name) for n, a in self.arrays.items()}
        others = {n: v for n, v in options.items() if n not in views}
        self.problem = Problem.check(**views, **others)
        numpy_backend.check_vectors(self.problem, self.arrays)

    def forward(self) -> RowStats:
        rows = RowStats(*(np.full(self.problem.row_shape, np.nan, np.float32) for _ in range(5)))
        numpy_backend.forward(self.problem, self.arrays, rows)
        return rows

    def backward(self, rows, grad_kl=None, wrt=SIDES, dtype=np.float32):
        grads = {n: np.full(self.arrays[n].shape, np.nan, dtype) for n in wrt}
        numpy_backend.backward(self.problem, self.arrays, rows, grad_kl, grads)
        return grads

    def check(self, grad_kl=None, wrt=SIDES):
        """Both directions. The gradients' bar leaves room for what float32 makes of a logit, a KL and P = 1: two units of each."""
        expected = reference.forward(*self.inputs, **self.options)
        rows = self.forward()
        largest = max([0.0] + [float(np.abs(lse[np.isfinite(lse)]).max(initial=0)) for lse in (expected.lse1, expected.lse2)])
        atol = 5e-6 + 2**-23 * largest
        np.testing.assert_allclose(rows.kl, expected.kl, 1e-5, atol)
        np.testing.assert_allclose(rows.lse1, expected.lse1, 1e-5, atol)
        np.testing.assert_allclose(rows.lse2, expected.lse2, 1e-5, atol)
        right = reference.backward(*self.inputs, grad_kl, wrt=wrt, **self.options)
        weight = 1.0 if grad_kl is None else float(np.abs(grad_kl).max(initial=0))
        inputs = [a.astype(np.float32) for a in self.inputs]
        for name, grad in self.backward(rows, grad_kl, wrt).items():
            unit = weight * max(self.problem.scale1, self.problem.scale2) * max(np.abs(a[np.isfinite(a)]).max(initial=0) for a in inputs)
            check_gradient(name, grad, getattr(right, name), 1e-5 + 2**-22 * largest, 2**-22 * (1 + largest) * unit)
            unseen = ~seen(self, name)[:, None, :, None]
            assert not np.where(unseen, numpy_tiles.canonical(self.problem, grad), 0).any(), f"{name}: not 0 where nothing is seen"
        return rows, right


def check_gradient(name, grad, expected, tolerance, unit=0.0):
    """Relative Frobenius norm, and an absolute `unit` for an element."""
    assert np.isfinite(grad).all(), name
    error, norm = np.linalg.norm(grad.astype(np.float64) - expected), np.linalg.norm(expected)
    assert error <= tolerance * norm + unit * grad.size**0.5, f"{name}: {error:.2e} of {norm:.2e}"


def normal(rng, shape, dtype="float32", size=1.0):
    return (size * rng.normal(size=shape)).astype(DTYPES[dtype])


def seen(case: Case, name: str) -> np.ndarray:
    """Which rows of q1, k1, q2 or k2 see a key, or which keys a row sees, as (batch, rows)."""
    view = numpy_tiles.canonical(case.problem, case.arrays[name])
    marks = np.zeros((view.shape[0], view.shape[2]), bool)
    for batch, q_begin, k_begin, band in numpy_tiles.sequences(case.problem, case.arrays):
        distance = np.arange(band.k_valid) - np.arange(band.q_valid)[:, None]
        visible = (distance >= band.before) & (distance <= band.after)
        begin, count = (q_begin, band.q_valid) if name[0] == "q" else (k_begin, band.k_valid)
        marks[batch, begin : begin + count] = visible.any(axis=1 if name[0] == "q" else 0)
    return marks


def poison(case: Case) -> None:
    """NaN into whatever no row may see."""
    for name in SIDES:
        view = numpy_tiles.canonical(case.problem, case.arrays[name])
        np.copyto(view, np.array(np.nan, view.dtype), where=~seen(case, name)[:, None, :, None])


@st.composite
def cases(draw):
    layout = draw(st.sampled_from(list(LAYOUTS)))
    dtype = draw(st.sampled_from(list(DTYPES)))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    batch, heads = draw(st.integers(1, 3)), draw(st.sampled_from([1, 2, 3, 6]))
    divisors = [h for h in range(1, heads + 1) if heads % h == 0]
    key_heads = {"1": draw(st.sampled_from(divisors)), "2": draw(st.sampled_from(divisors))}
    dims = {"1": draw(st.integers(1, 20)), "2": draw(st.integers(1, 20))}
    options = {"layout": layout, "causal": draw(st.booleans())}
    options["window"] = draw(st.sampled_from([(-1, -1), (3, -1), (-1, 2), (4, 5), (0, 0)]))
    options["q_offset"] = draw(st.sampled_from([None, 0, 5, -4, "vector"]))
    if options["q_offset"] == "vector":
        options["q_offset"] = rng.integers(-6, 9, batch).astype(np.int32)
    for side in "12":
        if draw(st.booleans()):
            options[f"scale{side}"] = draw(st.floats(0.05, 3.0))
    lengths = {}
    for side in "qk":
        if layout == "thd":
            ends = np.concatenate([[0], np.cumsum(rng.integers(0, 13, batch))]).astype(np.int32)
            options[f"cu_seqlens_{side}"], lengths[side] = ends, int(ends[-1]) + draw(st.integers(0, 3))
        else:
            lengths[side] = draw(st.integers(1, 33))
            if draw(st.booleans()):
                options[f"seqlens_{side}"] = rng.integers(0, lengths[side] + 1, batch).astype(np.int32)
    inputs = []
    for name in SIDES:
        sizes = dict(zip(LAYOUTS[layout], (batch, heads if name[0] == "q" else key_heads[name[1]], lengths[name[0]]), strict=True))
        shape = [size for axis, size in sorted((a, s) for a, s in sizes.items() if a is not None)]
        inputs.append(normal(rng, (*shape, dims[name[1]]), dtype, draw(st.sampled_from([0.3, 1.0, 3.0]))))
    case = Case(*inputs, **options)
    weight = draw(st.sampled_from([None, "rows", "broadcast", -2.5]))
    if weight == "rows":
        weight = rng.normal(size=case.problem.row_shape).astype(draw(st.sampled_from([np.float32, np.float64, np.float16])))
    elif weight == "broadcast":
        weight = np.broadcast_to(np.float32(0.7), case.problem.row_shape)
    return case, weight


@settings(max_examples=80, deadline=None)
@given(cases(), st.booleans(), st.integers(1, 15))
def test_against_reference(drawn, poisoned, wanted):
    case, weight = drawn
    if poisoned:
        poison(case)
    case.check(weight, tuple(n for i, n in enumerate(SIDES) if wanted >> i & 1))


@pytest.mark.parametrize("shape", [(1, 1), (113, 203), (203, 113), (300, 1024), (197, 197)])
@pytest.mark.parametrize("mask", [{}, {"causal": True}, {"causal": True, "window": (40, -1)}, {"window": (150, 90), "q_offset": -20}])
def test_many_tiles(monkeypatch, shape, mask):
    monkeypatch.setattr(numpy_tiles, "ROW_TILE", 32)
    monkeypatch.setattr(numpy_tiles, "KEY_TILE", 48)
    rng = np.random.default_rng(5)
    q, k = shape
    inputs = [normal(rng, s) for s in ((2, 6, q, 24), (2, 3, k, 24), (2, 6, q, 40), (2, 2, k, 40))]
    Case(*inputs, **mask).check(normal(rng, (2, 6, q)))


def test_heads_in_several_parts(monkeypatch):
    monkeypatch.setattr(numpy_tiles, "TILE_ELEMENTS", 3000)
    rng = np.random.default_rng(6)
    inputs = [normal(rng, s, "float16") for s in ((3, 12, 50, 8), (3, 6, 50, 8), (3, 12, 50, 16), (3, 4, 50, 16))]
    Case(*inputs, causal=True).check()


@pytest.mark.parametrize("name", [n for n in CASES if n.startswith("causal")])
def test_causal_cases(name):
    case = CASES[name]
    inputs = [np.array(case[n], np.float32)[None, None] for n in SIDES]
    offset = 0 if "top_left" in name else None
    c = Case(*inputs, causal=True, scale1=case["scale"], scale2=case["scale"], q_offset=offset)
    rows = c.forward()
    np.testing.assert_allclose(rows.kl[0, 0], case["kl"], 1e-5, 5e-6)
    np.testing.assert_allclose(rows.lse1[0, 0], np.array(case["lse1"], float), 1e-5, 5e-6)
    for n, grad in c.backward(rows).items():
        np.testing.assert_allclose(grad[0, 0], case["d" + n.upper()], 1e-4, 1e-6)


def test_zero_length_segments():
    case = CASES["varlen_zero_len_none"]
    inputs = [np.array(case[n], np.float32)[:, None] for n in SIDES]
    ends = {n: np.array(case[n], np.int32) for n in ("cu_seqlens_q", "cu_seqlens_k")}
    c = Case(*inputs, layout="thd", scale1=case["scale"], scale2=case["scale"], **ends)
    rows = c.forward()
    np.testing.assert_allclose(rows.kl[0], case["kl"], 1e-5, 5e-6)
    for n, grad in c.backward(rows, wrt=("q2", "k2")).items():
        np.testing.assert_allclose(grad[:, 0], case["d" + n.upper()], 1e-4, 1e-6)
    np.testing.assert_array_equal(c.backward(rows)["k2"][:4], 0)  # keys of a segment without rows


def embed(*sides, dtype=np.float32):
    """Logits (rows, keys) of both sides as inputs: q has ones where k holds a row's logits."""
    inputs = []
    for s in sides:
        rows, keys = s.shape
        q, k = np.zeros((1, rows, 1, 8), dtype), np.zeros((1, rows, keys, 8), dtype)
        q[..., 0], k[0, :, :, 0] = 1, s
        inputs += [q, k]
    return Case(*inputs, scale1=1.0, scale2=1.0)


@pytest.mark.parametrize("offset", [1e3, -1e4, 2.45e5])
@pytest.mark.parametrize("keys", [5, 700])
def test_common_offsets(offset, keys):
    """Logits that are exact in float32, with a common offset: the KL of a converged student must survive."""
    rng = np.random.default_rng(8)
    s1 = offset + np.round(4 * rng.normal(size=(20, keys)) * 32) / 32
    s2 = s1 + np.round(0.1 * rng.normal(size=(20, keys)) * 32) / 32
    case = embed(s1, s2)
    expected = reference.forward(*case.inputs, **case.options)
    rows = case.forward()
    np.testing.assert_allclose(rows.kl, expected.kl, 1e-5, 5e-6)  # even without the term for large logits
    np.testing.assert_allclose(rows.lse1, expected.lse1, 1e-5, 5e-6 + 2**-23 * abs(offset))
    right = reference.backward(*case.inputs, wrt=SIDES, **case.options)
    for name, grad in case.backward(rows).items():
        if name[0] == "k":  # those of q are sums of huge terms that cancel
            check_gradient(name, grad, getattr(right, name), 2e-5)


@pytest.mark.parametrize("offset", [0.0, 1e4])
def test_underflow_of_either_side(offset):
    far = np.array([[0.0, 0.0], [0.0, -200.0]]) + offset
    case = embed(far, far[::-1].copy())
    rows = case.forward()
    np.testing.assert_allclose(rows.kl[0, :, 0], [99.30685281944005, 0.6931471805599453], 1e-5)
    grads = case.backward(rows)
    np.testing.assert_allclose(grads["k2"][0, :, :, 0], [[0.5, -0.5], [-0.5, 0.5]], 1e-6)
    np.testing.assert_allclose(grads["k1"][0, 1, :, 0], [0, 0], atol=1e-6)


@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("heads_k", [1, 2, 4])
@pytest.mark.parametrize("rows", [1, 2, 131])
def test_equal_sides_give_exactly_nothing(dtype, heads_k, rows):
    rng = np.random.default_rng(9)
    q, k = normal(rng, (2, 4, rows, 33), dtype, 3.0), normal(rng, (2, heads_k, 571, 33), dtype, 3.0)
    # The second side holds the same values at other strides.
    q2 = np.stack([q, q], axis=-1)[..., 1]
    k2 = np.concatenate([k, k], axis=2)[:, :, 571:]
    case = Case(q, k, q2, k2, causal=rows == 131)
    stats = case.forward()
    assert (stats.kl == 0).all()
    for grad in case.backward(stats).values():
        assert (grad == 0).all()


def test_never_much_below_zero():
    rng = np.random.default_rng(10)
    s = 1e4 + np.round(3 * rng.normal(size=(40, 300)) * 64) / 64
    case = embed(s, s + np.where(rng.random(s.shape) < 0.02, 1 / 64, 0))
    assert case.forward().kl.min() >= -5e-6


@pytest.mark.parametrize("dtype", list(DTYPES))
def test_tiny_upstream_weights(dtype):
    rng = np.random.default_rng(11)
    inputs = [normal(rng, (1, 2, 30, 16), dtype) for _ in range(4)]
    case = Case(*inputs)
    rows = case.forward()
    right = reference.backward(*inputs, 1e-9, wrt=SIDES)
    for weight in (1e-9, np.full(case.problem.row_shape, 1e-9, np.float32)):
        for name, grad in case.backward(rows, weight).items():
            expected = getattr(right, name)
            assert np.linalg.norm(grad - expected) <= 1e-5 * np.linalg.norm(expected)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_gradients_in_the_inputs_dtype_are_rounded_once(dtype):
    rng = np.random.default_rng(12)
    case = Case(*(normal(rng, s, dtype) for s in ((1, 4, 300, 16), (1, 2, 300, 16), (1, 4, 300, 8), (1, 1, 300, 8))))
    rows = case.forward()
    exact = case.backward(rows)
    for name, grad in case.backward(rows, dtype=DTYPES[dtype]).items():
        np.testing.assert_array_equal(grad, exact[name].astype(DTYPES[dtype]))


@pytest.mark.parametrize("causal", [False, True])
def test_key_shards(causal):
    """Shards merge into the whole: the same rows, dK side by side, dQ as a sum."""
    rng = np.random.default_rng(13)
    q1, q2 = normal(rng, (2, 3, 40, 16)), normal(rng, (2, 3, 40, 8))
    k1, k2 = normal(rng, (2, 3, 70, 16)), normal(rng, (2, 1, 70, 8))
    weight = normal(rng, (2, 3, 40))
    offset = 20
    whole = Case(q1, k1, q2, k2, causal=causal, q_offset=offset)
    expected, right = whole.check(weight)
    bounds = ((0, 17), (17, 17), (17, 45), (45, 70))
    shards = [Case(q1, k1[:, :, a:b], q2, k2[:, :, a:b], causal=causal, q_offset=offset - a) for a, b in bounds]
    merged = RowStats(*(np.full((2, 3, 40), np.nan, np.float32) for _ in range(5)))
    numpy_backend.merge([shard.forward() for shard in shards], merged)
    np.testing.assert_allclose(merged.kl, expected.kl, 1e-5, 5e-6)
    np.testing.assert_allclose(merged.lse1, expected.lse1, 1e-5, 5e-6)
    grads = [shard.backward(merged, weight) for shard in shards]
    for name in SIDES:
        parts = [g[name] for g in grads]
        check_gradient(name, sum(parts) if name[0] == "q" else np.concatenate(parts, axis=2), getattr(right, name), 1e-5)


def test_rows_that_no_shard_sees_contribute_nothing():
    rng = np.random.default_rng(14)
    case = Case(*(normal(rng, (1, 2, 6, 8)) for _ in range(4)))
    rows = case.forward()
    before = case.backward(rows)
    for array, value in zip(rows, (0, 0, -np.inf, 0, -np.inf), strict=True):
        array[0, 1, 3] = value
    weight = np.ones((1, 2, 6))
    weight[0, 1, 3] = 0
    expected = reference.backward(*case.inputs, weight, wrt=SIDES)
    for name, grad in case.backward(rows, np.where(weight == 0, np.nan, weight)).items():
        check_gradient(name, grad, getattr(expected, name), 1e-5)
        assert not np.array_equal(grad, before[name])


def test_strided_and_reversed_inputs_and_outputs():
    rng = np.random.default_rng(15)
    wide = [normal(rng, (2, 7, 3, 22)) for _ in range(4)]
    inputs = [a[::-1, ::2, :, 1::2] for a in wide]
    case = Case(*inputs, layout="bshd")
    rows, right = case.check()
    buffers = {n: np.full((2, 4, 3, 22), np.nan, np.float32) for n in SIDES}
    numpy_backend.backward(case.problem, case.arrays, rows, None, {n: b[:, :, :, ::2] for n, b in buffers.items()})
    for n, buffer in buffers.items():
        check_gradient(n, buffer[..., ::2], getattr(right, n), 1e-5)
        assert np.isnan(buffer[..., 1::2]).all()


def test_memory_grows_with_rows_only():
    n = 4096
    rng = np.random.default_rng(16)
    case = Case(*(normal(rng, (1, 1, n, 16), "float16") for _ in range(4)), causal=True)
    rows = RowStats(*(np.empty(case.problem.row_shape, np.float32) for _ in range(5)))
    grads = {name: np.empty(case.arrays[name].shape, np.float16) for name in SIDES}
    tracemalloc.start()
    numpy_backend.forward(case.problem, case.arrays, rows)
    numpy_backend.backward(case.problem, case.arrays, rows, None, grads)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < n * n * 4 / 8


@pytest.mark.parametrize(
    ("vectors", "message"),
    [
        ({"cu_seqlens_q": [1, 4, 6]}, "cu_seqlens_q starts with 1"),
        ({"cu_seqlens_q": [0, 4, 3]}, "cu_seqlens_q falls from 4 to 3"),
        ({"cu_seqlens_k": [0, 4, 10]}, "cu_seqlens_k ends with 10"),
    ],
)
def test_bad_segment_ends(vectors, message):
    vectors = {n: np.array(v, np.int32) for n, v in ({"cu_seqlens_q": [0, 4, 6], "cu_seqlens_k": [0, 4, 9]} | vectors).items()}
    inputs = [np.zeros(s, np.float32) for s in ((6, 2, 8), (9, 2, 8), (6, 2, 8), (9, 2, 8))]
    with pytest.raises(ValueError, match=message):
        Case(*inputs, layout="thd", **vectors)


@pytest.mark.parametrize(("name", "values"), [("seqlens_q", [0, 7]), ("seqlens_k", [-1, 3])])
def test_bad_lengths(name, values):
    inputs = [np.zeros((2, 1, 6, 8), np.float32) for _ in range(4)]
    with pytest.raises(ValueError, match=f"{name} has {max(values) if name[-1] == 'q' else min(values)} at entry"):
        Case(*inputs, **{name: np.array(values, np.int32)})
