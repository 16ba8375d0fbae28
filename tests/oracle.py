"""Problems of every kind, and how far from the float64 reference an answer may be.

A `Case` holds host arrays and options; `check` runs it forward and backward on a backend, into outputs full of NaN, and compares.
What fails says shapes, dtype, options and seed.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

import streamkl_cupy as skl
from streamkl_cupy import reference
from streamkl_cupy.arrays import BFLOAT16
from streamkl_cupy.problem import LAYOUTS, SIDES, VECTORS

from .backends import COMMON_DIMS

DTYPES = ("float16", "bfloat16", "float32")
NUMPY = {"float16": np.dtype(np.float16), "bfloat16": BFLOAT16, "float32": np.dtype(np.float32), "float64": np.dtype(np.float64)}
EPSILON = 2.0**-23
KL_FLOOR = -5e-6


@dataclass(frozen=True)
class Case:
    """Host arrays by name, the options of `forward` with vectors as int32 arrays, and what to say when it fails."""

    arrays: dict[str, np.ndarray]
    options: dict[str, Any] = field(default_factory=dict)
    note: str = ""

    @property
    def dtype(self) -> str:
        return self.arrays["q1"].dtype.name

    def with_options(self, **options) -> Case:
        return replace(self, options=self.options | options)

    def with_arrays(self, **arrays) -> Case:
        return replace(self, arrays=self.arrays | arrays)

    def geometry(self) -> reference._Case:
        """The reference's own view of the problem: which rows see which keys, one (sequence, head) after the other."""
        return reference._Case(**self.arrays, **self.options)

    def __str__(self) -> str:
        shapes = ", ".join(f"{name} {array.shape}" for name, array in self.arrays.items())
        options = {name: v.tolist() if isinstance(v, np.ndarray) else v for name, v in self.options.items()}
        return f"{self.dtype}, {shapes}, {options}, {self.note}"


def shape(layout: str, batch: int, heads: int, rows: int, dim: int) -> tuple[int, ...]:
    """The shape of an input in a layout.

    >>> shape("sbhd", 2, 3, 5, 8)
    (5, 2, 3, 8)
    """
    sizes = {axis: size for axis, size in zip(LAYOUTS[layout], (batch, heads, rows), strict=True) if axis is not None}
    return (*(sizes[axis] for axis in sorted(sizes)), dim)


def make(
    seed: int,
    dtype: str = "float32",
    *,
    layout: str = "bhsd",
    batch: int = 3,
    heads: int = 4,
    heads_k: tuple[int, int] = (2, 1),
    n: tuple[int, int] = (37, 53),
    d: tuple[int, int] = COMMON_DIMS,
    size: float = 1.0,
    **options,
) -> Case:
    """Normal inputs. As it stands, every size differs from every other one: a mixed-up axis cannot hide."""
    rng = np.random.default_rng(seed)
    arrays = {}
    for name in SIDES:
        side = int(name[1]) - 1
        dims = (batch, heads, n[0], d[side]) if name[0] == "q" else (batch, heads_k[side], n[1], d[side])
        arrays[name] = (size * rng.normal(size=shape(layout, *dims))).astype(np.float32).astype(NUMPY[dtype])
    options = {name: np.asarray(v, np.int32) if name in VECTORS and np.ndim(v) else v for name, v in options.items()}
    return Case(arrays, {"layout": layout} | options, f"seed {seed}, size {size}")


class Truth(NamedTuple):
    """float64 answers for a case, the largest logit that counts, how far each row's KL may be off because of its logits, and the
    norm by which each gradient may differ."""

    rows: reference.Reference
    largest: float
    logit_slack: np.ndarray
    grads: dict[str, np.ndarray]
    allowed: dict[str, float]
    touched: dict[str, np.ndarray]


