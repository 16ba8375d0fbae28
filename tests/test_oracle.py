"""The bars can fail: answers that are wrong in small ways are refused, right ones in float64 are not."""

import numpy as np
import pytest

import streamkl_cupy as skl
from streamkl_cupy import reference
from streamkl_cupy.checks import SIDES
from streamkl_cupy.state import LN2

from .backends import NumPyBackend
from .oracle import DTYPES, NUMPY, check_gradients, check_rows, make, truth

BACKEND = NumPyBackend()


def answer(case, **changes) -> skl.KLState:
    """The reference's rows as a state, with other options or arrays than the case's."""
    rows = reference.forward(**(case.arrays | case.options | changes))
    lse = [np.where(np.isneginf(x), -np.inf, x / LN2).astype(np.float32) for x in (rows.lse1, rows.lse2)]
    zeros = np.zeros(rows.kl.shape, np.float32)
    return skl.KLState(skl.RowStats(rows.kl.astype(np.float32), zeros, lse[0], zeros, lse[1]), None, None)


def refused(case, state) -> None:
    with pytest.raises(AssertionError):
        check_rows(BACKEND, case, state, truth(case))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1.0, 6.0])
def test_rows(dtype, size):
    case = make(1, dtype, size=size, seqlens_k=[53, 20, 0])
    expected, right = truth(case), answer(case)
    check_rows(BACKEND, case, right, expected)
    at = np.unravel_index(np.argmin(np.where(expected.rows.kl > 0.1 * size, expected.logit_slack, np.inf)), right.kl.shape)
    for field in ("kl", "logsum1", "logsum2"):
        wrong = getattr(right.rows, field).copy()
        wrong[at] *= 1 + 1e-4
        refused(case, skl.KLState(right.rows._replace(**{field: wrong}), None, None))
    wrong = right.rows.kl.copy()
    wrong[2, 0, 0] = 1e-30
    refused(case, skl.KLState(right.rows._replace(kl=wrong), None, None))
    refused(case, answer(case, causal=True))
    refused(case, answer(case, scale2=1.0001 * 24**-0.5))
    refused(case, answer(case, seqlens_k=[53, 19, 0]))
    refused(case, answer(case, k1=np.roll(case.arrays["k1"], 1, axis=2)))


def test_rounded_logits_explain_little():
    """They matter where logits are large and a row's mass lies on keys of different log-ratios, and nowhere else."""
    assert truth(make(2)).logit_slack.max() < 3e-6
    sharp = truth(make(2, size=6.0))
    assert sharp.logit_slack.max() < 2e-3 and np.median(sharp.logit_slack / (1e-5 * sharp.rows.kl)) < 0.1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("wide", [False, True])
def test_gradients(dtype, wide):
    case = make(3, dtype, causal=True)
    expected = truth(case, None, SIDES, "float32" if wide else None)
    right = {name: expected.grads[name].astype(np.float32 if wide else NUMPY[dtype]) for name in SIDES}
    check_gradients(BACKEND, case, skl.Gradients(**right), expected)
    off = {"float16": 2e-3, "bfloat16": 1.5e-2, "float32": 3e-5}[dtype]
    for name in SIDES:
        lost = expected.grads[name].copy()
        lost[0, 0, 0] = 0
        for wrong in ((1 + off) * expected.grads[name], lost, -expected.grads[name], np.roll(expected.grads[name], 1, axis=-1)):
            with pytest.raises(AssertionError, match=f"d{name} is off"):
                check_gradients(BACKEND, case, skl.Gradients(**(right | {name: wrong})), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_that_are_zero(dtype):
    """One key: float noise is taken, a hundred times as much is not."""
    case = make(4, dtype, n=(1, 1))
    expected = truth(case, None, SIDES)
    for noise, fits in ((1e-7, True), (1e-4, False)):
        grads = {name: (noise * 0.2 * case.arrays[name].astype(float)).astype(NUMPY[dtype]) for name in SIDES}
        if fits:
            check_gradients(BACKEND, case, skl.Gradients(**grads), expected)
        else:
            with pytest.raises(AssertionError, match="is off"):
                check_gradients(BACKEND, case, skl.Gradients(**grads), expected)


def test_what_nobody_sees_is_exactly_zero():
    case = make(5, seqlens_q=[37, 0, 37], seqlens_k=[53, 53, 20])
    expected = truth(case, None, SIDES)
    for name, at in (("q1", (1, 0, 0, 0)), ("k2", (2, 0, 20, 3))):
        wrong = expected.grads[name].copy()
        wrong[at] = 1e-30
        with pytest.raises(AssertionError, match="not 0 where nothing is seen"):
            check_gradients(BACKEND, case, skl.Gradients(**(expected.grads | {name: wrong})), expected)
