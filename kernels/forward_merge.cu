// Joins row statistics over disjoint sets of keys: the splits of one forward call, or the shards that a caller merges.
//
// Part i of an array lies i * stride from part 0 (in elements; each array has its own stride, so parts may lie anywhere).
// The parts of a row are merged in their order: deterministic.
#include "problem.cuh"
#include "row_stats.cuh"

struct MergeInput {
  RowStatsArrays first;
  i64 kl_stride, ref1_stride, logsum1_stride, ref2_stride, logsum2_stride;
  i64 rows;
  i64 parts;
};

extern "C" __global__ void __launch_bounds__(256)
forward_merge(const __grid_constant__ MergeInput input, const __grid_constant__ RowStatsArrays output) {
  for (i64 row = blockIdx.x * 256ll + threadIdx.x; row < input.rows; row += gridDim.x * 256ll) {
    OnlineRow merged;
    merged.clear();
    for (i64 part = 0; part < input.parts; ++part) {
      merged.merge(reopen({input.first.kl[row + part * input.kl_stride], input.first.ref1[row + part * input.ref1_stride],
                           input.first.logsum1[row + part * input.logsum1_stride], input.first.ref2[row + part * input.ref2_stride],
                           input.first.logsum2[row + part * input.logsum2_stride]}));
    }
    store(output, row, finish(merged));
  }
}
