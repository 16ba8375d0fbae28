"""How the blocks of a grid find their rows, kernels/problem.cuh and blocks.cuh: every row once, and never outside the arrays."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamkl_cupy.checks import OPEN
from streamkl_cupy.gpu.parameters import BOTTOM_RIGHT, OFFSET_VECTOR, ONE_OFFSET, PROBLEM

from . import Emulated, pointer

TEXT = """
#include "problem.cuh"
#include "mask.cuh"
#include "row_stats.cuh"
#include "ptx_sm80.cuh"
#include "tile.cuh"
#include "blocks.cuh"

struct Place { i64 q_begin, k_begin, q_offset; int batch_index, head, q_rows, k_rows, q_valid, k_valid, begin, end, valid_end, padding; };

extern "C" __global__ void places(Problem problem, int of_queries, int heads, int tile_rows, i64 count, Place* places) {
  for (i64 i = threadIdx.x; i < count; i += 32) {
    const OwnTile t = of_queries ? query_tile(problem, i, tile_rows) : key_tile(problem, i, tile_rows, heads);
    const Sequence& s = t.sequence;
    places[i] = {s.q_begin, s.k_begin, s.q_offset, s.batch_index, t.head, s.q_rows, s.k_rows, s.q_valid, s.k_valid, t.begin, t.end, t.valid_end, 0};
  }
}

