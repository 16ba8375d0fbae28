"""The bands of kernels/mask.cuh against brute force: every row, key and span of small sequences, and the ends of the range."""

import itertools

import numpy as np
import pytest

from streamkl_cupy.checks import MAX_SEQLEN, OPEN

from . import Emulated, pointer

MOST = 6  # rows and keys of the small sequences
TEXT = """
#include "problem.cuh"
#include "mask.cuh"

struct Case { i64 q_offset, left, right; int q_valid, k_valid; };

__device__ Band band_of(const Case& c) {
  Problem problem = {};
  problem.window_left = c.left;
  problem.window_right = c.right;
  Sequence s = {};
  s.q_rows = s.q_valid = c.q_valid;
  s.k_rows = s.k_valid = c.k_valid;
  s.q_offset = c.q_offset;
  return band(problem, s);
}

// Keys of a row, rows of a key, for `count` of each.
extern "C" __global__ void edges(const Case* cases, int cases_count, const int* at, int count, int2* keys, int2* rows) {
  for (int c = threadIdx.x; c < cases_count; c += 32) {
    const Band b = band_of(cases[c]);
    for (int i = 0; i < count; ++i) {
      keys[c * count + i] = make_int2(b.first_key(at[i]), b.end_key(at[i]));
      rows[c * count + i] = make_int2(b.first_row(at[i]), b.end_row(at[i]));
    }
  }
}

// Four spans of every case for the rows (or keys) [begin, end).
extern "C" __global__ void spans(const Case* cases, int cases_count, int begin, int end, Span* results) {
  for (int c = threadIdx.x; c < cases_count; c += 32) {
    const Band b = band_of(cases[c]);
    results[4 * c] = keys_seen_by_some(b, begin, end);
    results[4 * c + 1] = keys_seen_by_all(b, begin, end);
    results[4 * c + 2] = rows_seeing_some(b, begin, end);
    results[4 * c + 3] = rows_seeing_all(b, begin, end);
  }
}
"""
CASE = np.dtype([("q_offset", np.int64), ("left", np.int64), ("right", np.int64), ("q_valid", np.int32), ("k_valid", np.int32)], align=True)


def small_cases():
    windows = [(OPEN, OPEN), (OPEN, 0), (0, 0), (0, OPEN), (2, 0), (1, 2), (3, OPEN), (OPEN, 1), (0, 3)]
    offsets = (-9, -6, -3, -1, 0, 1, 2, 5, 6, 9)
    lengths = ((6, 6), (3, 6), (6, 3), (1, 5), (5, 1), (0, 4), (4, 0))
    return np.array([(o, *w, *n) for o, w, n in itertools.product(offsets, windows, lengths)], CASE)


def visible(cases):
    """(cases, row, key): what the definition at the top of mask.cuh says."""
    row, key = np.arange(MOST)[None, :, None], np.arange(MOST)[None, None, :]
    c = {name: cases[name][:, None, None] for name in CASE.names}
    in_band = (row + c["q_offset"] - c["left"] <= key) & (key <= row + c["q_offset"] + c["right"])
    return in_band & (row < c["q_valid"]) & (key < c["k_valid"])


def members(begin, end):
    """The indices below MOST in the spans, as booleans along a last axis."""
    index = np.arange(MOST)
    return (begin[..., None] <= index) & (index < end[..., None])


def test_keys_of_rows_and_rows_of_keys():
    cases, at = small_cases(), np.arange(MOST, dtype=np.int32)
    keys, rows = (np.full((len(cases), MOST, 2), -1, np.int32) for _ in range(2))
    args = [pointer(cases), np.int32(len(cases)), pointer(at), np.int32(MOST), pointer(keys), pointer(rows)]
    Emulated.of_text(TEXT, "edges").launch(1, 32, args)
    seen = visible(cases)
    valid_row, valid_key = at < cases["q_valid"][:, None], at < cases["k_valid"][:, None]
    np.testing.assert_array_equal(members(keys[..., 0], keys[..., 1]) & valid_row[:, :, None], seen)
    np.testing.assert_array_equal(members(rows[..., 0], rows[..., 1]) & valid_key[:, :, None], seen.swapaxes(1, 2))
    assert ((keys >= 0) & (keys <= cases["k_valid"][:, None, None])).all()
    assert ((rows >= 0) & (rows <= cases["q_valid"][:, None, None])).all()


def test_spans_of_tiles():
    """Seen by some is the union, seen by all the intersection: both exactly, and empty spans are empty."""
    kernel, everything = Emulated.of_text(TEXT, "spans"), small_cases()
    for begin, end in itertools.combinations_with_replacement(range(MOST + 1), 2):
        for of_rows, limit in ((True, "q_valid"), (False, "k_valid")):
            cases = everything[everything[limit] >= end]
            results = np.full((len(cases), 4, 2), -1, np.int32)
            kernel.launch(1, 32, [pointer(cases), *map(np.int32, (len(cases), begin, end)), pointer(results)])
            seen = visible(cases) if of_rows else visible(cases).swapaxes(1, 2)
            some, all_ = (members(results[:, i, 0], results[:, i, 1]) for i in ((0, 1) if of_rows else (2, 3)))
            np.testing.assert_array_equal(some, seen[:, begin:end].any(axis=1))
            if begin < end:
                np.testing.assert_array_equal(all_, seen[:, begin:end].all(axis=1))


@pytest.mark.parametrize("length", [MAX_SEQLEN, MAX_SEQLEN - 1, 1 << 20, 3])
def test_nothing_overflows(length):
    """Offsets and windows of any size, in the longest sequences."""
    far = (OPEN - 1, 2**31 - 1, -(2**31), 1 << 30, (1 << 30) - 1, length, length - 1, 7, 0)
    offsets = sorted({sign * n for n in far for sign in (1, -1)})
    windows = (0, 5, length - 1, MAX_SEQLEN, 1 << 30, 2**31, OPEN - 1, OPEN)
    cases = np.array([(o, a, b, length, length) for o, a, b in itertools.product(offsets, windows, windows)], CASE)
    at = np.array([0, 1, length // 2, length - 1], np.int32)
    keys, rows = (np.full((len(cases), len(at), 2), -1, np.int32) for _ in range(2))
    args = [pointer(cases), np.int32(len(cases)), pointer(at), np.int32(len(at)), pointer(keys), pointer(rows)]
    Emulated.of_text(TEXT, "edges").launch(1, 32, args)
    offset, left, right = (cases[name][:, None] for name in ("q_offset", "left", "right"))
    for result, first, end in (
        (keys, at + offset - left, at + offset + right + 1),
        (rows, at - offset - right, at - offset + left + 1),
    ):
        np.testing.assert_array_equal(result[..., 0], np.clip(first, 0, length))
        np.testing.assert_array_equal(result[..., 1], np.clip(end, 0, length))
