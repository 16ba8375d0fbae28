"""Errors against float64, on sampled rows and keys, so that a check costs O(N) and not O(N^2).

Rows are computed outright. A sampled key's gradient needs every row's denominators: these come from the library's own state, whose
values on the sampled rows are checked against float64 first.
"""

from __future__ import annotations

import numpy as np

from .cases import Case
from .data import Data, to_host

SAMPLES = 8
TOLERANCE = {"float32": 1e-3, "float16": 2e-2, "bfloat16": 6e-2}
"""Beyond these a contender is wrong, not inaccurate. Logits that are rounded to bfloat16 cost a per cent."""


class Checker:
    """Samples of two heads of a case. Errors are relative: maximum over maximum for row values, Frobenius norms for gradients."""

    def __init__(self, case: Case, data: Data):
        self.case, self.data = case, data
        self.rows = np.unique(np.linspace(0, case.seqlen_q - 1, SAMPLES).astype(int))
        self.keys = np.unique(np.linspace(0, case.seqlen_k - 1, SAMPLES).astype(int))
        self.heads = sorted({(0, 0), (case.batch - 1, case.heads - 1)})
        self.weights = {head: to_host(data.grad_kl[head]) for head in self.heads}
        self.reference = {head: self._rows(head) for head in self.heads}

    def forward_error(self, kl) -> float:
        """Of a (B, H, Nq) array of row KLs."""
        return self._row_error(kl, "kl")

    def state_error(self, state) -> float:
        """The largest error among KL and both log-sum-exps of the library's state; keeps its values for `backward_error`."""
        self.stats = {head: [to_host(array[head]) for array in (state.kl, state.lse1, state.lse2)] for head in self._group_heads()}
        return max(self._row_error(array, name) for name, array in (("kl", state.kl), ("lse1", state.lse1), ("lse2", state.lse2)))

    def backward_error(self, grads: dict) -> float:
        """Of gradients by input name, the largest; call `state_error` first."""
        errors = []
        for name, grad in grads.items():
            difference = norm = 0.0
            for head in self.heads:
                if name[0] == "q":
                    got, want = to_host(grad[head][self.rows]), self.reference[head][f"d{name}"]
                else:
                    b, h = head
                    got, want = to_host(grad[b, h // self._group][self.keys]), self._key_gradient(name[1], head)
                difference += float(((got - want) ** 2).sum())
                norm += float((want**2).sum())
            errors.append(np.sqrt(difference / norm) if norm else float(np.sqrt(difference)))
        return float(max(errors))

    def attention_error(self, out) -> float:
        """Of attention P1 K2, what the cuDNN companion computes."""
        want = {head: self.reference[head]["p1"] @ self._keys("2", head) for head in self.heads}
        top = max(np.abs(w).max() for w in want.values())
        return float(max(np.abs(to_host(out[head][self.rows]) - want[head]).max() for head in self.heads) / top)

    @property
    def _group(self) -> int:
        return self.case.heads // self.case.kv_heads

    def _group_heads(self):
        return {(b, h // self._group * self._group + i) for b, h in self.heads for i in range(self._group)}

    def _keys(self, side, head, some=slice(None)):
        return to_host(getattr(self.data, f"k{side}")[head[0], head[1] // self._group][some])

    def _row_error(self, array, name):
        want = np.stack([self.reference[head][name] for head in self.heads])
        got = np.stack([to_host(array[head])[self.rows] for head in self.heads])
        alive = np.isfinite(want)
        if not np.array_equal(np.isfinite(got), alive):
            return float("inf")
        top = np.abs(want[alive]).max(initial=0.0)
        return float(np.abs(got[alive] - want[alive]).max(initial=0.0) / (top or 1.0))

    def _rows(self, head):
        first, end = self.case.visible(self.rows)
        columns = np.arange(self.case.seqlen_k)
        seen = (columns >= first[:, None]) & (columns < end[:, None])
        alive = seen.any(axis=1)
        log_p, lse, keys = {}, {}, {}
        for side, scale in zip("12", self.case.scales, strict=True):
            keys[side] = self._keys(side, head)
            logits = np.where(seen, scale * to_host(getattr(self.data, f"q{side}")[head][self.rows]) @ keys[side].T, -np.inf)
            top = np.where(alive, logits.max(axis=1), 0.0)
            with np.errstate(divide="ignore"):
                lse[side] = top + np.log(np.exp(logits - top[:, None]).sum(axis=1))
            log_p[side] = np.where(seen, logits - np.where(alive, lse[side], 0.0)[:, None], 0.0)
        gap = log_p["1"] - log_p["2"]
        p1, p2 = (np.where(seen, np.exp(log_p[side]), 0.0) for side in "12")
        kl = (p1 * gap).sum(axis=1)
        weight = self.weights[head][self.rows][:, None]
        ds = {"1": weight * p1 * (gap - kl[:, None]), "2": weight * (p2 - p1)}
        out = {f"dq{side}": scale * ds[side] @ keys[side] for side, scale in zip("12", self.case.scales, strict=True)}
        return out | {"kl": kl, "lse1": lse["1"], "lse2": lse["2"], "p1": p1}

    def _key_gradient(self, side, head):
        b, h = head
        total = 0.0
        first, end = self.case.visible(np.arange(self.case.seqlen_q))
        seen = (self.keys >= first[:, None]) & (self.keys < end[:, None])
        for each in (each for each in sorted(self._group_heads()) if each[0] == b and each[1] // self._group == h // self._group):
            kl, *lse = self.stats[each]
            queries = [to_host(getattr(self.data, f"q{s}")[each]) for s in "12"]
            log_p = [
                np.where(
                    seen, scale * q @ self._keys(s, each, self.keys).T - np.where(np.isfinite(total_log), total_log, 0.0)[:, None], 0.0
                )
                for s, scale, q, total_log in zip("12", self.case.scales, queries, lse, strict=True)
            ]
            weight = np.where(seen, to_host(self.data.grad_kl[each])[:, None], 0.0)
            if side == "1":
                ds = weight * np.exp(log_p[0]) * (log_p[0] - log_p[1] - kl[:, None])
            else:
                ds = weight * (np.exp(log_p[1]) - np.exp(log_p[0]))
            total = total + self.case.scales[int(side) - 1] * ds.T @ queries[int(side) - 1]
        return total
