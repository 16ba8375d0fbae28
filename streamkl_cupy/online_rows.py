"""The online state of many query rows: both softmax denominators and the KL numerator, in one pass over the keys.

    x_t = s_t scale_t log2(e) - ref_t      l_t = sum 2^x_t      a = sum 2^x_1 (x_1 - x_2)
    KL  = (a / l_1 + log2 l_2 - log2 l_1) ln 2

(StreamKL, equations 5 to 8, made shift-invariant: the paper's acc / l_1 + LSE_2 - LSE_1 cancels when logits share an offset.)
A reference is an integer at or above the largest logit seen, so every rescale is by an exact power of two. When ref_1 moves by
d_1 and ref_2 by d_2:  a = 2^-d_1 (a + (d_2 - d_1) l_1),  l_t = 2^-d_t l_t.
kernels/row_stats.cuh holds the same mathematics, under the same names, for one row in registers. Here the five numbers of a row
are float64: beside a tile of logits they cost nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .state import LN2, RowStats

NO_REFERENCE = -1.7e38
"""Below any logit, and finite: differences of two references are never NaN. A state with l_1 = 0 has seen no key."""


def power_of_two(minus_d: np.ndarray) -> np.ndarray:
    """2^-d for integers d >= 0, exactly; 0 where that is below the smallest float64."""
    return np.ldexp(1.0, np.maximum(minus_d, -2000.0).astype(np.int32))


@dataclass
class OnlineRows:
    """Arrays of one shape, one entry per row; `product` is a above. All methods work in place."""

    ref1: np.ndarray
    sum1: np.ndarray
    ref2: np.ndarray
    sum2: np.ndarray
    product: np.ndarray

    @classmethod
    def clear(cls, shape) -> OnlineRows:
        """Rows that have seen no key."""
        zeros = [np.zeros(shape) for _ in range(3)]
        return cls(np.full(shape, NO_REFERENCE), zeros[0], np.full(shape, NO_REFERENCE), zeros[1], zeros[2])

    def rebase(self, new_ref1: np.ndarray, new_ref2: np.ndarray) -> None:
        """Moves the references up to at least these."""
        d1, d2 = new_ref1 - self.ref1, new_ref2 - self.ref2
        shrink1, shrink2 = power_of_two(-d1), power_of_two(-d2)
        # (d2 - d1) is huge where this is the first key: sum1 is 0 there, and the product stays 0.
        self.product = shrink1 * (self.product + (d2 - d1) * self.sum1)
        self.sum1 = self.sum1 * shrink1
        self.sum2 = self.sum2 * shrink2
        self.ref1, self.ref2 = new_ref1, new_ref2

    def merge(self, other: OnlineRows) -> None:
        """Takes in what `other` saw of the same rows over other keys. Rebases `other` too."""
        new_ref1, new_ref2 = np.maximum(self.ref1, other.ref1), np.maximum(self.ref2, other.ref2)
        self.rebase(new_ref1, new_ref2)
        other.rebase(new_ref1, new_ref2)
        self.sum1 += other.sum1
        self.sum2 += other.sum2
        self.product += other.product


def finish(online: OnlineRows) -> RowStats:
    """What is kept of the rows: KL in nats, references, base-2 logarithms of the sums. A row that saw no key: 0, 0, -inf.

    The whole part of a logarithm moves into its reference. What is left is small, so that float32 keeps it to 3e-8: a
    gradient at a converged student is a small difference of two distributions, and shows every error of their denominators.
    """
    seen = online.sum1 > 0
    sum1, sum2 = np.where(seen, online.sum1, 1.0), np.where(seen, online.sum2, 1.0)
    logsum1, logsum2 = np.log2(sum1), np.log2(sum2)
    kl = (online.product / sum1 + (logsum2 - logsum1)) * LN2
    whole1, whole2 = np.rint(logsum1), np.rint(logsum2)
    return RowStats(
        np.where(seen, kl, 0.0),
        np.where(seen, online.ref1 + whole1, 0.0),
        np.where(seen, logsum1 - whole1, -np.inf),
        np.where(seen, online.ref2 + whole2, 0.0),
        np.where(seen, logsum2 - whole2, -np.inf),
    )


def reopen(rows: RowStats) -> OnlineRows:
    """Kept rows as a state again. References that others supply need not be integers, nor their sums be near 1: both are put
    right here, so that `rebase` stays exact."""
    kl, ref1, logsum1, ref2, logsum2 = (np.asarray(a).astype(np.float64) for a in rows)
    seen = logsum1 != -np.inf
    logsum1, logsum2 = (np.where(seen, ls + (ref - np.rint(ref)), 0.0) for ls, ref in ((logsum1, ref1), (logsum2, ref2)))
    whole1, whole2 = np.ceil(logsum1), np.ceil(logsum2)
    sum1, sum2 = np.where(seen, np.exp2(logsum1 - whole1), 0.0), np.where(seen, np.exp2(logsum2 - whole2), 0.0)
    return OnlineRows(
        np.where(seen, np.rint(ref1) + whole1, NO_REFERENCE),
        sum1,
        np.where(seen, np.rint(ref2) + whole2, NO_REFERENCE),
        sum2,
        np.where(seen, kl / LN2 + ((logsum1 - whole1) - (logsum2 - whole2)), 0.0) * sum1,
    )
