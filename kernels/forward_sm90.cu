// KL forward on Hopper: TMA and wgmma, float16 and bfloat16, head dimensions up to 128.
//
//   S_t = Q_t K_t^T,  then per row the online state of row_stats.cuh over all visible keys
//
// Three consumer warpgroups own 64 query rows each. One producer thread brings slices of keys, K1 and K2 of a tile in turn, through
// a ring in shared memory. Within a warpgroup products and exponentials alternate; across the three they overlap, each needing the
// tensor cores a third of the time and the exponential unit another third. Q1 is held in registers as the products' left operand,
// which saves a third of the traffic out of shared memory; both sides' would leave no registers for a tile of 80 keys.
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

using Element = ELEMENT;
constexpr int kConsumers = 3;
constexpr int kThreads = 128 * (kConsumers + 1);
constexpr int kRows = 64 * kConsumers;
constexpr int kKeys = KEYS;
constexpr int kColumnBlocks = kKeys / 8;
constexpr int kQueryBytes = kRows * kChunkRowBytes * chunks_of(HEAD_DIM2);
constexpr int kSliceBytes = kKeys * kChunkRowBytes * chunks_of(HEAD_DIM1 > HEAD_DIM2 ? HEAD_DIM1 : HEAD_DIM2);
static_assert(kKeys % 8 == 0, "a swizzled operand starts at a multiple of 1024 bytes");

extern "C" __global__ void __launch_bounds__(kThreads, 1)
forward_sm90(const __grid_constant__ Problem problem, const __grid_constant__ ForwardOutput output, const __grid_constant__ TensorMap k1_map,
             const __grid_constant__ TensorMap k2_map) {
  // Storage.
  extern __shared__ __align__(1024) unsigned char shared[];
  const u32 q2_tile = shared_address(shared);
  const Ring<STAGES, kSliceBytes> ring(q2_tile + kQueryBytes);
  // The consumers look it up at edges and at the end: no registers are left to keep it in.
  OwnTile& kept_rows = *reinterpret_cast<OwnTile*>(shared + kQueryBytes + ring.kBytes);

  // Whose rows, and which keys they see.
  const Share share = share_of_block(output);
  const OwnTile rows = query_tile(problem, share.tile, kRows);
  if (rows.begin >= rows.end) return;
  const Sequence& s = rows.sequence;
  const Span tiles = share_of(keys_seen_by_some(rows.band, rows.begin, rows.valid_end), kKeys, share.split, share.splits);
  const Span unmasked = keys_seen_by_all(rows.band, rows.begin, rows.valid_end);

  // Barriers.
  const int working = (rows.valid_end - rows.begin + 63) / 64;  // warpgroups that own a row; the others have nothing to do
  if (threadIdx.x == 0) {
    kept_rows = rows;
    for (int i = 0; i < STAGES; ++i) {
      barrier_init(ring.full + 8 * i, 1);
      barrier_init(ring.empty + 8 * i, max(working, 1));
    }
    proxy_fence();
  }
  __syncthreads();

  const int warpgroup = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 128, 0);
  if (warpgroup == kConsumers) {
    // Producer.
    registers_give<32>();
    if (threadIdx.x == 128 * kConsumers) {
      prefetch_tensor_map(&k1_map);
      prefetch_tensor_map(&k2_map);
      const int head1 = rows.head / (problem.heads / problem.heads_k1), head2 = rows.head / (problem.heads / problem.heads_k2);
      RingPosition<STAGES> at;
      for (int tile = tiles.begin; tile < tiles.end; ++tile) {
        const int key = static_cast<int>(s.k_begin) + tile * kKeys;
        ring.bring(at, &k1_map, chunks_of(HEAD_DIM1), kKeys, key, head1, s.batch_index);
        ring.bring(at, &k2_map, chunks_of(HEAD_DIM2), kKeys, key, head2, s.batch_index);
      }
    }
  } else {
    // Consumers.
    registers_take<160>();
    copy_operand_async<Element, kRows, HEAD_DIM2, 128 * kConsumers>(q2_tile, head_rows<Element>(problem.q2, s.batch_index, rows.head, s.q_begin),
                                                                    problem.q2.row_stride, rows.begin, {rows.begin, rows.valid_end},
                                                                    problem.head_dim2);
    copy_async_commit();
    const Lane lane;
    const int warp_row = 64 * warpgroup + static_cast<int>(threadIdx.x) % 128 / 32 * 16;
    u32 q1[HEAD_DIM1 / 16][4];
    load_operand<Element, HEAD_DIM1>(q1, head_rows<Element>(problem.q1, s.batch_index, rows.head, s.q_begin), problem.q1.row_stride, rows.begin + warp_row,
                 rows.valid_end, problem.head_dim1, lane);
    copy_async_wait<0>();
    proxy_fence();  // what ordinary copies wrote, the tensor cores read
    named_barrier<1, 128 * kConsumers>();
    const u64 q2_rows = wgmma_descriptor(q2_tile + warpgroup * 64 * kChunkRowBytes);
    auto rows1 = [&](int k) -> const u32(&)[4] { return q1[k]; };
    auto rows2 = [&](int k) { return q2_rows + (k / 4 * kRows * kChunkRowBytes + k % 4 * 32) / 16; };
    OnlineRow online[1][2];
    online[0][0].clear(), online[0][1].clear();

    RingPosition<STAGES> at;
    for (int tile = tiles.begin; tile < tiles.end && warpgroup < working; ++tile) {
      float scores1[1][kColumnBlocks][4], scores2[1][kColumnBlocks][4];
      auto& s1 = reinterpret_cast<float(&)[4 * kColumnBlocks]>(scores1);
      auto& s2 = reinterpret_cast<float(&)[4 * kColumnBlocks]>(scores2);
      const int slot1 = at.slot;
      ring.await(at);
      start_scores<Element, HEAD_DIM1>(s1, rows1, ring.slice(slot1));
      at.advance();
      const int slot2 = at.slot;
      ring.await(at);
      start_scores<Element, HEAD_DIM2>(s2, rows2, ring.slice(slot2));
      at.advance();
      wgmma_wait<0>();
      hold(s1);
      hold(s2);
      if (threadIdx.x % 128 == 0) ring.release(slot1), ring.release(slot2);
      const int first_key = tile * kKeys;
      if (first_key >= unmasked.begin && first_key + kKeys <= unmasked.end) {
        update_optimistic<false>(online[0], s1, s2, problem.log2_scale1, problem.log2_scale2);
      } else {
        hide_unseen(scores1, scores2, kept_rows.band, kept_rows.begin + warp_row, first_key, lane);
        update_optimistic<true>(online[0], s1, s2, problem.log2_scale1, problem.log2_scale2);
      }
    }

    write_rows(online, problem, output, kept_rows, kRows, warp_row, lane);
  }
}
