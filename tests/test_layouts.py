"""Where the numbers lie: every layout, heads shared on either side, ragged sizes, and views of larger arrays, on both backends."""

import numpy as np
import pytest

import streamkl_cupy as skl
from streamkl_cupy.checks import LAYOUTS, SIDES

from .oracle import DTYPES, Case, check, check_gradients, make, poisoned, row_weights, run_forward, truth

PADDED = ("bhsd", "bshd", "sbhd")
ENDS = {"cu_seqlens_q": [0, 11, 11, 25, 37], "cu_seqlens_k": [0, 20, 31, 31, 53]}
"""Four segments of 37 rows and 53 keys: one without rows, one without keys."""


def packing(layout: str, ends=ENDS) -> dict:
    return ends if layout == "thd" else {}


MASKS = {"plain": {}, "causal": {"causal": True}, "window": {"window": (9, 4), "q_offset": 3}}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(backend, layout, dtype, mask):
    """B, H, both Hk, Nq, Nk, D1 and D2 all differ."""
    case = make(1, dtype, layout=layout, **packing(layout), **MASKS[mask])
    check(backend, case, row_weights(case))


@pytest.mark.parametrize("layout", PADDED)
@pytest.mark.parametrize("mask", MASKS)
def test_padded_lengths(backend, layout, mask):
    case = poisoned(make(2, "float16", layout=layout, seqlens_q=[37, 0, 20], seqlens_k=[40, 53, 0], **MASKS[mask]))
    check(backend, case, row_weights(case))


