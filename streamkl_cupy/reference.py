"""The dense float64 oracle: one N_q x N_k matrix at a time, no streaming, no shortcuts. For tests and for users' doubts.

    P_t = softmax(scale_t Q_t K_t^T over the visible keys)      KL = sum_j P_1j (log P_1j - log P_2j)
    dS_2 = g (P_2 - P_1)          dS_1 = g P_1 (log P_1 - log P_2 - KL)          (StreamKL, algorithms 2 and 3)
    dQ_t = scale_t dS_t K_t       dK_t = scale_t dS_t^T Q_t

The logarithms are kept as such: `scipy.special.rel_entr` on probabilities is infinite where P_2 underflows, and the KL is not.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np
from scipy.special import log_softmax, logsumexp

from .checks import LAYOUTS, SIDES, check_wrt
from .state import Gradients


class Reference(NamedTuple):
    """float64 row arrays in nats, (B, H, Nq) or (H, total_q); `visible_rows` counts the rows that see a key."""

    kl: np.ndarray
    lse1: np.ndarray
    lse2: np.ndarray
    visible_rows: int

    def reduced(self, reduction: str):
        """The value that `forward` returns for this reduction."""
        if reduction == "none":
            return self.kl
        total = self.kl.sum()
        return total if reduction == "sum" else total / max(self.visible_rows, 1)


def forward(q1, k1, q2, k2, **options) -> Reference:
    """Row-wise KL and natural-log denominators in float64, with the arguments of `streamkl_cupy.forward`.

    >>> import numpy as np
    >>> rng = np.random.default_rng(0)
    >>> q1, k1, q2, k2 = (rng.normal(size=(1, 1, 3, 4)) for _ in range(4))
    >>> bool((forward(q1, k1, q2, k2).kl >= 0).all())
    True
    """
    case = _Case(q1, k1, q2, k2, **options)
    kl, lse1, lse2 = case.empty_rows(0.0), case.empty_rows(-np.inf), case.empty_rows(-np.inf)
    seen = 0
    for block in case.blocks():
        rows = block.rows
        kl[rows], lse1[rows], lse2[rows] = block.kl, block.lse1, block.lse2
        seen += int(block.visible.any(axis=1).sum())
    return Reference(kl, lse1, lse2, seen)


def backward(q1, k1, q2, k2, grad_kl=None, *, wrt=("q2", "k2"), **options) -> Gradients:
    """Gradients in float64, with the arguments of `streamkl_cupy.forward` and a host `grad_kl` (None is 1)."""
    case = _Case(q1, k1, q2, k2, **options)
    wrt = check_wrt(wrt)
    weight = np.broadcast_to(np.float64(1) if grad_kl is None else np.asarray(grad_kl).astype(np.float64), case.row_shape)
    if case.reduction == "mean":
        weight = weight / max(forward(q1, k1, q2, k2, **options).visible_rows, 1)
    out = {name: np.zeros(case.arrays[name].shape) for name in SIDES}
    for block in case.blocks():
        seen = block.visible.any(axis=1)
        g = np.where(seen, weight[block.rows], 0.0)[:, None]
        p1, p2 = np.exp(block.log_p1), np.exp(block.log_p2)
        gap = np.where(block.visible, block.log_p1, 0.0) - np.where(block.visible, block.log_p2, 0.0)
        d1, d2 = g * p1 * (gap - block.kl[:, None]), g * (p2 - p1)
        for side, d, scale in (("1", d1, case.scale1), ("2", d2, case.scale2)):
            q_at, k_at = block.at[f"q{side}"], block.at[f"k{side}"]
            d = np.where(block.visible, d, 0.0)
            out[f"q{side}"][q_at] += scale * d @ block.matrices[f"k{side}"]
            out[f"k{side}"][k_at] += scale * d.T @ block.matrices[f"q{side}"]
    return Gradients(**{name: out[name] for name in wrt})


class _Block:
    """One (sequence, head): its rows in the outputs, its masks, and its log-probabilities, computed where they are asked for."""

    def __init__(self, case, rows, at, visible):
        self.case, self.rows, self.at, self.visible = case, rows, at, visible

    @functools.cached_property
    def matrices(self):
        used = {"q": self.visible.any(axis=1)[:, None], "k": self.visible.any(axis=0)[:, None]}
        return {n: np.where(used[n[0]], self.case.arrays[n][self.at[n]].astype(np.float64), 0.0) for n in SIDES}

    @functools.cached_property
    def _sides(self):
        return self._distribution("1", self.case.scale1), self._distribution("2", self.case.scale2)

    log_p1 = property(lambda self: self._sides[0][0])
    lse1 = property(lambda self: self._sides[0][1])
    log_p2 = property(lambda self: self._sides[1][0])
    lse2 = property(lambda self: self._sides[1][1])

    @functools.cached_property
    def kl(self):
        with np.errstate(invalid="ignore"):
            terms = np.exp(self.log_p1) * (self.log_p1 - self.log_p2)
        return np.where(self.visible, terms, 0.0).sum(axis=1)

    def _distribution(self, side, scale):
        logits = scale * self.matrices[f"q{side}"] @ self.matrices[f"k{side}"].T
        logits = np.where(self.visible, logits, -np.inf)
        log_p, lse = np.full(logits.shape, -np.inf), np.full(len(logits), -np.inf)
        seen = self.visible.any(axis=1)
        if seen.any():
            log_p[seen], lse[seen] = log_softmax(logits[seen], axis=1), logsumexp(logits[seen], axis=1)
        return log_p, lse


class _Case:
    def __init__(
        self,
        q1,
        k1,
        q2,
        k2,
        *,
        layout="bhsd",
        scale1=None,
        scale2=None,
        causal=False,
        q_offset=None,
        window=(-1, -1),
        seqlens_q=None,
        seqlens_k=None,
        cu_seqlens_q=None,
        cu_seqlens_k=None,
        reduction="none",
    ):
        self.arrays = {n: np.asarray(a) for n, a in zip(SIDES, (q1, k1, q2, k2), strict=True)}
        self.batch_axis, self.head_axis, self.row_axis = LAYOUTS[layout]
        self.scale1 = self.arrays["q1"].shape[-1] ** -0.5 if scale1 is None else scale1
        self.scale2 = self.arrays["q2"].shape[-1] ** -0.5 if scale2 is None else scale2
        self.causal, self.window, self.q_offset, self.reduction = causal, window or (-1, -1), q_offset, reduction
        self.seqlens_q, self.seqlens_k = seqlens_q, seqlens_k
        self.cu_seqlens_q, self.cu_seqlens_k = cu_seqlens_q, cu_seqlens_k
        q = self.arrays["q1"].shape
        self.heads, self.n_q, self.n_k = q[self.head_axis], q[self.row_axis], self.arrays["k1"].shape[self.row_axis]
        self.batch = len(cu_seqlens_q) - 1 if self.batch_axis is None else q[self.batch_axis]
        self.row_shape = (self.heads, self.n_q) if self.batch_axis is None else (self.batch, self.heads, self.n_q)

    def empty_rows(self, value):
        return np.full(self.row_shape, value, dtype=np.float64)

    def blocks(self):
        for b in range(self.batch):
            if self.batch_axis is None:
                q_span = slice(int(self.cu_seqlens_q[b]), int(self.cu_seqlens_q[b + 1]))
                k_span = slice(int(self.cu_seqlens_k[b]), int(self.cu_seqlens_k[b + 1]))
            else:
                q_span = slice(0, self.n_q if self.seqlens_q is None else int(self.seqlens_q[b]))
                k_span = slice(0, self.n_k if self.seqlens_k is None else int(self.seqlens_k[b]))
            visible = self._visible(b, q_span.stop - q_span.start, k_span.stop - k_span.start)
            for h in range(self.heads):
                rows = (h, q_span) if self.batch_axis is None else (b, h, q_span)
                yield _Block(self, rows, {n: self._at(n, b, h, q_span if n[0] == "q" else k_span) for n in SIDES}, visible)

    def _visible(self, b, n_q, n_k):
        offset = n_k - n_q if self.q_offset is None else int(self.q_offset if np.ndim(self.q_offset) == 0 else self.q_offset[b])
        distance = np.arange(n_k)[None, :] - (np.arange(n_q)[:, None] + offset)
        visible = np.ones((n_q, n_k), dtype=bool)
        if self.causal:
            visible &= distance <= 0
        if self.window[0] >= 0:
            visible &= distance >= -self.window[0]
        if self.window[1] >= 0:
            visible &= distance <= self.window[1]
        return visible

    def _at(self, name, b, h, span):
        group = self.heads // self.arrays[name].shape[self.head_axis]
        index = [slice(None)] * self.arrays[name].ndim
        if self.batch_axis is not None:
            index[self.batch_axis] = b
        index[self.head_axis] = h // group
        index[self.row_axis] = span
        return tuple(index)
