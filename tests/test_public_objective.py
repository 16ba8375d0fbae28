"""Objective, direction, reduction: what went wrong elsewhere, by its right value here, one kind of public report a test."""

import numpy as np
import pytest

import streamkl_cupy as skl
from streamkl_cupy.checks import SIDES

from .logits import CASES, ROUNDING, embed
from .oracle import DTYPES, Case, check, make, poisoned, row_weights, run_forward, truth


def test_direction(backend):
    """verl#7806, trl#3043, trl#4935: teacher and student swapped. KL(P1 || P2): the first two arguments are the teacher's."""
    teacher, student = np.log([0.9, 0.1]), np.log([0.6, 0.4])
    for first, second, name in ((teacher, student, "kl_teacher_student"), (student, teacher, "kl_student_teacher")):
        kl = backend.get(run_forward(backend, embed(first, second)).kl).ravel()
        np.testing.assert_allclose(kl, CASES["direction"][name], rtol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_mean_is_over_rows(backend, dtype):
    """deit#61, pytorch#2259, pytorch#14457, ActionCLIP#24: `mean` was divided by the number of keys as well."""
    case = make(8, dtype, batch=2, heads=3, heads_k=(3, 1), n=(4, 8))
    rows = backend.get(check(backend, case).kl).astype(float)
    for reduction, want in (("sum", rows.sum()), ("mean", rows.sum() / 24)):
        value = check(backend, case.with_options(reduction=reduction)).kl
        np.testing.assert_allclose(float(backend.get(value)), want, rtol=1e-6)


def test_all_keys_count(backend):
    """PaddleFleet#1682: a warm-up scored the columns up to a cap only. PaddleFleet#1753: shared memory grew with their number."""
    case = make(9, "bfloat16", batch=1, heads=1, heads_k=(1, 1), n=(3, 9000), causal=True)
    run = check(backend, case)
    np.testing.assert_array_equal(backend.get(run.grads.k2)[0, 0].astype(float).any(axis=-1), True)
    flat = run_forward(backend, case.with_arrays(q1=case.arrays["q1"] * 0, q2=case.arrays["q2"] * 0)).state
    np.testing.assert_allclose(backend.get(flat.lse1).ravel(), np.log([8998, 8999, 9000]), rtol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_over_micro_batches_add_up(backend, dtype):
    """Megatron-LM#4070: the loss was not scaled by the number of micro-batches. grad(a g) = a grad(g), and batches are independent."""
    case = make(10, dtype, batch=4, causal=True)
    whole = skl.backward(run_forward(backend, case).state, 1 / 4, wrt=SIDES, dtype="float32")
    for half in (slice(0, 2), slice(2, 4)):
        run = run_forward(backend, case.with_arrays(**{name: array[half] for name, array in case.arrays.items()}))
        part = skl.backward(run.state, 1 / 2, wrt=SIDES, dtype="float32")
        for name in SIDES:
            got, want = backend.get(getattr(part, name)) / 2, backend.get(getattr(whole, name))[half]
            assert np.linalg.norm(got - want) <= ROUNDING[dtype] * np.linalg.norm(want), name


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_over_two_calls_add_up(backend, dtype):
    """Megatron-LM#3674: too small by the number of context-parallel ranks. Query shards need an offset, and nothing else."""
    case = make(11, dtype, n=(64, 80), causal=True, reduction="sum")
    whole = check(backend, case)
    parts = []
    for begin, end in ((0, 24), (24, 64)):
        arrays = {name: case.arrays[name][:, :, begin:end] for name in ("q1", "q2")}
        parts.append(check(backend, case.with_arrays(**arrays).with_options(q_offset=16 + begin), dtype="float32"))
    total = float(backend.get(whole.kl))
    assert abs(sum(float(backend.get(part.kl)) for part in parts) - total) <= 1e-5 * total
    for name in ("k1", "k2"):
        together = sum(backend.get(getattr(part.grads, name)) for part in parts)
        want = truth(case, None, (name,)).grads[name]
        assert np.linalg.norm(together - want) <= ROUNDING[dtype] * np.linalg.norm(want), name


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_packing_changes_no_loss(backend, reduction):
    """Megatron-LM#4894, optipfair#34: padded or packed, over the same tokens; padding is no part of a mean."""
    q, k = np.array([7, 37, 20], np.int32), np.array([53, 11, 30], np.int32)
    padded = poisoned(make(12, "float16", reduction=reduction, seqlens_q=q, seqlens_k=k, causal=True))
    arrays = {}
    for name, array in padded.arrays.items():
        lengths = q if name[0] == "q" else k
        arrays[name] = np.concatenate([array[b, :, :n].swapaxes(0, 1) for b, n in enumerate(lengths)])
    ends = {f"cu_seqlens_{side}": np.concatenate([[0], np.cumsum(n)]).astype(np.int32) for side, n in (("q", q), ("k", k))}
    packed = Case(arrays, {"layout": "thd", "causal": True, "reduction": reduction} | ends, "packed")
    runs = [check(backend, case, 0.5) for case in (padded, packed)]
    values = [float(backend.get(run.kl)) for run in runs]
    np.testing.assert_allclose(values[0], values[1], rtol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_small_kl_still_has_a_gradient(backend, dtype):
    """verl#7806: a KL clamped at 0 has no gradient there. P2 - P1 at a student that is off by 2^-8 in one logit: KL 2e-6."""
    step = 2.0**-8
    run = check(backend, embed([0.0, 0.0], [0.0, step], dtype), dtype="float32")
    p = 1 / (1 + np.exp(-step))
    np.testing.assert_allclose(backend.get(run.grads.k2)[0, 0, :, 0], [0.5 - p, p - 0.5], rtol=2e-3)


def test_no_two_sizes_are_equal(backend):
    """maxtext#3364: equal sizes hid a wrong broadcast."""
    case = make(13, "float32", batch=3, heads=12, heads_k=(4, 2), n=(37, 53), d=(16, 24))
    assert len({3, 12, 4, 2, 37, 53, 16, 24}) == 8
    check(backend, case, row_weights(case))


@pytest.mark.parametrize("d", [8, 12])
def test_relation_heads(backend, d):
    """unilm#349, #354: hidden states split into 6 relation heads, teacher 16 wide, student 8 or 12; queries and keys are one tensor.
    "bshd" is the reshaped hidden state as it is; "bhsd" needs the transpose that was forgotten there."""
    rng = np.random.default_rng(14)
    hidden = {"1": rng.normal(size=(2, 33, 6 * 16)), "2": rng.normal(size=(2, 33, 6 * d))}
    split = {side: h.astype(np.float16).reshape(2, 33, 6, -1) for side, h in hidden.items()}
    case = Case({name: split[name[1]] for name in SIDES}, {"layout": "bshd"}, "relations")
    turned = Case({name: split[name[1]].swapaxes(1, 2) for name in SIDES}, {}, "relations, turned")
    on_device = {side: backend.put(array) for side, array in split.items()}
    one = check(backend, case, inputs={name: on_device[name[1]] for name in SIDES})
    other = check(backend, turned, inputs={name: on_device[name[1]].swapaxes(1, 2) for name in SIDES})
    np.testing.assert_allclose(backend.get(one.kl), backend.get(other.kl), rtol=1e-5, atol=1e-5)
