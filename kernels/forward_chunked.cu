// KL forward for float32, and for float16 and bfloat16 with head dimensions above 256; see chunks.cuh.
//
// As forward_sm80.cu, but neither side's queries stay in shared memory: logits of a tile are summed chunk by chunk of columns.
//
// Specialised by: ELEMENT, WARPS, ROW_BLOCKS (of 16 rows a warp), KEYS (of a tile), CHUNK (columns), MIN_BLOCKS.
#include "problem.cuh"
#include "mask.cuh"
#include "row_stats.cuh"
#include "ptx_sm80.cuh"
#include "tile.cuh"
#include "blocks.cuh"
#include "chunks.cuh"
#include "forward.cuh"

using Element = ELEMENT;
constexpr int kThreads = 32 * WARPS;
constexpr int kRows = 16 * ROW_BLOCKS * WARPS;
constexpr int kKeys = KEYS;
constexpr int kColumnBlocks = kKeys / 8;
constexpr int kQueryBytes = kRows * TileLayout<Element, CHUNK>::kRowBytes, kStageBytes = kQueryBytes + kKeys * TileLayout<Element, CHUNK>::kRowBytes;

extern "C" __global__ void __launch_bounds__(kThreads, MIN_BLOCKS)
forward_chunked(const __grid_constant__ Problem problem, const __grid_constant__ ForwardOutput output) {
  // Storage.
  extern __shared__ __align__(128) unsigned char shared[];

  // Whose rows, and which keys they see.
  const Share share = share_of_block(output);
  const OwnTile rows = query_tile(problem, share.tile, kRows);
  if (rows.begin >= rows.end) return;
  const Span keys = keys_seen_by_some(rows.band, rows.begin, rows.valid_end);
  const Span unmasked = keys_seen_by_all(rows.band, rows.begin, rows.valid_end);
  const Span tiles = share_of(keys, kKeys, share.split, share.splits);

  // Copies: side 1 chunk by chunk, then side 2, for each tile of keys.
  const Sequence& s = rows.sequence;
  const int head1 = rows.head / (problem.heads / problem.heads_k1), head2 = rows.head / (problem.heads / problem.heads_k2);
  const int chunks1 = chunk_count(problem.head_dim1, CHUNK), chunks2 = chunk_count(problem.head_dim2, CHUNK);
  auto copy = [&](int step, unsigned char* stage) {
    const int tile = tiles.begin + step / (chunks1 + chunks2), within = step % (chunks1 + chunks2);
    if (tile >= tiles.end) return;
    const bool side1 = within < chunks1;
    const int column = (side1 ? within : within - chunks1) * CHUNK, columns = (side1 ? problem.head_dim1 : problem.head_dim2) - column;
    const Matrix& q = side1 ? problem.q1 : problem.q2;
    const Matrix& k = side1 ? problem.k1 : problem.k2;
    copy_tile_async<Element, kRows, CHUNK, kThreads>(shared_address(stage), head_rows<Element>(q, s.batch_index, rows.head, s.q_begin) + column,
                                                     q.row_stride, rows.begin, {rows.begin, rows.valid_end}, columns);
    copy_tile_async<Element, kKeys, CHUNK, kThreads>(shared_address(stage + kQueryBytes),
                                                     head_rows<Element>(k, s.batch_index, side1 ? head1 : head2, s.k_begin) + column,
                                                     k.row_stride, tile * kKeys, keys, columns);
  };
  ChunkStream<kStageBytes, decltype(copy)> stream(copy, shared);

  // One tile of keys after the other.
  const Lane lane;
  const int warp_row = static_cast<int>(threadIdx.x) / 32 * 16 * ROW_BLOCKS;
  OnlineRow online[ROW_BLOCKS][2];
#pragma unroll
  for (int m = 0; m < ROW_BLOCKS; ++m) online[m][0].clear(), online[m][1].clear();
  for (int tile = tiles.begin; tile < tiles.end; ++tile) {
    float s1[ROW_BLOCKS][kColumnBlocks][4] = {}, s2[ROW_BLOCKS][kColumnBlocks][4] = {};
    for (int c = 0; c < chunks1; ++c) {
      const unsigned char* stage = stream.next();
      add_chunk_scores<Element, CHUNK>(s1, stage, warp_row, stage + kQueryBytes, lane);
    }
    for (int c = 0; c < chunks2; ++c) {
      const unsigned char* stage = stream.next();
      add_chunk_scores<Element, CHUNK>(s2, stage, warp_row, stage + kQueryBytes, lane);
    }
    const int first_key = tile * kKeys;
    const bool masked = first_key < unmasked.begin || first_key + kKeys > unmasked.end;
    if (masked) hide_unseen(s1, s2, rows.band, rows.begin + warp_row, first_key, lane);
    if (masked) update<true>(online, s1, s2, problem.log2_scale1, problem.log2_scale2);
    else update<false>(online, s1, s2, problem.log2_scale1, problem.log2_scale2);
  }
  copy_async_wait<0>();

  write_rows(online, problem, output, rows, kRows, warp_row, lane);
}
