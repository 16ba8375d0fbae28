"""How far from the float64 reference an answer may be: no further than float32 and the dtype of the inputs explain."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from streamkl_cupy import reference

from .problems import NUMPY, Case, touched

EPSILON = 2.0**-23


class Truth(NamedTuple):
    """float64 answers for a case, the largest logit that counts, how far each row's KL and denominators may be off because of its
    logits, and the norm by which each gradient may differ."""

    rows: reference.Reference
    largest: float
    logit_slack: np.ndarray
    lse_slack: tuple[np.ndarray, np.ndarray]
    grads: dict[str, np.ndarray]
    allowed: dict[str, float]
    touched: dict[str, np.ndarray]


def truth(case: Case, grad_kl=None, wrt=(), dtype: str | None = None, *, exact_logits: bool = False) -> Truth:
    """`exact_logits` says that float32 holds every logit exactly: then nothing is allowed for their rounding.

    Gradients of float32 inputs may be off by 1e-5 of their norm; others by twice the error of the materialised computation in
    the inputs' dtype, or of what its roundings make on average where it is lucky. Where terms cancel (one visible key, equal sides)
    what float32 makes of a probability comes on top.
    """
    rows = reference.forward(**case.arrays, **case.options)
    geometry, largest = case.geometry(), 0.0
    logit_slack, *lse_slack = (np.zeros(geometry.row_shape) for _ in range(3))
    for block in geometry.blocks():
        logit_slack[block.rows], *of_sides = by_rounded_logits(geometry, block)
        for slack, off in zip(lse_slack, of_sides, strict=True):
            slack[block.rows] = off
        for log_p, lse in ((block.log_p1, block.lse1), (block.log_p2, block.lse2)):
            largest = max(largest, float(np.abs((log_p + lse[:, None])[block.visible]).max(initial=0)))
    if not wrt:
        return Truth(rows, largest, logit_slack, tuple(lse_slack), {}, {}, {})
    grads = reference.backward(**case.arrays, grad_kl=grad_kl, wrt=wrt, **case.options)
    grads = {name: getattr(grads, name) for name in wrt}
    weight = np.broadcast_to(np.asarray(1.0 if grad_kl is None else grad_kl).astype(np.float64), geometry.row_shape)
    if case.options.get("reduction") == "mean":
        weight = weight / max(rows.visible_rows, 1)
    dtype = dtype or case.dtype
    allowed = probability_noise(case, weight, wrt, 0.0 if exact_logits else largest, dtype)
    if case.dtype == "float32":
        bars = {name: 1e-5 * np.linalg.norm(grad) for name, grad in grads.items()}
    else:
        dense, expected = materialised(case, weight, wrt, dtype), rounding_of_logit_gradients(case, weight, wrt)
        bars = {name: 2 * np.maximum(np.linalg.norm(dense[name] - grads[name]), expected[name]) for name in wrt}
    allowed = {name: allowed[name] + bars[name] for name in wrt}
    return Truth(rows, largest, logit_slack, tuple(lse_slack), grads, allowed, touched(case, wrt))


def by_rounded_logits(geometry, block) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """How far the KL and the two denominators of each row move, to first order, when every logit is off by 2^-23 of the sum of its
    products' sizes: what float32 makes of a dot product, whose roundings are those of its running sums, whatever cancels in the end.
    There are D of them, independent: 16 make about one 2^-23, and more make as many times that as the root of their number.

    The derivatives of the KL are P1 (gap - KL) and P2 - P1, those of a denominator P. Logits of a few units move the KL by 1e-7.
    Where a row's mass lies on two keys with very different log-ratios, at logits of hundreds, no float32 logits give the KL to
    1e-5 of itself; rows whose mass lies on one key get nothing from this, and neither do small logits.
    """
    m = {name: np.abs(matrix) for name, matrix in block.matrices.items()}
    units = {s: EPSILON * scale * max(1.0, m[f"q{s}"].shape[1] ** 0.5 / 4) for s, scale in (("1", geometry.scale1), ("2", geometry.scale2))}
    off1, off2 = (unit * (m[f"q{s}"] @ m[f"k{s}"].T) for s, unit in units.items())
    p1, p2 = np.exp(block.log_p1), np.exp(block.log_p2)
    gap = np.where(block.visible, block.log_p1, 0) - np.where(block.visible, block.log_p2, 0)
    of_kl = np.abs(p1 * (gap - block.kl[:, None])) * off1 + np.abs(p2 - p1) * off2
    return of_kl.sum(axis=1), (p1 * off1).sum(axis=1), (p2 * off2).sum(axis=1)


def finite(array: np.ndarray) -> np.ndarray:
    return np.where(np.isfinite(array), array, 0)


def materialised(case: Case, weight: np.ndarray, wrt, dtype: str) -> dict[str, np.ndarray]:
    """The gradients as a program with an Nq x Nk matrix has them: float32 logits and softmax, dS rounded to the inputs' dtype,
    float32 accumulation, the result rounded to `dtype`.

    float32 gradients do not depend on the size of the upstream weights: the dense program then gets them near 1.
    """
    widen = 1.0
    if dtype == "float32" and np.abs(finite(weight)).max(initial=0) > 0:
        widen = 2.0 ** np.round(np.log2(np.abs(finite(weight)).max()))
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


def rounding_of_logit_gradients(case: Case, weight: np.ndarray, wrt) -> dict[str, float]:
    """Norm of what roundings of dS to the inputs' dtype make of the gradients, were they independent.

    The materialised computation is one draw of them. Few terms may all be near a number of the dtype, and two that are equal but
    for their signs round alike and cancel; another order of operations has other luck. So few terms get a margin. `count` is the
    number of terms, had they all one size.
    """
    geometry, unit = case.geometry(), {"float16": 2.0**-11, "bfloat16": 2.0**-8}[case.dtype]
    squares, fourths = dict.fromkeys(wrt, 0.0), dict.fromkeys(wrt, 0.0)
    for block in geometry.blocks():
        g = np.where(block.visible.any(axis=1), weight[block.rows], 0)[:, None]
        p1, p2 = np.exp(block.log_p1), np.exp(block.log_p2)
        gap = np.where(block.visible, block.log_p1, 0) - np.where(block.visible, block.log_p2, 0)
        for side, d, scale in (("1", g * p1 * (gap - block.kl[:, None]), geometry.scale1), ("2", g * (p2 - p1), geometry.scale2)):
            d = np.where(block.visible, scale * d, 0) ** 2
            for name, other in ((f"q{side}", f"k{side}"), (f"k{side}", f"q{side}")):
                if name in squares:
                    by = (block.matrices[other] ** 2).sum(axis=1)
                    terms = d * (by if name[0] == "q" else by[:, None])
                    squares[name] += float(terms.sum())
                    fourths[name] += float((terms**2).sum())
    result = {}
    for name, square in squares.items():
        count = square**2 / fourths[name] if fourths[name] > 0 else np.inf
        # A rounding error is uniform below half a unit in the last place, whose size against a number depends on its mantissa.
        result[name] = 0.41 * unit * square**0.5 * (1 + 2 / count**0.5)
    return result


def probability_noise(case: Case, weight: np.ndarray, wrt, largest: float, dtype: str) -> dict[str, float]:
    """Norm of what one float32 rounding of each exponent, of each KL and of each denominator does to the gradients.

    A row that sees one key has no gradient at all. Its P2 - P1 may still come out as 1e-7 of the largest weight: the materialised
    bar is 0 there. Probabilities below 2^-126 may be 0. float16 results are multiples of 2^-24, whatever their size. Running sums of
    denormal numbers are multiples of 2^-149, and lose every term below half of that.

    What a row's KL and denominators are off by is the same for all its keys, and where all logits are alike an exponent's rounding is
    the same for all rows. Gradients are then sums that cancel, and these errors are all that is left: they add up (`together`)
    as independent ones do not.
    """
    geometry, squares = case.geometry(), dict.fromkeys(wrt, 0.0)
    together = {name: np.zeros((2, *case.arrays[name].shape)) for name in wrt}
    heaviest = np.abs(finite(weight)).max(initial=0)
    if dtype == "float16":
        squares = {name: 2.0**-50 * case.arrays[name].size for name in wrt}
    for block in geometry.blocks():
        alone = EPSILON * heaviest * (block.visible.sum(axis=1) == 1)[:, None]
        g = np.abs(np.where(block.visible.any(axis=1), weight[block.rows], 0))[:, None]
        p1, p2 = np.exp(block.log_p1), np.exp(block.log_p2)
        log_p1, log_p2 = (np.where(block.visible, log_p, 0) for log_p in (block.log_p1, block.log_p2))
        gap = np.abs(log_p1 - log_p2) + np.abs(block.kl)[:, None]
        lost = g * 2.0**-126 * (1 + gap)
        # An exponent is a sum with two roundings: of the logit, and of what is left without the reference.
        off1, off2 = (EPSILON * p * (1 + largest + np.abs(log_p)) for p, log_p in ((p1, log_p1), (p2, log_p2)))
        off_both = off1 * (2 + gap) + EPSILON * p1 * np.abs(log_p2)
        of_kl = p1 * off_both.sum(axis=1, keepdims=True)
        for side, parts, scale in (("1", (g * off_both, g * of_kl), geometry.scale1), ("2", (g * off1, g * off2), geometry.scale2)):
            d = np.where(block.visible, parts[0] + (parts[1] if side == "2" else 0) + lost + alone, 0) ** 2
            for name, other, axis in ((f"q{side}", f"k{side}", 1), (f"k{side}", f"q{side}", 0)):
                if name not in squares:
                    continue
                by, at = block.matrices[other], block.at[name]
                for i, part in enumerate(parts):
                    together[name][(i, *at)] += scale * (part @ by if axis else part.T @ by)
                terms = (block.visible.sum(axis=axis, dtype=float) ** 2).sum() * by.shape[1]
                product = (d.sum(axis=1 - axis) @ by**2).sum() + terms * (2.0**-150 * max(1.0, heaviest)) ** 2
                squares[name] += float(product) * scale**2
    return {name: (square + float((np.abs(together[name]).sum(axis=0) ** 2).sum())) ** 0.5 for name, square in squares.items()}
