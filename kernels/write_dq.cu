// The gradient dQ of one side from the sums of the fused backward kernel: scaled, in the shape and the element type asked for.
//
//   dQ = scale unit sum        (dq_sums.cuh says where a sum lies, and what the unit is)
//
// Specialised by: ELEMENT, SIDE (1 or 2), HEAD_DIM (padded, as the sums have it).
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

extern "C" __global__ void __launch_bounds__(128)
write_dq(const __grid_constant__ Problem problem, const __grid_constant__ RowWeights weights, const __grid_constant__ GradientOutput output,
         const __grid_constant__ DqSums sums) {
  const TileIndex index = locate(problem, problem.cu_seqlens_q, problem.seqlen_q, problem.heads, blockIdx.x, kDqRows, false);
  const OwnTile rows = own_tile(problem, index, kDqRows, true);
  if (rows.begin >= rows.end) return;
  float values[1][HEAD_DIM / 8][4];
  const float4* tile = reinterpret_cast<const float4*>(sums.data + static_cast<i64>(blockIdx.x) * (kDqRows * HEAD_DIM)) + threadIdx.x;
#pragma unroll
  for (int i = 0; i < HEAD_DIM / 8; ++i) *reinterpret_cast<float4*>(values[0][i]) = tile[128 * i];
  float factor[1][2];
  factor[0][0] = factor[0][1] = (SIDE == 1 ? problem.scale1 : problem.scale2) * weight_unit<Element, SIDE>(weights);
  const int warp_row = static_cast<int>(threadIdx.x) / 32 * 16;
  write_gradient<Element>(values, factor, SIDE == 1 ? output.q1 : output.q2, output.as_float32, rows, rows.sequence.q_begin, rows.begin + warp_row, 0,
                          SIDE == 1 ? problem.head_dim1 : problem.head_dim2, Lane());
}

// The same from plain rows, each by a warp.
extern "C" __global__ void __launch_bounds__(128)
write_dq_rows(const __grid_constant__ Problem problem, const __grid_constant__ RowWeights weights, const __grid_constant__ GradientOutput output,
              const __grid_constant__ DqSums sums) {
  const i64 row = blockIdx.x * 4ll + threadIdx.x / 32, heads = row / problem.seqlen_q;
  if (heads >= static_cast<i64>(problem.batch) * problem.heads) return;
  const Matrix& matrix = SIDE == 1 ? output.q1 : output.q2;
  const i64 at = heads / problem.heads * matrix.batch_stride + heads % problem.heads * matrix.head_stride + row % problem.seqlen_q * matrix.row_stride;
  const float factor = (SIDE == 1 ? problem.scale1 : problem.scale2) * weight_unit<Element, SIDE>(weights);
  for (int column = 2 * (threadIdx.x % 32); column < (SIDE == 1 ? problem.head_dim1 : problem.head_dim2); column += 64) {
    const float2 sum = *reinterpret_cast<const float2*>(sums.data + row * HEAD_DIM + column);
    if (output.as_float32) *reinterpret_cast<float2*>(static_cast<float*>(matrix.data) + at + column) = make_float2(sum.x * factor, sum.y * factor);
    else store_pair(static_cast<Element*>(matrix.data) + at + column, sum.x * factor, sum.y * factor);
  }
}