extern "C" __global__ void shares(Span span, int tile_rows, int splits, Span* results) {
  for (int i = threadIdx.x; i < splits; i += 32) results[i] = share_of(span, tile_rows, i, splits);
}
"""
INTS = ("batch_index", "head", "q_rows", "k_rows", "q_valid", "k_valid", "begin", "end", "valid_end", "padding")
PLACE = np.dtype([(n, np.int64) for n in ("q_begin", "k_begin", "q_offset")] + [(n, np.int32) for n in INTS], align=True)
SPAN = np.dtype([("begin", np.int32), ("end", np.int32)])


@pytest.fixture(scope="module")
def kernel():
    return Emulated.of_text(TEXT, "places")


def places(kernel, side, tile_rows, seqlen_q, seqlen_k, batch, heads=2, heads_k=1, causal=False, q_offset=0, mode=BOTTOM_RIGHT, **vectors):
    """What every block of the grid owns, in the order of the blocks. The vectors are lists."""
    arrays = {name: np.array(values, np.int32) for name, values in vectors.items()}
    problem = np.zeros(1, PROBLEM)
    for name, array in arrays.items():
        problem[name] = pointer(array)
    problem["seqlen_q"], problem["seqlen_k"], problem["batch"] = seqlen_q, seqlen_k, batch
    problem["heads"], problem["heads_k1"], problem["heads_k2"] = heads, heads_k, heads_k
    problem["window_left"], problem["window_right"] = OPEN, 0 if causal else OPEN
    problem["q_offset"], problem["q_offset_mode"] = q_offset, mode
    rows, own_heads = (seqlen_q, heads) if side == "q" else (seqlen_k, heads_k)
    packed = "cu_seqlens_q" in vectors
    per_head = rows // tile_rows + batch + 1 if packed else -(-rows // tile_rows)  # as tiles_per_head in gpu/launch.py
    count = per_head * own_heads * (1 if packed else batch)
    found = np.zeros(count, PLACE)
    args = [problem, np.int32(side == "q"), np.int32(heads_k), np.int32(tile_rows), np.int64(count), pointer(found)]
    kernel.launch(1, 32, args)
    return found


def check_inside(found, side, tile_rows, seqlen_q, seqlen_k, batch, heads):
    """Nothing reaches outside the arrays, whatever the vectors say."""
    for name, seqlen in (("q", seqlen_q), ("k", seqlen_k)):
        begin, rows, valid = found[f"{name}_begin"], found[f"{name}_rows"], found[f"{name}_valid"]
        assert ((begin >= 0) & (rows >= 0) & (begin + rows <= seqlen) & (valid >= 0) & (valid <= rows)).all()
    owning = found[found["begin"] < found["end"]]
    assert ((owning["begin"] >= 0) & (owning["end"] <= owning[f"{side}_rows"])).all()
    assert (owning["end"] - owning["begin"] <= tile_rows).all()
    assert ((owning["valid_end"] >= owning["begin"]) & (owning["valid_end"] <= owning["end"])).all()
    assert ((found["head"] >= 0) & (found["head"] < heads)).all()
    assert ((found["batch_index"] >= 0) & (found["batch_index"] < max(batch, 1))).all()


def cover(found, side, seqlen, heads, batch=1):
    """How often each row of (batch, head, row) is owned, and the places that own them."""
    counts = np.zeros((batch, heads, seqlen), int)
    for place in found[found["begin"] < found["end"]]:
        first = place[f"{side}_begin"]
        counts[place["batch_index"], place["head"], first + place["begin"] : first + place["end"]] += 1
    return counts


lengths = st.lists(st.integers(0, 9), min_size=0, max_size=6)


@settings(max_examples=150, deadline=None)
@given(lengths, st.data(), st.integers(0, 8), st.integers(0, 8), st.sampled_from([1, 2, 4, 16]), st.booleans(), st.sampled_from("qk"))
def test_packed_rows_are_owned_once(kernel, q_lengths, data, q_tail, k_tail, tile_rows, causal, side):
    """Segments of any length, none too, and a tail that belongs to none: its rows see no key."""
    k_lengths = data.draw(st.lists(st.integers(0, 9), min_size=len(q_lengths), max_size=len(q_lengths)))
    batch = len(q_lengths)
    cu_q, cu_k = ([0, *map(int, np.cumsum(n))] for n in (q_lengths, k_lengths))
    seqlen_q, seqlen_k = cu_q[-1] + q_tail, cu_k[-1] + k_tail
    found = places(kernel, side, tile_rows, seqlen_q, seqlen_k, batch, causal=causal, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)
    seqlen, heads, begins = (seqlen_q, 2, cu_q) if side == "q" else (seqlen_k, 1, cu_k)
    check_inside(found, side, tile_rows, seqlen_q, seqlen_k, 1, heads)
    assert (cover(found, side, seqlen, heads) == 1).all()
    for place in found[found["begin"] < found["end"]]:
        first = int(place[f"{side}_begin"])
        segment = int(np.searchsorted(begins, first + place["begin"], side="right")) - 1
        assert first == begins[segment]
        if segment == batch:
            assert place["q_valid"] == place["k_valid"] == 0 and place["valid_end"] == place["begin"]
        else:
            assert (place["q_begin"], place["k_begin"]) == (cu_q[segment], cu_k[segment])
            assert place["q_rows"] == place["q_valid"] == q_lengths[segment]
            assert place["k_rows"] == place["k_valid"] == k_lengths[segment]
            assert place["valid_end"] == place["end"] and place["q_offset"] == k_lengths[segment] - q_lengths[segment]


hostile = st.integers(-5, 40) | st.sampled_from([-(2**31), 2**31 - 1])


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 5), st.data(), st.integers(0, 20), st.integers(0, 20), st.sampled_from([1, 4, 16]), st.sampled_from("qk"))
def test_hostile_segments_stay_inside(kernel, batch, data, seqlen_q, seqlen_k, tile_rows, side):
    """Negative, decreasing, past the end."""
    vectors = {f"cu_seqlens_{s}": data.draw(st.lists(hostile, min_size=batch + 1, max_size=batch + 1)) for s in "qk"}
    found = places(kernel, side, tile_rows, seqlen_q, seqlen_k, batch, **vectors)
    check_inside(found, side, tile_rows, seqlen_q, seqlen_k, 1, 2 if side == "q" else 1)


@settings(max_examples=150, deadline=None)
@given(
    st.integers(1, 4), st.data(), st.integers(0, 20), st.integers(0, 20), st.sampled_from([1, 4, 16]), st.booleans(), st.sampled_from("qk")
)
def test_padded_rows_are_owned_once(kernel, batch, data, seqlen_q, seqlen_k, tile_rows, causal, side):
    """With the valid lengths clamped to the arrays; rows beyond them are owned too, to be written."""
    vectors = {f"seqlens_{s}": data.draw(st.lists(hostile, min_size=batch, max_size=batch)) for s in "qk" if data.draw(st.booleans())}
    mode = data.draw(st.sampled_from([BOTTOM_RIGHT, ONE_OFFSET, OFFSET_VECTOR]))
    if mode == OFFSET_VECTOR:
        vectors["q_offsets"] = data.draw(st.lists(hostile, min_size=batch, max_size=batch))
    found = places(kernel, side, tile_rows, seqlen_q, seqlen_k, batch, causal=causal, q_offset=-11, mode=mode, **vectors)
    heads = 2 if side == "q" else 1
    check_inside(found, side, tile_rows, seqlen_q, seqlen_k, batch, heads)
    assert (cover(found, side, seqlen_q if side == "q" else seqlen_k, heads, batch) == 1).all()
    for place in found:
        index = place["batch_index"]
        q_valid, k_valid = (
            int(np.clip(vectors[name][index], 0, n)) if name in vectors else n
            for name, n in (("seqlens_q", seqlen_q), ("seqlens_k", seqlen_k))
        )
        assert (place["q_valid"], place["k_valid"]) == (q_valid, k_valid)
        expected = {BOTTOM_RIGHT: k_valid - q_valid, ONE_OFFSET: -11, OFFSET_VECTOR: vectors.get("q_offsets", [0] * batch)[index]}
        assert place["q_offset"] == expected[mode]


def test_causal_queries_come_longest_first(kernel):
    found = places(kernel, "q", 4, 18, 18, 1, heads=1, causal=True)
    assert list(found["begin"]) == [16, 12, 8, 4, 0]
    assert list(places(kernel, "q", 4, 18, 18, 1, heads=1)["begin"]) == [0, 4, 8, 12, 16]


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 100), st.integers(0, 100), st.sampled_from([1, 8, 48, 64]), st.integers(1, 9))
def test_splits_share_all_tiles(begin, length, tile_rows, splits):
    shares = np.zeros(splits, SPAN)
    span = np.array([(begin, begin + length)], SPAN)
    Emulated.of_text(TEXT, "shares").launch(1, 32, [span, np.int32(tile_rows), np.int32(splits), pointer(shares)])
    tiles = [tile for share in shares for tile in range(share["begin"], share["end"])]
    assert tiles == (list(range(begin // tile_rows, -(-(begin + length) // tile_rows))) if length else [])
