// dQ and dK of one side for few query rows and many keys, on Hopper: TMA and wgmma, float16 and bfloat16, head dimensions up to 128.
//
//   S_t = Q_t K_t^T,  dS by hopper_terms.cuh,  dQ = scale dS K,  dK = scale dS^T Q
//
// The rows of all query heads that share a key head fit one tile of 64, so that keys are read once and dK is written once: the time
// that this takes is the floor. A block keeps the rows and walks through its share of the keys in tiles of 64. One producer thread
// keeps the ring full; two consumer warpgroups take the tiles in turn and never wait for each other: while one waits for its products,
// the other takes exponentials or writes, and the next tiles arrive.
// Rows are queries: their statistics are registers, and dS goes to dQ from registers and to dK through shared memory. dK of a tile
// is complete at once. It leaves in whole lines, by way of the slice that the other side's keys were in. dQ stays in registers to
// the end, and is added to float32 sums in memory (write_dq.cu turns these into the gradient); the order of these sums is open.
//
// "Own" is the side whose gradients are wanted; no two rows of a block may differ in the other side's key head. Not for packed rows.
// Specialised by: ELEMENT, SIDE (1 or 2), HEAD_DIM1, HEAD_DIM2 (padded), STAGES (slices in the ring, even).
#include "problem.cuh"
#include "mask.cuh"
#include "row_stats.cuh"
#include "ptx_sm80.cuh"
#include "ptx_sm90.cuh"
#include "tile.cuh"
#include "blocks.cuh"
#include "hopper.cuh"
#include "backward.cuh"
#include "hopper_terms.cuh"
#include "dq_sums.cuh"
#include "few_rows.cuh"

using Element = ELEMENT;
constexpr int kConsumers = 2;
constexpr int kThreads = 128 * (kConsumers + 1);
constexpr int kRows = kFewRows;
constexpr int kKeys = 64;
constexpr int kColumnBlocks = kKeys / 8;
constexpr int kOwnDim = SIDE == 1 ? HEAD_DIM1 : HEAD_DIM2, kOtherDim = SIDE == 1 ? HEAD_DIM2 : HEAD_DIM1;
constexpr int kOwnBytes = kRows * kChunkRowBytes * chunks_of(kOwnDim), kOtherBytes = kRows * kChunkRowBytes * chunks_of(kOtherDim);
constexpr int kSliceBytes = kKeys * kChunkRowBytes * chunks_of(kOwnDim > kOtherDim ? kOwnDim : kOtherDim);
constexpr int kWeightBytes = kRows * kChunkRowBytes * chunks_of(kKeys);  // dS: rows of 64 keys
static_assert(STAGES % 2 == 0 && STAGES >= 2 * kConsumers, "a key tile is two slices, and every consumer holds one");

// A lane's share of a warp's 16 rows of dK: one piece of 16 bytes in every kPieceStep-th row.
constexpr int kRowPieces = kOwnDim / 8, kPieceStep = 32 / kRowPieces;
static_assert(32 % kRowPieces == 0, "a warp writes whole rows of dK");
struct Pieces {
  u32 words[16 / kPieceStep][4];
  int row, column;  // of the first
  __device__ __forceinline__ Pieces(int warp_row, const Lane& lane) : row(warp_row + lane.index / kRowPieces), column(lane.index % kRowPieces * 8) {}

  // From the accumulators, by way of the rows' place in a slice that nobody reads any more.
  __device__ __forceinline__ void take(const float (&gradient)[1][kOwnDim / 8][4], u32 slice, int warp_row, const Lane& lane) {
    using Layout = TileLayout<Element, kChunk>;
    u32 rounded[kOwnDim / 16][4];
    to_operand<Element>(rounded, gradient);
    const u32 to = slice + Layout::offset(warp_row + lane.index % 16, lane.index / 16);
#pragma unroll
    for (int k = 0; k < kOwnDim / 16; ++k) store_matrix_x4(Layout::advance(to, 2 * (k % 4)) + k / 4 * kKeys * kChunkRowBytes, rounded[k]);
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 16 / kPieceStep; ++i)
      load_shared_16(words[i], slice + column / kChunk * kKeys * kChunkRowBytes + Layout::offset(row + i * kPieceStep, column % kChunk / 8));
  }
  // To memory: `keys` is where the first of 64 rows goes, `rows` of which exist.
  __device__ __forceinline__ void write(Element* keys, i64 row_stride, int rows, int columns) const {
    const int end = column < columns ? rows : 0;
    Element* to = keys + row * row_stride + column;
#pragma unroll
    for (int i = 0; i < 16 / kPieceStep; ++i, to += kPieceStep * row_stride) {
      if (row + i * kPieceStep < end) store_global_16(to, words[i]);
    }
  }
};

