"""The Hopper kernels from the launching code down, like test_kernels.py: bulk copies and products take place as late as they may."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("cupy", reason="the launching code needs CuPy, though no GPU")

from streamkl_cupy.checks import SIDES
from streamkl_cupy.gpu import backward, forward
from streamkl_cupy.problem import Problem

from .machine import HOPPER, Machine, inputs, ints, nan_rows, run, views


@pytest.fixture
def machine(monkeypatch):
    machine = Machine(HOPPER)
    machine.install(monkeypatch)
    yield machine
    assert all("sm90" in entry for entry in machine.launched if not any(name in entry for name in ("merge", "reduce", "write_dq")))
    forward.plan.cache_clear()
    backward.plan.cache_clear()


def padded(dtype, layout, lengths_q, lengths_k, **sizes):
    """Inputs with NaN behind the valid lengths."""
    arrays = inputs(dtype, layout, batch=len(lengths_q), **sizes)
    for name, array in arrays.items():
        for index, length in enumerate(lengths_q if name[0] == "q" else lengths_k):
            array[index, :, length:] = np.nan
    return arrays


CASES = {
    "plain": ("bhsd", {}),
    "causal": ("bshd", {"causal": True}),
    "causal from an offset": ("sbhd", {"causal": True, "q_offset": 30}),
    "window": ("bhsd", {"window": (20, 9)}),
    "rows that see nothing": ("bshd", {"window": (5, 0), "q_offset": ints(-20, 100)}),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_masks_and_layouts(machine, dtype, name):
    """Query heads share keys, on side 2 more of them; the columns of side 2 are fewer than its class."""
    layout, options = CASES[name]
    run(machine, inputs(dtype, layout, n=(150, 203)), layout=layout, **options)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_padded_batch(machine, dtype):
    """NaN behind the valid lengths, one of which is 0."""
    lengths_q, lengths_k = ints(129, 0, 31), ints(70, 12, 161)
    arrays = padded(dtype, "bhsd", lengths_q, lengths_k, heads=(2, 1, 2), n=(140, 170))
    run(machine, arrays, seqlens_q=lengths_q, seqlens_k=lengths_k, causal=True)


def test_sequences_without_keys(machine):
    lengths_q, lengths_k = ints(130, 20), ints(0, 90)
    arrays = padded("bfloat16", "bhsd", lengths_q, lengths_k, heads=(2, 1, 1), n=(140, 100))
    run(machine, arrays, seqlens_q=lengths_q, seqlens_k=lengths_k)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_packed_segments(machine, dtype):
    """Zero-length segments on either side, and NaN in the tail that belongs to none."""
    arrays = inputs(dtype, "thd", heads=(2, 2, 1), n=(311, 270))
    for name, array in arrays.items():
        array[{"q": 305, "k": 260}[name[0]] :] = np.nan
    run(machine, arrays, layout="thd", cu_seqlens_q=ints(0, 0, 140, 150, 150, 305), cu_seqlens_k=ints(0, 30, 100, 100, 150, 260))


def test_splits_over_the_keys(machine):
    run(machine, inputs("bfloat16", "bhsd", heads=(2, 1, 1), n=(37, 700), batch=1), wrt=("q2",))
    assert machine.launched[:2] == ["forward_sm90", "forward_merge_splits"]


FEW_ROWS = {
    "one row": {"n": (1, 1100)},
    "a group of heads is one tile": {"n": (16, 1300), "heads": (8, 2, 1), "causal": True},
    "groups of unequal size": {"n": (5, 1100), "heads": (6, 1, 2), "causal": True, "q_offset": 700},
    "window": {"n": (20, 2000), "window": (500, 20)},
    "a whole tile": {"n": (64, 1030), "heads": (2, 1, 1), "batch": 1, "d": (128, 128)},
    "rows that see nothing": {"n": (6, 1100), "window": (5, 0), "q_offset": ints(-20, 1000)},
}


class TestFewRows:
    """All rows that see the same keys as one tile, the keys split."""

    @pytest.mark.parametrize("name", FEW_ROWS)
    @pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
    def test_masks_and_groups(self, machine, dtype, name):
        options = dict(FEW_ROWS[name])
        sizes = {n: options.pop(n) for n in ("n", "heads", "batch", "d") if n in options}
        run(machine, inputs(dtype, "bshd", **sizes), wrt=("q2",), layout="bshd", **options)
        assert machine.launched[:2] == ["forward_few_rows_sm90", "forward_merge"]

    def test_padded_batch(self, machine):
        lengths_q, lengths_k = ints(30, 0, 7), ints(1100, 12, 1161)
        arrays = padded("bfloat16", "bhsd", lengths_q, lengths_k, heads=(4, 1, 2), n=(30, 1170))
        run(machine, arrays, wrt=("q2",), seqlens_q=lengths_q, seqlens_k=lengths_k, causal=True)
        assert machine.launched[:2] == ["forward_few_rows_sm90", "forward_merge"]

    def test_more_rows_or_fewer_keys_take_the_other_kernel(self, machine):
        for n in ((65, 1030), (3, 1020)):
            run(machine, inputs("bfloat16", "bhsd", heads=(1, 1, 1), n=n, batch=1), wrt=("q2",))
        assert "forward_few_rows_sm90" not in machine.launched


@pytest.mark.parametrize("heads", [(4, 1, 2), (4, 4, 1)])
def test_heads_that_share_keys(machine, heads):
    """With more key heads on the other side, its keys change in the middle of a group."""
    run(machine, inputs("bfloat16", "bhsd", heads=heads, batch=1, n=(70, 90)), wrt=("k1", "k2"), causal=True)


@pytest.mark.parametrize("d", [(128, 64), (24, 128)])
def test_two_chunks_of_columns(machine, d):
    run(machine, inputs("bfloat16", "bhsd", heads=(2, 1, 2), batch=1, n=(140, 150), d=d), wrt=("q1", "k2"), causal=True)


def test_row_weights(machine):
    """Tiny weights of a float16 array too: g goes in through a power of two."""
    weights = (np.random.default_rng(1).normal(size=(2, 4, 37)) * 1e-9).astype(np.float32)
    weights[:, 1] *= 1e6
    run(machine, inputs("float16", "bhsd", heads=(4, 2, 2)), weights=weights)


def test_mean_and_gradients_in_the_dtype_of_the_inputs(machine):
    run(machine, inputs("bfloat16", "bhsd"), weights=0.5, as_float32=False, reduction="mean", causal=True, q_offset=-10)


class TestFused:
    """dQ and dK of a side in one launch."""

    @pytest.mark.parametrize("name", CASES)
    @pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
    def test_masks_and_layouts(self, machine, dtype, name):
        layout, options = CASES[name]
        run(machine, inputs(dtype, layout, n=(150, 203)), deterministic=False, layout=layout, **options)
        assert machine.launched[1:] == ["backward_sm90", "write_dq"] * 2

    def test_padded_batch_and_row_weights(self, machine):
        lengths_q, lengths_k = ints(129, 0, 31, 100), ints(70, 12, 161, 0)
        arrays = padded("bfloat16", "bhsd", lengths_q, lengths_k, heads=(2, 1, 2), n=(140, 170))
        weights = np.random.default_rng(1).normal(size=(4, 2, 140)).astype(np.float32)
        run(machine, arrays, weights=weights, deterministic=False, seqlens_q=lengths_q, seqlens_k=lengths_k, causal=True)
        assert "write_dq" in machine.launched

    def test_packed_segments(self, machine):
        arrays = inputs("bfloat16", "thd", heads=(2, 2, 1), n=(311, 270))
        for name, array in arrays.items():
            array[{"q": 305, "k": 260}[name[0]] :] = np.nan
        options = {"layout": "thd", "cu_seqlens_q": ints(0, 0, 140, 150, 150, 305), "cu_seqlens_k": ints(0, 30, 100, 100, 150, 260)}
        run(machine, arrays, deterministic=False, **options)
        assert "write_dq" in machine.launched

    @pytest.mark.parametrize("d", [(128, 64), (24, 128), (96, 16)])
    def test_columns(self, machine, d):
        options = {"deterministic": False, "causal": True, "as_float32": False, "wrt": ("q1", "k1", "q2")}
        run(machine, inputs("bfloat16", "bhsd", heads=(2, 1, 2), batch=1, n=(140, 150), d=d), **options)
        assert machine.launched[1:] == ["backward_sm90", "write_dq", "backward_dq_sm90"]

    @pytest.mark.parametrize("weight", [1e-9, -1e6])
    def test_one_weight_of_any_size(self, machine, weight):
        run(machine, inputs("float16", "bhsd", heads=(4, 2, 2)), weights=weight, deterministic=False)
        assert "write_dq" in machine.launched

    @pytest.mark.parametrize("deterministic", [False, True])
    def test_what_sees_nothing_and_what_is_not_seen_may_be_nan(self, machine, deterministic):
        """Keys ahead of every row of a causal batch, rows behind every key of a window, and the weights of such rows."""
        for options, rows, keys in (
            ({"causal": True, "q_offset": -30}, slice(0, 30), slice(40, None)),
            ({"window": (10, 5), "q_offset": 100}, slice(75, None), slice(0, 90)),
        ):
            arrays = inputs("bfloat16", "bhsd", heads=(2, 2, 2), n=(70, 150) if "causal" in options else (90, 165), d=(64, 24))
            weights = np.ones(arrays["q1"].shape[:3], np.float32)
            for name, array in arrays.items():
                array[:, :, rows if name[0] == "q" else keys] = np.nan
            weights[:, :, rows] = np.nan
            run(machine, arrays, weights=weights, deterministic=deterministic, **options)

    @pytest.mark.parametrize("deterministic", [False, True])
    def test_float16_gradients_up_to_its_range(self, machine, deterministic):
        """Two keys of equal probability that the student tells apart by 32000 nats: dS of 8000 on either."""
        arrays = {name: np.zeros((1, 2, 64, 16), np.float16) for name in ("q1", "q2")}
        arrays |= {name: np.zeros((1, 2, 2, 16), np.float16) for name in ("k1", "k2")}
        arrays["q1"][..., 1] = 1
        arrays["q2"][..., 0], arrays["k2"][:, :, 0, 0], arrays["k2"][:, :, 1, 0] = 250, 64, -64
        arrays["k1"][..., 2] = 1
        run(machine, arrays, wrt=("k1",), deterministic=deterministic, scale1=1.0, scale2=1.0)

    @pytest.mark.parametrize("deterministic", [False, True])
    @pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
    def test_equal_sides_have_zero_gradients(self, machine, dtype, deterministic):
        arrays = inputs(dtype, "bhsd", heads=(4, 2, 2), d=(64, 64))
        arrays["q2"], arrays["k2"] = arrays["q1"], arrays["k1"]
        given = views(arrays)
        problem = Problem.check(*(given[n] for n in SIDES))
        machine.memory, rows = list(arrays.values()), nan_rows(problem)
        forward.run(problem, given, views(rows), None, None, 0, allocate=machine.allocate)
        grads = {n: np.full(arrays[n].shape, np.nan, np.float32) for n in SIDES}
        backward.run(problem, given, views(rows), 1e6, None, views(grads), deterministic, None, 0, allocate=machine.allocate)
        assert not any(grad.any() for grad in grads.values())
        assert ("write_dq" in machine.launched) != deterministic

    def test_separate_where_float16_rows_differ_in_weight(self, machine):
        weights = np.random.default_rng(1).normal(size=(2, 4, 37)).astype(np.float32)
        run(machine, inputs("float16", "bhsd"), weights=weights, deterministic=False)
        assert "write_dq" not in machine.launched
