// For operands too large to stay in shared memory: head dimensions of any size, and float32. Logits are summed over chunks of
// columns, both sides of the product streaming by.
//
// float32 products are plain FFMA in the layout of the mma accumulators. On tensor cores the 1e-5 that is promised would take three
// TF32 or six bfloat16 products and their splitting, and the gain would depend on the card; this is exact everywhere.
#pragma once

template <typename Element>
constexpr bool kFloat32 = sizeof(Element) == 4;

// scores += X Y^T over one chunk of columns.
template <typename Element, int kColumns, int kRowBlocks, int kColumnBlocks>
__device__ __forceinline__ void add_chunk_scores(float (&scores)[kRowBlocks][kColumnBlocks][4], const unsigned char* x_tile, int x_row,
                                                 const unsigned char* y_tile, const Lane& lane) {
  if constexpr (!kFloat32<Element>) {
    add_scores<Element, kColumns>(scores, shared_address(x_tile), x_row, shared_address(y_tile), lane);
  } else {
    using Layout = TileLayout<Element, kColumns>;
#pragma unroll 2
    for (int chunk = 0; chunk < Layout::kChunks; ++chunk) {
      float4 x[kRowBlocks][2];
#pragma unroll
      for (int m = 0; m < kRowBlocks; ++m) {
#pragma unroll
        for (int half = 0; half < 2; ++half)
          x[m][half] = *reinterpret_cast<const float4*>(x_tile + Layout::offset(x_row + 16 * m + 8 * half + lane.row, chunk));
      }
#pragma unroll
      for (int n = 0; n < kColumnBlocks; ++n) {
#pragma unroll
        for (int odd = 0; odd < 2; ++odd) {
          const float4 y = *reinterpret_cast<const float4*>(y_tile + Layout::offset(8 * n + lane.column + odd, chunk));
#pragma unroll
          for (int m = 0; m < kRowBlocks; ++m) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
              float& s = scores[m][n][2 * half + odd];
              s = fmaf(x[m][half].w, y.w, fmaf(x[m][half].z, y.z, fmaf(x[m][half].y, y.y, fmaf(x[m][half].x, y.x, s))));
            }
          }
        }
      }
    }
  }
}

// result += W Y, with Y a tile of kColumns columns. In float32 the four lanes of a quad hand their weights to each other.
template <typename Element, int kColumns, int kRowBlocks, int kColumnBlocks>
__device__ __forceinline__ void add_chunk_rows(float (&result)[kRowBlocks][kColumns / 8][4], const float (&weights)[kRowBlocks][kColumnBlocks][4],
                                               const unsigned char* y_tile, const Lane& lane) {
  if constexpr (!kFloat32<Element>) {
    add_weighted_rows<Element, kColumns>(result, weights, shared_address(y_tile), lane);
  } else {
    using Layout = TileLayout<Element, kColumns>;
#pragma unroll
    for (int k = 0; k < 8 * kColumnBlocks; ++k) {
      float w[kRowBlocks][2];
#pragma unroll
      for (int m = 0; m < kRowBlocks; ++m) {
#pragma unroll
        for (int half = 0; half < 2; ++half)
          w[m][half] = __shfl_sync(0xffffffffu, weights[m][k / 8][2 * half + k % 2], (lane.index & ~3) | (k % 8 / 2));
      }
#pragma unroll
      for (int n = 0; n < kColumns / 8; ++n) {
        const int column = 8 * n + lane.column;
        const float2 y = *reinterpret_cast<const float2*>(y_tile + Layout::offset(k, column / 4) + column % 4 * 4);
#pragma unroll
        for (int m = 0; m < kRowBlocks; ++m) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            result[m][n][2 * half] = fmaf(w[m][half], y.x, result[m][n][2 * half]);
            result[m][n][2 * half + 1] = fmaf(w[m][half], y.y, result[m][n][2 * half + 1]);
          }
        }
      }
    }
  }
}

// Two stages through which (tile, side, chunk) steps stream: a step is copied while the one before it is read.
// `copy(step, stage)` issues the asynchronous copies of one step, or none past the stream's end.
template <int kStageBytes, typename Copy>
struct ChunkStream {
  Copy copy;
  unsigned char* stages;
  int step = 0;

  __device__ __forceinline__ ChunkStream(Copy copy, unsigned char* stages) : copy(copy), stages(stages) {
    copy(0, stages);
    copy_async_commit();
  }
  __device__ __forceinline__ unsigned char* next() {
    copy_async_wait<0>();
    __syncthreads();  // everyone's copies have arrived, and everyone is done with the stage that is filled now
    unsigned char* stage = stages + step % 2 * kStageBytes;
    ++step;
    copy(step, stages + step % 2 * kStageBytes);
    copy_async_commit();
    return stage;
  }
};

__device__ __forceinline__ int chunk_count(int head_dim, int chunk) { return (head_dim + chunk - 1) / chunk; }
