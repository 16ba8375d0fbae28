"""The portable kernels from the launching code down, on CPU arrays: plans, grids, parameters and CUDA sources as a GPU gets them.

Everything that the kernels copy is checked to lie in the inputs; outputs start as NaN, and so does what no row may look at.
"""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("cupy", reason="the launching code needs CuPy, though no GPU")

from streamkl_cupy.checks import SIDES, VECTORS
from streamkl_cupy.gpu import backward, forward, merge
from streamkl_cupy.problem import Problem

from .machine import AMPERE, DTYPES, SMALL, Machine, check_kl, inputs, ints, nan_rows, run, views


@pytest.fixture
def machine(monkeypatch):
    machine = Machine(AMPERE)
    machine.install(monkeypatch)
    yield machine
    forward.plan.cache_clear()
    backward.plan.cache_clear()


CASES = {
    "plain": ("bhsd", {}),
    "causal": ("bshd", {"causal": True}),
    "causal from the top left": ("sbhd", {"causal": True, "q_offset": 0}),
    "window": ("bhsd", {"window": (20, 9)}),
    "rows that see nothing": ("bshd", {"window": (5, 0), "q_offset": ints(-20, 100)}),
    "sum": ("bhsd", {"reduction": "sum"}),
    "mean": ("bhsd", {"reduction": "mean", "causal": True, "q_offset": -10}),
}
assert all(name in VECTORS for _, options in CASES.values() for name, v in options.items() if isinstance(v, np.ndarray))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_masks_and_layouts(machine, dtype, name):
    layout, options = CASES[name]
    run(machine, inputs(dtype, layout), layout=layout, **options)


@pytest.mark.parametrize("dtype", DTYPES)
def test_padded_batch(machine, dtype):
    """NaN behind the valid lengths, one of which is 0."""
    arrays = inputs(dtype, "bhsd", batch=3, n=(140, 70))
    lengths = {"q": ints(129, 0, 31), "k": ints(70, 12, 49)}
    for name, array in arrays.items():
        for index, length in enumerate(lengths[name[0]]):
            array[index, :, length:] = np.nan
    run(machine, arrays, seqlens_q=lengths["q"], seqlens_k=lengths["k"], causal=True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_packed_segments(machine, dtype):
    """Zero-length segments on either side, and NaN in the tail that belongs to none."""
    arrays = inputs(dtype, "thd", n=(211, 170))
    for name, array in arrays.items():
        array[{"q": 205, "k": 160}[name[0]] :] = np.nan
    run(machine, arrays, layout="thd", cu_seqlens_q=ints(0, 0, 140, 150, 150, 205), cu_seqlens_k=ints(0, 30, 100, 100, 150, 160))


def test_splits_over_the_keys(machine):
    run(machine, inputs("bfloat16", "bhsd", n=(37, 700), batch=1), wrt=("q2",))
    assert machine.launched[:2] == ["forward", "forward_merge_splits"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_that_see_nothing_may_have_nan_weights(machine, dtype):
    weights = np.ones((2, 4, 37), np.float32)
    weights[:, :, :20] = np.nan
    run(machine, inputs(dtype, "bhsd"), weights=weights, causal=True, q_offset=-20)


@pytest.mark.parametrize("dtype", DTYPES)
def test_both_sides_in_one_launch_with_row_weights(machine, dtype):
    """Tiny weights of a float16 array too: g goes in through a power of two."""
    arrays = inputs(dtype, "bhsd", heads=(4, 2, 2))
    weights = (np.random.default_rng(1).normal(size=(2, 4, 37)) * 1e-9).astype(np.float32)
    weights[:, 1] *= 1e6
    run(machine, arrays, weights=weights)
    if dtype != "float32":
        assert machine.launched[-2:] == ["backward_dq", "backward_dk"]


def test_side_2_has_more_key_heads(machine):
    """The keys of the other side change in the middle of a group; the cases above have more heads on side 1."""
    run(machine, inputs("bfloat16", "bhsd", heads=(4, 1, 2)), wrt=("k1", "k2"))


def test_gradients_in_the_dtype_of_the_inputs(machine):
    run(machine, inputs("bfloat16", "bhsd"), weights=0.5, as_float32=False)


@pytest.mark.parametrize("info", [AMPERE, SMALL], ids=["164 KB", "99 KB"])
def test_wide_heads(machine, info):
    machine.info = info
    run(machine, inputs("float16", "bhsd", heads=(1, 1, 1), batch=1, n=(70, 45), d=(256, 192)), causal=True)


def test_merging_shards(machine):
    arrays = inputs("bfloat16", "bhsd")
    parts = []
    for keys in (slice(0, 50), slice(50, 113)):
        shard = {n: np.ascontiguousarray(a[:, :, keys]) if n[0] == "k" else a for n, a in arrays.items()}
        problem = Problem.check(*views(shard).values())
        machine.memory = list(shard.values())
        parts.append(nan_rows(problem))
        forward.run(problem, views(shard), views(parts[-1]), None, None, 0, allocate=machine.allocate)
    merged = nan_rows(problem)
    merge.run([views(p) for p in parts], views(merged), problem.row_shape, 0)
    check_kl(merged, arrays, {})


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("d", [(576, 40), (72, 320)])
def test_wide_heads_by_column_chunks(machine, dtype, d):
    run(machine, inputs(dtype, "bhsd", heads=(2, 1, 2), batch=1, n=(50, 70), d=d), causal=True)
    assert all("chunked" in entry for entry in machine.launched if "merge" not in entry)


def test_float32_takes_the_chunked_kernels(machine):
    run(machine, inputs("float32", "bshd", n=(150, 100), d=(8, 40)), layout="bshd", window=(60, 10))
    assert all("chunked" in entry for entry in machine.launched if "merge" not in entry)


@pytest.mark.parametrize("dtype", DTYPES)
def test_equal_sides_give_exactly_nothing(machine, dtype):
    arrays = inputs(dtype, "bhsd", heads=(2, 1, 1), d=(40, 40))
    arrays |= {"q2": arrays["q1"], "k2": arrays["k1"]}
    given = views(arrays)
    problem = Problem.check(*(given[n] for n in SIDES), causal=True)
    machine.memory = list(arrays.values())
    rows, grads = nan_rows(problem), {n: np.full(arrays[n].shape, np.nan, np.float32) for n in SIDES}
    forward.run(problem, given, views(rows), None, None, 0, allocate=machine.allocate)
    backward.run(problem, given, views(rows), None, None, views(grads), True, None, 0, allocate=machine.allocate)
    assert not rows["kl"].any() and not any(grad.any() for grad in grads.values())
