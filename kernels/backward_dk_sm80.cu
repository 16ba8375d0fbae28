// dK on mma.sync, float16 and bfloat16, head dimensions up to 256; backward.cuh holds the formulas.
//
// The mirror of backward_dq_sm80.cu: a block owns kRows keys of one key head, and the queries that see them stream by, all query
// heads of the group one after the other. Logits are computed transposed, S^T = K Q^T, so that their gradient again is an operand
// without leaving the registers. Keys are summed by one warp in one order: deterministic.
//
// g differs from query to query, so it must go into the operand. For float16, which would lose a tiny g, it goes in as g / unit
// with a power of two `unit` near the largest |g| so far, and the sums carry the unit.
//
// Specialised by: ELEMENT, HEAD_DIM1, HEAD_DIM2 (padded), SIDES (1, 2 or 3: dK1, dK2, both), WARPS, ROW_BLOCKS, QUERIES, STAGES, MIN_BLOCKS.
#include "problem.cuh"
#include "mask.cuh"
#include "row_stats.cuh"
#include "ptx_sm80.cuh"
#include "tile.cuh"
#include "blocks.cuh"
#include "backward.cuh"

constexpr int kThreads = 32 * WARPS;
constexpr int kRows = 16 * ROW_BLOCKS * WARPS;
constexpr int kQueries = QUERIES;
constexpr int kColumnBlocks = kQueries / 8;
// The side whose queries are needed again for its gradient comes second, so that it is still there; with both, both stay.
constexpr int kFirst = SIDES == kSide1 ? 1 : 0;
constexpr int kAhead = SIDES == (kSide1 | kSide2) ? STAGES - 2 : STAGES - 1;
static_assert(kQueries <= kThreads && kQueries <= 64, "a thread brings a query's statistics, a lane looks at two weights");

using Element = ELEMENT;
using Layout1 = TileLayout<Element, HEAD_DIM1>;
using Layout2 = TileLayout<Element, HEAD_DIM2>;
constexpr int kSliceBytes = kQueries * (Layout1::kRowBytes > Layout2::kRowBytes ? Layout1::kRowBytes : Layout2::kRowBytes);

