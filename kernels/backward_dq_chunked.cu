// dQ of one side for float32, and for float16 and bfloat16 with head dimensions above 256; see chunks.cuh and backward.cuh.
//
// As backward_dq_sm80.cu, but logits are summed chunk by chunk of columns, and a block owns RESULT columns of the gradient:
// blockIdx.y counts them. The keys that the gradient is a sum of come along with the first chunk of their tile.
//
// Specialised by: ELEMENT, SIDES (1 or 2), WARPS, ROW_BLOCKS, KEYS, CHUNK, RESULT (columns), MIN_BLOCKS.
#include "problem.cuh"
#include "mask.cuh"
#include "row_stats.cuh"
#include "ptx_sm80.cuh"
#include "tile.cuh"
#include "blocks.cuh"
#include "chunks.cuh"
#include "backward.cuh"

using Element = ELEMENT;
constexpr int kThreads = 32 * WARPS;
constexpr int kRows = 16 * ROW_BLOCKS * WARPS;
constexpr int kKeys = KEYS;
constexpr int kColumnBlocks = kKeys / 8;
constexpr int kQueryBytes = kRows * TileLayout<Element, CHUNK>::kRowBytes, kStageBytes = kQueryBytes + kKeys * TileLayout<Element, CHUNK>::kRowBytes;
constexpr int kResultBytes = kKeys * TileLayout<Element, RESULT>::kRowBytes;

extern "C" __global__ void __launch_bounds__(kThreads, MIN_BLOCKS)
backward_dq_chunked(const __grid_constant__ Problem problem, const __grid_constant__ RowWeights weights,
                    const __grid_constant__ GradientOutput output) {
  // Storage: two stages of chunks, two of the keys' result columns, and the rows' statistics.
  extern __shared__ __align__(128) unsigned char shared[];
  unsigned char* results = shared + 2 * kStageBytes;
  RowStats* stats = reinterpret_cast<RowStats*>(results + 2 * kResultBytes);

  // Whose rows, and which keys they see.
  const OwnTile rows = query_tile(problem, blockIdx.x, kRows);
  if (rows.begin >= rows.end) return;
  const Span keys = keys_seen_by_some(rows.band, rows.begin, rows.valid_end);
  const Span unmasked = keys_seen_by_all(rows.band, rows.begin, rows.valid_end);
  const Span tiles = share_of(keys, kKeys, 0, 1);

  // Copies.
  const Sequence& s = rows.sequence;
  const int head1 = rows.head / (problem.heads / problem.heads_k1), head2 = rows.head / (problem.heads / problem.heads_k2);
  const int chunks1 = chunk_count(problem.head_dim1, CHUNK), chunks2 = chunk_count(problem.head_dim2, CHUNK);
  const Matrix& own_k = SIDES == kSide1 ? problem.k1 : problem.k2;
  const int own_head = SIDES == kSide1 ? head1 : head2, own_dim = SIDES == kSide1 ? problem.head_dim1 : problem.head_dim2;
  const int result_column = static_cast<int>(blockIdx.y) * RESULT;
  auto copy = [&](int step, unsigned char* stage) {
    const int count = step / (chunks1 + chunks2), tile = tiles.begin + count, within = step % (chunks1 + chunks2);
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
    if (within == 0)
      copy_tile_async<Element, kKeys, RESULT, kThreads>(shared_address(results + count % 2 * kResultBytes),
                                                        head_rows<Element>(own_k, s.batch_index, own_head, s.k_begin) + result_column,
                                                        own_k.row_stride, tile * kKeys, keys, own_dim - result_column);
  };
  ChunkStream<kStageBytes, decltype(copy)> stream(copy, shared);
  for (int i = threadIdx.x; i < kRows; i += kThreads) {
    const int row = rows.begin + i;
    stats[i] = row < rows.valid_end ? load(problem.rows, row_arrays_offset(problem, s, rows.head) + row) : RowStats{0, 0, 0, 0, 0};
  }

  // One tile of keys after the other.
  const Lane lane;
  const int warp_row = static_cast<int>(threadIdx.x) / 32 * 16 * ROW_BLOCKS;
  float dq[ROW_BLOCKS][RESULT / 8][4] = {};
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
    gradients_of_rows<SIDES>(s1, s2, problem, stats + warp_row, lane);
    auto& own = SIDES == kSide1 ? s1 : s2;
    const int first_key = tile * kKeys;
    if (first_key < unmasked.begin || first_key + kKeys > unmasked.end) hide_keys_unseen(own, rows.band, rows.begin + warp_row, first_key, lane);
    add_chunk_rows<Element, RESULT>(dq, own, results + (tile - tiles.begin) % 2 * kResultBytes, lane);
  }
  copy_async_wait<0>();

  // Results. g is applied to the sum in float32.
  float factor[ROW_BLOCKS][2];
#pragma unroll
  for (int m = 0; m < ROW_BLOCKS; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half)
      factor[m][half] = row_factor(weights, rows, rows.begin + warp_row + 16 * m + 8 * half + lane.row, SIDES == kSide1 ? problem.scale1 : problem.scale2);
  }
  write_gradient<Element>(dq, factor, SIDES == kSide1 ? output.q1 : output.q2, output.as_float32, rows, s.q_begin, rows.begin + warp_row,
                          result_column, own_dim, lane);
}
