"""One fuzzed case on a backend: the calls that it describes, into outputs full of NaN, against the dense reference."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np

import streamkl_cupy as skl
from streamkl_cupy.checks import LAYOUTS

from .fuzz_cases import FuzzCase
from .fuzz_places import put
from .oracle import NUMPY, call_options, check_gradients, check_rows, host_rows, nan_state, truth
from .problems import shard

LARGEST_FLOAT16 = 3e4
"""Half of what float16 holds: gradients beyond are asked for in float32."""


def run(backend, fuzz: FuzzCase) -> None:
    """AssertionError, or whatever the library raises, where a case fails."""
    case = fuzz.case
    with np.errstate(over="ignore", under="ignore"):
        expected = truth(case, fuzz.weight_of_rows, fuzz.wrt, fuzz.dtype, exact_logits=fuzz.exact)
        largest = max(np.abs(grad).max(initial=0) for grad in expected.grads.values())
        # The dense computation in float16 may overflow on its way to a result that does not.
        representable = largest < LARGEST_FLOAT16 and np.isfinite(list(expected.allowed.values())).all()
        if case.dtype == "float16" and fuzz.dtype is None and not representable:
            fuzz = replace(fuzz, dtype="float32")
            expected = truth(case, fuzz.weight_of_rows, fuzz.wrt, fuzz.dtype, exact_logits=fuzz.exact)
    inputs = {name: put(backend, array, fuzz.places[name]) for name, array in case.arrays.items()}
    weight = fuzz.weight
    if isinstance(weight, np.ndarray):
        weight = put(backend, weight, fuzz.weight_place) if weight.ndim > 1 else backend.put(weight)
    if fuzz.shards:
        state, grads = in_shards(backend, fuzz, inputs, weight)
    else:
        state, grads = in_one(backend, fuzz, inputs, weight)
    check_rows(backend, case, state, expected)
    check_gradients(backend, case, grads, expected, f"dtype {fuzz.dtype}")
    if fuzz.exact and not fuzz.shards:  # then the size of the logits is no excuse
        np.testing.assert_allclose(host_rows(backend, state).kl, expected.rows.kl, rtol=1e-5, atol=5e-6, err_msg=str(case))
    if fuzz.identical:
        assert not host_rows(backend, state).kl.any(), f"equal sides have a KL, of {case}"
        for name in fuzz.wrt:
            assert not backend.get(getattr(grads, name)).any(), f"equal sides have a d{name}, of {case}"


def workspace(backend, fuzz: FuzzCase, inputs, options, **backward):
    """NaN bytes, as many as the call says it takes; or None."""
    return backend.bytes(skl.workspace_size(**inputs, **options, **backward)) if fuzz.workspace else None


def nan_outputs(backend, fuzz: FuzzCase) -> skl.Gradients:
    """Gradients to fill, some of them in another order of axes than the inputs'."""
    nans = {n: np.full(fuzz.case.arrays[n].shape, np.nan, NUMPY[fuzz.dtype or fuzz.case.dtype]) for n in fuzz.wrt}
    return skl.Gradients(**{n: put(backend, a, fuzz.places[n]._replace(how="permuted")) for n, a in nans.items()})


def in_one(backend, fuzz: FuzzCase, inputs, weight):
    """Forward and backward, each in one call; twice where the same bits are promised."""
    options = call_options(backend, fuzz.case)
    scratch = workspace(backend, fuzz, inputs, options)
    kl, state = skl.forward(**inputs, **options, workspace=scratch, out=None if fuzz.fresh else nan_state(backend, fuzz.case))
    assert kl is (state.kl if state.reduced is None else state.reduced[0])
    if fuzz.rebuilt:
        state = skl.KLState(state.rows, state.problem, state.inputs)
    scratch = workspace(backend, fuzz, inputs, options, wrt=fuzz.wrt, deterministic=fuzz.deterministic)
    results = []
    for _ in range(1 + fuzz.deterministic):
        out = None if fuzz.fresh else nan_outputs(backend, fuzz)
        results.append(
            skl.backward(state, weight, wrt=fuzz.wrt, dtype=fuzz.dtype, deterministic=fuzz.deterministic, out=out, workspace=scratch)
        )
    for name in fuzz.wrt if fuzz.deterministic else ():
        first, second = (backend.get(getattr(grads, name)).astype(np.float32) for grads in results)
        assert np.array_equal(first, second, equal_nan=True), f"d{name} differs between two runs, of {fuzz.case}"
    return state, results[-1]


def in_shards(backend, fuzz: FuzzCase, inputs, weight):
    """Forward over shards of the keys, merged; the shards' shares of dQ added up, their dK side by side."""
    axis = LAYOUTS[fuzz.case.options["layout"]][2]
    states = []
    for begin, end in itertools.pairwise(fuzz.shards):
        part, at = shard(fuzz.case, begin, end), (*(slice(None),) * axis, slice(begin, end))
        arrays = inputs | {name: inputs[name][at] for name in ("k1", "k2")}
        out = None if fuzz.fresh else nan_state(backend, part)
        states.append(skl.forward(**arrays, **call_options(backend, part), out=out)[1])
    rows = skl.merge([state.rows for state in (states[::-1] if fuzz.rebuilt else states)])
    parts = [
        skl.backward(state.with_rows(rows), weight, wrt=fuzz.wrt, dtype=fuzz.dtype, deterministic=fuzz.deterministic) for state in states
    ]
    arrays = {name: [backend.get(getattr(part, name)) for part in parts] for name in fuzz.wrt}
    whole = {name: sum(a) if name[0] == "q" else np.concatenate(a, axis=axis) for name, a in arrays.items()}
    return skl.KLState(rows, states[0].problem, states[0].inputs), skl.Gradients(**whole)