@pytest.mark.parametrize("heads", [(6, 6, 6), (6, 1, 1), (6, 6, 1), (6, 1, 6), (6, 3, 2), (12, 2, 4), (1, 1, 1)], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_shared_heads(backend, layout, heads):
    """Every query head its own keys, all heads the same ones, and what lies between: each side as it likes."""
    case = make(3, "bfloat16", layout=layout, heads=heads[0], heads_k=heads[1:], causal=True, **packing(layout))
    check(backend, case, row_weights(case))


@pytest.mark.parametrize("n", [(1, 1), (113, 203), (197, 197), (197, 257), (257, 197)], ids=str)
@pytest.mark.parametrize("layout", ["bshd", "sbhd", "thd"])
def test_ragged_sizes(backend, layout, n):
    ends = {"cu_seqlens_q": [0, n[0] // 3, n[0]], "cu_seqlens_k": [0, n[1] // 2, n[1]]}
    case = make(sum(n), "float16", layout=layout, batch=2, n=n, **packing(layout, ends))
    check(backend, case, row_weights(case))


@pytest.mark.parametrize("layout", ["bshd", "sbhd", "thd"])
def test_about_a_thousand(backend, layout):
    """Side 2 in heads of its own and of another width."""
    ends = {"cu_seqlens_q": [0, 1000, 1000, 1023], "cu_seqlens_k": [0, 900, 1010, 1024]}
    case = make(4, "bfloat16", layout=layout, batch=1, heads=2, heads_k=(1, 2), n=(1023, 1024), causal=True, **packing(layout, ends))
    check(backend, case, row_weights(case))


SEGMENTS = {
    "no rows in the first, no keys in the last": ([0, 0, 20, 37], [0, 9, 53, 53]),
    "no keys in the first, no rows in the last": ([0, 20, 37, 37], [0, 0, 40, 53]),
    "neither in the middle": ([0, 20, 20, 37], [0, 40, 40, 53]),
    "only the last has keys": ([0, 10, 20, 37], [0, 0, 0, 53]),
    "only the first has rows": ([0, 37, 37, 37], [0, 10, 20, 53]),
    "all rows without keys": ([0, 37, 37], [0, 0, 53]),
    "rows and keys beyond the last segment": ([0, 5, 9], [0, 3, 8]),
}


@pytest.mark.parametrize("ends", SEGMENTS)
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_segments_of_length_zero(backend, ends, dtype):
    """Nothing of a neighbour leaks: what no row may look at is NaN."""
    ends = dict(zip(("cu_seqlens_q", "cu_seqlens_k"), SEGMENTS[ends], strict=True))
    case = poisoned(make(5, dtype, layout="thd", **ends))
    check(backend, case, row_weights(case))


def nans(shape, dtype) -> np.ndarray:
    return np.full(shape, np.nan, dtype)


VIEWS = {
    "columns of a wider row": (lambda s: (*s[:-1], s[-1] + 16), lambda a: a[..., 8:-8]),
    "columns that start askew": (lambda s: (*s[:-1], s[-1] + 8), lambda a: a[..., 3:-5]),
    "rows of an odd pitch": (lambda s: (*s[:-1], s[-1] + 1), lambda a: a[..., :-1]),
    "every other column": (lambda s: (*s[:-1], 2 * s[-1]), lambda a: a[..., ::2]),
    "columns backwards": (lambda s: s, lambda a: a[..., ::-1]),
    "outer axes backwards": (lambda s: s, lambda a: a[(slice(None, None, -1),) * (a.ndim - 1)]),
    "every other of each outer axis": (lambda s: (*(2 * n for n in s[:-1]), s[-1]), lambda a: a[(slice(1, None, 2),) * (a.ndim - 1)]),
    "a part of each outer axis": (lambda s: (*(n + 3 for n in s[:-1]), s[-1]), lambda a: a[(slice(1, -2),) * (a.ndim - 1)]),
    "outer axes in another order": (
        lambda s: (*reversed(s[:-1]), s[-1]),
        lambda a: a.transpose(*reversed(range(a.ndim - 1)), a.ndim - 1),
    ),
    "columns first": (lambda s: (s[-1], *s[:-1]), lambda a: a.transpose(*range(1, a.ndim), 0)),
}
"""The shape of the array that holds a view of shape s, and the view."""


def place(backend, array: np.ndarray, form: str):
    """The array's values on the device as a view of something larger, NaN all around."""
    holder_shape, look = VIEWS[form]
    holder = nans(holder_shape(array.shape), array.dtype)
    look(holder)[...] = array
    view = look(backend.put(holder))
    assert view.shape == array.shape
    return view


@pytest.mark.parametrize("form", VIEWS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_views(backend, form, layout):
    """Read in place, or copied once: the same numbers."""
    case = make(6, "float16", layout=layout, causal=True, **packing(layout))
    inputs = {name: place(backend, array, form) for name, array in case.arrays.items()}
    check(backend, case, row_weights(case), inputs=inputs)


@pytest.mark.parametrize("form", ["columns that start askew", "rows of an odd pitch", "outer axes in another order", "columns first"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_views_of_other_dtypes(backend, form, dtype):
    case = make(7, dtype, seqlens_k=[53, 0, 20])
    inputs = {name: place(backend, array, form) for name, array in case.arrays.items()}
    check(backend, case, row_weights(case), inputs=inputs)


def test_each_input_lies_differently(backend):
    case = make(8, "float16", layout="bshd")
    forms = ("columns first", "columns of a wider row", "outer axes in another order", "every other column")
    inputs = {name: place(backend, case.arrays[name], form) for name, form in zip(SIDES, forms, strict=True)}
    check(backend, case, row_weights(case), inputs=inputs)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_parts_of_one_projection(backend, dtype):
    """Queries and keys of both sides in one array (B, N, 4, H, D), as a fused projection leaves them."""
    rng = np.random.default_rng(9)
    holder = rng.normal(size=(2, 45, 4, 3, 16)).astype(dtype)
    on_device = backend.put(holder)
    case = Case({name: holder[:, :, i] for i, name in enumerate(SIDES)}, {"layout": "bshd", "causal": True}, "one projection")
    check(backend, case, row_weights(case), inputs={name: on_device[:, :, i] for i, name in enumerate(SIDES)})
    turned = Case({name: a.swapaxes(1, 2) for name, a in case.arrays.items()}, {"causal": True}, "one projection, turned")
    check(backend, turned, row_weights(turned), inputs={name: on_device[:, :, i].swapaxes(1, 2) for i, name in enumerate(SIDES)})


@pytest.mark.parametrize("axes", [(0,), (1,), (0, 1), (2,)], ids=str)
def test_expanded_inputs(backend, axes):
    """Stride 0 along the batch, the heads, both, or the query rows."""
    case = make(10, "float16", heads_k=(4, 2))
    broadcast_to = np.broadcast_to if backend.name == "numpy" else backend.cupy.broadcast_to
    inputs, arrays = {}, {}
    for name, array in case.arrays.items():
        if axes == (2,) and name[0] == "k":
            arrays[name], inputs[name] = array, backend.put(array)
            continue
        small = array[tuple(slice(0, 1) if axis in axes else slice(None) for axis in range(4))]
        arrays[name], inputs[name] = np.broadcast_to(small, array.shape), broadcast_to(backend.put(small), array.shape)
        assert all(inputs[name].strides[axis] == 0 for axis in axes)
    case = case.with_arrays(**arrays)
    check(backend, case, row_weights(case), inputs=inputs)


def test_axes_of_one_have_any_stride(backend):
    """Frameworks leave there what they like."""
    case = make(11, "float16", batch=1, heads=1, heads_k=(1, 1))
    as_strided = np.lib.stride_tricks.as_strided if backend.name == "numpy" else backend.cupy.lib.stride_tricks.as_strided
    inputs = {}
    for name, array in case.arrays.items():
        item = array.itemsize
        inputs[name] = as_strided(backend.put(array), array.shape, (3 * item, item, array.shape[-1] * item, item))
    check(backend, case, row_weights(case), inputs=inputs)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_array_in_several_places(backend, layout):
    """Relations of a projection with itself: queries are the keys; each place has its own gradient, their sum is the array's."""
    case = make(12, "bfloat16", layout=layout, heads_k=(4, 4), n=(53, 53), **packing(layout, {n: ENDS["cu_seqlens_k"] for n in ENDS}))
    case = case.with_arrays(k1=case.arrays["q1"], k2=case.arrays["q2"])
    first, second = backend.put(case.arrays["q1"]), backend.put(case.arrays["q2"])
    check(backend, case, row_weights(case), inputs={"q1": first, "k1": first, "q2": second, "k2": second})


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_into_views(backend, layout):
    """`out` may be parts of a larger array; what lies between stays as it was."""
    case = make(13, "float16", layout=layout, causal=True, **packing(layout))
    run, weight = run_forward(backend, case), row_weights(case)
    holders = {name: backend.put(nans((*a.shape[:-1], 3, a.shape[-1]), a.dtype)) for name, a in case.arrays.items()}
    out = skl.Gradients(**{name: holder[..., 1, :] for name, holder in holders.items()})
    grads = skl.backward(run.state, backend.put(weight), wrt=SIDES, out=out)
    check_gradients(backend, case, grads, truth(case, weight, SIDES))
    for name, holder in holders.items():
        assert getattr(grads, name) is getattr(out, name)
        assert np.isnan(backend.get(holder)[..., ::2, :]).all(), name


def test_layouts_agree(backend):
    """The same problem in all layouts, sequences of equal length: the rows of one are those of the others."""
    case = make(14, "float16", causal=True)
    rows, keys = case.arrays["q1"].shape[2], case.arrays["k1"].shape[2]
    want = backend.get(run_forward(backend, case).kl)
    for layout, turn in (("bshd", (0, 2, 1, 3)), ("sbhd", (2, 0, 1, 3)), ("thd", (0, 2, 1, 3))):
        arrays = {name: array.transpose(turn) for name, array in case.arrays.items()}
        options = {"layout": layout}
        if layout == "thd":
            arrays = {name: array.reshape(-1, *array.shape[2:]) for name, array in arrays.items()}
            options |= {f"cu_seqlens_{side}": np.arange(4, dtype=np.int32) * n for side, n in (("q", rows), ("k", keys))}
        kl = backend.get(run_forward(backend, case.with_arrays(**arrays).with_options(**options)).kl)
        kl = kl.reshape(4, 3, rows).swapaxes(0, 1) if layout == "thd" else kl
        np.testing.assert_allclose(kl, want, rtol=1e-5, atol=1e-5, err_msg=layout)


@pytest.mark.parametrize("sizes", [{"batch": 70, "heads": 2, "heads_k": (1, 2)}, {"batch": 2, "heads": 33, "heads_k": (11, 3)}], ids=str)
@pytest.mark.parametrize("layout", ["bhsd", "sbhd"])
def test_many_sequences_or_heads(backend, sizes, layout):
    check(backend, make(15, "float16", layout=layout, n=(5, 9), **sizes))


def test_many_segments(backend):
    """Two hundred of them, one in three without rows, one in five without keys."""
    rng = np.random.default_rng(16)
    counts = rng.integers(1, 7, size=(2, 200))
    counts[0, ::3], counts[1, ::5] = 0, 0
    ends = np.concatenate([[[0], [0]], counts.cumsum(axis=1)], axis=1)
    case = make(16, "float16", layout="thd", n=tuple(ends[:, -1]), causal=True, cu_seqlens_q=ends[0], cu_seqlens_k=ends[1])
    check(backend, case, row_weights(case))
