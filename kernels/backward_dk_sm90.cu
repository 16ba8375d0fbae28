// dK of one side on Hopper: TMA and wgmma, float16 and bfloat16, head dimensions up to 128; hopper_terms.cuh holds the formulas.
//
// The mirror of backward_dq_sm90.cu: two consumer warpgroups own 64 keys each, and the queries that see them stream by, all query
// heads of the group one after the other. Logits are computed transposed, S^T = K Q^T, so that their gradient is again an operand
// without leaving the registers. A second warp of the producer's brings the queries' statistics along with each tile.
// Every key has one owner and one order: deterministic. For g see backward_dk_sm80.cu.
//
// "Own" is the side whose gradient is wanted: its keys lie in shared memory, the other side's in registers.
// Specialised by: ELEMENT, SIDE (1 or 2), HEAD_DIM1, HEAD_DIM2 (padded), QUERIES (of a tile), STAGES (slices in the ring, even).
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
constexpr int kConsumers = 2;
constexpr int kThreads = 128 * (kConsumers + 1);
constexpr int kRows = 64 * kConsumers;
constexpr int kQueries = QUERIES;
constexpr int kColumnBlocks = kQueries / 8;
constexpr int kOwnDim = SIDE == 1 ? HEAD_DIM1 : HEAD_DIM2, kOtherDim = SIDE == 1 ? HEAD_DIM2 : HEAD_DIM1;
constexpr int kOwnBytes = kRows * kChunkRowBytes * chunks_of(kOwnDim);
constexpr int kSliceBytes = kQueries * kChunkRowBytes * chunks_of(kOwnDim > kOtherDim ? kOwnDim : kOtherDim);
static_assert(kQueries % 16 == 0, "queries are summed over in steps of 16");
static_assert(STAGES % 2 == 0, "a tile's two slices share an entry of the statistics");

