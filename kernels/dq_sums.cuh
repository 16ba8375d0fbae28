// Where the fused backward kernel adds up dQ: float32, tile by tile of 64 query rows, each in the order of the tensor cores'
// registers, so that a lane's four neighbours are one 16-byte access. Tiles are numbered like the blocks of a grid over queries.
#pragma once

constexpr int kDqRows = 64;

struct DqSums {
  float* data;
};

// The number of a tile of a query head; `locate` finds the tile of a number.
__device__ __forceinline__ i64 dq_tile(const Problem& problem, const Sequence& s, int head, int tile) {
  const bool packed = problem.cu_seqlens_q != nullptr;
  const i64 tiles = packed ? problem.seqlen_q / kDqRows + problem.batch + 1 : ceil_div(problem.seqlen_q, kDqRows);
  const i64 first = packed ? s.q_begin / kDqRows + s.index : 0;
  return (static_cast<i64>(s.batch_index) * problem.heads + head) * tiles + first + tile;
}

// The weights of rows are divided by this before dS is rounded, and the gradients multiplied by it. bfloat16 has float32's range;
// for float16 the host sees to it that every row has the same weight, and the unit is a power of two near that.
template <typename Element, int kSide>
__device__ __forceinline__ float weight_unit(const RowWeights& weights) {
  if (kWideExponent<Element>) return 1.0f;
  return power_of_two_near(fabsf(row_weight(weights, 0, 0, 0)) / kRaise<Element, kSide>);
}

// Adds dS K to a tile's sums, for kColumns columns of K in one chunk: dS^T lies in `left`, K in `right`, kRows rows each. Half of a
// wide tile at a time, so that a warpgroup does with few registers. The sums leave through `staging`, of which there are two that
// take turns. `done()` is called when dS^T and K have been read.
template <typename Element, int kRows, int kColumns, typename Done>
__device__ __forceinline__ void add_dq(float* to, u32 staging, u64 left, u64 right, int warpgroup, const Done& done) {
  float dq[kColumns / 2];
  hold(dq);
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < kRows / 16; ++k) wgmma<1, 1>(Element(), dq, left + k * (16 * kChunkRowBytes) / 16, right + k * (16 * kChunkRowBytes) / 16, k > 0);
  wgmma_commit();
  const int thread = static_cast<int>(threadIdx.x) % 128;
  if (thread == 0) bulk_wait_read<1>();
  warpgroup_barrier(warpgroup);
  wgmma_wait<0>();
  hold(dq);
  done();
#pragma unroll
  for (int i = 0; i < kColumns / 8; ++i) store_shared_4(staging + 16 * thread + 2048 * i, dq[4 * i], dq[4 * i + 1], dq[4 * i + 2], dq[4 * i + 3]);
  proxy_fence();
  warpgroup_barrier(warpgroup);
  if (thread == 0) {
    bulk_reduce_add_f32(to, staging, 4 * kDqRows * kColumns);
    bulk_commit();
  }
}
