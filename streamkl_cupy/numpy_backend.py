"""The streaming algorithm on NumPy arrays: what CPU inputs run on.

Query rows are taken tile by tile, and for each tile the keys that some of its rows see, tile by tile again; no N_q x N_k matrix
ever exists. Heads (and batch elements of one geometry) go through a tile together. Logits are float32; beside the tiles there
are five numbers a row of the tile, and float32 sums of the key gradients of the heads at hand where their output is narrower.

A tile holds logits s without their scale. With c = scale log2(e), an exponent is s c - ref, which NumPy cannot do in one
rounding. So it is taken around an anchor m, the logit nearest to ref / c:  (s - m) c + (m c - ref). The first difference is
exact near the reference, where the weight is, and the last one is known to float64: common offsets of any size do no harm.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from .checks import SIDES
from .numpy_tiles import Part, Sequence, canonical, canonical_rows, parts, sequences, span, tiles
from .online_rows import NO_REFERENCE, OnlineRows, finish, reopen
from .problem import Problem
from .state import LN2, RowStats

LOG2_E = math.log2(math.e)


def check_vectors(problem: Problem, arrays: dict[str, Any]) -> None:
    """Checks the values of `cu_seqlens_q`, `cu_seqlens_k`, `seqlens_q` and `seqlens_k`; raises ValueError naming the argument."""
    for side, total in (("q", problem.seqlen_q), ("k", problem.seqlen_k)):
        if problem.packed:
            name = f"cu_seqlens_{side}"
            ends = np.asarray(arrays[name]).astype(np.int64)
            if ends[0] != 0:
                raise ValueError(f"{name} starts with {ends[0]}; it takes 0 first")
            falls = np.diff(ends) < 0
            if falls.any():
                at = int(np.argmax(falls))
                raise ValueError(f"{name} falls from {ends[at]} to {ends[at + 1]} at entry {at + 1}; it takes ends in rising order")
            if ends[-1] > total:
                raise ValueError(f"{name} ends with {ends[-1]}; it takes at most {total}, the rows of {side}1")
        elif arrays.get(f"seqlens_{side}") is not None:
            lengths = np.asarray(arrays[f"seqlens_{side}"])
            bad = (lengths < 0) | (lengths > total)
            if bad.any():
                at = int(np.argmax(bad))
                raise ValueError(f"seqlens_{side} has {lengths[at]} at entry {at}; it takes 0 to {total}, the rows of {side}1")


def forward(problem: Problem, arrays: dict[str, Any], rows: RowStats) -> None:
    """Fills `rows`, float32 arrays of shape `problem.row_shape`.

    `arrays` maps q1, k1, q2, k2 and the vectors that there are to NumPy arrays of any strides.
    """
    views = {name: canonical(problem, arrays[name]) for name in SIDES}
    outputs = [canonical_rows(problem, array) for array in rows]
    for output, unseen in zip(outputs, (0.0, 0.0, -np.inf, 0.0, -np.inf), strict=True):
        output[...] = unseen
    c1, c2 = problem.scale1 * LOG2_E, problem.scale2 * LOG2_E
    for sequence in sequences(problem, arrays):
        band = sequence.band
        for part in parts(problem, sequence):
            for rows_at in tiles(band.rows_with_keys(), part.row_tile):
                q1, q2 = (_load(views, name, part, sequence.q_begin, rows_at) for name in ("q1", "q2"))
                online = OnlineRows.clear(q1.shape[:3])
                for keys_at in tiles(band.keys_of(rows_at), part.key_tile):
                    k1, k2 = (_load(views, name, part, sequence.k_begin, keys_at) for name in ("k1", "k2"))
                    update(online, logits(q1, k1), logits(q2, k2), c1, c2, band.hidden(rows_at, keys_at))
                at = part.batch, part.heads["q1"], span(sequence.q_begin, rows_at)
                for output, values in zip(outputs, finish(online), strict=True):
                    output[at] = values


def backward(problem: Problem, arrays: dict[str, Any], rows: RowStats, grad_kl, grads: dict[str, np.ndarray]) -> None:
    """Fills the arrays of `grads` (any of q1, k1, q2, k2; of the inputs' dtype or float32) from the statistics of the rows.

    `grad_kl` is None (1), a scalar, or an array of any float dtype that broadcasts to `problem.row_shape`. `rows` may know more
    keys than there are here (`merge`): the gradients are then this shard's.
    """
    views = {name: canonical(problem, arrays[name]) for name in SIDES}
    outputs = {name: canonical(problem, array) for name, array in grads.items()}
    stats = [canonical_rows(problem, array) for array in rows]
    weights = canonical_rows(problem, np.broadcast_to(np.asarray(1.0 if grad_kl is None else grad_kl), problem.row_shape))
    scales = {"1": problem.scale1, "2": problem.scale2}
    for output in outputs.values():
        output[...] = 0
    # A gradient beyond float16 becomes inf there, as it would anywhere; the exponent of a hidden pair may overflow unseen.
    with np.errstate(over="ignore", invalid="ignore"):
        for sequence in sequences(problem, arrays):
            band = sequence.band
            for part in parts(problem, sequence):
                k_sums = {n: _key_sums(outputs[n], part, n, sequence) for n in ("k1", "k2") if n in outputs}
                for rows_at in tiles(band.rows_with_keys(), part.row_tile):
                    at = part.batch, part.heads["q1"], span(sequence.q_begin, rows_at)
                    terms = RowTerms(*(array[at].astype(np.float64) for array in stats), weights[at].astype(np.float32))
                    q = {n: _load(views, n, part, sequence.q_begin, rows_at) for n in ("q1", "q2")}
                    q_sums = {n: np.zeros(q[n].shape, np.float32) for n in ("q1", "q2") if n in outputs}
                    for keys_at in tiles(band.keys_of(rows_at), part.key_tile):
                        k = {n: _load(views, n, part, sequence.k_begin, keys_at) for n in ("k1", "k2")}
                        s1, s2 = logits(q["q1"], k["k1"]), logits(q["q2"], k["k2"])
                        ds = logit_gradients(terms, s1, s2, scales, band.hidden(rows_at, keys_at), outputs)
                        for side, d in ds.items():
                            q_side, k_side = f"q{side}", f"k{side}"
                            d = _by_key_head(d, k[k_side])
                            if q_side in q_sums:
                                q_sums[q_side] += (d @ k[k_side]).reshape(q[q_side].shape)
                            if k_side in k_sums:
                                at_keys = k_sums[k_side][:, :, keys_at.start : keys_at.stop]
                                at_keys += d.swapaxes(-1, -2) @ _by_key_head(q[q_side], k[k_side])
                    for name, total in q_sums.items():
                        outputs[name][at] = total * np.float32(scales[name[1]])
                for name, total in k_sums.items():
                    at = part.batch, part.heads[name], span(sequence.k_begin, range(band.k_valid))
                    outputs[name][at] = total * np.float32(scales[name[1]])


def merge(shards, out: RowStats) -> None:
    """Fills `out` with the statistics of the same rows over the keys of all shards (`RowStats` each), which are disjoint."""
    merged = OnlineRows.clear(np.shape(out.kl))
    for shard in shards:
        merged.merge(reopen(shard))
    for output, values in zip(out, finish(merged), strict=True):
        output[...] = values


def logits(q: np.ndarray, k: np.ndarray) -> np.ndarray:
    """Q K^T of a tile without the scale, (batch, heads, rows, keys).

    Head by head: both sides are then multiplied in the same shapes, and equal operands give bitwise equal logits.
    """
    batch, heads, rows, _ = q.shape
    grouped = q.reshape(batch, k.shape[1], -1, *q.shape[2:])
    return (grouped @ k[:, :, None].swapaxes(-1, -2)).reshape(batch, heads, rows, k.shape[2])


def update(online: OnlineRows, s1: np.ndarray, s2: np.ndarray, c1: float, c2: float, hidden: np.ndarray | None) -> None:
    """Takes a tile of logits into the states of its rows, and overwrites it."""
    refs = []
    for s, c, ref in ((s1, c1, online.ref1), (s2, c2, online.ref2)):
        if hidden is not None:
            np.copyto(s, -np.inf, where=hidden)
        top = np.ceil(s.max(axis=-1) * np.float32(c))
        refs.append(np.maximum(ref, top.astype(np.float64)))
        # While a row has seen no key, any finite reference keeps its exponents at -inf.
        _exponents(s, np.where(refs[-1] == NO_REFERENCE, 0.0, refs[-1]), 0.0, c)
    online.rebase(*refs)
    # A tile is summed on its own first: fewer roundings than one long sum.
    p1 = np.exp2(s1)
    online.sum1 += p1.sum(axis=-1)
    with np.errstate(invalid="ignore"):
        s1 -= s2
    if hidden is not None:
        np.copyto(s1, 0.0, where=hidden)
    s1 *= p1
    online.product += s1.sum(axis=-1)
    online.sum2 += np.exp2(s2, out=s2).sum(axis=-1)


class RowTerms:
    """What the logit gradients of a tile need of its rows. `unseen` marks rows without any key, or is None without such rows."""

    def __init__(self, kl, ref1, logsum1, ref2, logsum2, weight):
        unseen = np.isneginf(logsum1) | np.isneginf(logsum2)
        self.kl, self.weight = kl.astype(np.float32)[..., None], weight[..., None]
        self.ref1, self.ref2 = ref1, ref2
        self.logsum1, self.logsum2 = np.where(unseen, 0.0, logsum1), np.where(unseen, 0.0, logsum2)
        self.unseen = unseen[..., None] if unseen.any() else None


def logit_gradients(terms: RowTerms, s1, s2, scales: dict[str, float], hidden, wanted) -> dict[str, np.ndarray]:
    """A tile of logits becomes the gradients of the scaled logits, in place, for the sides "1" and "2" that `wanted` names.

    y_t = log2 P_t        dS_1 = g P_1 (ln 2 (y_1 - y_2) - KL)        dS_2 = g (P_2 - P_1)
    """
    y1 = _exponents(s1, terms.ref1, terms.logsum1, scales["1"] * LOG2_E)
    y2 = _exponents(s2, terms.ref2, terms.logsum2, scales["2"] * LOG2_E)
    p1, ds = np.exp2(y1), {}
    if "q1" in wanted or "k1" in wanted:
        y1 -= y2
        y1 *= np.float32(LN2)
        y1 -= terms.kl
        y1 *= p1
        ds["1"] = y1
    if "q2" in wanted or "k2" in wanted:
        ds["2"] = np.exp2(y2, out=y2)
        y2 -= p1
    for d in ds.values():
        d *= terms.weight
        for nothing in (hidden, terms.unseen):
            if nothing is not None:
                np.copyto(d, 0.0, where=nothing)
    return ds


def _exponents(s: np.ndarray, ref: np.ndarray, logsum: np.ndarray | float, c: float) -> np.ndarray:
    """s c - ref - logsum, in place."""
    anchor = (ref / c).astype(np.float32)
    s -= anchor[..., None]
    s *= np.float32(c)
    s += (anchor.astype(np.float64) * c - ref - logsum).astype(np.float32)[..., None]
    return s


def _load(views, name: str, part: Part, begin: int, rows: range) -> np.ndarray:
    """A float32 copy of some rows: contiguous whatever the strides, so that matrix products always run alike."""
    return views[name][part.batch, part.heads[name], span(begin, rows)].astype(np.float32, order="C")


def _by_key_head(tile: np.ndarray, k: np.ndarray) -> np.ndarray:
    """Rows of all query heads that share a key head, one after the other."""
    return tile.reshape(tile.shape[0], k.shape[1], -1, tile.shape[-1])


def _key_sums(output: np.ndarray, part: Part, name: str, sequence: Sequence) -> np.ndarray:
    """Where the key gradients of a part are summed: in a float32 output itself, which is 0 so far, else beside it."""
    target = output[part.batch, part.heads[name], span(sequence.k_begin, range(sequence.band.k_valid))]
    return target if target.dtype == np.float32 else np.zeros(target.shape, np.float32)
