// dQ of one side on Hopper: TMA and wgmma, float16 and bfloat16, head dimensions up to 128; hopper_terms.cuh holds the formulas.
//
// Three consumer warpgroups own 64 query rows each and recompute their logits key tile by key tile. The gradient of the logits goes
// from accumulators to operand registers without touching memory, and meets the keys, which are still in the ring. Within a warpgroup
// nothing overlaps: while one computes exponentials, the two others keep the tensor cores busy.
// Every row has one owner and one order: deterministic.
//
// "Own" is the side whose gradient is wanted.
// Specialised by: ELEMENT, SIDE (1 or 2), HEAD_DIM1, HEAD_DIM2 (padded), KEYS (of a tile), STAGES (slices in the ring).
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

using Element = ELEMENT;
constexpr int kConsumers = 3;
constexpr int kThreads = 128 * (kConsumers + 1);
constexpr int kRows = 64 * kConsumers;
constexpr int kKeys = KEYS;
constexpr int kColumnBlocks = kKeys / 8;
constexpr int kOwnDim = SIDE == 1 ? HEAD_DIM1 : HEAD_DIM2, kOtherDim = SIDE == 1 ? HEAD_DIM2 : HEAD_DIM1;
constexpr int kOwnBytes = kRows * kChunkRowBytes * chunks_of(kOwnDim), kOtherBytes = kRows * kChunkRowBytes * chunks_of(kOtherDim);
constexpr int kSliceBytes = kKeys * kChunkRowBytes * chunks_of(kOwnDim > kOtherDim ? kOwnDim : kOtherDim);
static_assert(kKeys % 16 == 0, "keys are summed over in steps of 16");

