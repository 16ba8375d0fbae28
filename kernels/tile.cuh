// Tiles in shared memory, and which fragment element belongs to which lane.
//
// A tile is row-major in 16-byte chunks. Chunk c of a row lies at c ^ f(row), where f makes the eight rows that one ldmatrix
// phase reads (the same chunk of eight neighbouring rows) fall on eight different groups of four banks.
#pragma once

template <typename Element, int kColumns>
struct TileLayout {
  static constexpr int kPerChunk = 16 / sizeof(Element);
  static constexpr int kChunks = kColumns / kPerChunk;
  static constexpr int kRowBytes = kChunks * 16;
  // Rows 8 / gcd(kChunks, 8) apart start on the same banks: those are the ones to tell apart.
  static constexpr int kShift = kChunks % 8 == 0 ? 0 : (kChunks % 4 == 0 ? 1 : 2);
  static constexpr int kMask = 7 >> kShift;
  static_assert(kColumns % kPerChunk == 0 && kChunks % 2 == 0, "a tile row is a whole even number of 16-byte chunks");

  __device__ static __forceinline__ int swizzle(int row) { return (row >> kShift) & kMask; }
  __device__ static __forceinline__ u32 offset(int row, int chunk) {
    return static_cast<u32>(row * kRowBytes + ((chunk ^ swizzle(row)) << 4));
  }
  // From the address of (row, chunk 0 or 1) to that of (row, chunk + even): the bits of a chunk that the swizzle touches are
  // free in a row's address, so one XOR with a constant does it, and every fragment address hangs on one register.
  __device__ static __forceinline__ u32 advance(u32 address, int even) {
    return (address ^ static_cast<u32>((even & kMask) << 4)) + static_cast<u32>((even & ~kMask) << 4);
  }
};

// Rows [first_row, first_row + kRows) of a matrix into a tile, asynchronously. Rows outside `valid` and columns from `columns`
// on become zero without being read: they may hold NaN, and 0 times NaN would not be 0.
template <typename Element, int kRows, int kColumns, int kThreads>
__device__ __forceinline__ void copy_tile_async(u32 tile, const Element* rows, i64 row_stride, int first_row, Span valid,
                                                int columns) {
  using Layout = TileLayout<Element, kColumns>;
#pragma unroll
  for (int i = 0; i < (kRows * Layout::kChunks + kThreads - 1) / kThreads; ++i) {
    const int index = i * kThreads + static_cast<int>(threadIdx.x);
    if (kRows * Layout::kChunks % kThreads != 0 && index >= kRows * Layout::kChunks) break;
    const int row = index / Layout::kChunks, chunk = index % Layout::kChunks;
    const int source_row = first_row + row;
    const bool inside = source_row >= valid.begin && source_row < valid.end && chunk * Layout::kPerChunk < columns;
    const Element* source = inside ? rows + source_row * row_stride + chunk * Layout::kPerChunk : rows;
    copy_async_16(tile + Layout::offset(row, chunk), source, inside);
  }
}

// An accumulator block is 16 rows by 8 columns over a warp: a lane owns elements (row, column), (row, column + 1),
// (row + 8, column) and (row + 8, column + 1) in this order. The four lanes of a quad share their two rows.
struct Lane {
  int index, row, column;
  __device__ __forceinline__ Lane() : index(threadIdx.x % 32), row(index / 4), column(2 * (index % 4)) {}
};

// scores[16 kRowBlocks x 8 kColumnBlocks] += X Y^T over kHeadDim columns: rows of X from `x_row` on, all rows of Y.
template <typename Element, int kHeadDim, int kRowBlocks, int kColumnBlocks>
__device__ __forceinline__ void add_scores(float (&scores)[kRowBlocks][kColumnBlocks][4], u32 x_tile, int x_row, u32 y_tile,
                                           const Lane& lane) {
  using Layout = TileLayout<Element, kHeadDim>;
  static_assert(kColumnBlocks % 2 == 0, "one ldmatrix.x4 brings the keys of two column blocks");
  const u32 x_lane = x_tile + Layout::offset(x_row + lane.index % 16, lane.index / 16);
  const u32 y_lane = y_tile + Layout::offset(lane.index / 16 * 8 + lane.index % 8, lane.index / 8 % 2);
#pragma unroll
  for (int k = 0; k < kHeadDim / 16; ++k) {
    u32 x[kRowBlocks][4];
#pragma unroll
    for (int m = 0; m < kRowBlocks; ++m)
      load_matrix_x4(x[m], Layout::advance(x_lane, 2 * k) + 16 * m * Layout::kRowBytes);
#pragma unroll
    for (int n = 0; n < kColumnBlocks; n += 2) {
      u32 y[4];
      load_matrix_x4(y, Layout::advance(y_lane, 2 * k) + 8 * n * Layout::kRowBytes);
#pragma unroll
      for (int m = 0; m < kRowBlocks; ++m) {
        mma_16x8x16(Element(), scores[m][n], x[m], y[0], y[1]);
        mma_16x8x16(Element(), scores[m][n + 1], x[m], y[2], y[3]);
      }
    }
  }
}

// result[16 kRowBlocks x kHeadDim] += W Y, where W is an accumulator rounded to the element type: its registers are the operand.
template <typename Element, int kHeadDim, int kRowBlocks, int kColumnBlocks>
__device__ __forceinline__ void add_weighted_rows(float (&result)[kRowBlocks][kHeadDim / 8][4],
                                                  const float (&weights)[kRowBlocks][kColumnBlocks][4], u32 y_tile,
                                                  const Lane& lane) {
  using Layout = TileLayout<Element, kHeadDim>;
  const u32 y_lane = y_tile + Layout::offset(lane.index % 16, lane.index / 16);
#pragma unroll
  for (int k = 0; k < kColumnBlocks / 2; ++k) {
    u32 w[kRowBlocks][4];
#pragma unroll
    for (int m = 0; m < kRowBlocks; ++m) {
#pragma unroll
      for (int i = 0; i < 4; ++i)
        w[m][i] = pack(Element(), weights[m][2 * k + i / 2][2 * (i % 2)], weights[m][2 * k + i / 2][2 * (i % 2) + 1]);
    }
#pragma unroll
    for (int n = 0; n < kHeadDim / 8; n += 2) {
      u32 y[4];
      load_matrix_x4_transposed(y, Layout::advance(y_lane, n) + 16 * k * Layout::kRowBytes);
#pragma unroll
      for (int m = 0; m < kRowBlocks; ++m) {
        mma_16x8x16(Element(), result[m][n], w[m], y[0], y[1]);
        mma_16x8x16(Element(), result[m][n + 1], w[m], y[2], y[3]);
      }
    }
  }
}
