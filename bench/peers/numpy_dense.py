"""NumPy on whole matrices in float32, one head at a time: the comparison on a CPU."""

from __future__ import annotations

import numpy as np

from ..cases import Case
from ..data import Data
from . import Prepared

NAME, DEVICE, COMPANION = "dense", "cpu", False


def available() -> str | None:
    return None


def prepare(case: Case, data: Data) -> Prepared:
    group = case.heads // case.kv_heads
    first, end = case.visible(np.arange(case.seqlen_q))
    columns = np.arange(case.seqlen_k)
    seen = (columns >= first[:, None]) & (columns < end[:, None]) if case.masked else None
    alive = end > first
    inputs = dict(zip(("q1", "k1", "q2", "k2"), (x.astype(np.float32) for x in data.inputs), strict=True))

    def distributions(b, h):
        pair = []
        for side, scale in zip("12", case.scales, strict=True):
            logits = inputs[f"q{side}"][b, h] @ inputs[f"k{side}"][b, h // group].T
            logits *= np.float32(scale)
            if seen is not None:
                logits[~seen] = -1e30
            logits -= logits.max(axis=1, keepdims=True)
            logits -= np.log(np.exp(logits).sum(axis=1, keepdims=True))
            pair.append(logits)
        p1 = np.exp(pair[0])
        gap = pair[0] - pair[1]
        return p1, pair[1], gap, (p1 * gap).sum(axis=1) * alive

    def forward():
        kl = np.empty((case.batch, case.heads, case.seqlen_q), np.float32)
        for b, h in np.ndindex(kl.shape[:2]):
            kl[b, h] = distributions(b, h)[-1]
        return kl

    def backward():
        grads = {name: np.zeros(case.shape(name), np.float32) for name in case.wrt}
        for b, h in np.ndindex(case.batch, case.heads):
            p1, log_p2, gap, kl = distributions(b, h)
            weight = (data.grad_kl[b, h] * alive)[:, None]
            for side, scale in zip("12", case.scales, strict=True):
                if not {f"q{side}", f"k{side}"} & set(case.wrt):
                    continue
                ds = np.float32(scale) * weight * (p1 * (gap - kl[:, None]) if side == "1" else np.exp(log_p2) - p1)
                if seen is not None:
                    ds *= seen
                if f"q{side}" in grads:
                    grads[f"q{side}"][b, h] = ds @ inputs[f"k{side}"][b, h // group]
                if f"k{side}" in grads:
                    grads[f"k{side}"][b, h // group] += ds.T @ inputs[f"q{side}"][b, h]
        return {name: grad.astype(data.q1.dtype) for name, grad in grads.items()}

    return Prepared(forward, backward)
