"""kernels/tile.cuh against NumPy: copies into swizzled tiles, and both products, over every shape that kernels ask for."""

import ml_dtypes
import numpy as np
import pytest

from . import Emulated, pointer

DTYPES = {"Half": np.dtype(np.float16), "BFloat16": np.dtype(ml_dtypes.bfloat16), "float": np.dtype(np.float32)}
HEAD_DIMS, ROW_BLOCKS, COLUMN_BLOCKS = (16, 32, 64, 96, 128), (1, 2), (4, 8)
WARPS = 2
INCLUDES = "".join(f'#include "{name}.cuh"\n' for name in ("problem", "mask", "row_stats", "ptx_sm80", "tile"))

PRODUCTS = """
using Element = ELEMENT;
constexpr int kThreads = 64;

// Element (row, column) of a warp's accumulators, row-major in memory.
template <int kRowBlocks, int kColumnBlocks, typename Visit>
__device__ void each(float (&values)[kRowBlocks][kColumnBlocks][4], const Lane& lane, const Visit& visit) {
  const int warp_row = threadIdx.x / 32 * 16 * kRowBlocks;
  for (int m = 0; m < kRowBlocks; ++m)
    for (int n = 0; n < kColumnBlocks; ++n)
      for (int e = 0; e < 4; ++e) visit(values[m][n][e], warp_row + 16 * m + lane.row + 8 * (e / 2), 8 * n + lane.column + e % 2);
}

template <int kHeadDim, int kRowBlocks, int kColumnBlocks>
__device__ void products(const Element* x, const Element* y, float* scores, float* result) {
  extern __shared__ __align__(128) unsigned char shared[];
  constexpr int kRows = 32 * kRowBlocks, kKeys = 8 * kColumnBlocks;
  const u32 x_tile = shared_address(shared), y_tile = x_tile + kRows * TileLayout<Element, kHeadDim>::kRowBytes;
  copy_tile_async<Element, kRows, kHeadDim, kThreads>(x_tile, x, kHeadDim, 0, {0, kRows}, kHeadDim);
  copy_tile_async<Element, kKeys, kHeadDim, kThreads>(y_tile, y, kHeadDim, 0, {0, kKeys}, kHeadDim);
  copy_async_commit();
  copy_async_wait<0>();
  __syncthreads();
  const Lane lane;
  float s[kRowBlocks][kColumnBlocks][4], r[kRowBlocks][kHeadDim / 8][4];
  each(s, lane, [&](float& value, int row, int column) { value = scores[row * kKeys + column]; });
  each(r, lane, [&](float& value, int row, int column) { value = result[row * kHeadDim + column]; });
  add_weighted_rows<Element, kHeadDim>(r, s, y_tile, lane);
  add_scores<Element, kHeadDim>(s, x_tile, threadIdx.x / 32 * 16 * kRowBlocks, y_tile, lane);
  each(s, lane, [&](float& value, int row, int column) { scores[row * kKeys + column] = value; });
  each(r, lane, [&](float& value, int row, int column) { result[row * kHeadDim + column] = value; });
}

template <int kHeadDim>
__device__ void products_of(const Element* x, const Element* y, float* scores, float* result, int row_blocks, int column_blocks) {
  if (row_blocks == 1 && column_blocks == 4) products<kHeadDim, 1, 4>(x, y, scores, result);
  if (row_blocks == 1 && column_blocks == 8) products<kHeadDim, 1, 8>(x, y, scores, result);
  if (row_blocks == 2 && column_blocks == 4) products<kHeadDim, 2, 4>(x, y, scores, result);
  if (row_blocks == 2 && column_blocks == 8) products<kHeadDim, 2, 8>(x, y, scores, result);
}
extern "C" __global__ void kernel(const Element* x, const Element* y, float* scores, float* result, int head_dim, int row_blocks, int column_blocks) {
  if (head_dim == 16) products_of<16>(x, y, scores, result, row_blocks, column_blocks);
  if (head_dim == 32) products_of<32>(x, y, scores, result, row_blocks, column_blocks);
  if (head_dim == 64) products_of<64>(x, y, scores, result, row_blocks, column_blocks);
  if (head_dim == 96) products_of<96>(x, y, scores, result, row_blocks, column_blocks);
  if (head_dim == 128) products_of<128>(x, y, scores, result, row_blocks, column_blocks);
}
"""


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("element", ["Half", "BFloat16"])
def test_products(element, head_dim):
    """scores += X Y^T and result += W Y, W being the scores before; without bank conflicts."""
    kernel = Emulated.of_text(INCLUDES + PRODUCTS, "kernel", {"ELEMENT": element})
    rng = np.random.default_rng(head_dim)
    for row_blocks in ROW_BLOCKS:
        for column_blocks in COLUMN_BLOCKS:
            rows, keys = 16 * row_blocks * WARPS, 8 * column_blocks
            x, y = (rng.normal(size=(n, head_dim)).astype(DTYPES[element]) for n in (rows, keys))
            scores, result = (rng.normal(size=(rows, n)).astype(np.float32) for n in (keys, head_dim))
            wide_x, wide_y = x.astype(np.float64), y.astype(np.float64)
            expected_scores = scores + wide_x @ wide_y.T
            expected_result = result + scores.astype(DTYPES[element]).astype(np.float64) @ wide_y
            args = [pointer(a) for a in (x, y, scores, result)] + [np.int32(n) for n in (head_dim, row_blocks, column_blocks)]
            report = kernel.launch(1, 32 * WARPS, args, (rows + keys) * head_dim * 2, [x, y])
            np.testing.assert_allclose(scores, expected_scores, rtol=0, atol=1e-6 * head_dim)
            np.testing.assert_allclose(result, expected_result, rtol=0, atol=1e-6 * keys)
            assert report.bank_conflicts == 0


