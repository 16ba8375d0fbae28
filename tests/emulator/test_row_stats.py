"""The online state of kernels/row_stats.cuh against float64: key by key, merged from parts, kept and reopened."""

import numpy as np
import pytest

from streamkl_cupy.gpu.parameters import ROW_STATS

from . import Emulated, pointer

LN2 = np.log(2)
FIELDS = ("kl", "ref1", "logsum1", "ref2", "logsum2")
TEXT = """
#include "problem.cuh"
#include "row_stats.cuh"

// One row a thread: its base-2 logits in `parts` runs of keys, of which every part has a state of its own; those are merged as
// they are, or (`kept`) after they were written out and reopened.
extern "C" __global__ void kernel(const float* x1, const float* x2, int rows, int keys, int parts, int kept, RowStatsArrays output) {
  for (int row = threadIdx.x; row < rows; row += 32) {
    OnlineRow merged;
    merged.clear();
    for (int part = 0; part < parts; ++part) {
      OnlineRow state;
      state.clear();
      for (int key = keys * part / parts; key < keys * (part + 1) / parts; ++key) {
        const float s1 = x1[row * keys + key], s2 = x2[row * keys + key];
        if (s1 == -__int_as_float(0x7f800000)) continue;  // hidden
        const float ref1 = fmaxf(state.ref1, ceilf(s1)), ref2 = fmaxf(state.ref2, ceilf(s2));
        if (ref1 != state.ref1 || ref2 != state.ref2) state.rebase(ref1, ref2);
        const float p1 = exp2f(s1 - state.ref1), p2 = exp2f(s2 - state.ref2);
        state.sum1 += p1;
        state.sum2 += p2;
        state.product = fmaf(p1, (s1 - state.ref1) - (s2 - state.ref2), state.product);
      }
      merged.merge(kept ? reopen(finish(state)) : state);
    }
    store(output, row, finish(merged));
  }
}

extern "C" __global__ void merge_rows(RowStatsArrays input, int rows, int parts, RowStatsArrays output) {
  for (int row = threadIdx.x; row < rows; row += 32) {
    OnlineRow merged;
    merged.clear();
    for (int part = 0; part < parts; ++part) merged.merge(reopen(load(input, part * rows + row)));
    store(output, row, finish(merged));
  }
}
"""


@pytest.fixture(scope="module")
def kernels():
    return tuple(Emulated.of_text(TEXT, entry) for entry in ("kernel", "merge_rows"))


def outputs(*shape):
    """Row arrays full of NaN, and the record that points at them."""
    rows = {name: np.full(shape, np.nan, np.float32) for name in FIELDS}
    return rows, np.array([tuple(pointer(rows[name]) for name in FIELDS)], ROW_STATS)


def online(kernel, x1, x2, parts=1, kept=False):
    rows, record = outputs(len(x1))
    sizes = map(np.int32, (*x1.shape, parts, kept))
    kernel.launch(1, 32, [pointer(x1), pointer(x2), *sizes, record])
    return rows


def exact(x1, x2):
    """KL and natural-log denominators in float64; 0 and -inf for a row without keys. Logits come in base 2."""
    x1, x2 = x1.astype(np.float64), x2.astype(np.float64)
    seen = np.isfinite(x1)
    with np.errstate(invalid="ignore", divide="ignore"):
        logs = []
        for x in (x1, x2):
            top = x.max(axis=1, keepdims=True, where=seen, initial=-1e300)
            logs.append(top + np.log2(np.where(seen, np.exp2(x - top), 0).sum(axis=1, keepdims=True)))
        y1, y2 = x1 - logs[0], x2 - logs[1]
        kl = np.where(seen, np.exp2(y1) * (y1 - y2), 0).sum(axis=1) * LN2
    some = seen.any(axis=1)
    return np.where(some, kl, 0), *(np.where(some, log[:, 0] * LN2, -np.inf) for log in logs)


def check(rows, x1, x2):
    kl, lse1, lse2 = exact(x1, x2)
    seen = np.isfinite(lse1)
    largest = max(np.abs(x[np.isfinite(x)], dtype=np.float64).max(initial=0) for x in (x1, x2))
    np.testing.assert_allclose(rows["kl"], kl, rtol=1e-5, atol=5e-6)
    for side, lse in (("1", lse1), ("2", lse2)):
        ref, logsum = rows[f"ref{side}"].astype(np.float64), rows[f"logsum{side}"].astype(np.float64)
        np.testing.assert_allclose((ref + logsum)[seen] * LN2, lse[seen], rtol=1e-7, atol=5e-6 + 2e-7 * np.log2(2 + largest))
        assert (ref[~seen] == 0).all() and (logsum[~seen] == -np.inf).all()
    assert (rows["kl"][~seen] == 0).all()


