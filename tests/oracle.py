"""Runs problems on a backend, into outputs full of NaN, and compares with the float64 reference.

`check` does both directions. What fails says shapes, dtype, options and seed.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

import streamkl_cupy as skl
from streamkl_cupy.checks import SIDES

from .bars import EPSILON, Truth, truth
from .problems import DTYPES, NUMPY, Case, make, offset_case, poisoned, row_weights, touched

__all__ = [
    "DTYPES",
    "EPSILON",
    "KL_FLOOR",
    "NUMPY",
    "SIDES",
    "Case",
    "Run",
    "Truth",
    "call_options",
    "check",
    "check_forward",
    "check_gradients",
    "check_rows",
    "host_rows",
    "make",
    "nan_gradients",
    "nan_state",
    "offset_case",
    "poisoned",
    "put_weight",
    "row_weights",
    "run_forward",
    "touched",
    "truth",
]
KL_FLOOR = -5e-6


class Run(NamedTuple):
    """A case on a device."""

    inputs: dict[str, Any]
    kl: Any
    state: skl.KLState
    grads: skl.Gradients | None


def call_options(backend, case: Case) -> dict[str, Any]:
    """The options of a case as the backend takes them."""
    return {name: backend.put(v) if isinstance(v, np.ndarray) else v for name, v in case.options.items()}


def nan_state(backend, case: Case) -> skl.KLState:
    """A state to fill, full of NaN."""
    rows = case.geometry().row_shape
    reduced = None
    if case.options.get("reduction", "none") != "none":
        reduced = tuple(backend.put(np.full((), np.nan, np.float32)) for _ in range(2))
    return skl.KLState(skl.RowStats(*(backend.put(np.full(rows, np.nan, np.float32)) for _ in range(5))), None, None, reduced)


def nan_gradients(backend, case: Case, wrt=SIDES, dtype: str | None = None) -> skl.Gradients:
    dtype = NUMPY[dtype or case.dtype]
    return skl.Gradients(**{name: backend.put(np.full(case.arrays[name].shape, np.nan, dtype)) for name in wrt})


def run_forward(backend, case: Case, inputs=None) -> Run:
    """Forward into outputs full of NaN. `inputs`: the case's arrays on the device, where they are not to be contiguous copies."""
    inputs = inputs or {name: backend.put(a) for name, a in case.arrays.items()}
    kl, state = skl.forward(**inputs, **call_options(backend, case), out=nan_state(backend, case))
    return Run(inputs, kl, state, None)


def host_rows(backend, state) -> skl.RowStats:
    return skl.RowStats(*(backend.get(array) for array in state.rows))


def check_rows(backend, case: Case, state, expected: Truth) -> None:
    """KL and both denominators against the bar."""
    got, want = host_rows(backend, state), expected.rows
    atol = 5e-6 + EPSILON * expected.largest
    assert np.isfinite(got.kl).all(), f"KL is not finite, of {case}"
    bar = atol + expected.logit_slack
    for name, slack in zip(("lse1", "lse2", "kl"), (*(atol + off for off in expected.lse_slack), bar), strict=True):
        values, right = getattr(got, name), getattr(want, name)
        within = np.isclose(values, right, rtol=1e-5, atol=slack)
        if not within.all():
            with np.errstate(invalid="ignore"):
                at = np.unravel_index(np.where(within, -1, np.abs(values - right)).argmax(), within.shape)
            raise AssertionError(
                f"{name} {values[at]:.9g} of row {tuple(map(int, at))}, not {right[at]:.9g}, allowed are 1e-5 and {slack[at]:.3g}, of {case}"
            )
    assert got.kl.min(initial=0) >= KL_FLOOR, f"KL {got.kl.min()} of {case}"
    empty = np.isneginf(want.lse1)
    assert not got.kl[empty].any() and not got.ref1[empty].any() and not got.ref2[empty].any(), f"rows without keys of {case}"
    if state.reduced is not None:
        value = float(backend.get(state.reduced[0]))
        right = float(want.reduced(case.options["reduction"]))
        slack = bar[~empty].sum() / (max(1, want.visible_rows) if case.options["reduction"] == "mean" else 1)
        assert abs(value - right) <= 1e-5 * abs(right) + slack, f"{case.options['reduction']} {value}, not {right}, of {case}"


def check_gradients(backend, case: Case, grads, expected: Truth, note="") -> None:
    """Each gradient against its bar; exactly 0 where nothing was seen."""
    for name, right in expected.grads.items():
        got = backend.get(getattr(grads, name))
        assert got.shape == right.shape, f"{name} has shape {got.shape}"
        got = got.astype(np.float64)
        assert np.isfinite(got).all(), f"d{name} is not finite, of {case} {note}"
        off, norm = np.linalg.norm(got - right), np.linalg.norm(right)
        allowed = expected.allowed[name]
        assert off <= allowed, f"d{name} is off by {off:.3e}, allowed are {allowed:.3e} (norm {norm:.3e}), of {case} {note}"
        assert not got[~expected.touched[name]].any(), f"d{name} is not 0 where nothing is seen, of {case} {note}"


def check_forward(backend, case: Case) -> Run:
    run = run_forward(backend, case)
    check_rows(backend, case, run.state, truth(case))
    return run


def put_weight(backend, grad_kl):
    return backend.put(grad_kl) if isinstance(grad_kl, np.ndarray) else grad_kl


def check(
    backend, case: Case, grad_kl=None, *, wrt=SIDES, dtype: str | None = None, exact_logits=False, inputs=None, **backward_options
) -> Run:
    """Forward and backward against the reference. `grad_kl` is a host array (put on the device) or a host number."""
    run = run_forward(backend, case, inputs)
    expected = truth(case, grad_kl, wrt, dtype, exact_logits=exact_logits)
    check_rows(backend, case, run.state, expected)
    out = nan_gradients(backend, case, wrt, dtype)
    grads = skl.backward(run.state, put_weight(backend, grad_kl), wrt=wrt, dtype=dtype, out=out, **backward_options)
    check_gradients(backend, case, grads, expected, f"grad_kl {np.shape(grad_kl)}, dtype {dtype}, wrt {wrt}")
    return run._replace(grads=grads)
