// dQ on mma.sync, float16 and bfloat16, head dimensions up to 256; backward.cuh holds the formulas.
//
// A block owns kRows query rows of one head and recomputes their logits key tile by key tile, as the forward does; the gradient
// of the logits is the next product's operand without leaving the registers. Every row is summed by one warp in one order:
// deterministic, and g is applied to the sum in float32, so that a tiny g costs no precision.
//
// Specialised by: ELEMENT, HEAD_DIM1, HEAD_DIM2 (padded), SIDES (1, 2 or 3: dQ1, dQ2, both), WARPS, ROW_BLOCKS, KEYS, STAGES, MIN_BLOCKS.
#include "problem.cuh"
#include "mask.cuh"
#include "row_stats.cuh"
#include "ptx_sm80.cuh"
#include "tile.cuh"
#include "blocks.cuh"
#include "backward.cuh"

constexpr int kThreads = 32 * WARPS;
constexpr int kRows = 16 * ROW_BLOCKS * WARPS;
constexpr int kKeys = KEYS;
constexpr int kColumnBlocks = kKeys / 8;
// The side whose keys are needed again for its gradient comes second, so that it is still there; with both, both stay.
constexpr int kFirst = SIDES == kSide1 ? 1 : 0;
constexpr int kAhead = SIDES == (kSide1 | kSide2) ? STAGES - 2 : STAGES - 1;

using Element = ELEMENT;
using Layout1 = TileLayout<Element, HEAD_DIM1>;
using Layout2 = TileLayout<Element, HEAD_DIM2>;
constexpr int kSliceBytes = kKeys * (Layout1::kRowBytes > Layout2::kRowBytes ? Layout1::kRowBytes : Layout2::kRowBytes);