extern "C" __global__ void __launch_bounds__(kThreads, 1)
backward_dq_sm90(const __grid_constant__ Problem problem, const __grid_constant__ RowWeights weights, const __grid_constant__ GradientOutput output,
                 const __grid_constant__ TensorMap k1_map, const __grid_constant__ TensorMap k2_map) {
  // Storage.
  extern __shared__ __align__(1024) unsigned char shared[];
  const u32 own_tile = shared_address(shared), other_tile = own_tile + kOwnBytes;
  const Ring<STAGES, kSliceBytes> ring(other_tile + kOtherBytes);
  // Read again tile by tile: no registers are left to keep them in.
  OwnTile& kept_rows = *reinterpret_cast<OwnTile*>(shared + kOwnBytes + kOtherBytes + ring.kBytes);
  RowTerms* terms = reinterpret_cast<RowTerms*>(&kept_rows + 1);

  // Whose rows, and which keys they see.
  const OwnTile rows = query_tile(problem, blockIdx.x, kRows);
  if (rows.begin >= rows.end) return;
  const Sequence& s = rows.sequence;
  const Span keys = keys_seen_by_some(rows.band, rows.begin, rows.valid_end);
  const Span unmasked = keys_seen_by_all(rows.band, rows.begin, rows.valid_end);
  const Span tiles = share_of(keys, kKeys, 0, 1);

  // Barriers.
  const int working = (rows.valid_end - rows.begin + 63) / 64;  // warpgroups that own a valid row; the others only write zeros
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
      const int head1 = rows.head / (problem.heads / problem.heads_k1), head2 = rows.head / (problem.heads / problem.heads_k2);
      RingPosition<STAGES> at;
      for (int tile = tiles.begin; tile < tiles.end; ++tile) {
        const int key = static_cast<int>(s.k_begin) + tile * kKeys;
        ring.bring(at, SIDE == 1 ? &k2_map : &k1_map, chunks_of(kOtherDim), kKeys, key, SIDE == 1 ? head2 : head1, s.batch_index);
        ring.bring(at, SIDE == 1 ? &k1_map : &k2_map, chunks_of(kOwnDim), kKeys, key, SIDE == 1 ? head1 : head2, s.batch_index);
      }
    }
  } else {
    // Consumers.
    registers_take<160>();
    const Matrix& own_q = SIDE == 1 ? problem.q1 : problem.q2;
    const Matrix& other_q = SIDE == 1 ? problem.q2 : problem.q1;
    copy_operand_async<Element, kRows, kOwnDim, 128 * kConsumers>(own_tile, head_rows<Element>(own_q, s.batch_index, rows.head, s.q_begin),
                                                                 own_q.row_stride, rows.begin, {rows.begin, rows.valid_end},
                                                                 SIDE == 1 ? problem.head_dim1 : problem.head_dim2);
    copy_operand_async<Element, kRows, kOtherDim, 128 * kConsumers>(other_tile, head_rows<Element>(other_q, s.batch_index, rows.head, s.q_begin),
                                                                   other_q.row_stride, rows.begin, {rows.begin, rows.valid_end},
                                                                   SIDE == 1 ? problem.head_dim2 : problem.head_dim1);
    copy_async_commit();
    const Lane lane;
    const int warp_row = 64 * warpgroup + static_cast<int>(threadIdx.x) % 128 / 32 * 16;
    for (int i = threadIdx.x; i < kRows; i += 128 * kConsumers) {
      const int row = rows.begin + i;
      terms[i] = row < rows.valid_end ? row_terms<SIDE>(load(problem.rows, row_arrays_offset(problem, s, rows.head) + row), kRaise<Element, SIDE>)
                                      : RowTerms{0, 0, 0, 0};
    }
    copy_async_wait<0>();
    proxy_fence();  // what ordinary copies wrote, the tensor cores read
    named_barrier<1, 128 * kConsumers>();
    const u64 own_rows = wgmma_descriptor(own_tile + warpgroup * 64 * kChunkRowBytes);
    const u64 other_rows = wgmma_descriptor(other_tile + warpgroup * 64 * kChunkRowBytes);
    auto left_own = [&](int k) { return own_rows + (k / 4 * kRows * kChunkRowBytes + k % 4 * 32) / 16; };
    auto left_other = [&](int k) { return other_rows + (k / 4 * kRows * kChunkRowBytes + k % 4 * 32) / 16; };

    RingPosition<STAGES> at;
    float gradient[1][kOwnDim / 8][4];
    auto& result = reinterpret_cast<float(&)[kOwnDim / 2]>(gradient);
    u32 operand[kKeys / 16][4];
    for (int tile = tiles.begin; tile < tiles.end && warpgroup < working; ++tile) {
      float s1[1][kColumnBlocks][4], s2[1][kColumnBlocks][4];
      auto& flat1 = reinterpret_cast<float(&)[4 * kColumnBlocks]>(s1);
      auto& flat2 = reinterpret_cast<float(&)[4 * kColumnBlocks]>(s2);
      const int other_slot = at.slot;
      ring.await(at);
      start_scores<Element, kOtherDim>(SIDE == 1 ? flat2 : flat1, left_other, ring.slice(other_slot));
      at.advance();
      const int own_slot = at.slot;
      ring.await(at);
      start_scores<Element, kOwnDim>(SIDE == 1 ? flat1 : flat2, left_own, ring.slice(own_slot));
      at.advance();
      wgmma_wait<0>();
      hold(flat1);
      hold(flat2);
      if (threadIdx.x % 128 == 0) ring.release(other_slot);

      gradients_by_row<SIDE>(s1, s2, problem.log2_scale1, problem.log2_scale2, terms + warp_row, lane);
      auto& own = SIDE == 1 ? s1 : s2;
      const int first_key = tile * kKeys;
      if (first_key < unmasked.begin || first_key + kKeys > unmasked.end) {
        hide_keys_unseen(own, kept_rows.band, kept_rows.begin + warp_row, first_key, lane);
        clear_rows<kKeys>(ring.slice(own_slot), chunks_of(kOwnDim), first_key, keys, warpgroup);
      }
      to_operand<Element>(operand, own);
      start_weighted_rows<Element, kKeys>(result, operand, ring.slice(own_slot), tile > tiles.begin);
      wgmma_wait<0>();
      hold(result);
      if (threadIdx.x % 128 == 0) ring.release(own_slot);
    }
    if (tiles.empty() || warpgroup >= working) clear(gradient);  // the registers hold anything

    // Results. g is applied to the sum in float32.
    const float scale = (SIDE == 1 ? problem.scale1 : problem.scale2) / kRaise<Element, SIDE>;
    float factor[1][2];
#pragma unroll
    for (int half = 0; half < 2; ++half) factor[0][half] = row_factor(weights, kept_rows, kept_rows.begin + warp_row + lane.row + 8 * half, scale);
    write_gradient<Element>(gradient, factor, SIDE == 1 ? output.q1 : output.q2, output.as_float32, kept_rows, kept_rows.sequence.q_begin,
                            kept_rows.begin + warp_row, 0,
                            SIDE == 1 ? problem.head_dim1 : problem.head_dim2, lane);
  }
}
