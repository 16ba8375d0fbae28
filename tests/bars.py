"""How far from the float64 reference an answer may be: no further than float32 and the dtype of the inputs explain."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from streamkl_cupy import reference

from .problems import NUMPY, Case, touched

EPSILON = 2.0**-23


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
