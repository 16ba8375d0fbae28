// Where the fused backward kernel adds up dQ: float32, tile by tile of 64 query rows, each in the order of the tensor cores'
// registers, so that a lane's four neighbours are one 16-byte access. Tiles are numbered like the blocks of a grid over queries.
// The backward for few rows adds up plain rows, in the order of the row arrays.
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

// Columns kFirst to kEnd - 1 of a warpgroup's dQ into shared memory, from where the copy engine adds them to a tile's sums.
template <int kFirst, int kEnd, int kCount>
__device__ __forceinline__ void stage_dq(u32 staging, const float (&dq)[kCount]) {
  const int thread = static_cast<int>(threadIdx.x) % 128;
#pragma unroll
  for (int i = kFirst / 8; i < kEnd / 8; ++i)
    store_shared_4(staging + 16 * thread + 2048 * (i - kFirst / 8), dq[4 * i], dq[4 * i + 1], dq[4 * i + 2], dq[4 * i + 3]);
}

// gradient (+)= dS^T Q: dS lies in shared memory in rows of queries, as chunks of 64 keys, and Q as a slice of kQueries rows.
template <typename Element, int kQueries, int kKeyChunks, int kColumnBlocks>
__device__ __forceinline__ void add_dk(float (&gradient)[kKeyChunks][1][kColumnBlocks][4], u32 weight_tile, u32 slice, bool accumulate) {
  const u64 left = wgmma_descriptor(weight_tile), right = wgmma_descriptor(slice, kQueries * kChunkRowBytes);
#pragma unroll
  for (int m = 0; m < kKeyChunks; ++m) hold(reinterpret_cast<float(&)[4 * kColumnBlocks]>(gradient[m]));
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < kQueries / 16; ++k) {
#pragma unroll
    for (int m = 0; m < kKeyChunks; ++m)
      wgmma<1, 1>(Element(), reinterpret_cast<float(&)[4 * kColumnBlocks]>(gradient[m]), left + (m * kQueries + 16 * k) * kChunkRowBytes / 16,
                  right + 16 * k * kChunkRowBytes / 16, accumulate || k > 0);
  }
  wgmma_commit();
  wgmma_wait<0>();
#pragma unroll
  for (int m = 0; m < kKeyChunks; ++m) hold(reinterpret_cast<float(&)[4 * kColumnBlocks]>(gradient[m]));
}