def truth(case: Case, grad_kl=None, wrt=(), dtype: str | None = None, *, exact_logits: bool = False) -> Truth:
    """`exact_logits` says that float32 holds every logit exactly: then nothing is allowed for their rounding.

    Gradients of float32 inputs may be off by 1e-5 of their norm; others by twice the error of the materialised computation in
    the inputs' dtype. Where terms cancel (one visible key, equal sides) what float32 makes of a probability comes on top.
    """
    rows = reference.forward(**case.arrays, **case.options)
    geometry, largest = case.geometry(), 0.0
    logit_slack = np.zeros(geometry.row_shape)
    for block in geometry.blocks():
        logit_slack[block.rows] = kl_of_rounded_logits(block)
        for log_p, lse in ((block.log_p1, block.lse1), (block.log_p2, block.lse2)):
            largest = max(largest, float(np.abs((log_p + lse[:, None])[block.visible]).max(initial=0)))
    if not wrt:
        return Truth(rows, largest, logit_slack, {}, {}, {})
    grads = reference.backward(**case.arrays, grad_kl=grad_kl, wrt=wrt, **case.options)
    grads = {name: getattr(grads, name) for name in wrt}
    weight = np.broadcast_to(np.asarray(1.0 if grad_kl is None else grad_kl).astype(np.float64), geometry.row_shape)
    if case.options.get("reduction") == "mean":
        weight = weight / max(rows.visible_rows, 1)
    dtype = dtype or case.dtype
    dense = materialised(case, weight, wrt, dtype) if case.dtype != "float32" else None
    noise = probability_noise(case, weight, wrt, 0.0 if exact_logits else largest, dtype)
    allowed = {}
    for name in wrt:
        off = 1e-5 * np.linalg.norm(grads[name]) if dense is None else 2 * np.linalg.norm(dense[name] - grads[name])
        allowed[name] = off + noise[name]
    return Truth(rows, largest, logit_slack, grads, allowed, touched(case, wrt))


def kl_of_rounded_logits(block) -> np.ndarray:
    """How far the KL of each row moves, to first order, when every logit s is off by 2^-23 |s|: what float32 makes of a product
    and its scale.

    The KL's derivatives are P1 (gap - KL) and P2 - P1. Logits of a few units move it by 1e-7. Where a row's mass lies on two
    keys with very different log-ratios, at logits of hundreds, no float32 logits give the KL to 1e-5 of itself; rows whose mass
    lies on one key get nothing from this, and neither do small logits.
    """
    p1, p2 = np.exp(block.log_p1), np.exp(block.log_p2)
    log_p1, log_p2 = (np.where(block.visible, log_p, 0) for log_p in (block.log_p1, block.log_p2))
    by_logit1 = p1 * (log_p1 - log_p2 - block.kl[:, None]) * (log_p1 + finite(block.lse1)[:, None])
    by_logit2 = (p2 - p1) * (log_p2 + finite(block.lse2)[:, None])
    return EPSILON * (np.abs(by_logit1) + np.abs(by_logit2)).sum(axis=1)


def finite(array: np.ndarray) -> np.ndarray:
    return np.where(np.isfinite(array), array, 0)


def materialised(case: Case, weight: np.ndarray, wrt, dtype: str) -> dict[str, np.ndarray]:
    """The gradients as a program with an Nq x Nk matrix has them: float32 logits and softmax, dS rounded to the inputs' dtype,
    float32 accumulation, the result rounded to `dtype`.

    float32 gradients do not depend on the size of the upstream weights: the dense program then gets them near 1.
    """
    widen = 1.0
    if dtype == "float32" and np.abs(weight).max(initial=0) > 0:
        widen = 2.0 ** np.round(np.log2(np.abs(weight).max()))
    geometry = case.geometry()
    totals = {name: np.zeros(case.arrays[name].shape, np.float32) for name in wrt}
    with np.errstate(over="ignore", invalid="ignore"):
        for block in geometry.blocks():
            g = (weight[block.rows] / widen).astype(np.float32)[:, None]
            m = {name: matrix.astype(np.float32) for name, matrix in block.matrices.items()}
            log_p = {}
            for side, scale in (("1", geometry.scale1), ("2", geometry.scale2)):
                s = np.where(block.visible, np.float32(scale) * (m[f"q{side}"] @ m[f"k{side}"].T), -np.inf)
                top = np.where(block.visible.any(axis=1), s.max(axis=1, initial=-np.inf), 0)[:, None].astype(np.float32)
                total = np.exp(s - top).sum(axis=1, keepdims=True)
                log_p[side] = s - top - np.log(np.where(total > 0, total, 1))
            p1, p2 = np.exp(log_p["1"]), np.exp(log_p["2"])
            gap = np.where(block.visible, log_p["1"] - log_p["2"], 0)
            kl = (p1 * gap).sum(axis=1, keepdims=True)
            for side, d, scale in (("1", g * p1 * (gap - kl), geometry.scale1), ("2", g * (p2 - p1), geometry.scale2)):
                d = np.where(block.visible, d, 0).astype(NUMPY[case.dtype]).astype(np.float32)
                if f"q{side}" in totals:
                    totals[f"q{side}"][block.at[f"q{side}"]] += np.float32(scale) * (d @ m[f"k{side}"])
                if f"k{side}" in totals:
                    totals[f"k{side}"][block.at[f"k{side}"]] += np.float32(scale) * (d.T @ m[f"q{side}"])
        return {name: widen * total.astype(NUMPY[dtype]).astype(np.float64) for name, total in totals.items()}


