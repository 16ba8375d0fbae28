// dK of one side on Hopper, and with it dQ: TMA and wgmma, float16 and bfloat16, head dimensions up to 128.
//
//   S_t = Q_t K_t^T,  dS by hopper_terms.cuh,  dQ = scale dS K,  dK = scale dS^T Q
//
// A block owns 128 keys; the queries that see them stream by in tiles of 64, all query heads of the group one after the other. Two
// consumer warpgroups take the tiles in turn: logits, their gradient, and dQ of the tile, which is added to float32 sums in memory
// (write_dq.cu turns these into the gradient). They leave dS in shared memory for a third warpgroup, which keeps dK in its registers.
// So each waits for no other: exponentials of one run under the products of the two others.
// Shared-memory bandwidth is short. Where rows are queries, their statistics are registers, and dS goes to dQ from registers.
//
// dK has one owner and one order: without dQ (DQ 0) the kernel is deterministic. The order in which blocks add to dQ is open.
// "Own" is the side whose gradients are wanted.
// Specialised by: ELEMENT, SIDE (1 or 2), DQ (0 or 1), HEAD_DIM1, HEAD_DIM2 (padded), STAGES (slices in the ring, even).
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
constexpr int kKeys = 128;
constexpr int kQueries = kDqRows;
constexpr int kColumnBlocks = kKeys / 8;
constexpr int kOwnDim = SIDE == 1 ? HEAD_DIM1 : HEAD_DIM2, kOtherDim = SIDE == 1 ? HEAD_DIM2 : HEAD_DIM1;
constexpr int kOwnBytes = kKeys * kChunkRowBytes * chunks_of(kOwnDim), kOtherBytes = kKeys * kChunkRowBytes * chunks_of(kOtherDim);
constexpr int kSliceBytes = kQueries * kChunkRowBytes * chunks_of(kOwnDim > kOtherDim ? kOwnDim : kOtherDim);
constexpr int kWeightBytes = kQueries * kChunkRowBytes * chunks_of(kKeys);  // dS: rows of 128 keys
constexpr int kStagedColumns = kOwnDim < kChunk ? kOwnDim : kChunk;
constexpr int kStagingBytes = DQ ? 4 * kQueries * kStagedColumns : 0;
constexpr bool kStagedInSlice = DQ && kOwnDim > kChunk;  // half of a wide dQ is staged where the other side's queries were
// float16's weights are divided by a unit that depends on the rows at hand, unless one weight holds for all, as with dQ.
constexpr bool kChangingUnit = !DQ && !kWideExponent<Element>;
// Registers a thread of the producers, of dK's warpgroup and of the consumers: 512 with both of these.
constexpr int kProducerRegisters = 32, kDkRegisters = kOwnDim < 2 * kChunk ? 128 : 160;
constexpr int kConsumerRegisters = (512 - kProducerRegisters - kDkRegisters) / 16 * 8;
static_assert(STAGES % 2 == 0, "a query tile is two slices");
static_assert(!kStagedInSlice || kSliceBytes >= kStagingBytes, "a slice holds 64 columns of dQ");
static_assert(!DQ || kOwnDim <= kChunk || kOwnDim == 2 * kChunk, "dQ is staged in whole chunks");

// What a consumer looks up tile by tile: no registers are left to keep it in.
struct Kept {
  OwnTile keys;
  Span queries;   // that see some of the keys
  Span unmasked;  // that see all of them
};