extern "C" __global__ void __launch_bounds__(kThreads, MIN_BLOCKS)
backward_dq(const __grid_constant__ Problem problem, const __grid_constant__ RowWeights weights, const __grid_constant__ GradientOutput output) {
  // Storage.
  extern __shared__ __align__(128) unsigned char shared[];
  const u32 q1_tile = shared_address(shared);
  const u32 q2_tile = q1_tile + kRows * Layout1::kRowBytes;
  const u32 slices = q2_tile + kRows * Layout2::kRowBytes;
  // Statistics are read from here tile after tile: the registers are needed for the sums.
  RowStats* stats = reinterpret_cast<RowStats*>(shared + kRows * (Layout1::kRowBytes + Layout2::kRowBytes) + STAGES * kSliceBytes);

  // Whose rows, and which keys they see.
  const OwnTile rows = query_tile(problem, blockIdx.x, kRows);
  if (rows.begin >= rows.end) return;
  const Span keys = keys_seen_by_some(rows.band, rows.begin, rows.valid_end);
  const Span unmasked = keys_seen_by_all(rows.band, rows.begin, rows.valid_end);
  const Span tiles = share_of(keys, kKeys, 0, 1);

  // Copies.
  const Sequence& s = rows.sequence;
  const Span valid_rows = {rows.begin, rows.valid_end};
  const int head1 = rows.head / (problem.heads / problem.heads_k1), head2 = rows.head / (problem.heads / problem.heads_k2);
  const Element* k1 = head_rows<Element>(problem.k1, s.batch_index, head1, s.k_begin);
  const Element* k2 = head_rows<Element>(problem.k2, s.batch_index, head2, s.k_begin);
  auto copy_slice = [&](int side, int tile, u32 to) {
    if (tile >= tiles.end) return;
    if (side == 0) copy_tile_async<Element, kKeys, HEAD_DIM1, kThreads>(to, k1, problem.k1.row_stride, tile * kKeys, keys, problem.head_dim1);
    else copy_tile_async<Element, kKeys, HEAD_DIM2, kThreads>(to, k2, problem.k2.row_stride, tile * kKeys, keys, problem.head_dim2);
  };
  copy_tile_async<Element, kRows, HEAD_DIM1, kThreads>(q1_tile, head_rows<Element>(problem.q1, s.batch_index, rows.head, s.q_begin),
                                                       problem.q1.row_stride, rows.begin, valid_rows, problem.head_dim1);
  copy_tile_async<Element, kRows, HEAD_DIM2, kThreads>(q2_tile, head_rows<Element>(problem.q2, s.batch_index, rows.head, s.q_begin),
                                                       problem.q2.row_stride, rows.begin, valid_rows, problem.head_dim2);
  SliceRing<STAGES, kAhead, kFirst, kSliceBytes, decltype(copy_slice)> ring(copy_slice, slices, tiles.begin);

  for (int i = threadIdx.x; i < kRows; i += kThreads) {
    const int row = rows.begin + i;
    stats[i] = row < rows.valid_end ? load(problem.rows, row_arrays_offset(problem, s, rows.head) + row) : RowStats{0, 0, 0, 0, 0};
  }

  // One tile of keys after the other.
  const Lane lane;
  const int warp_row = static_cast<int>(threadIdx.x) / 32 * 16 * ROW_BLOCKS;
  float dq1[ROW_BLOCKS][HEAD_DIM1 / 8][4] = {}, dq2[ROW_BLOCKS][HEAD_DIM2 / 8][4] = {};  // one is unused where SIDES is 1 or 2
  for (int tile = tiles.begin; tile < tiles.end; ++tile) {
    float s1[ROW_BLOCKS][kColumnBlocks][4] = {}, s2[ROW_BLOCKS][kColumnBlocks][4] = {};
    const u32 first_slice = ring.next(0, tile);
    if (kFirst == 0) add_scores<Element, HEAD_DIM1>(s1, q1_tile, warp_row, first_slice, lane);
    else add_scores<Element, HEAD_DIM2>(s2, q2_tile, warp_row, first_slice, lane);
    const u32 second_slice = ring.next(1, tile);
    if (kFirst == 0) add_scores<Element, HEAD_DIM2>(s2, q2_tile, warp_row, second_slice, lane);
    else add_scores<Element, HEAD_DIM1>(s1, q1_tile, warp_row, second_slice, lane);
    gradients_of_rows<SIDES>(s1, s2, problem, stats + warp_row, lane);
    const int first_key = tile * kKeys;
    if (first_key < unmasked.begin || first_key + kKeys > unmasked.end) {
      if (SIDES & kSide1) hide_keys_unseen(s1, rows.band, rows.begin + warp_row, first_key, lane);
      if (SIDES & kSide2) hide_keys_unseen(s2, rows.band, rows.begin + warp_row, first_key, lane);
    }

    if constexpr ((SIDES & kSide1) != 0) add_weighted_rows<Element, HEAD_DIM1>(dq1, s1, kFirst == 0 ? first_slice : second_slice, lane);
    if constexpr ((SIDES & kSide2) != 0) add_weighted_rows<Element, HEAD_DIM2>(dq2, s2, kFirst == 0 ? second_slice : first_slice, lane);
  }
  copy_async_wait<0>();

  // Results.
  float factor[ROW_BLOCKS][2];
  auto set_factors = [&](float scale) {
#pragma unroll
    for (int m = 0; m < ROW_BLOCKS; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) factor[m][half] = row_factor(weights, rows, rows.begin + warp_row + 16 * m + 8 * half + lane.row, scale);
    }
  };
  if constexpr ((SIDES & kSide1) != 0) {
    set_factors(problem.scale1);
    write_gradient<Element>(dq1, factor, output.q1, output.as_float32, rows, s.q_begin, rows.begin + warp_row, 0, problem.head_dim1, lane);
  }
  if constexpr ((SIDES & kSide2) != 0) {
    set_factors(problem.scale2);
    write_gradient<Element>(dq2, factor, output.q2, output.as_float32, rows, s.q_begin, rows.begin + warp_row, 0, problem.head_dim2, lane);
  }
}
