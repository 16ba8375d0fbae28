// Joins row statistics over disjoint sets of keys: the shards that a caller merges, or the splits of one forward call.
// The parts of a row are merged in their order: deterministic.
#include "problem.cuh"
#include "mask.cuh"
#include "row_stats.cuh"
#include "ptx_sm80.cuh"
#include "tile.cuh"
#include "blocks.cuh"
#include "forward.cuh"

// Part i of an array lies i * stride from part 0 (in elements; each array has its own stride, so parts may lie anywhere).
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

// The row tiles of a forward call that were split over the keys, a block each.
extern "C" __global__ void __launch_bounds__(256)
forward_merge_splits(const __grid_constant__ Problem problem, const __grid_constant__ ForwardOutput output, int tile_rows) {
  const OwnTile rows = query_tile(problem, output.whole_tiles + static_cast<i64>(blockIdx.x), tile_rows);
  const i64 base = row_arrays_offset(problem, rows.sequence, rows.head) + rows.begin;
  for (int row = threadIdx.x; row < rows.end - rows.begin; row += 256) {
    OnlineRow merged;
    merged.clear();
    for (int split = 0; split < output.splits; ++split)
      merged.merge(reopen(load(output.partial, split * output.partial_stride + static_cast<i64>(blockIdx.x) * tile_rows + row)));
    store(output.rows, base + row, finish(merged));
  }
}
