"""The same bits: on every run, on any stream, beside other work. And a sequence alone is what it is in a batch, within the bar."""

import numpy as np
import pytest

import streamkl_cupy as skl

from ..oracle import EPSILON, SIDES, Case, check_gradients, make, row_weights, truth
from .spin import spin

pytestmark = pytest.mark.gpu

RUNS = 5
KINDS = {
    "bfloat16": ("bfloat16", {"n": (150, 203)}),
    "causal float16": ("float16", {"n": (300, 203), "d": (64, 128), "causal": True}),
    "float32": ("float32", {"n": (150, 203), "window": (60, 30)}),
    "wide heads": ("bfloat16", {"n": (70, 203), "d": (256, 192)}),
    "grouped heads": ("bfloat16", {"batch": 2, "heads": 8, "heads_k": (1, 2), "n": (600, 700), "d": (128, 128), "causal": True}),
    "split keys": ("bfloat16", {"batch": 1, "n": (5, 20000), "d": (128, 128)}),
    "split keys float32": ("float32", {"batch": 1, "n": (3, 9000)}),
    "split tail": ("float16", {"batch": 1, "heads": 8, "heads_k": (8, 4), "n": (2300, 3000), "d": (128, 128)}),
    "mean": ("bfloat16", {"n": (150, 203), "reduction": "mean"}),
    "packed": ("bfloat16", {"layout": "thd", "n": (900, 700), "cu_seqlens_q": [0, 400, 400, 900], "cu_seqlens_k": [0, 600, 650, 700]}),
}


def arguments(device, case):
    return {n: device.put(v) if isinstance(v, np.ndarray) else v for n, v in (case.arrays | case.options).items()}


def bits(device, arrays):
    return [device.get(array).tobytes() for array in arrays if array is not None]


@pytest.mark.parametrize("kind", KINDS)
def test_forward(device, kind):
    dtype, sizes = KINDS[kind]
    given = arguments(device, make(101, dtype, **sizes))
    states = [skl.forward(**given)[1] for _ in range(RUNS)]
    first, *others = [bits(device, (*state.rows, *(state.reduced or ()))) for state in states]
    assert all(other == first for other in others)


@pytest.mark.parametrize("kind", KINDS)
def test_backward(device, kind):
    dtype, sizes = KINDS[kind]
    case = make(102, dtype, **sizes)
    _, state = skl.forward(**arguments(device, case))
    weights = None if "reduction" in case.options else device.put(row_weights(case))
    runs = [skl.backward(state, weights, wrt=SIDES, deterministic=True) for _ in range(RUNS)]
    first, *others = [bits(device, grads) for grads in runs]
    assert all(other == first for other in others)


@pytest.mark.parametrize("wrt", [("q2", "k2"), ("k1",), ("q1", "k2")], ids=" ".join)
def test_what_else_is_wanted_changes_no_bit(device, wrt):
    """Deterministic gradients, run after run, for other sets of gradients in one call."""
    _, state = skl.forward(**arguments(device, make(103, "bfloat16", n=(300, 203), d=(128, 128), causal=True)))
    first, *others = [bits(device, skl.backward(state, wrt=wrt, deterministic=True)) for _ in range(RUNS)]
    assert all(other == first for other in others)


@pytest.mark.parametrize("kind", KINDS)
def test_thirty_runs(device, kind):
    dtype, sizes = KINDS[kind]
    given = arguments(device, make(104, dtype, **sizes))
    seen = set()
    for _ in range(30):
        _, state = skl.forward(**given)
        grads = skl.backward(state, wrt=SIDES, deterministic=True)
        seen.add(b"".join(bits(device, (*state.rows, *(state.reduced or ()), *grads))))
    assert len(seen) == 1


@pytest.mark.parametrize("kind", ["bfloat16", "grouped heads", "split keys", "split tail"])
def test_on_any_stream_beside_other_work(device, kind):
    """Other streams are busy, some blocks come late: the order of sums does not follow."""
    cuda, (dtype, sizes) = device.cupy.cuda, KINDS[kind]
    given = arguments(device, make(105, dtype, **sizes))
    _, state = skl.forward(**given)
    alone = bits(device, (*state.rows, *skl.backward(state, wrt=SIDES, deterministic=True)))
    streams, beside = [cuda.Stream(non_blocking=True) for _ in range(3)], cuda.Stream(non_blocking=True)
    device.synchronize()
    results = []
    spin(beside.ptr, 5)
    for stream in streams:
        with stream:
            _, state = skl.forward(**given)
            results.append((*state.rows, *skl.backward(state, wrt=SIDES, deterministic=True)))
    device.synchronize()
    assert all(bits(device, result) == alone for result in results)


@pytest.mark.parametrize("kind", ["grouped heads", "split keys", "mean"])
def test_with_a_workspace_the_bits_are_the_same(device, kind):
    dtype, sizes = KINDS[kind]
    given = arguments(device, make(106, dtype, **sizes))
    _, state = skl.forward(**given)
    grads = skl.backward(state, wrt=SIDES, deterministic=True)
    own = bits(device, (*state.rows, *grads))
    workspace = device.bytes(skl.workspace_size(**given, wrt=SIDES))
    _, state = skl.forward(**given, out=state, workspace=workspace)
    grads = skl.backward(state, wrt=SIDES, deterministic=True, out=grads, workspace=workspace)
    assert bits(device, (*state.rows, *grads)) == own


@pytest.mark.parametrize("kind", ["grouped heads", "causal float16", "float32"])
def test_the_default_is_right_on_every_run(device, kind):
    """Sums in any order stay within the bar."""
    dtype, sizes = KINDS[kind]
    case = make(107, dtype, **sizes)
    _, state = skl.forward(**arguments(device, case))
    expected = truth(case, None, SIDES)
    for _ in range(3):
        check_gradients(device, case, skl.backward(state, wrt=SIDES), expected)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (40, 20)}], ids=str)
def test_a_sequence_alone_is_what_it_is_in_a_batch(device, dtype, options):
    case = make(108, dtype, batch=3, n=(150, 203), **options)
    weights, whole = row_weights(case), arguments(device, case)
    _, state = skl.forward(**whole)
    grads = skl.backward(state, device.put(weights), wrt=SIDES, dtype="float32")
    for b in range(3):
        alone = Case({n: a[b : b + 1] for n, a in case.arrays.items()}, case.options, f"{case.note}, sequence {b}")
        right = truth(alone, weights[b : b + 1], SIDES, "float32")
        inputs = {n: whole[n][b : b + 1] for n in SIDES}
        _, one = skl.forward(**(whole | inputs))
        single = skl.backward(one, device.put(weights[b : b + 1]), wrt=SIDES, dtype="float32")
        atol = 5e-6 + EPSILON * right.largest
        for name in ("kl", "lse1", "lse2"):
            np.testing.assert_allclose(
                device.get(getattr(one, name)), device.get(getattr(state, name))[b : b + 1], rtol=1e-5, atol=atol, err_msg=name
            )
        check_gradients(device, alone, single, right)
        check_gradients(device, alone, skl.Gradients(*(g[b : b + 1] for g in grads)), right)
