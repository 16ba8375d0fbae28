"""How the NumPy backend walks through a problem: views in one order of axes, sequences, heads in parts, tiles within a band."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from .checks import LAYOUTS
from .problem import Problem

ROW_TILE, KEY_TILE = 128, 512
TILE_ELEMENTS = 1 << 16
"""Logits of one side at a time, over all heads together: a quarter of a megabyte, so that a tile's few arrays stay in a core's cache."""


class Band(NamedTuple):
    """Which keys a row of a sequence sees (kernels/mask.cuh): row i those from `i + before` to `i + after`, clipped to k_valid."""

    before: int
    after: int
    q_valid: int
    k_valid: int

    def first_key(self, row: int) -> int:
        return min(max(row + self.before, 0), self.k_valid)

    def end_key(self, row: int) -> int:
        return min(max(row + self.after + 1, 0), self.k_valid)

    def rows_with_keys(self) -> range:
        """Rows that see some key; nothing of the others is ever read."""
        if self.k_valid == 0:
            return range(0)
        return range(min(max(-self.after, 0), self.q_valid), min(max(self.k_valid - self.before, 0), self.q_valid))

    def keys_of(self, rows: range) -> range:
        """Keys that some row of a tile sees: one run without gaps, since the band moves one key a row. No other key is read."""
        return range(self.first_key(rows[0]), self.end_key(rows[-1]))

    def hidden(self, rows: range, keys: range) -> np.ndarray | None:
        """Pairs of a tile that do not see each other, or None where there are none."""
        if self.first_key(rows[-1]) <= keys.start and keys.stop <= self.end_key(rows[0]):
            return None
        row, key = np.arange(rows.start, rows.stop)[:, None], np.arange(keys.start, keys.stop)
        return (key < row + self.before) | (key > row + self.after)


class Sequence(NamedTuple):
    """Batch elements with one geometry, or one packed segment: where its rows and keys begin in memory, and its band."""

    batch: slice
    q_begin: int
    k_begin: int
    band: Band


class Part(NamedTuple):
    """Batch elements and heads of a sequence that go through its tiles together. `heads` has a slice for each of q1, k1, q2, k2."""

    batch: slice
    heads: dict[str, slice]
    row_tile: int
    key_tile: int


def canonical(problem: Problem, array: np.ndarray) -> np.ndarray:
    """An input of any layout as (batch, heads, rows, columns), without a copy."""
    batch, head, row = LAYOUTS[problem.layout]
    return array.transpose(head, row, 2)[None] if batch is None else array.transpose(batch, head, row, 3)


def canonical_rows(problem: Problem, array: np.ndarray) -> np.ndarray:
    """A row array as (batch, heads, rows), without a copy."""
    return array[None] if problem.packed else array


def sequences(problem: Problem, arrays: dict[str, Any]) -> Iterator[Sequence]:
    """The sequences of a problem; `arrays` has the device vectors that there are. Trusts their values (`check_vectors`)."""
    offsets = arrays.get("q_offset") if problem.q_offset == "vector" else None
    lengths = [arrays.get("seqlens_q"), arrays.get("seqlens_k")]
    if not problem.packed and offsets is None and all(vector is None for vector in lengths):
        yield Sequence(slice(0, problem.batch), 0, 0, _band(problem, problem.seqlen_q, problem.seqlen_k, None))
        return
    ends = [np.asarray(arrays[n]).tolist() for n in ("cu_seqlens_q", "cu_seqlens_k")] if problem.packed else None
    for b in range(problem.batch):
        offset = None if offsets is None else int(offsets[b])
        if ends is not None:
            (q_begin, q_end), (k_begin, k_end) = (e[b : b + 2] for e in ends)
            yield Sequence(slice(0, 1), q_begin, k_begin, _band(problem, q_end - q_begin, k_end - k_begin, offset))
        else:
            q_valid, k_valid = (n if v is None else int(v[b]) for v, n in zip(lengths, (problem.seqlen_q, problem.seqlen_k), strict=True))
            yield Sequence(slice(b, b + 1), 0, 0, _band(problem, q_valid, k_valid, offset))


def _band(problem: Problem, q_valid: int, k_valid: int, offset: int | None) -> Band:
    if offset is None:
        offset = k_valid - q_valid if problem.q_offset is None else problem.q_offset
    return Band(offset - problem.window_left, offset + problem.window_right, q_valid, k_valid)


def parts(problem: Problem, sequence: Sequence) -> Iterator[Part]:
    """Cuts a sequence's batch and heads so that a tile has about TILE_ELEMENTS, never between heads that share a key head."""
    groups = {"q1": 1, "k1": problem.heads // problem.heads_k1, "q2": 1, "k2": problem.heads // problem.heads_k2}
    unit = math.lcm(*groups.values())
    key_tile = max(1, min(KEY_TILE, sequence.band.k_valid))
    row_tile = max(1, min(ROW_TILE, sequence.band.q_valid, max(16, TILE_ELEMENTS // (unit * key_tile))))
    together = max(1, TILE_ELEMENTS // (row_tile * key_tile))
    heads = min(problem.heads, max(1, together // unit) * unit)
    batch = max(1, together // heads) if heads == problem.heads else 1
    for b in range(sequence.batch.start, sequence.batch.stop, batch):
        for h in range(0, problem.heads, heads):
            end = min(h + heads, problem.heads)
            slices = {name: slice(h // group, end // group) for name, group in groups.items()}
            yield Part(slice(b, min(b + batch, sequence.batch.stop)), slices, row_tile, key_tile)


def tiles(whole: range, size: int) -> Iterator[range]:
    for begin in range(whole.start, whole.stop, size):
        yield range(begin, min(begin + size, whole.stop))


def span(begin: int, rows: range) -> slice:
    return slice(begin + rows.start, begin + rows.stop)