extern "C" __global__ void __launch_bounds__(kThreads, 1)
backward_sm90(const __grid_constant__ Problem problem, const __grid_constant__ RowWeights weights, const __grid_constant__ GradientOutput output,
              const __grid_constant__ DqSums sums, const __grid_constant__ TensorMap q1_map, const __grid_constant__ TensorMap q2_map) {
  // Storage.
  extern __shared__ __align__(1024) unsigned char shared[];
  const u32 own_tile = shared_address(shared), other_tile = own_tile + kOwnBytes, weight_tiles = other_tile + kOtherBytes;
  const u32 staging_tiles = weight_tiles + kConsumers * kWeightBytes;
  const Ring<STAGES, kSliceBytes> ring(staging_tiles + kConsumers * kStagingBytes);
  const u32 weights_full = ring.empty + 8 * STAGES, weights_empty = weights_full + 8 * kConsumers;
  const u32 terms_full = weights_empty + 8 * kConsumers, terms_empty = terms_full + 8 * kConsumers;
  RowTerms* const all_terms = reinterpret_cast<RowTerms*>(shared + (terms_empty + 8 * kConsumers - own_tile));
  float* const units = reinterpret_cast<float*>(all_terms + kConsumers * kQueries);  // of the terms, and then of dS
  Kept& kept = *reinterpret_cast<Kept*>(units + 2 * kConsumers);

  // Whose keys, and which queries see them.
  const int own_heads = SIDE == 1 ? problem.heads_k1 : problem.heads_k2;
  const OwnTile keys = key_tile(problem, blockIdx.x, kKeys, own_heads);
  if (keys.begin >= keys.end) return;
  const Span queries = rows_seeing_some(keys.band, keys.begin, keys.valid_end);
  const Span tiles = share_of(queries, kQueries, 0, 1);
  const int group = problem.heads / own_heads, first_head = keys.head * group, end_head = first_head + group;

  // Barriers. What was read as an operand one thread releases for its warpgroup, what was loaded each thread for itself.
  if (threadIdx.x == 0) {
    kept.keys = keys;
    kept.queries = queries;
    kept.unmasked = keys.valid_end == keys.begin + kKeys ? rows_seeing_all(keys.band, keys.begin, keys.valid_end) : Span{0, 0};
    for (int i = 0; i < STAGES; ++i) {
      barrier_init(ring.full + 8 * i, 1);
      barrier_init(ring.empty + 8 * i, 1);
    }
    for (int i = 0; i < kConsumers; ++i) {
      barrier_init(weights_full + 8 * i, 1);
      barrier_init(weights_empty + 8 * i, kChangingUnit ? 128 : 1);
      barrier_init(terms_full + 8 * i, 32);
      barrier_init(terms_empty + 8 * i, 128);
    }
    proxy_fence();
  }
  __syncthreads();

  const int warpgroup = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 128, 0);
  const bool first_thread = threadIdx.x % 128 == 0;
  const int warp_row = static_cast<int>(threadIdx.x) % 128 / 32 * 16;
  RingPosition<STAGES> at;
  int turn = 0;
  if (warpgroup == kConsumers + 1) {
    // Producers: one thread for the slices, one warp for the statistics.
    registers_give<kProducerRegisters>();
    const int warp = static_cast<int>(threadIdx.x) % 128 / 32, lane = static_cast<int>(threadIdx.x) % 32;
    if (first_thread) {
      for (int head = first_head; head < end_head; ++head) {
        for (int tile = tiles.begin; tile < tiles.end; ++tile) {
          const int query = static_cast<int>(keys.sequence.q_begin) + tile * kQueries;
          ring.bring(at, SIDE == 1 ? &q2_map : &q1_map, chunks_of(kOtherDim), kQueries, query, head, keys.sequence.batch_index);
          ring.bring(at, SIDE == 1 ? &q1_map : &q2_map, chunks_of(kOwnDim), kQueries, query, head, keys.sequence.batch_index);
        }
      }
    } else if (warp == 1) {
      float unit = kChangingUnit ? 0.0f : weight_unit<Element, SIDE>(weights);
      for (int head = first_head; head < end_head; ++head) {
        for (int tile = tiles.begin; tile < tiles.end; ++tile, ++turn) {
          const int consumer = turn % kConsumers;
          const Sequence& s = kept.keys.sequence;
          if constexpr (kChangingUnit) {
            float largest = 0.0f;
#pragma unroll 1
            for (int i = lane; i < kQueries; i += 32)
              largest = fmaxf(largest, fabsf(query_terms(problem, weights, s, head, tile * kQueries + i, kept.queries).g));
            unit = fmaxf(unit, power_of_two_near_largest(largest / kRaise<Element, SIDE>));
          }
          barrier_wait(terms_empty + 8 * consumer, turn / kConsumers % 2 ^ 1);
          // One row at a time: few registers are left to this warp.
#pragma unroll 1
          for (int i = lane; i < kQueries; i += 32) {
            const QueryTerms query = query_terms(problem, weights, s, head, tile * kQueries + i, kept.queries);
            all_terms[consumer * kQueries + i] = row_terms<SIDE>(query.stats, query.g * (1.0f / unit));
          }
          if (kChangingUnit && lane == 0) units[consumer] = unit;
          barrier_arrive(terms_full + 8 * consumer);
        }
      }
    }
  } else if (warpgroup == kConsumers) {
    // dK, from both consumers' dS.
    registers_take<kDkRegisters>();
    float gradient[kKeys / 64][1][kOwnDim / 8][4], unit = 1.0f;
    if (tiles.empty()) clear(gradient[0]), clear(gradient[1]);  // nothing was seen
    for (const int steps = (tiles.end - tiles.begin) * group; turn < steps; ++turn) {
      const int consumer = turn % kConsumers;
      at.advance();
      ring.await(at);
      barrier_wait(weights_full + 8 * consumer, turn / kConsumers % 2);
      if constexpr (kChangingUnit) {
        const float new_unit = units[kConsumers + consumer];
        if (turn > 0 && new_unit != unit) scale_all(gradient[0], unit / new_unit), scale_all(gradient[1], unit / new_unit);
        unit = new_unit;
      }
      add_dk<Element, kQueries>(gradient, weight_tiles + consumer * kWeightBytes, ring.slice(at.slot), turn > 0);
      if (kChangingUnit || first_thread) barrier_arrive(weights_empty + 8 * consumer);
      if (first_thread) ring.release(at.slot);
      at.advance();
    }
    float factor[1][2];
    if (!kChangingUnit) unit = weight_unit<Element, SIDE>(weights);
    factor[0][0] = factor[0][1] = (SIDE == 1 ? problem.scale1 : problem.scale2) * unit;
#pragma unroll
    for (int m = 0; m < kKeys / 64; ++m)
      write_gradient<Element>(gradient[m], factor, SIDE == 1 ? output.k1 : output.k2, output.as_float32, kept.keys, kept.keys.sequence.k_begin,
                              kept.keys.begin + 64 * m + warp_row, 0, SIDE == 1 ? problem.head_dim1 : problem.head_dim2, Lane());
  } else {
    // Consumers.
    registers_take<kConsumerRegisters>();
    const Matrix& own_k = SIDE == 1 ? problem.k1 : problem.k2;
    const Matrix& other_k = SIDE == 1 ? problem.k2 : problem.k1;
    const int other_group = problem.heads / (SIDE == 1 ? problem.heads_k2 : problem.heads_k1);
    // Keys that nobody sees may hold NaN, and dQ sums over them.
    const Span seen = keys_seen_by_some(keys.band, 0, keys.sequence.q_valid);
    copy_operand_async<Element, kKeys, kOwnDim, 128 * kConsumers>(own_tile, head_rows<Element>(own_k, keys.sequence.batch_index, keys.head, keys.sequence.k_begin),
                                                                 own_k.row_stride, keys.begin, {max(keys.begin, seen.begin), min(keys.valid_end, seen.end)},
                                                                 SIDE == 1 ? problem.head_dim1 : problem.head_dim2);
    const Lane lane;
    const u32 staging = staging_tiles + warpgroup * kStagingBytes, weight_tile = weight_tiles + warpgroup * kWeightBytes;
    const u32 weight_row = weight_tile + TileLayout<Element, kChunk>::offset(warp_row + lane.index % 16, lane.index / 16);
    int staged_slot = -1;  // of the slice that half of dQ was staged in
    for (int head = first_head; head < end_head; ++head) {
      // The other side may have more key heads than this one: then its keys change in the middle of the group.
      if (head == first_head || head % other_group == 0) {
        if (head != first_head) named_barrier<1, 128 * kConsumers>();  // both are done with the ones before
        copy_operand_async<Element, kKeys, kOtherDim, 128 * kConsumers>(
            other_tile, head_rows<Element>(other_k, kept.keys.sequence.batch_index, head / other_group, kept.keys.sequence.k_begin), other_k.row_stride,
            kept.keys.begin, {kept.keys.begin, kept.keys.valid_end}, SIDE == 1 ? problem.head_dim2 : problem.head_dim1);
        copy_async_commit();
        copy_async_wait<0>();
        proxy_fence();  // what ordinary copies wrote, the tensor cores read
        named_barrier<8, 128 * kConsumers>();
      }
      for (int tile = tiles.begin; tile < tiles.end; ++tile, ++turn) {
        if (turn % kConsumers != warpgroup) {
          at.advance();
          at.advance();
          continue;
        }
        const int first_query = tile * kQueries;

        // Logits, the other side's first.
        float s1[1][kColumnBlocks][4], s2[1][kColumnBlocks][4];
        auto& own = SIDE == 1 ? s1 : s2;
        auto& other = SIDE == 1 ? s2 : s1;
        auto& own_flat = reinterpret_cast<float(&)[4 * kColumnBlocks]>(own);
        auto& other_flat = reinterpret_cast<float(&)[4 * kColumnBlocks]>(other);
        auto rows_of = [&](int slot) {
          return [rows = wgmma_descriptor(ring.slice(slot))](int k) { return rows + (k / 4 * kQueries * kChunkRowBytes + k % 4 * 32) / 16; };
        };
        const int other_slot = at.slot;
        ring.await_own_round(at);
        start_scores<Element, kOtherDim>(other_flat, rows_of(other_slot), other_tile);
        at.advance();
        const int own_slot = at.slot;
        ring.await_own_round(at);
        start_scores<Element, kOwnDim>(own_flat, rows_of(own_slot), own_tile);
        at.advance();
        if (DQ && first_thread) {
          bulk_wait_read<0>();
          if (kStagedInSlice && staged_slot >= 0) ring.release(staged_slot);
        }

        // Their gradient, rounded to an operand.
        barrier_wait(terms_full + 8 * warpgroup, turn / kConsumers % 2);
        const RowTerms* terms = all_terms + warpgroup * kQueries + warp_row + lane.row;
        const RowTerms rows[2] = {terms[0], terms[8]};
        wgmma_wait<1>();
        hold(other_flat);
        if (!kStagedInSlice && first_thread) ring.release(other_slot);
        gradients_first<SIDE>(other, SIDE == 1 ? problem.log2_scale2 : problem.log2_scale1, rows);
        wgmma_wait<0>();
        hold(own_flat);
        gradients_second<SIDE>(s1, s2, SIDE == 1 ? problem.log2_scale1 : problem.log2_scale2, rows);
        if (first_query < kept.unmasked.begin || first_query + kQueries > kept.unmasked.end) {
          hide_keys_unseen(own, kept.keys.band, first_query + warp_row, kept.keys.begin, lane);
          clear_rows<kQueries>(ring.slice(own_slot), chunks_of(kOwnDim), first_query, kept.queries, warpgroup);
        }
        u32 operand[kKeys / 16][4];
        to_operand<Element>(operand, own);

        // dS to where the third warpgroup finds it.
        float dq[kOwnDim / 2];
        if constexpr (DQ) start_weighted_rows<Element, kKeys>(dq, operand, own_tile, false);
        barrier_wait(weights_empty + 8 * warpgroup, turn / kConsumers % 2 ^ 1);
        if (kChangingUnit && first_thread) units[kConsumers + warpgroup] = units[warpgroup];
        barrier_arrive(terms_empty + 8 * warpgroup);
#pragma unroll
        for (int k = 0; k < kKeys / 16; ++k)
          store_matrix_x4(TileLayout<Element, kChunk>::advance(weight_row, 2 * (k % 4)) + k / 4 * kQueries * kChunkRowBytes, operand[k]);
        proxy_fence();
        warpgroup_barrier(warpgroup);  // all of dS is there, and nobody reads the other side's queries any more
        if (first_thread) barrier_arrive(weights_full + 8 * warpgroup);

        // dQ of the tile to the copy engine, which adds it to the sums.
        if constexpr (DQ) {
          wgmma_wait<0>();
          hold(dq);
          stage_dq<0, kStagedColumns>(staging, dq);
          if constexpr (kStagedInSlice) stage_dq<kChunk, kOwnDim>(ring.slice(other_slot), dq);
          proxy_fence();
          warpgroup_barrier(warpgroup);
          if (first_thread) {
            float* const to = sums.data + dq_tile(problem, kept.keys.sequence, head, tile) * (kDqRows * kOwnDim);
            bulk_reduce_add_f32(to, staging, kStagingBytes);
            if constexpr (kStagedInSlice) bulk_reduce_add_f32(to + kDqRows * kChunk, ring.slice(other_slot), kStagingBytes);
            bulk_commit();
          }
          staged_slot = other_slot;
        }
      }
    }
    if (DQ && first_thread) bulk_wait<0>();
  }
}
