// What the Hopper kernels share: the ring that the copy engine fills, and tiles as operands of wgmma.
//
// Operands in shared memory come in chunks of 64 columns: rows of 128 bytes, swizzled alike by TileLayout and by the copy engine.
#pragma once

constexpr int kChunk = 64, kChunkRowBytes = 128;

__host__ __device__ constexpr int chunks_of(int head_dim) { return (head_dim + kChunk - 1) / kChunk; }

// Consumers and producer walk the same ring of slices.
template <int kStages>
struct RingPosition {
  int slot = 0;
  u32 parity = 0;
  __device__ __forceinline__ void advance() {
    if (++slot == kStages) slot = 0, parity ^= 1;
  }
};

// The ring: slices, and for each a barrier that says it is full and one that says it is empty.
template <int kStages, int kSliceBytes>
struct Ring {
  u32 slices, full, empty;

  static constexpr int kBytes = kStages * (kSliceBytes + 16);
  __device__ __forceinline__ explicit Ring(u32 base) : slices(base), full(base + kStages * kSliceBytes), empty(full + 8 * kStages) {}

  __device__ __forceinline__ void await(const RingPosition<kStages>& at) const { barrier_wait(full + 8 * at.slot, at.parity); }
  __device__ __forceinline__ void await_empty(const RingPosition<kStages>& at) const { barrier_wait(empty + 8 * at.slot, at.parity ^ 1); }
  // The same for a warpgroup that does not read every round of a slot: the wait would pass at once while the round before is still on
  // its way, for it tells even rounds from odd ones only. Boxes arrive in any order.
  __device__ __forceinline__ void await_own_round(const RingPosition<kStages>& at) const {
    await_empty(at);
    await(at);
  }
  __device__ __forceinline__ u32 slice(int slot) const { return slices + slot * kSliceBytes; }

  // By one thread: `rows` rows from `row` on of one head, all columns, into the next slice.
  __device__ __forceinline__ void bring(RingPosition<kStages>& at, const TensorMap* map, int chunks, int rows, int row, int head, int batch) const {
    await_empty(at);
    barrier_arrive_expect(full + 8 * at.slot, chunks * rows * kChunkRowBytes);
    for (int c = 0; c < chunks; ++c)
      copy_box_4d(slice(at.slot) + c * rows * kChunkRowBytes, map, full + 8 * at.slot, c * kChunk, row, head, batch);
    at.advance();
  }
  // By one thread of a warpgroup: it will not read the slice again.
  __device__ __forceinline__ void release(int slot) const { barrier_arrive(empty + 8 * slot); }
};

// A warp's 16 rows as left operands, one for each 16 columns; rows and columns that do not exist are zero.
template <typename Element, int kHeadDim>
__device__ __forceinline__ void load_operand(u32 (&fragments)[kHeadDim / 16][4], const Element* head, i64 row_stride, int first_row,
                                             int valid_end, int columns, const Lane& lane) {
#pragma unroll
  for (int k = 0; k < kHeadDim / 16; ++k) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = first_row + lane.row + 8 * (i % 2), column = 16 * k + lane.column + 8 * (i / 2);
      fragments[k][i] = row < valid_end && column < columns ? *reinterpret_cast<const u32*>(head + row * row_stride + column) : 0u;
    }
  }
}

// kRows rows as an operand in shared memory, by kThreads threads from 0 on, asynchronously; zeros where there are none.
template <typename Element, int kRows, int kHeadDim, int kThreads>
__device__ __forceinline__ void copy_operand_async(u32 tile, const Element* head, i64 row_stride, int first_row, Span valid, int columns) {
  for (int c = 0; c < chunks_of(kHeadDim); ++c)
    copy_tile_async<Element, kRows, kChunk, kThreads>(tile + c * kRows * kChunkRowBytes, head + c * kChunk, row_stride, first_row, valid,
                                                      columns - c * kChunk);
}

// Starts s[64 x n] = A B^T over the columns of the slice B of `slice_rows` rows; `left(k)` is A's k-th 16 columns, in registers or
// as a descriptor.
template <typename Element, int kHeadDim, int kCount, typename Left>
__device__ __forceinline__ void start_scores(float (&s)[kCount], const Left& left, u32 slice) {
  const u64 right = wgmma_descriptor(slice);
  hold(s);
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < kHeadDim / 16; ++k) wgmma(Element(), s, left(k), right + (k / 4 * 2 * kCount * kChunkRowBytes + k % 4 * 32) / 16, k > 0);
  wgmma_commit();
}

// Starts result[64 x kHeadDim] (+)= W B, where W[64 x kRows] is in registers as operands and B is a slice of kRows rows.
template <typename Element, int kRows, int kCount>
__device__ __forceinline__ void start_weighted_rows(float (&result)[kCount], const u32 (&weights)[kRows / 16][4], u32 slice,
                                                    bool accumulate) {
  const u64 right = wgmma_descriptor(slice, kRows * kChunkRowBytes);
  hold(result);
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < kRows / 16; ++k) wgmma<1>(Element(), result, weights[k], right + k * (16 * kChunkRowBytes) / 16, accumulate || k > 0);
  wgmma_commit();
}

// Accumulators rounded to operands: a lane's registers are already where a left operand wants them.
template <typename Element, int kColumnBlocks>
__device__ __forceinline__ void to_operand(u32 (&operand)[kColumnBlocks / 2][4], const float (&values)[1][kColumnBlocks][4]) {
#pragma unroll
  for (int k = 0; k < kColumnBlocks / 2; ++k) {
#pragma unroll
    for (int i = 0; i < 4; ++i)
      operand[k][i] = pack(Element(), values[0][2 * k + i / 2][2 * (i % 2)], values[0][2 * k + i / 2][2 * (i % 2) + 1]);
  }
}

// Rows of a slice outside `valid` become zero (the copy engine brought what lies there, perhaps NaN), seen by the calling warpgroup.
// Both warpgroups may do so at once, while the other reads: whatever it reads of those rows is hidden or zero.
template <int kRows>
__device__ __forceinline__ void clear_rows(u32 slice, int chunks, int first_row, Span valid, int warpgroup) {
  for (int i = threadIdx.x % 128; i < chunks * kRows * (kChunkRowBytes / 16); i += 128) {
    const int row = first_row + i / (kChunkRowBytes / 16) % kRows;
    if (row < valid.begin || row >= valid.end) store_shared_16(slice + 16 * i, 0);
  }
  proxy_fence();
  warpgroup_barrier(warpgroup);
}