def probability_noise(case: Case, weight: np.ndarray, wrt, largest: float, dtype: str) -> dict[str, float]:
    """Norm of what one float32 rounding of each exponent, and of each KL, does to the gradients.

    A row that sees one key has no gradient at all. Its P2 - P1 may still come out as 1e-7 of the largest weight: the materialised
    bar is 0 there. Probabilities below 2^-126 may be 0. float16 results are multiples of 2^-24, whatever their size.
    """
    geometry, squares = case.geometry(), dict.fromkeys(wrt, 0.0)
    unit, heaviest = EPSILON * (1 + largest), np.abs(finite(weight)).max(initial=0)
    if dtype == "float16":
        squares = {name: 2.0**-50 * case.arrays[name].size for name in wrt}
    for block in geometry.blocks():
        alone = EPSILON * heaviest * (block.visible.sum(axis=1) == 1)[:, None]
        g = np.abs(np.where(block.visible.any(axis=1), weight[block.rows], 0))[:, None]
        p1, p2 = np.exp(block.log_p1), np.exp(block.log_p2)
        gap = np.abs(np.where(block.visible, block.log_p1, 0) - np.where(block.visible, block.log_p2, 0)) + np.abs(block.kl)[:, None]
        lost = g * 2.0**-126 * (1 + gap)
        for side, d, scale in (
            ("1", g * p1 * unit * (2 + gap) + lost, geometry.scale1),
            ("2", g * (p1 + p2) * unit + lost, geometry.scale2),
        ):
            d = np.where(block.visible, d + alone, 0) ** 2
            for name, product in (
                (f"q{side}", d.sum(axis=0) @ block.matrices[f"k{side}"] ** 2),
                (f"k{side}", d.sum(axis=1) @ block.matrices[f"q{side}"] ** 2),
            ):
                if name in squares:
                    squares[name] += float(product.sum()) * scale**2
    return {name: square**0.5 for name, square in squares.items()}


def touched(case: Case, names=SIDES) -> dict[str, np.ndarray]:
    """Which rows see a key, and which keys a row sees, as booleans in the shapes of the inputs."""
    marks = {name: np.zeros(case.arrays[name].shape, bool) for name in names}
    for block in case.geometry().blocks():
        for name in names:
            marks[name][block.at[name]] |= block.visible.any(axis=1 if name[0] == "q" else 0)[:, None]
    return marks


def poisoned(case: Case, value: float = np.nan) -> Case:
    """The case with NaN (or another value) wherever no row may look."""
    arrays = {name: array.copy() for name, array in case.arrays.items()}
    for name, mark in touched(case).items():
        arrays[name][~mark] = value
    return replace(case, arrays=arrays, note=f"{case.note}, {value} where no row may look")


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
    for name, values, right in (("lse1", got.lse1, want.lse1), ("lse2", got.lse2, want.lse2)):
        np.testing.assert_allclose(values, right, rtol=1e-5, atol=atol, err_msg=f"{name} of {case}")
    bar = atol + expected.logit_slack
    excess = np.abs(got.kl - want.kl) - (1e-5 * np.abs(want.kl) + bar)
    assert np.isfinite(got.kl).all(), f"KL is not finite, of {case}"
    if excess.size and excess.max() > 0:
        at = np.unravel_index(excess.argmax(), excess.shape)
        raise AssertionError(f"KL {got.kl[at]:.9g} of row {at}, not {want.kl[at]:.9g}, allowed are 1e-5 and {bar[at]:.3g}, of {case}")
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


def row_weights(case: Case, seed: int = 1, dtype="float32") -> np.ndarray:
    """A weight for every row."""
    return np.random.default_rng(seed).normal(size=case.geometry().row_shape).astype(NUMPY[dtype])


def offset_case(seed: int, offset: float, dtype: str, **sizes) -> Case:
    """Logits that float32 holds exactly: one coordinate carries a common offset on side 1 and its negative on side 2; the rest
    are multiples of 2^-5. The scale is 1."""
    case = make(seed, dtype, **sizes)
    rng = np.random.default_rng(seed)
    left, right = {1024.0: (32, 32), 9984.0: (96, 104), 246016.0: (496, 496)}[offset]
    arrays = {}
    for name, array in case.arrays.items():
        step = 0.25 if name[0] == "q" else 0.125
        values = np.clip(np.round(rng.normal(size=array.shape) * 2), -4, 4) * step
        values[..., 3] = left * (1 if name[1] == "1" else -1) if name[0] == "q" else right
        arrays[name] = values.astype(array.dtype)
    return replace(case, arrays=arrays, note=f"{case.note}, offset {offset}").with_options(scale1=1.0, scale2=1.0)
