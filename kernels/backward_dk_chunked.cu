// dK of one side for float32, and for float16 and bfloat16 with head dimensions above 256; see chunks.cuh and backward.cuh.
//
// The mirror of backward_dq_chunked.cu: a block owns keys, and the queries that see them stream by, all query heads of the group
// one after the other. For g see backward_dk_sm80.cu.
//
// Specialised by: ELEMENT, SIDES (1 or 2), WARPS, ROW_BLOCKS, QUERIES, CHUNK, RESULT (columns), MIN_BLOCKS.
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
constexpr int kQueries = QUERIES;
constexpr int kColumnBlocks = kQueries / 8;
constexpr int kKeyBytes = kRows * TileLayout<Element, CHUNK>::kRowBytes, kStageBytes = kKeyBytes + kQueries * TileLayout<Element, CHUNK>::kRowBytes;
constexpr int kResultBytes = kQueries * TileLayout<Element, RESULT>::kRowBytes;
static_assert(kQueries <= kThreads, "a thread brings a query's statistics");

extern "C" __global__ void __launch_bounds__(kThreads, MIN_BLOCKS)
backward_dk_chunked(const __grid_constant__ Problem problem, const __grid_constant__ RowWeights weights,
                    const __grid_constant__ GradientOutput output) {
  // Storage: two stages of chunks, two of the queries' result columns, and the queries' statistics.
  extern __shared__ __align__(128) unsigned char shared[];
  unsigned char* results = shared + 2 * kStageBytes;
  QueryTerms* terms = reinterpret_cast<QueryTerms*>(results + 2 * kResultBytes);

  // Whose keys, and which queries see them.
  const int own_heads = SIDES == kSide1 ? problem.heads_k1 : problem.heads_k2;
  const OwnTile keys = key_tile(problem, blockIdx.x, kRows, own_heads);
  if (keys.begin >= keys.end) return;
  const Span queries = rows_seeing_some(keys.band, keys.begin, keys.valid_end);
  const Span unmasked = rows_seeing_all(keys.band, keys.begin, keys.valid_end);
  const Span tiles = share_of(queries, kQueries, 0, 1);
  const int group = problem.heads / own_heads, first_head = keys.head * group, tile_count = tiles.end - tiles.begin;

  // Copies. `count` runs over the tiles of all heads of the group.
  const Sequence& s = keys.sequence;
  const int chunks1 = chunk_count(problem.head_dim1, CHUNK), chunks2 = chunk_count(problem.head_dim2, CHUNK);
  const Matrix& own_q = SIDES == kSide1 ? problem.q1 : problem.q2;
  const int own_dim = SIDES == kSide1 ? problem.head_dim1 : problem.head_dim2, result_column = static_cast<int>(blockIdx.y) * RESULT;
  auto copy = [&](int step, unsigned char* stage) {
    const int count = step / (chunks1 + chunks2), within = step % (chunks1 + chunks2);
    if (count >= tile_count * group) return;
    const int head = first_head + count / tile_count, first_query = (tiles.begin + count % tile_count) * kQueries;
    const bool side1 = within < chunks1;
    const int column = (side1 ? within : within - chunks1) * CHUNK, columns = (side1 ? problem.head_dim1 : problem.head_dim2) - column;
    const Matrix& q = side1 ? problem.q1 : problem.q2;
    const Matrix& k = side1 ? problem.k1 : problem.k2;
    const int key_head = head / (problem.heads / (side1 ? problem.heads_k1 : problem.heads_k2));
    copy_tile_async<Element, kRows, CHUNK, kThreads>(shared_address(stage), head_rows<Element>(k, s.batch_index, key_head, s.k_begin) + column,
                                                     k.row_stride, keys.begin, {keys.begin, keys.valid_end}, columns);
    copy_tile_async<Element, kQueries, CHUNK, kThreads>(shared_address(stage + kKeyBytes),
                                                        head_rows<Element>(q, s.batch_index, head, s.q_begin) + column, q.row_stride,
                                                        first_query, queries, columns);
    if (within == 0)
      copy_tile_async<Element, kQueries, RESULT, kThreads>(shared_address(results + count % 2 * kResultBytes),
                                                           head_rows<Element>(own_q, s.batch_index, head, s.q_begin) + result_column,
                                                           own_q.row_stride, first_query, queries, own_dim - result_column);
  };
  ChunkStream<kStageBytes, decltype(copy)> stream(copy, shared);

  // One tile of queries after the other.
  const Lane lane;
  const int warp_row = static_cast<int>(threadIdx.x) / 32 * 16 * ROW_BLOCKS;
  float dk[ROW_BLOCKS][RESULT / 8][4] = {};
  float unit = 1.0f;
  for (int count = 0; count < tile_count * group; ++count) {
    const int head = first_head + count / tile_count, first_query = (tiles.begin + count % tile_count) * kQueries;
    float s1[ROW_BLOCKS][kColumnBlocks][4] = {}, s2[ROW_BLOCKS][kColumnBlocks][4] = {};
    for (int c = 0; c < chunks1; ++c) {
      const unsigned char* stage = stream.next();
      // Everyone is done with the last tile's statistics by now, and sees these after the next barrier: side 2 has one.
      if (c == 0 && threadIdx.x < kQueries)
        terms[threadIdx.x] = query_terms(problem, weights, s, head, first_query + static_cast<int>(threadIdx.x), queries);
      add_chunk_scores<Element, CHUNK>(s1, stage, warp_row, stage + kKeyBytes, lane);
    }
    for (int c = 0; c < chunks2; ++c) {
      const unsigned char* stage = stream.next();
      add_chunk_scores<Element, CHUNK>(s2, stage, warp_row, stage + kKeyBytes, lane);
    }
    if (!kWideExponent<Element>) {
      const float new_unit = fmaxf(count == 0 ? 0.0f : unit, weight_unit<kQueries>(terms, lane));
      if (new_unit != unit) scale_all(dk, unit / new_unit);
      unit = new_unit;
    }
    gradients_of_columns<SIDES>(s1, s2, problem, terms, unit, lane);
    auto& own = SIDES == kSide1 ? s1 : s2;
    if (first_query < unmasked.begin || first_query + kQueries > unmasked.end)
      hide_queries_unseeing(own, keys.band, keys.begin + warp_row, first_query, lane);
    add_chunk_rows<Element, RESULT>(dk, own, results + count % 2 * kResultBytes, lane);
  }
  copy_async_wait<0>();

  // Results.
  float factor[ROW_BLOCKS][2];
#pragma unroll
  for (int m = 0; m < ROW_BLOCKS; ++m) factor[m][0] = factor[m][1] = (SIDES == kSide1 ? problem.scale1 : problem.scale2) * unit;
  write_gradient<Element>(dk, factor, SIDES == kSide1 ? output.k1 : output.k2, output.as_float32, keys, s.k_begin, keys.begin + warp_row,
                          result_column, own_dim, lane);
}
