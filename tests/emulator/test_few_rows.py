"""The Hopper backward for few query rows and many keys, like test_hopper.py."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("cupy", reason="the launching code needs CuPy, though no GPU")

from streamkl_cupy.checks import SIDES
from streamkl_cupy.gpu import backward, forward
from streamkl_cupy.problem import Problem

from .machine import HOPPER, Machine, inputs, ints, nan_rows, run, views

KERNELS = ["backward_few_rows_sm90", "write_dq_rows"]


@pytest.fixture
def machine(monkeypatch):
    machine = Machine(HOPPER)
    machine.install(monkeypatch)
    yield machine
    forward.plan.cache_clear()
    backward.plan.cache_clear()


def check(machine, arrays, launches=KERNELS * 2, **options):
    run(machine, arrays, deterministic=False, **options)
    assert [entry for entry in machine.launched if entry.startswith(("backward", "write"))] == launches


CASES = {
    "plain": ("bhsd", {}),
    "causal": ("bshd", {"causal": True}),
    "causal from an offset": ("sbhd", {"causal": True, "q_offset": 300}),
    "window": ("bhsd", {"window": (150, 9), "q_offset": 600}),
    "rows that see nothing": ("bshd", {"window": (70, 0), "q_offset": ints(-3, 705)}),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_masks_and_layouts(machine, dtype, name):
    """Two query heads share keys; the columns of side 2 are fewer than its class. No length is a multiple of a tile."""
    layout, options = CASES[name]
    check(machine, inputs(dtype, layout, heads=(4, 2, 2), n=(9, 707)), layout=layout, **options)


@pytest.mark.parametrize("rows", [1, 16, 63, 64])
def test_rows(machine, rows):
    check(machine, inputs("bfloat16", "bhsd", heads=(2, 2, 2), batch=1, n=(rows, 650)), as_float32=False)


@pytest.mark.parametrize("d", [(128, 128), (128, 64), (24, 128), (96, 16), (32, 96)], ids=str)
@pytest.mark.parametrize("as_float32", [False, True])
def test_columns(machine, d, as_float32):
    """In one block a key head: the ring wraps."""
    check(machine, inputs("bfloat16", "bhsd", heads=(2, 1, 1), batch=4, n=(20, 650), d=d), as_float32=as_float32, causal=True)


@pytest.mark.parametrize(
    "heads, launches",
    [
        ((4, 1, 1), KERNELS * 2),
        ((4, 2, 1), [*KERNELS, "backward_sm90", "write_dq"]),
        ((4, 1, 4), ["backward_sm90", "write_dq", *KERNELS]),
    ],
)
def test_heads_that_share_keys(machine, heads, launches):
    """The side with fewer key heads takes the other kernel: its groups meet several of the other's keys."""
    check(machine, inputs("bfloat16", "bhsd", heads=heads, batch=1, n=(13, 650)), launches, causal=True)


def test_too_many_rows_or_too_few_keys(machine):
    for n in ((33, 650), (9, 250)):
        machine.launched.clear()
        check(machine, inputs("bfloat16", "bhsd", heads=(2, 1, 1), batch=1, n=n), ["backward_sm90", "write_dq"], wrt=("q2", "k2"))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_padded_batch(machine, dtype):
    """NaN behind the valid lengths, some of which are 0."""
    lengths_q, lengths_k = ints(9, 0, 5, 8), ints(700, 320, 129, 0)
    arrays = inputs(dtype, "bhsd", heads=(2, 1, 1), n=(9, 700), batch=4)
    for name, array in arrays.items():
        for index, length in enumerate(lengths_q if name[0] == "q" else lengths_k):
            array[index, :, length:] = np.nan
    check(machine, arrays, seqlens_q=lengths_q, seqlens_k=lengths_k, causal=True)


def test_what_sees_nothing_and_what_is_not_seen_may_be_nan(machine):
    """Keys ahead of every row, keys behind the window of every row, rows whose window is empty, and the weights of such rows."""
    for options, rows, keys in (
        ({"causal": True, "q_offset": 330}, slice(0, 0), slice(340, None)),
        ({"causal": True, "q_offset": -4}, slice(0, 4), slice(6, None)),
        ({"window": (10, 5), "q_offset": 693}, slice(7, None), slice(0, 683)),
    ):
        arrays = inputs("bfloat16", "bhsd", heads=(2, 1, 1), n=(10, 690), d=(64, 24))
        weights = np.ones(arrays["q1"].shape[:3], np.float32)
        for name, array in arrays.items():
            array[:, :, rows if name[0] == "q" else keys] = np.nan
        weights[:, :, rows] = np.nan
        machine.launched.clear()
        check(machine, arrays, weights=weights, **options)


@pytest.mark.parametrize("weight", [1e-9, -1e6])
def test_one_weight_of_any_size(machine, weight):
    check(machine, inputs("float16", "bhsd", heads=(4, 2, 2), n=(7, 650)), weights=weight)


def test_row_weights_and_a_mean(machine):
    weights = np.random.default_rng(1).normal(size=(2, 2, 7)).astype(np.float32)
    check(machine, inputs("bfloat16", "bhsd", heads=(2, 1, 1), n=(7, 650)), weights=weights)
    machine.launched.clear()
    check(machine, inputs("float16", "bhsd", heads=(2, 1, 1), n=(7, 650)), weights=0.5, reduction="mean", causal=True)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_equal_sides_have_zero_gradients(machine, dtype):
    arrays = inputs(dtype, "bhsd", heads=(4, 2, 2), n=(11, 650), d=(64, 64))
    arrays["q2"], arrays["k2"] = arrays["q1"], arrays["k1"]
    given = views(arrays)
    problem = Problem.check(*(given[n] for n in SIDES))
    machine.memory, rows = list(arrays.values()), nan_rows(problem)
    forward.run(problem, given, views(rows), None, None, 0, allocate=machine.allocate)
    grads = {n: np.full(arrays[n].shape, np.nan, np.float32) for n in SIDES}
    backward.run(problem, given, views(rows), 1e6, None, views(grads), False, None, 0, allocate=machine.allocate)
    assert not any(grad.any() for grad in grads.values())
    assert KERNELS[0] in machine.launched