VARIANTS = [(1, False), (1, True), (3, False), (7, True), (50, False), (50, True)]
"""Parts, and whether they are written out in between; 50 parts of 37 keys: some are empty."""


def logits(kind, rng, shape=(64, 37)):
    """Base-2 logits of both sides in float32."""
    x1, x2 = rng.normal(size=shape) * 4, rng.normal(size=shape) * 4
    if kind == "rising":  # every key moves the references
        x1, x2 = np.sort(x1, axis=1), np.sort(x2, axis=1)[:, ::-1]
    elif kind == "far":  # states that underflow against each other
        x1[:, ::3] += 200
        x2[:, 1::3] -= 300
    elif kind == "common offset":
        x1, x2 = x1 + 3e5, x2 + 3e5
    elif kind == "different offsets":
        x1, x2 = x1 + 1e6, x2 - 2e6
    elif kind == "huge":
        x1 = x1 * 1e7
        x2 = x1 + 8 * rng.normal(size=shape)
    elif kind == "hidden":
        x1[rng.random(shape) < 0.7] = -np.inf
        x1[:5] = -np.inf
        x1[5:10, :30] = -np.inf
        x1[10:15, 1:] = -np.inf
    x1 = x1.astype(np.float32)
    x2 = np.ascontiguousarray(x2, np.float32)
    x2[np.isinf(x1)] = -np.inf
    return np.ascontiguousarray(x1), x2


@pytest.mark.parametrize(("parts", "kept"), VARIANTS)
@pytest.mark.parametrize("kind", ["plain", "rising", "far", "common offset", "different offsets", "huge", "hidden"])
def test_against_float64(kernels, kind, parts, kept):
    x1, x2 = logits(kind, np.random.default_rng(3))
    check(online(kernels[0], x1, x2, parts, kept), x1, x2)


@pytest.mark.parametrize(("parts", "kept"), VARIANTS)
@pytest.mark.parametrize("kind", ["plain", "rising", "far", "common offset", "huge", "hidden"])
def test_equal_sides_give_exactly_zero(kernels, kind, parts, kept):
    x, _ = logits(kind, np.random.default_rng(4))
    rows = online(kernels[0], x, x.copy(), parts, kept)
    assert (rows["kl"] == 0).all()
    np.testing.assert_array_equal(rows["logsum1"], rows["logsum2"])


def test_no_keys_at_all(kernels):
    empty = np.zeros((40, 0), np.float32)
    for parts, kept in ((1, False), (3, True)):
        rows = online(kernels[0], empty, empty, parts, kept)
        for name, value in zip(FIELDS, (0, 0, -np.inf, 0, -np.inf), strict=True):
            assert (rows[name] == value).all(), name


@pytest.mark.parametrize("offset", [0.0, 1e4, -3e5])
def test_rows_kept_by_others(kernels, offset):
    """References may be any number and the sums of any size: an LSE as the reference with a log-sum of 0, or the reverse."""
    x1, x2 = logits("plain", np.random.default_rng(5), (32, 60))
    x1, x2 = x1 + np.float32(offset), x2 + np.float32(offset / 3)
    parts, record = outputs(3, 32)
    for part, split in enumerate((slice(0, 20), slice(20, 21), slice(21, 60))):
        kl, lse1, lse2 = exact(x1[:, split], x2[:, split])
        parts["kl"][part] = kl
        for side, lse in (("1", lse1 / LN2), ("2", lse2 / LN2)):
            ref = (lse, np.round(lse, 2) - 40.25, np.zeros_like(lse) if offset == 0 else np.floor(lse) + 7.5)[part]
            parts[f"ref{side}"][part] = ref
            parts[f"logsum{side}"][part] = lse - parts[f"ref{side}"][part]
    rows, merged = outputs(32)
    kernels[1].launch(1, 32, [record, np.int32(32), np.int32(3), merged])
    check(rows, x1, x2)


def test_merging_one_state_changes_nothing(kernels):
    """Bitwise so for the log-denominators, and to a rounding for the KL."""
    x1, x2 = logits("hidden", np.random.default_rng(6))
    before = online(kernels[0], x1, x2)
    parts, record = outputs(3, len(x1))
    for name in FIELDS:  # an empty part on either side
        parts[name][0] = parts[name][2] = -np.inf if name.startswith("log") else 0
        parts[name][1] = before[name]
    rows, merged = outputs(len(x1))
    kernels[1].launch(1, 32, [record, np.int32(len(x1)), np.int32(3), merged])
    np.testing.assert_allclose(rows["kl"], before["kl"], rtol=1e-6, atol=1e-6)
    for side in "12":
        seen = np.isfinite(before[f"logsum{side}"])
        total, kept = (r[f"ref{side}"].astype(np.float64) + r[f"logsum{side}"] for r in (rows, before))
        np.testing.assert_allclose(total[seen], kept[seen], rtol=0, atol=3e-7)
        assert (total[~seen] == -np.inf).all()
