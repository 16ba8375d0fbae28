// dQ and dK of one side on Hopper, fused: TMA and wgmma, float16 and bfloat16, head dimensions up to 128.
//
//   S_t^T = K_t Q_t^T,  dS^T by hopper_terms.cuh,  dK = scale dS^T Q,  dQ = scale dS K
//
// A block owns 128 keys; the queries that see them stream by, all query heads of the group one after the other. Two consumer
// warpgroups own 64 keys each: they compute S^T, turn it into dS^T, keep dK in registers, and leave dS^T in shared memory for a
// third warpgroup, which alone computes dQ and adds it to float32 sums in memory (write_dq.cu turns these into the gradient). So the
// consumers never wait for each other. Within each, the next tile's logits and this one's part of dK are under way while dS^T is
// handed over and the exponentials are taken; nothing is in flight at the loop's end, or the compiler would serialise the products.
// Shared-memory bandwidth is short: dS^T goes to dK, and the other side's keys to S, from registers.
//
// The order in which blocks add to dQ is open: not deterministic. "Own" is the side whose gradients are wanted.
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

using Element = ELEMENT;
constexpr int kConsumers = 2;
constexpr int kThreads = 128 * (kConsumers + 2);
constexpr int kRows = 64 * kConsumers;
constexpr int kQueries = kDqRows;
constexpr int kColumnBlocks = kQueries / 8;
constexpr int kOwnDim = SIDE == 1 ? HEAD_DIM1 : HEAD_DIM2, kOtherDim = SIDE == 1 ? HEAD_DIM2 : HEAD_DIM1;
constexpr int kOwnBytes = kRows * kChunkRowBytes * chunks_of(kOwnDim);
constexpr int kSliceBytes = kQueries * kChunkRowBytes * chunks_of(kOwnDim > kOtherDim ? kOwnDim : kOtherDim);
constexpr int kWeightBytes = kRows * kChunkRowBytes;  // dS^T: rows of 64 queries
constexpr int kWeightBuffers = 2;
constexpr int kStagingBytes = 4 * kQueries * (kOwnDim < kChunk ? kOwnDim : kChunk);
static_assert(STAGES % 2 == 0, "a tile's two slices share an entry of the statistics");