// Zeros for dK of tiles that nobody sees, by the consumers: a row a warp.
__device__ __forceinline__ void clear_tiles(const Matrix& matrix, int item_bytes, const OwnTile& keys, Span tiles, int columns) {
  for (int row = tiles.begin * kKeys + static_cast<int>(threadIdx.x) / 32; row < min(tiles.end * kKeys, keys.end); row += 4 * kConsumers) {
    const i64 at = keys.sequence.batch_index * matrix.batch_stride + keys.head * matrix.head_stride + row * matrix.row_stride;
    char* const to = static_cast<char*>(matrix.data) + at * item_bytes;
    for (int i = 16 * (threadIdx.x % 32); i < columns * item_bytes; i += 16 * 32) store_global_16(to + i, {0, 0, 0, 0});
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
backward_few_rows_sm90(const __grid_constant__ Problem problem, const __grid_constant__ RowWeights weights, const __grid_constant__ GradientOutput output,
                       const __grid_constant__ DqSums sums, const __grid_constant__ TensorMap k1_map, const __grid_constant__ TensorMap k2_map) {
  // Storage.
  extern __shared__ __align__(1024) unsigned char shared[];
  const u32 own_tile = shared_address(shared), other_tile = own_tile + kOwnBytes, weight_tiles = other_tile + kOtherBytes;
  const Ring<STAGES, kSliceBytes> ring(weight_tiles + kConsumers * kWeightBytes);

  // Whose rows and keys, and which of the keys: those that some row sees, and for zeros those before and behind.
  const int own_heads = SIDE == 1 ? problem.heads_k1 : problem.heads_k2, other_heads = SIDE == 1 ? problem.heads_k2 : problem.heads_k1;
  const FewRowsTile rows = few_rows_tile(problem, blockIdx.x, problem.heads / own_heads);
  const Sequence& s = rows.sequence;
  const int head = rows.first_head / rows.heads;
  const Span seen = keys_seen_by_some(rows.band, 0, s.q_valid);
  const Span tiles = share_of(seen, kKeys, blockIdx.y, gridDim.y);

  // Barriers. What a warpgroup has read each of its warps releases.
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; ++i) {
      barrier_init(ring.full + 8 * i, 1);
      barrier_init(ring.empty + 8 * i, 4);
    }
    proxy_fence();
  }
  __syncthreads();

  const int warpgroup = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 128, 0);
  RingPosition<STAGES> at;
  if (warpgroup == kConsumers) {
    // Producer.
    registers_give<24>();
    if (threadIdx.x == 128 * kConsumers) {
      const int other_head = rows.first_head / (problem.heads / other_heads);
      for (int tile = tiles.begin; tile < tiles.end; ++tile) {
        ring.bring(at, SIDE == 1 ? &k2_map : &k1_map, chunks_of(kOtherDim), kKeys, tile * kKeys, other_head, s.batch_index);
        ring.bring(at, SIDE == 1 ? &k1_map : &k2_map, chunks_of(kOwnDim), kKeys, tile * kKeys, head, s.batch_index);
      }
    }
  } else {
    // Consumers.
    registers_take<240>();
    copy_few_rows_async<Element, kOwnDim, 128 * kConsumers>(own_tile, SIDE == 1 ? problem.q1 : problem.q2, rows, SIDE == 1 ? problem.head_dim1 : problem.head_dim2);
    copy_few_rows_async<Element, kOtherDim, 128 * kConsumers>(other_tile, SIDE == 1 ? problem.q2 : problem.q1, rows, SIDE == 1 ? problem.head_dim2 : problem.head_dim1);
    copy_async_commit();
    const Lane lane;
    const int warp_row = static_cast<int>(threadIdx.x) % 128 / 32 * 16;
    const float unit = weight_unit<Element, SIDE>(weights);
    RowTerms terms[2];
    Span visible[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const QueryRow query = query_row(rows, warp_row + lane.row + 8 * half);
      visible[half] = query.keys;
      terms[half] = {0.0f, 0.0f, 0.0f, 0.0f};
      if (!query.keys.empty())
        terms[half] = row_terms<SIDE>(load(problem.rows, row_arrays_offset(problem, s, query.head) + query.index),
                                      row_weight(weights, s.batch_index, query.head, query.index) * (1.0f / unit));
    }
    copy_async_wait<0>();
    proxy_fence();  // what ordinary copies wrote, the tensor cores read
    named_barrier<1, 128 * kConsumers>();

    const Matrix& own_dk = SIDE == 1 ? output.k1 : output.k2;
    const int columns = SIDE == 1 ? problem.head_dim1 : problem.head_dim2;
    const OwnTile keys = {s, rows.band, head, 0, s.k_rows, s.k_valid};
    const Span unmasked = keys_seen_by_all(rows.band, 0, s.q_valid);
    const u32 weight_tile = weight_tiles + warpgroup * kWeightBytes;
    const u32 weight_row = weight_tile + TileLayout<Element, kChunk>::offset(warp_row + lane.index % 16, lane.index / 16);
    float factor[1][2];
    factor[0][0] = factor[0][1] = (SIDE == 1 ? problem.scale1 : problem.scale2) * unit;
    auto rows_of = [](u32 tile) {
      return [rows = wgmma_descriptor(tile)](int k) { return rows + (k / 4 * kRows * kChunkRowBytes + k % 4 * 32) / 16; };
    };
    float dq[1][kOwnDim / 8][4];
    auto& dq_flat = reinterpret_cast<float(&)[kOwnDim / 2]>(dq);
    for (int i = 0; i < 2 * warpgroup; ++i) at.advance();
    for (int tile = tiles.begin + warpgroup; tile < tiles.end; tile += kConsumers) {
      const int first_key = tile * kKeys;

      // Logits, the other side's first, and their gradient, rounded to an operand.
      float s1[1][kColumnBlocks][4], s2[1][kColumnBlocks][4];
      auto& own = SIDE == 1 ? s1 : s2;
      auto& other = SIDE == 1 ? s2 : s1;
      auto& own_flat = reinterpret_cast<float(&)[4 * kColumnBlocks]>(own);
      auto& other_flat = reinterpret_cast<float(&)[4 * kColumnBlocks]>(other);
      const int other_slot = at.slot;
      ring.await_own_round(at);
      start_scores<Element, kOtherDim>(other_flat, rows_of(other_tile), ring.slice(other_slot));
      at.advance();
      const int own_slot = at.slot;
      ring.await_own_round(at);
      start_scores<Element, kOwnDim>(own_flat, rows_of(own_tile), ring.slice(own_slot));
      at.advance();
      wgmma_wait<1>();
      hold(other_flat);
      gradients_first<SIDE>(other, SIDE == 1 ? problem.log2_scale2 : problem.log2_scale1, terms);
      wgmma_wait<0>();
      hold(own_flat);
      gradients_second<SIDE>(s1, s2, SIDE == 1 ? problem.log2_scale1 : problem.log2_scale2, terms);
      if (first_key < unmasked.begin || first_key + kKeys > unmasked.end) {
        const int begin[1][2] = {visible[0].begin - first_key, visible[1].begin - first_key};
        const int end[1][2] = {visible[0].end - first_key, visible[1].end - first_key};
        hide_unseen_rows(own, begin, end, lane);
        // Keys that nobody sees may hold NaN, and dQ sums over them.
        clear_rows<kKeys>(ring.slice(own_slot), chunks_of(kOwnDim), first_key, seen, warpgroup);
      }
      u32 operand[kKeys / 16][4];
      to_operand<Element>(operand, own);

      // dQ from registers, and dK once all of dS is in shared memory.
      start_weighted_rows<Element, kKeys>(dq_flat, operand, ring.slice(own_slot), tile >= tiles.begin + kConsumers);
#pragma unroll
      for (int k = 0; k < kKeys / 16; ++k) store_matrix_x4(TileLayout<Element, kChunk>::advance(weight_row, 2 * k), operand[k]);
      proxy_fence();
      warpgroup_barrier(warpgroup);  // and nobody reads the other side's keys any more
      float dk[1][1][kOwnDim / 8][4];
      add_dk<Element, kRows>(dk, weight_tile, own_tile, false);
      hold(dq_flat);
      if (lane.index == 0) ring.release(own_slot);
      if (output.as_float32) {
        if (lane.index == 0) ring.release(other_slot);
        write_gradient<Element>(dk[0], factor, own_dk, true, keys, 0, first_key + warp_row, 0, columns, lane);
      } else {
        Pieces pieces(warp_row, lane);
        scale_all(dk[0], factor[0][0]);
        pieces.take(dk[0], ring.slice(other_slot), warp_row, lane);
        proxy_fence();
        __syncwarp();
        if (lane.index == 0) ring.release(other_slot);
        pieces.write(head_rows<Element>(own_dk, s.batch_index, head, first_key), own_dk.row_stride, s.k_rows - first_key, columns);
      }
      for (int i = 0; i < 2 * (kConsumers - 1); ++i) at.advance();
    }

    // Results: zeros for the keys that no row sees, and dQ.
    const int item_bytes = output.as_float32 ? 4 : 2;
    const int first_seen = seen.empty() ? 0 : seen.begin / kKeys * kKeys, end_seen = seen.empty() ? 0 : (seen.end + kKeys - 1) / kKeys * kKeys;
    clear_tiles(own_dk, item_bytes, keys, share_of({0, first_seen}, kKeys, blockIdx.y, gridDim.y), columns);
    clear_tiles(own_dk, item_bytes, keys, share_of({end_seen, s.k_rows}, kKeys, blockIdx.y, gridDim.y), columns);
    if (tiles.begin + warpgroup >= tiles.end) return;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const QueryRow query = query_row(rows, warp_row + lane.row + 8 * half);
      if (query.keys.empty()) continue;
      float* const to = sums.data + (row_arrays_offset(problem, s, query.head) + query.index) * kOwnDim + lane.column;
#pragma unroll
      for (int n = 0; n < kOwnDim / 8; ++n) {
        atomicAdd(to + 8 * n, dq[0][n][2 * half]);
        atomicAdd(to + 8 * n + 1, dq[0][n][2 * half + 1]);
      }
    }
  }
}
