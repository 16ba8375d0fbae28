// KL forward on mma.sync, float16 and bfloat16, head dimensions up to 256.
//
//   S_t = Q_t K_t^T,  then per row the online state of row_stats.cuh over all visible keys
//
// A block owns kRows query rows of one head. Q1 and Q2 stay in shared memory; the key tiles of both sides come through one ring
// of slices, K1 and K2 of a tile in turn, so that a side's copy always runs under the other side's products. Every lane keeps
// online states of its own for its rows, over the columns it owns: nothing crosses lanes until the keys are through.
//
// Specialised by: ELEMENT, HEAD_DIM1, HEAD_DIM2 (padded), WARPS, ROW_BLOCKS (of 16 rows a warp), KEYS (of a tile), STAGES, MIN_BLOCKS.
#include "problem.cuh"
#include "mask.cuh"
#include "row_stats.cuh"
#include "ptx_sm80.cuh"
#include "tile.cuh"
#include "blocks.cuh"
#include "forward.cuh"

constexpr int kThreads = 32 * WARPS;
constexpr int kRows = 16 * ROW_BLOCKS * WARPS;
constexpr int kKeys = KEYS;
constexpr int kColumnBlocks = kKeys / 8;

using Element = ELEMENT;
using Layout1 = TileLayout<Element, HEAD_DIM1>;
using Layout2 = TileLayout<Element, HEAD_DIM2>;
constexpr int kSliceBytes = kKeys * (Layout1::kRowBytes > Layout2::kRowBytes ? Layout1::kRowBytes : Layout2::kRowBytes);

extern "C" __global__ void __launch_bounds__(kThreads, MIN_BLOCKS)
forward(const __grid_constant__ Problem problem, const __grid_constant__ ForwardOutput output) {
  // Storage.
  extern __shared__ __align__(128) unsigned char shared[];
  const u32 q1_tile = shared_address(shared);
  const u32 q2_tile = q1_tile + kRows * Layout1::kRowBytes;
  const u32 slices = q2_tile + kRows * Layout2::kRowBytes;

  // Whose rows, and which keys they see.
  const Share share = share_of_block(output);
  const OwnTile rows = query_tile(problem, share.tile, kRows);
  if (rows.begin >= rows.end) return;
  const Span keys = keys_seen_by_some(rows.band, rows.begin, rows.valid_end);
  const Span unmasked = keys_seen_by_all(rows.band, rows.begin, rows.valid_end);
  const Span tiles = share_of(keys, kKeys, share.split, share.splits);

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
  SliceRing<STAGES, STAGES - 1, 0, kSliceBytes, decltype(copy_slice)> ring(copy_slice, slices, tiles.begin);

  // One tile of keys after the other.
  const Lane lane;
  const int warp_row = static_cast<int>(threadIdx.x) / 32 * 16 * ROW_BLOCKS;
  OnlineRow online[ROW_BLOCKS][2];
#pragma unroll
  for (int m = 0; m < ROW_BLOCKS; ++m) online[m][0].clear(), online[m][1].clear();

  for (int tile = tiles.begin; tile < tiles.end; ++tile) {
    float s1[ROW_BLOCKS][kColumnBlocks][4] = {}, s2[ROW_BLOCKS][kColumnBlocks][4] = {};
    const u32 k1_tile = ring.next(0, tile);
    add_scores<Element, HEAD_DIM1>(s1, q1_tile, warp_row, k1_tile, lane);
    const u32 k2_tile = ring.next(1, tile);
    add_scores<Element, HEAD_DIM2>(s2, q2_tile, warp_row, k2_tile, lane);
    const int first_key = tile * kKeys;
    const bool masked = first_key < unmasked.begin || first_key + kKeys > unmasked.end;
    if (masked) hide_unseen(s1, s2, rows.band, rows.begin + warp_row, first_key, lane);
    if (masked) update<true>(online, s1, s2, problem.log2_scale1, problem.log2_scale2);
    else update<false>(online, s1, s2, problem.log2_scale1, problem.log2_scale2);
  }
  copy_async_wait<0>();

  write_rows(online, problem, output, rows, kRows, warp_row, lane);
}