extern "C" __global__ void __launch_bounds__(kThreads, 1)
backward_sm90(const __grid_constant__ Problem problem, const __grid_constant__ RowWeights weights, const __grid_constant__ GradientOutput output,
              const __grid_constant__ DqSums sums, const __grid_constant__ TensorMap q1_map, const __grid_constant__ TensorMap q2_map) {
  // Storage.
  extern __shared__ __align__(1024) unsigned char shared[];
  const u32 own_tile = shared_address(shared), weight_tiles = own_tile + kOwnBytes, staging = weight_tiles + kWeightBuffers * kWeightBytes;
  const Ring<STAGES, kSliceBytes> ring(staging + 2 * kStagingBytes);
  const u32 weights_full = ring.empty + 8 * STAGES, weights_empty = weights_full + 8 * kWeightBuffers, own_full = weights_empty + 8 * kWeightBuffers;
  const TermsRing<STAGES> terms_ring{own_full + 16};
  // Read again tile by tile: no registers are left to keep it in.
  OwnTile& kept_keys = *reinterpret_cast<OwnTile*>(shared + (terms_ring.empty + terms_ring.kBytes - own_tile));
  RowTerms* all_terms = reinterpret_cast<RowTerms*>(&kept_keys + 1);

  // Whose keys, and which queries see them.
  const int own_heads = SIDE == 1 ? problem.heads_k1 : problem.heads_k2;
  const OwnTile keys = key_tile(problem, blockIdx.x, kRows, own_heads);
  if (keys.begin >= keys.end) return;
  const Sequence& s = keys.sequence;
  const Span queries = rows_seeing_some(keys.band, keys.begin, keys.valid_end);
  const Span unmasked = keys.valid_end == keys.begin + kRows ? rows_seeing_all(keys.band, keys.begin, keys.valid_end) : Span{0, 0};
  const Span tiles = share_of(queries, kQueries, 0, 1);
  const int group = problem.heads / own_heads, first_head = keys.head * group, steps = (tiles.end - tiles.begin) * group;
  const float unit = weight_unit<Element, SIDE>(weights);

  // Barriers. The first slice of a tile is full when the statistics are there, too.
  const int working = (keys.valid_end - keys.begin + 63) / 64;  // warpgroups that own a valid key; the others only write zeros
  if (threadIdx.x == 0) {
    kept_keys = keys;
    for (int i = 0; i < STAGES; ++i) {
      barrier_init(ring.full + 8 * i, i % 2 == 0 ? 33 : 1);
      barrier_init(ring.empty + 8 * i, max(working, 1));
    }
    for (int i = 0; i < kWeightBuffers; ++i) {
      barrier_init(weights_full + 8 * i, max(working, 1));
      barrier_init(weights_empty + 8 * i, 1);
    }
    barrier_init(own_full, 128 * kConsumers);
    terms_ring.init(working);
    proxy_fence();
  }
  __syncthreads();

  const int warpgroup = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 128, 0);
  if (warpgroup == kConsumers + 1) {
    // Producers: one thread for the slices, one warp for the statistics.
    registers_give<32>();
    const int warp = static_cast<int>(threadIdx.x) % 128 / 32, lane = static_cast<int>(threadIdx.x) % 32;
    RingPosition<STAGES> at;
    if (warp == 0 && lane == 0) {
      for (int head = first_head; head < first_head + group; ++head) {
        for (int tile = tiles.begin; tile < tiles.end; ++tile) {
          const int query = static_cast<int>(s.q_begin) + tile * kQueries;
          ring.bring(at, SIDE == 1 ? &q2_map : &q1_map, chunks_of(kOtherDim), kQueries, query, head, s.batch_index);
          ring.bring(at, SIDE == 1 ? &q1_map : &q2_map, chunks_of(kOwnDim), kQueries, query, head, s.batch_index);
        }
      }
    } else if (warp == 1) {
      const float per_unit = 1.0f / unit;
      for (int head = first_head; head < first_head + group; ++head) {
        for (int tile = tiles.begin; tile < tiles.end; ++tile) {
          terms_ring.await_empty(at);
          for (int i = lane; i < kQueries; i += 32) {
            const QueryTerms query = query_terms(problem, weights, s, head, tile * kQueries + i, queries);
            all_terms[at.slot / 2 * kQueries + i] = row_terms<SIDE>(query.stats, query.g * per_unit);
          }
          barrier_arrive(ring.full + 8 * at.slot);
          at.advance();
          at.advance();
        }
      }
    }
  } else if (warpgroup == kConsumers) {
    // dQ, from both consumers' dS^T.
    registers_give<64>();
    barrier_wait(own_full, 0);
    const u64 own_keys = wgmma_descriptor(own_tile);
    int buffer = 0, turn = 0;
    u32 parity = 0;
    auto release = [&] {
      if (threadIdx.x % 128 == 0) barrier_arrive(weights_empty + 8 * buffer);
    };
    for (int head = first_head; head < first_head + group; ++head) {
      for (int tile = tiles.begin; tile < tiles.end; ++tile) {
        float* const to = sums.data + dq_tile(problem, kept_keys.sequence, head, tile) * (kDqRows * kOwnDim);
        const u64 left = wgmma_descriptor(weight_tiles + buffer * kWeightBytes);
        barrier_wait(weights_full + 8 * buffer, parity);
        if constexpr (kOwnDim <= kChunk) {
          add_dq<Element, kRows, kOwnDim>(to, staging + turn * kStagingBytes, left, own_keys, kConsumers, release);
          turn ^= 1;
        } else {
          add_dq<Element, kRows, kChunk>(to, staging, left, own_keys, kConsumers, [] {});
          add_dq<Element, kRows, kOwnDim - kChunk>(to + kDqRows * kChunk, staging + kStagingBytes, left, own_keys + kRows * kChunkRowBytes / 16, kConsumers, release);
        }
        if (++buffer == kWeightBuffers) buffer = 0, parity ^= 1;
      }
    }
    if (threadIdx.x % 128 == 0) bulk_wait<0>();
  } else {
    // Consumers.
    registers_take<208>();
    const Matrix& own_k = SIDE == 1 ? problem.k1 : problem.k2;
    const Matrix& other_k = SIDE == 1 ? problem.k2 : problem.k1;
    const Span seen = keys_seen_by_some(keys.band, 0, s.q_valid);  // others may hold NaN, and dQ sums over them
    copy_operand_async<Element, kRows, kOwnDim, 128 * kConsumers>(own_tile, head_rows<Element>(own_k, s.batch_index, keys.head, s.k_begin),
                                                                 own_k.row_stride, keys.begin, {max(keys.begin, seen.begin), min(keys.valid_end, seen.end)},
                                                                 SIDE == 1 ? problem.head_dim1 : problem.head_dim2);
    copy_async_commit();
    const Lane lane;
    const int warp_row = 64 * warpgroup + static_cast<int>(threadIdx.x) % 128 / 32 * 16;
    if (warpgroup >= working) {  // these keys take no part in dQ
      for (int i = threadIdx.x % 128; i < kWeightBuffers * kWeightBytes / 32; i += 128)
        store_shared_16(weight_tiles + i / (kWeightBytes / 32) * kWeightBytes + kWeightBytes / 2 + i % (kWeightBytes / 32) * 16, 0);
    }
    copy_async_wait<0>();
    proxy_fence();  // what ordinary copies wrote, the tensor cores read
    barrier_arrive(own_full);
    named_barrier<1, 128 * kConsumers>();
    const u64 own_rows = wgmma_descriptor(own_tile + warpgroup * 64 * kChunkRowBytes);
    const u32 weight_row = weight_tiles + TileLayout<Element, kQueries>::offset(warp_row + lane.index % 16, lane.index / 16);
    u32 other[kOtherDim / 16][4];
    auto left_other = [&](int k) -> const u32(&)[4] { return other[k]; };
    auto left_own = [&](int k) { return own_rows + (k / 4 * kRows * kChunkRowBytes + k % 4 * 32) / 16; };

    RingPosition<STAGES> at;
    float gradient[1][kOwnDim / 8][4], s1[1][kColumnBlocks][4], s2[1][kColumnBlocks][4];
    auto& result = reinterpret_cast<float(&)[kOwnDim / 2]>(gradient);
    auto& flat1 = reinterpret_cast<float(&)[4 * kColumnBlocks]>(s1);
    auto& flat2 = reinterpret_cast<float(&)[4 * kColumnBlocks]>(s2);
    auto& own = SIDE == 1 ? s1 : s2;
    auto& other_scores = SIDE == 1 ? s2 : s1;
    auto& own_flat = SIDE == 1 ? flat1 : flat2;
    auto& other_flat = SIDE == 1 ? flat2 : flat1;
    u32 operand[kQueries / 16][4];
    int buffer = 0;  // where the next tile's dS^T goes
    u32 parity = 1;
    const int other_group = problem.heads / (SIDE == 1 ? problem.heads_k2 : problem.heads_k1);
    auto load_other_keys = [&](int head) {
      load_operand<Element, kOtherDim>(other, head_rows<Element>(other_k, kept_keys.sequence.batch_index, head / other_group, kept_keys.sequence.k_begin),
                                       other_k.row_stride, kept_keys.begin + warp_row, kept_keys.valid_end,
                                       SIDE == 1 ? problem.head_dim2 : problem.head_dim1, lane);
    };
    // The logits of the other side's slice are there, and then the own side's: from them the gradient.
    auto first_half = [&](int other_slot) {
      hold(other_flat);
      if (threadIdx.x % 128 == 0) ring.release(other_slot);
      gradients_first<SIDE>(other_scores, SIDE == 1 ? problem.log2_scale2 : problem.log2_scale1, all_terms + other_slot / 2 * kQueries, lane);
    };
    auto second_half = [&](int other_slot) {
      hold(own_flat);
      gradients_second<SIDE>(s1, s2, SIDE == 1 ? problem.log2_scale1 : problem.log2_scale2, all_terms + other_slot / 2 * kQueries, lane);
      terms_ring.release(other_slot);
    };
    // The gradient where pairs see each other, rounded to an operand.
    auto round = [&](int first_query, int own_slot) {
      if (first_query < unmasked.begin || first_query + kQueries > unmasked.end) {
        hide_queries_unseeing(own, kept_keys.band, kept_keys.begin + warp_row, first_query, lane);
        clear_rows<kQueries>(ring.slice(own_slot), chunks_of(kOwnDim), first_query, queries, warpgroup);
      }
      to_operand<Element>(operand, own);
    };
    // dS^T to where the third warpgroup finds it.
    auto hand_over = [&] {
      barrier_wait(weights_empty + 8 * buffer, parity);
#pragma unroll
      for (int k = 0; k < kQueries / 16; ++k)
        store_matrix_x4(TileLayout<Element, kQueries>::advance(weight_row, 2 * k) + buffer * kWeightBytes, operand[k]);
      proxy_fence();
      warpgroup_barrier(warpgroup);  // all of dS^T is there
      if (threadIdx.x % 128 == 0) barrier_arrive(weights_full + 8 * buffer);
      if (++buffer == kWeightBuffers) buffer = 0, parity ^= 1;
    };
    if (steps > 0 && warpgroup < working) {
      load_other_keys(first_head);
      int other_slot = at.slot;
      ring.await(at);
      start_scores<Element, kOtherDim>(other_flat, left_other, ring.slice(other_slot));
      at.advance();
      int own_slot = at.slot;
      ring.await(at);
      start_scores<Element, kOwnDim>(own_flat, left_own, ring.slice(own_slot));
      at.advance();
      wgmma_wait<1>();
      first_half(other_slot);
      wgmma_wait<0>();
      second_half(other_slot);
      int head = first_head, tile = tiles.begin;
      for (int step = 1; step < steps; ++step) {
        round(tile * kQueries, own_slot);
        // The next tile's logits and this one's part of dK.
        if (++tile == tiles.end) {
          tile = tiles.begin;
          // The other side may have more key heads than this one: then its keys change in the middle of the group.
          if (++head % other_group == 0) load_other_keys(head);
        }
        other_slot = at.slot;
        ring.await(at);
        start_scores<Element, kOtherDim>(other_flat, left_other, ring.slice(other_slot));
        at.advance();
        const int next_own_slot = at.slot;
        ring.await(at);
        start_scores<Element, kOwnDim>(own_flat, left_own, ring.slice(next_own_slot));
        at.advance();
        start_weighted_rows<Element, kQueries>(result, operand, ring.slice(own_slot), step > 1);
        hand_over();
        wgmma_wait<2>();
        first_half(other_slot);
        wgmma_wait<1>();
        second_half(other_slot);
        wgmma_wait<0>();
        hold(result);
        if (threadIdx.x % 128 == 0) ring.release(own_slot);
        own_slot = next_own_slot;
      }
      round(tile * kQueries, own_slot);
      start_weighted_rows<Element, kQueries>(result, operand, ring.slice(own_slot), steps > 1);
      hand_over();
      wgmma_wait<0>();
      hold(result);
    } else {
      clear(gradient);  // nothing was seen
    }

    // Results.
    float factor[1][2];
    factor[0][0] = factor[0][1] = (SIDE == 1 ? problem.scale1 : problem.scale2) * unit;
    write_gradient<Element>(gradient, factor, SIDE == 1 ? output.k1 : output.k2, output.as_float32, kept_keys, kept_keys.sequence.k_begin,
                            kept_keys.begin + warp_row, 0, SIDE == 1 ? problem.head_dim1 : problem.head_dim2, lane);
  }
}
