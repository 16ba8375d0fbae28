// Two neighbouring row tiles of a cluster of two blocks. Where they read the same keys, each block brings half of every slice to both:
// half of the traffic out of L2. A slot of the ring is free when both blocks are done with it, and so both walk through all keys that
// either of them sees.
#pragma once

// What a block must know of the other one.
struct Partner {
  bool reads_the_same;  // this tells whether the two work together; if not, each is on its own
  int working;          // its warpgroups that own a row
  Span keys;            // that some of its rows see
};

// How many warpgroups of a block own a valid row: the others have nothing to do.
__device__ __forceinline__ int working_warpgroups(const OwnTile& rows) { return (rows.valid_end - rows.begin + 63) / 64; }

// Row tiles 2 i and 2 i + 1 are a cluster's.
__device__ __forceinline__ Partner partner(const Problem& problem, const OwnTile& rows, i64 tile, int tile_rows) {
  const OwnTile other = query_tile(problem, tile ^ 1, tile_rows);
  const int group1 = problem.heads / problem.heads_k1, group2 = problem.heads / problem.heads_k2;
  const bool same = other.sequence.index == rows.sequence.index && other.head / group1 == rows.head / group1 && other.head / group2 == rows.head / group2;
  return {same && rows.begin < rows.valid_end && other.begin < other.valid_end, working_warpgroups(other),
          keys_seen_by_some(other.band, other.begin, other.valid_end)};
}

__device__ __forceinline__ Span hull(Span a, Span b) {
  if (a.empty()) return b;
  if (b.empty()) return a;
  return {min(a.begin, b.begin), max(a.end, b.end)};
}

// By one thread: `rows` rows from `row` on of one head into the next slice; `together`: this block's half of them, to both blocks.
template <int kStages, int kSliceBytes>
__device__ __forceinline__ void bring_halves(const Ring<kStages, kSliceBytes>& ring, RingPosition<kStages>& at, const TensorMap* map, int chunks,
                                             int rows, int row, int head, int batch, bool together) {
  const u32 full = ring.full + 8 * at.slot;
  const int half = rows / 2, own = cluster_rank() * half;
  ring.await_empty(at);
  barrier_arrive_expect(full, chunks * rows * kChunkRowBytes);
  for (int c = 0; c < chunks; ++c) {
    const u32 to = ring.slice(at.slot) + c * rows * kChunkRowBytes;
    if (together) {
      copy_box_4d_to_both(to + own * kChunkRowBytes, map, full, c * kChunk, row + own, head, batch);
    } else {
      copy_box_4d(to, map, full, c * kChunk, row, head, batch);
      copy_box_4d(to + half * kChunkRowBytes, map, full, c * kChunk, row + half, head, batch);
    }
  }
  at.advance();
}