extern "C" __global__ void __launch_bounds__(kThreads, MIN_BLOCKS)
backward_dk(const __grid_constant__ Problem problem, const __grid_constant__ RowWeights weights, const __grid_constant__ GradientOutput output) {
  // Storage.
  extern __shared__ __align__(128) unsigned char shared[];
  const u32 k1_tile = shared_address(shared);
  const u32 k2_tile = k1_tile + kRows * Layout1::kRowBytes;
  const u32 slices = k2_tile + kRows * Layout2::kRowBytes;
  QueryTerms* terms = reinterpret_cast<QueryTerms*>(shared + kRows * (Layout1::kRowBytes + Layout2::kRowBytes) + STAGES * kSliceBytes);

  // Whose keys, and which queries see them. With both sides the two have the same key heads.
  const int key_heads = SIDES == kSide1 ? problem.heads_k1 : problem.heads_k2;
  const OwnTile keys = key_tile(problem, blockIdx.x, kRows, key_heads);
  if (keys.begin >= keys.end) return;
  const Span queries = rows_seeing_some(keys.band, keys.begin, keys.valid_end);
  const Span unmasked = rows_seeing_all(keys.band, keys.begin, keys.valid_end);
  const Span tiles = share_of(queries, kQueries, 0, 1);
  const int group = problem.heads / key_heads, first_head = keys.head * group, tile_count = tiles.end - tiles.begin;

  // Copies. A step of the stream is a tile of queries of one head of the group.
  const Sequence& s = keys.sequence;
  auto copy_slice = [&](int side, int step, u32 to) {
    if (step >= tile_count * group) return;
    const int head = first_head + step / tile_count, first_query = (tiles.begin + step % tile_count) * kQueries;
    if (side == 0) copy_tile_async<Element, kQueries, HEAD_DIM1, kThreads>(to, head_rows<Element>(problem.q1, s.batch_index, head, s.q_begin),
                                                                           problem.q1.row_stride, first_query, queries, problem.head_dim1);
    else copy_tile_async<Element, kQueries, HEAD_DIM2, kThreads>(to, head_rows<Element>(problem.q2, s.batch_index, head, s.q_begin),
                                                                 problem.q2.row_stride, first_query, queries, problem.head_dim2);
  };
  const Span valid_keys = {keys.begin, keys.valid_end};
  auto copy_k1 = [&](int head) {
    copy_tile_async<Element, kRows, HEAD_DIM1, kThreads>(k1_tile, head_rows<Element>(problem.k1, s.batch_index, head, s.k_begin),
                                                         problem.k1.row_stride, keys.begin, valid_keys, problem.head_dim1);
  };
  auto copy_k2 = [&](int head) {
    copy_tile_async<Element, kRows, HEAD_DIM2, kThreads>(k2_tile, head_rows<Element>(problem.k2, s.batch_index, head, s.k_begin),
                                                         problem.k2.row_stride, keys.begin, valid_keys, problem.head_dim2);
  };
  const int group1 = problem.heads / problem.heads_k1, group2 = problem.heads / problem.heads_k2;
  copy_k1(first_head / group1);
  copy_k2(first_head / group2);
  SliceRing<STAGES, kAhead, kFirst, kSliceBytes, decltype(copy_slice)> ring(copy_slice, slices, 0);

  // One tile of queries after the other.
  const Lane lane;
  const int warp_row = static_cast<int>(threadIdx.x) / 32 * 16 * ROW_BLOCKS;
  float dk1[ROW_BLOCKS][HEAD_DIM1 / 8][4] = {}, dk2[ROW_BLOCKS][HEAD_DIM2 / 8][4] = {};  // one is unused where SIDES is 1 or 2
  float unit = 1.0f;
  for (int step = 0; step < tile_count * group; ++step) {
    const int head = first_head + step / tile_count, first_query = (tiles.begin + step % tile_count) * kQueries;
    // The other side may have more key heads than this one: then its keys change in the middle of the group.
    const bool new_k1 = SIDES == kSide2 && step > 0 && step % tile_count == 0 && head % group1 == 0;
    const bool new_k2 = SIDES == kSide1 && step > 0 && step % tile_count == 0 && head % group2 == 0;
    if (new_k1 || new_k2) {
      __syncthreads();
      if (new_k1) copy_k1(head / group1);
      else copy_k2(head / group2);
      copy_async_commit();
      copy_async_wait<0>();
    }

    float s1[ROW_BLOCKS][kColumnBlocks][4] = {}, s2[ROW_BLOCKS][kColumnBlocks][4] = {};
    const u32 first_slice = ring.next(0, step);
    QueryTerms mine;
    if (threadIdx.x < kQueries) mine = query_terms(problem, weights, s, head, first_query + static_cast<int>(threadIdx.x), queries);
    if (kFirst == 0) add_scores<Element, HEAD_DIM1>(s1, k1_tile, warp_row, first_slice, lane);
    else add_scores<Element, HEAD_DIM2>(s2, k2_tile, warp_row, first_slice, lane);
    if (threadIdx.x < kQueries) terms[threadIdx.x] = mine;
    const u32 second_slice = ring.next(1, step);  // its barrier also shows the terms to everyone
    if (kFirst == 0) add_scores<Element, HEAD_DIM2>(s2, k2_tile, warp_row, second_slice, lane);
    else add_scores<Element, HEAD_DIM1>(s1, k1_tile, warp_row, second_slice, lane);

    if (!kWideExponent<Element>) {
      const float new_unit = fmaxf(step == 0 ? 0.0f : unit, weight_unit<kQueries>(terms, lane));
      if (new_unit != unit) {
        if (SIDES & kSide1) scale_all(dk1, unit / new_unit);
        if (SIDES & kSide2) scale_all(dk2, unit / new_unit);
        unit = new_unit;
      }
    }
    gradients_of_columns<SIDES>(s1, s2, problem, terms, unit, lane);
    if (first_query < unmasked.begin || first_query + kQueries > unmasked.end) {
      if (SIDES & kSide1) hide_queries_unseeing(s1, keys.band, keys.begin + warp_row, first_query, lane);
      if (SIDES & kSide2) hide_queries_unseeing(s2, keys.band, keys.begin + warp_row, first_query, lane);
    }

    if constexpr ((SIDES & kSide1) != 0) add_weighted_rows<Element, HEAD_DIM1>(dk1, s1, kFirst == 0 ? first_slice : second_slice, lane);
    if constexpr ((SIDES & kSide2) != 0) add_weighted_rows<Element, HEAD_DIM2>(dk2, s2, kFirst == 0 ? second_slice : first_slice, lane);
  }
  copy_async_wait<0>();

  // Results.
  auto write = [&](auto& values, float scale, const Matrix& matrix, int head_dim) {
    float factor[ROW_BLOCKS][2];
#pragma unroll
    for (int m = 0; m < ROW_BLOCKS; ++m) factor[m][0] = factor[m][1] = scale * unit;
    write_gradient<Element>(values, factor, matrix, output.as_float32, keys, s.k_begin, keys.begin + warp_row, 0, head_dim, lane);
  };
  if constexpr ((SIDES & kSide1) != 0) write(dk1, problem.scale1, output.k1, problem.head_dim1);
  if constexpr ((SIDES & kSide2) != 0) write(dk2, problem.scale2, output.k2, problem.head_dim2);
}
