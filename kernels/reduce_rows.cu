// The sum of the rows' KL, or its mean over the rows that see at least one key; the count stays on the device.
//
// First as many blocks as the launch has sum a part each, in float64; then one block sums the parts. A fixed order: deterministic.
#include "problem.cuh"
#include "row_stats.cuh"

struct Total {
  double kl;
  double rows;  // that see a key
};

constexpr int kThreads = 256;

// The block's total, in thread 0.
__device__ __forceinline__ Total block_total(Total mine) {
  __shared__ Total warps[kThreads / 32];
  for (int distance = 16; distance > 0; distance /= 2) {
    mine.kl += __shfl_xor_sync(0xffffffffu, mine.kl, distance);
    mine.rows += __shfl_xor_sync(0xffffffffu, mine.rows, distance);
  }
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = mine;
  __syncthreads();
  Total total = {0, 0};
  if (threadIdx.x == 0) {
    for (int i = 0; i < kThreads / 32; ++i) total.kl += warps[i].kl, total.rows += warps[i].rows;
  }
  return total;
}

extern "C" __global__ void __launch_bounds__(kThreads)
reduce_rows(const __grid_constant__ RowStatsArrays rows, i64 count, Total* partial) {
  Total mine = {0, 0};
  for (i64 row = blockIdx.x * static_cast<i64>(kThreads) + threadIdx.x; row < count; row += gridDim.x * static_cast<i64>(kThreads)) {
    mine.kl += rows.kl[row];
    mine.rows += rows.logsum1[row] > -__int_as_float(0x7f800000) ? 1.0 : 0.0;
  }
  const Total total = block_total(mine);
  if (threadIdx.x == 0) partial[blockIdx.x] = total;
}

// value: the sum, or the mean when `mean` is not 0; factor: what a row's gradient is multiplied by, 1 or 1 / rows. No rows: 0.
extern "C" __global__ void __launch_bounds__(kThreads)
reduce_partial(const Total* partial, int count, int mean, float* value, float* factor) {
  Total mine = {0, 0};
  for (int i = threadIdx.x; i < count; i += kThreads) mine.kl += partial[i].kl, mine.rows += partial[i].rows;
  const Total total = block_total(mine);
  if (threadIdx.x == 0) {
    const double weight = !mean ? 1.0 : (total.rows > 0 ? 1.0 / total.rows : 0.0);
    *value = static_cast<float>(total.kl * weight);
    *factor = static_cast<float>(weight);
  }
}