COPY = """
using Element = ELEMENT;

template <int kHeadDim>
__device__ void copy(const Element* rows, i64 row_stride, int first_row, Span valid, int columns, Element* tile) {
  using Layout = TileLayout<Element, kHeadDim>;
  extern __shared__ __align__(128) unsigned char shared[];
  copy_tile_async<Element, ROWS, kHeadDim, THREADS>(shared_address(shared), rows, row_stride, first_row, valid, columns);
  copy_async_commit();
  copy_async_wait<0>();
  __syncthreads();
  for (int i = threadIdx.x; i < ROWS * kHeadDim; i += THREADS) {
    const int row = i / kHeadDim, column = i % kHeadDim;
    const u32 chunk = Layout::offset(row, column / Layout::kPerChunk);
    tile[i] = reinterpret_cast<const Element*>(shared + chunk)[column % Layout::kPerChunk];
  }
}
extern "C" __global__ void kernel(const Element* rows, i64 row_stride, int first_row, int begin, int end, int head_dim, int columns, Element* tile) {
  if (head_dim == 16) copy<16>(rows, row_stride, first_row, {begin, end}, columns, tile);
  if (head_dim == 32) copy<32>(rows, row_stride, first_row, {begin, end}, columns, tile);
  if (head_dim == 64) copy<64>(rows, row_stride, first_row, {begin, end}, columns, tile);
  if (head_dim == 96) copy<96>(rows, row_stride, first_row, {begin, end}, columns, tile);
  if (head_dim == 128) copy<128>(rows, row_stride, first_row, {begin, end}, columns, tile);
}
"""


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize(("element", "rows", "threads"), [("Half", 32, 64), ("BFloat16", 48, 128), ("float", 16, 96)])
def test_copy_clips_rows_and_columns(element, rows, threads, head_dim):
    """What lies outside becomes zero and is never read: it is NaN, and beyond the last valid row there is nothing."""
    dtype = DTYPES[element]
    kernel = Emulated.of_text(INCLUDES + COPY, "kernel", {"ELEMENT": element, "ROWS": rows, "THREADS": threads})
    rng = np.random.default_rng(rows)
    step = 16 // dtype.itemsize
    total = 2 * rows
    for first_row, begin, end, columns in [
        (0, 0, rows, head_dim),
        (5, 0, total, head_dim),
        (rows, 0, total - 3, head_dim - step),
        (rows, rows + 2, rows + 3, step),
        (0, 3, rows - 1, head_dim),
        (0, rows, total, head_dim),
        (rows, 4, 4, head_dim),
        (total, 0, total, head_dim),
    ]:
        stride = head_dim + 2 * step
        buffer = np.full(total * stride + 64, np.nan, dtype)
        start = -buffer.ctypes.data % 16 // dtype.itemsize
        source = buffer[start : start + total * stride].reshape(total, stride)
        source[begin:end, :columns] = rng.normal(size=(end - begin, columns))
        expected = np.zeros((rows, head_dim), dtype)
        here = np.arange(first_row, first_row + rows)
        inside = (here >= begin) & (here < end)
        expected[inside, :columns] = source[here[inside], :columns]
        tile = np.full((rows, head_dim), np.nan, dtype)
        args = [pointer(source), np.int64(stride), *map(np.int32, (first_row, begin, end, head_dim, columns)), pointer(tile)]
        kernel.launch(1, threads, args, rows * head_dim * dtype.itemsize, [source[begin:end, :columns]])
        np.testing.assert_array_equal(tile, expected)


ADVANCE = """
template <int kHeadDim>
__device__ void count_wrong(int* wrong, int base) {
  using Layout = TileLayout<Half, kHeadDim>;
  for (int row = threadIdx.x; row < 96; row += 32)
    for (int first = 0; first < 2; ++first)
      for (int even = 0; first + even < Layout::kChunks; even += 2)
        if (Layout::advance(base + Layout::offset(row, first), even) != base + Layout::offset(row, first + even)) *wrong += 1;
}
extern "C" __global__ void kernel(int* wrong, int base) {
  count_wrong<16>(wrong + 0, base);
  count_wrong<32>(wrong + 1, base);
  count_wrong<64>(wrong + 2, base);
  count_wrong<96>(wrong + 3, base);
  count_wrong<128>(wrong + 4, base);
  count_wrong<192>(wrong + 5, base);
  count_wrong<256>(wrong + 6, base);
}
"""


def test_advance_is_the_offset_of_a_later_chunk():
    wrong = np.zeros(7, np.int32)
    kernel = Emulated.of_text(INCLUDES + ADVANCE, "kernel")
    for base in (0, 128, 1024 + 384):
        kernel.launch(1, 32, [pointer(wrong), np.int32(base)])
    assert not wrong.any()
