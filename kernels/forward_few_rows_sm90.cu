// KL forward on Hopper for few query rows against many keys: TMA and wgmma, float16 and bfloat16, head dimensions up to 128.
//
//   S_t = Q_t K_t^T,  then per row the online state of row_stats.cuh over the visible keys of a share
//
// Reading the keys is all that takes time here, so they are read once: all query rows that see the same keys, those of every query
// head that shares them on both sides, are one tile of at most 64 rows. The keys are split over the multiprocessors, and the two
// consumer warpgroups of a block take its tiles of keys in turn: while one computes, the other's loads are awaited, and the ring
// never runs dry. Each leaves the rows' statistics over what it saw, and forward_merge.cu joins them in their order: deterministic.
//
// Specialised by: ELEMENT, HEAD_DIM1, HEAD_DIM2 (padded), KEYS (of a tile), STAGES (slices in the ring).
#include "problem.cuh"
#include "mask.cuh"
#include "row_stats.cuh"
#include "ptx_sm80.cuh"
#include "ptx_sm90.cuh"
#include "tile.cuh"
#include "blocks.cuh"
#include "hopper.cuh"
#include "forward.cuh"
#include "optimistic.cuh"
#include "few_rows.cuh"

using Element = ELEMENT;
constexpr int kConsumers = 2;
constexpr int kThreads = 128 * (kConsumers + 1);
constexpr int kKeys = KEYS;
constexpr int kColumnBlocks = kKeys / 8;
constexpr int kQuery1Bytes = kFewRows * kChunkRowBytes * chunks_of(HEAD_DIM1), kQuery2Bytes = kFewRows * kChunkRowBytes * chunks_of(HEAD_DIM2);
constexpr int kSliceBytes = kKeys * kChunkRowBytes * chunks_of(HEAD_DIM1 > HEAD_DIM2 ? HEAD_DIM1 : HEAD_DIM2);
static_assert(kKeys % 8 == 0, "a swizzled operand starts at a multiple of 1024 bytes");
static_assert(STAGES % 2 == 0, "a key tile is two slices");

struct FewRows {
  i64 all_rows;  // of the problem
  int heads;     // of a tile: they share their keys on both sides
  int splits;    // blocks of a tile, each over a part of the keys
};

extern "C" __global__ void __launch_bounds__(kThreads, 1)
forward_few_rows_sm90(const __grid_constant__ Problem problem, const __grid_constant__ FewRows few, const __grid_constant__ RowStatsArrays partial,
                      const __grid_constant__ TensorMap k1_map, const __grid_constant__ TensorMap k2_map) {
  // Storage.
  extern __shared__ __align__(1024) unsigned char shared[];
  const u32 q1_tile = shared_address(shared), q2_tile = q1_tile + kQuery1Bytes;
  const Ring<STAGES, kSliceBytes> ring(q2_tile + kQuery2Bytes);

  // Whose rows, and which keys they see.
  const FewRowsTile rows = few_rows_tile(problem, static_cast<int>(blockIdx.x / few.splits), few.heads);
  const Sequence& s = rows.sequence;
  const int split = static_cast<int>(blockIdx.x % few.splits);
  const Span tiles = share_of(keys_seen_by_some(rows.band, 0, s.q_valid), kKeys, split, few.splits);
  const Span unmasked = keys_seen_by_all(rows.band, 0, s.q_valid);

  // Barriers.
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; ++i) {
      barrier_init(ring.full + 8 * i, 1);
      barrier_init(ring.empty + 8 * i, 1);
    }
    proxy_fence();
  }
  __syncthreads();

  const int warpgroup = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 128, 0);
  RingPosition<STAGES> at;
  if (warpgroup == kConsumers) {
    // Producer.
    if (threadIdx.x == 128 * kConsumers) {
      prefetch_tensor_map(&k1_map);
      prefetch_tensor_map(&k2_map);
      const int head1 = rows.first_head / (problem.heads / problem.heads_k1), head2 = rows.first_head / (problem.heads / problem.heads_k2);
      for (int tile = tiles.begin; tile < tiles.end; ++tile) {
        ring.bring(at, &k1_map, chunks_of(HEAD_DIM1), kKeys, tile * kKeys, head1, s.batch_index);
        ring.bring(at, &k2_map, chunks_of(HEAD_DIM2), kKeys, tile * kKeys, head2, s.batch_index);
      }
    }
  } else {
    // Consumers.
    copy_few_rows_async<Element, HEAD_DIM1, 128 * kConsumers>(q1_tile, problem.q1, rows, problem.head_dim1);
    copy_few_rows_async<Element, HEAD_DIM2, 128 * kConsumers>(q2_tile, problem.q2, rows, problem.head_dim2);
    copy_async_commit();
    copy_async_wait<0>();
    proxy_fence();  // what ordinary copies wrote, the tensor cores read
    named_barrier<1, 128 * kConsumers>();
    const Lane lane;
    const int warp_row = static_cast<int>(threadIdx.x) % 128 / 32 * 16;
    auto rows_of = [&](u32 tile) {
      return [rows = wgmma_descriptor(tile)](int k) { return rows + (k / 4 * kFewRows * kChunkRowBytes + k % 4 * 32) / 16; };
    };
    OnlineRow online[2];
    online[0].clear(), online[1].clear();

    for (int tile = tiles.begin; tile < tiles.end; ++tile) {
      if ((tile - tiles.begin) % kConsumers != warpgroup) {
        at.advance();
        at.advance();
        continue;
      }
      float scores1[kColumnBlocks][4], scores2[kColumnBlocks][4];
      auto& s1 = reinterpret_cast<float(&)[4 * kColumnBlocks]>(scores1);
      auto& s2 = reinterpret_cast<float(&)[4 * kColumnBlocks]>(scores2);
      const int slot1 = at.slot;
      ring.await_own_round(at);
      start_scores<Element, HEAD_DIM1>(s1, rows_of(q1_tile), ring.slice(slot1));
      at.advance();
      const int slot2 = at.slot;
      ring.await_own_round(at);
      start_scores<Element, HEAD_DIM2>(s2, rows_of(q2_tile), ring.slice(slot2));
      at.advance();
      wgmma_wait<0>();
      hold(s1);
      hold(s2);
      if (threadIdx.x % 128 == 0) ring.release(slot1), ring.release(slot2);
      const int first_key = tile * kKeys;
      if (first_key >= unmasked.begin && first_key + kKeys <= unmasked.end) {
        update_optimistic<false>(online, s1, s2, problem.log2_scale1, problem.log2_scale2);
      } else {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const Span keys = query_row(rows, warp_row + 8 * half + lane.row).keys;
          hide_outside(scores1, scores2, half, keys.begin - first_key, keys.end - first_key, lane);
        }
        update_optimistic<true>(online, s1, s2, problem.log2_scale1, problem.log2_scale2);
      }
    }

    // Rows.
    const i64 part = static_cast<i64>(split) * kConsumers + warpgroup, first = row_arrays_offset(problem, s, rows.first_head);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = warp_row + 8 * half + lane.row;
      join_quad(online[half]);
      if (query_row(rows, row).keys.empty()) online[half].clear();
      if (lane.column == 0 && row < rows.heads * s.q_rows) store(partial, part * few.all_rows + first + row, finish(online[half]));
    }
  }
}