extern "C" __global__ void __launch_bounds__(kThreads, 1)
backward_dk_sm90(const __grid_constant__ Problem problem, const __grid_constant__ RowWeights weights, const __grid_constant__ GradientOutput output,
                 const __grid_constant__ TensorMap q1_map, const __grid_constant__ TensorMap q2_map) {
  // Storage.
  extern __shared__ __align__(1024) unsigned char shared[];
  const u32 own_tile = shared_address(shared);
  const Ring<STAGES, kSliceBytes> ring(own_tile + kOwnBytes);
  const TermsRing<STAGES> terms_ring{own_tile + kOwnBytes + ring.kBytes};
  // Read again tile by tile: no registers are left to keep it in.
  OwnTile& kept_keys = *reinterpret_cast<OwnTile*>(shared + kOwnBytes + ring.kBytes + terms_ring.kBytes);
  RowTerms* all_terms = reinterpret_cast<RowTerms*>(&kept_keys + 1);
  float* units = reinterpret_cast<float*>(all_terms + STAGES / 2 * kQueries);  // what each tile's weights were divided by

  // Whose keys, and which queries see them.
  const int own_heads = SIDE == 1 ? problem.heads_k1 : problem.heads_k2;
  const OwnTile keys = key_tile(problem, blockIdx.x, kRows, own_heads);
  if (keys.begin >= keys.end) return;
  const Sequence& s = keys.sequence;
  const Span queries = rows_seeing_some(keys.band, keys.begin, keys.valid_end);
  const Span unmasked = rows_seeing_all(keys.band, keys.begin, keys.valid_end);
  const Span tiles = share_of(queries, kQueries, 0, 1);
  const int group = problem.heads / own_heads, first_head = keys.head * group, tile_count = tiles.end - tiles.begin;
  const int steps = tile_count * group;

  // Barriers. The first slice of a tile is full when the statistics are there, too.
  const int working = (keys.valid_end - keys.begin + 63) / 64;  // warpgroups that own a valid key; the others only write zeros
  if (threadIdx.x == 0) {
    kept_keys = keys;
    for (int i = 0; i < STAGES; ++i) {
      barrier_init(ring.full + 8 * i, i % 2 == 0 ? 33 : 1);
      barrier_init(ring.empty + 8 * i, max(working, 1));
    }
    terms_ring.init(working);
    proxy_fence();
  }
  __syncthreads();

  const int warpgroup = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 128, 0);
  if (warpgroup == kConsumers) {
    // Producers: one thread for the slices, one warp for the statistics.
    registers_give<40>();
    const int warp = static_cast<int>(threadIdx.x) % 128 / 32, lane = static_cast<int>(threadIdx.x) % 32;
    RingPosition<STAGES> at;
    if (warp == 0 && lane == 0 && working > 0) {
      for (int step = 0; step < steps; ++step) {
        const int head = first_head + step / tile_count, query = static_cast<int>(s.q_begin) + (tiles.begin + step % tile_count) * kQueries;
        ring.bring(at, SIDE == 1 ? &q2_map : &q1_map, chunks_of(kOtherDim), kQueries, query, head, s.batch_index);
        ring.bring(at, SIDE == 1 ? &q1_map : &q2_map, chunks_of(kOwnDim), kQueries, query, head, s.batch_index);
      }
    } else if (warp == 1 && working > 0) {
      float unit = kWideExponent<Element> ? 1.0f : 0.0f;
      for (int step = 0; step < steps; ++step) {
        const int head = first_head + step / tile_count, first_query = (tiles.begin + step % tile_count) * kQueries;
        terms_ring.await_empty(at);
        QueryTerms query[kQueries / 32];
        float largest = 0.0f;
#pragma unroll
        for (int i = 0; i < kQueries / 32; ++i) {
          query[i] = query_terms(problem, weights, s, head, first_query + 32 * i + lane, queries);
          largest = fmaxf(largest, fabsf(query[i].g));
        }
        if (!kWideExponent<Element>) unit = fmaxf(unit, power_of_two_near_largest(largest / kRaise<Element, SIDE>));
#pragma unroll
        for (int i = 0; i < kQueries / 32; ++i)
          all_terms[at.slot / 2 * kQueries + 32 * i + lane] = row_terms<SIDE>(query[i].stats, query[i].g / unit);
        if (!kWideExponent<Element> && lane == 0) units[at.slot / 2] = unit;
        barrier_arrive(ring.full + 8 * at.slot);
        at.advance();
        at.advance();
      }
    }
  } else {
    // Consumers.
    registers_take<232>();
    const Matrix& own_k = SIDE == 1 ? problem.k1 : problem.k2;
    const Matrix& other_k = SIDE == 1 ? problem.k2 : problem.k1;
    copy_operand_async<Element, kRows, kOwnDim, 128 * kConsumers>(own_tile, head_rows<Element>(own_k, s.batch_index, keys.head, s.k_begin),
                                                                 own_k.row_stride, keys.begin, {keys.begin, keys.valid_end},
                                                                 SIDE == 1 ? problem.head_dim1 : problem.head_dim2);
    copy_async_commit();
    copy_async_wait<0>();
    proxy_fence();  // what ordinary copies wrote, the tensor cores read
    named_barrier<1, 128 * kConsumers>();
    const Lane lane;
    const int warp_row = 64 * warpgroup + static_cast<int>(threadIdx.x) % 128 / 32 * 16;
    const u64 own_rows = wgmma_descriptor(own_tile + warpgroup * 64 * kChunkRowBytes);
    u32 other[kOtherDim / 16][4];
    auto left_other = [&](int k) -> const u32(&)[4] { return other[k]; };
    auto left_own = [&](int k) { return own_rows + (k / 4 * kRows * kChunkRowBytes + k % 4 * 32) / 16; };

    RingPosition<STAGES> at;
    float gradient[1][kOwnDim / 8][4];
    auto& result = reinterpret_cast<float(&)[kOwnDim / 2]>(gradient);
    u32 operand[kQueries / 16][4];
    int product_slot = -1;  // of the slice that the product in flight reads
    float unit = 1.0f;
    const int other_group = problem.heads / (SIDE == 1 ? problem.heads_k2 : problem.heads_k1);
    for (int step = 0; step < steps && warpgroup < working; ++step) {
      const int head = first_head + step / tile_count, first_query = (tiles.begin + step % tile_count) * kQueries;
      // The other side may have more key heads than this one: then its keys change in the middle of the group.
      if (step == 0 || (step % tile_count == 0 && head % other_group == 0))
        load_operand<Element, kOtherDim>(other, head_rows<Element>(other_k, kept_keys.sequence.batch_index, head / other_group, kept_keys.sequence.k_begin),
                                         other_k.row_stride, kept_keys.begin + warp_row, kept_keys.valid_end,
                                         SIDE == 1 ? problem.head_dim2 : problem.head_dim1, lane);
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
      hold(result);
      if (threadIdx.x % 128 == 0) {
        ring.release(other_slot);
        if (product_slot >= 0) ring.release(product_slot);
      }

      if (!kWideExponent<Element>) {
        const float new_unit = units[other_slot / 2];
        if (new_unit != unit && step > 0) scale_all(gradient, unit / new_unit);
        unit = new_unit;
      }
      gradients_by_column<SIDE>(s1, s2, problem.log2_scale1, problem.log2_scale2, all_terms + other_slot / 2 * kQueries, lane);
      auto& own = SIDE == 1 ? s1 : s2;
      terms_ring.release(other_slot);
      if (first_query < unmasked.begin || first_query + kQueries > unmasked.end) {
        hide_queries_unseeing(own, kept_keys.band, kept_keys.begin + warp_row, first_query, lane);
        clear_rows<kQueries>(ring.slice(own_slot), chunks_of(kOwnDim), first_query, queries, warpgroup);
      }
      to_operand<Element>(operand, own);
      start_weighted_rows<Element, kQueries>(result, operand, ring.slice(own_slot), product_slot >= 0);
      product_slot = own_slot;
    }
    wgmma_wait<0>();
    hold(result);
    if (product_slot < 0) clear(gradient);  // nothing was seen, and the registers hold anything

    // Results.
    float factor[1][2];
    factor[0][0] = factor[0][1] = (SIDE == 1 ? problem.scale1 : problem.scale2) * unit;
    write_gradient<Element>(gradient, factor, SIDE == 1 ? output.k1 : output.k2, output.as_float32, kept_keys, kept_keys.sequence.k_begin,
                            kept_keys.begin + warp_row, 0, SIDE == 1 ? problem.head_dim1 : problem.head_dim2, lane);
  }
}
