// Which part of the problem a block works on, and the ring through which the other part comes to it.
#pragma once

// The rows [begin, end) of one head of one sequence that a block owns: query rows, or keys. Those from valid_end on take no part.
struct OwnTile {
  Sequence sequence;
  Band band;
  int head;
  int begin, end, valid_end;
};

__device__ __forceinline__ OwnTile own_tile(const Problem& problem, const TileIndex& index, int tile_rows, bool of_queries) {
  OwnTile t;
  t.sequence = sequence(problem, index.sequence_index);
  t.band = band(problem, t.sequence);
  t.head = index.head;
  const int rows = of_queries ? t.sequence.q_rows : t.sequence.k_rows, valid = of_queries ? t.sequence.q_valid : t.sequence.k_valid;
  t.begin = index.first_row;
  t.end = min(t.begin + tile_rows, rows);
  t.valid_end = max(t.begin, min(t.end, valid));
  return t;
}

// Query rows; when keys are hidden from the early ones, the last rows come first: they take the longest.
__device__ __forceinline__ OwnTile query_tile(const Problem& problem, i64 linear, int tile_rows) {
  const bool longest_first = problem.window_right != kOpen;
  return own_tile(problem, locate(problem, problem.cu_seqlens_q, problem.seqlen_q, problem.heads, linear, tile_rows, longest_first),
                  tile_rows, true);
}

// Keys of one of `heads` key heads; the first ones are seen by the most rows.
__device__ __forceinline__ OwnTile key_tile(const Problem& problem, i64 linear, int tile_rows, int heads) {
  return own_tile(problem, locate(problem, problem.cu_seqlens_k, problem.seqlen_k, heads, linear, tile_rows, false), tile_rows, false);
}

// The tiles of a span that fall to one of `splits` blocks.
__device__ __forceinline__ Span share_of(Span span, int tile_rows, int split, int splits) {
  if (span.empty()) return {0, 0};
  const int begin = span.begin / tile_rows, count = (span.end + tile_rows - 1) / tile_rows - begin;
  return {begin + static_cast<int>(static_cast<i64>(count) * split / splits), begin + static_cast<int>(static_cast<i64>(count) * (split + 1) / splits)};
}

// A ring of slices in shared memory. Every step of the stream brings two slices, kFirst's side and then the other, each copied
// kAhead slices before it is read. A slice stays readable for kStages - kAhead further calls of `next`.
// `copy(side, step, address)` issues the asynchronous copies of one slice, or none past the stream's end.
template <int kStages, int kAhead, int kFirst, int kSliceBytes, typename Copy>
struct SliceRing {
  static_assert(kAhead >= 1 && kAhead < kStages, "a slice is copied while another is read");
  Copy copy;
  u32 base;
  int slot = 0;  // of the slice that is read next

  __device__ __forceinline__ SliceRing(Copy copy, u32 base, int first_step) : copy(copy), base(base) {
#pragma unroll
    for (int i = 0; i < kAhead; ++i) issue(i, first_step, i);
  }
  __device__ __forceinline__ void issue(int position, int step, int to_slot) {
    copy(position % 2 == 0 ? kFirst : 1 - kFirst, step + position / 2, base + to_slot * kSliceBytes);
    copy_async_commit();
  }
  // The slice of `step` that comes first (position 0) or second (1).
  __device__ __forceinline__ u32 next(int position, int step) {
    copy_async_wait<kAhead - 1>();
    __syncthreads();  // everyone's copies have arrived, and everyone is done with the slot that is filled now
    int to_slot = slot + kAhead;
    if (to_slot >= kStages) to_slot -= kStages;
    issue(position + kAhead, step, to_slot);
    const u32 slice = base + slot * kSliceBytes;
    if (++slot == kStages) slot = 0;
    return slice;
  }
};
