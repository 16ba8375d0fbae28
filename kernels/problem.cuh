// What every kernel is told about the problem, and how it finds its own part of it.
//
// A problem is a batch of sequences. Padded layouts have one sequence per batch element; the packed layout has one per
// segment of cu_seqlens, plus one last sequence for whatever lies beyond the final entry, whose rows see no key. Values in
// device vectors are never trusted: `locate` clamps them to the arrays, so a wrong one gives wrong numbers and never an
// access outside. Addresses are counted in elements and 64 bits wide; rows within one sequence stay below kMostRows and fit an int.
#pragma once

typedef long long i64;
typedef unsigned long long u64;
typedef unsigned int u32;
typedef unsigned short u16;

// A window side that is open: far beyond any sequence.
constexpr i64 kOpen = 1ll << 40;
// More rows or keys than a sequence has; the host refuses arrays with more.
constexpr int kMostRows = 1 << 30;

// One (batch, head, row, column) array whose columns are contiguous. Strides are in elements.
struct Matrix {
  void* data;
  i64 batch_stride;
  i64 head_stride;
  i64 row_stride;
};

// One float32 per query row each; all five share the row strides of the problem. References and log-sums are base 2.
struct RowStatsArrays {
  float* kl;  // nats
  float* ref1;
  float* logsum1;
  float* ref2;
  float* logsum2;
};

// The gradient that comes in from above, one value per query row. `data` null: `value` everywhere.
struct RowWeights {
  const void* data;
  const float* factor;  // null, or one device float that multiplies every value (1 / visible rows after a mean)
  i64 batch_stride;
  i64 head_stride;
  i64 row_stride;
  float value;    // the constant when data is null
  int data_type;  // 0 float32, 1 float64, 2 float16, 3 bfloat16
};

enum QOffsetMode : int { kBottomRight = 0, kOneOffset = 1, kOffsetVector = 2 };

struct Problem {
  Matrix q1, k1, q2, k2;
  RowStatsArrays rows;
  i64 row_batch_stride;  // of the row arrays
  i64 row_head_stride;
  i64 seqlen_q;  // rows in memory: per batch element, or in all when packed
  i64 seqlen_k;
  const int* cu_seqlens_q;  // batch + 1 entries each; null unless packed
  const int* cu_seqlens_k;
  const int* seqlens_q;  // batch entries; null: all rows are valid
  const int* seqlens_k;
  const int* q_offsets;  // batch entries; read when q_offset_mode is kOffsetVector
  i64 q_offset;
  i64 window_left;  // keys before i + q_offset that row i sees; kOpen: all of them
  i64 window_right;  // keys after it; causal is 0
  int batch;
  int heads;
  int heads_k1;
  int heads_k2;
  int head_dim1;
  int head_dim2;
  int q_offset_mode;
  float scale1;
  float scale2;
  float log2_scale1;  // scale * log2(e): logits in base 2
  float log2_scale2;
  int padding;
};

// One sequence and one head of it.
struct Sequence {
  int index;        // which one of the batch
  int batch_index;  // for Matrix::batch_stride: 0 when packed
  int q_rows;       // rows there are to write
  int q_valid;      // rows that take part: at most q_rows
  int k_rows;
  int k_valid;
  i64 q_begin;  // first row in memory
  i64 k_begin;
  i64 q_offset;
};

__device__ __forceinline__ i64 clamp(i64 value, i64 low, i64 high) {
  return value < low ? low : (value > high ? high : value);
}
__device__ __forceinline__ i64 ceil_div(i64 a, i64 b) { return (a + b - 1) / b; }

__device__ __forceinline__ Sequence sequence(const Problem& problem, int index) {
  Sequence s;
  s.index = index;
  if (problem.cu_seqlens_q != nullptr) {
    const bool beyond = index >= problem.batch;  // what no segment covers: rows without keys, keys without rows
    s.batch_index = 0;
    s.q_begin = clamp(problem.cu_seqlens_q[beyond ? problem.batch : index], 0, problem.seqlen_q);
    s.k_begin = clamp(problem.cu_seqlens_k[beyond ? problem.batch : index], 0, problem.seqlen_k);
    const i64 q_end = beyond ? problem.seqlen_q : clamp(problem.cu_seqlens_q[index + 1], s.q_begin, problem.seqlen_q);
    const i64 k_end = beyond ? problem.seqlen_k : clamp(problem.cu_seqlens_k[index + 1], s.k_begin, problem.seqlen_k);
    s.q_rows = static_cast<int>(q_end - s.q_begin);
    s.k_rows = static_cast<int>(k_end - s.k_begin);
    s.q_valid = beyond ? 0 : s.q_rows;
    s.k_valid = beyond ? 0 : s.k_rows;
  } else {
    s.batch_index = index;
    s.q_begin = s.k_begin = 0;
    s.q_rows = static_cast<int>(problem.seqlen_q);
    s.k_rows = static_cast<int>(problem.seqlen_k);
    s.q_valid = problem.seqlens_q ? static_cast<int>(clamp(problem.seqlens_q[index], 0, s.q_rows)) : s.q_rows;
    s.k_valid = problem.seqlens_k ? static_cast<int>(clamp(problem.seqlens_k[index], 0, s.k_rows)) : s.k_rows;
  }
  s.q_offset = s.k_valid - s.q_valid;
  if (problem.q_offset_mode == kOneOffset) s.q_offset = problem.q_offset;
  if (problem.q_offset_mode == kOffsetVector && index < problem.batch) s.q_offset = problem.q_offsets[index];
  return s;
}

// One tile of rows (or of keys) of one head.
struct TileIndex {
  int sequence_index;
  int head;
  int first_row;  // of the tile, within the sequence; past its end when packed, where tiles are counted without reading lengths
};

// Tiles that a grid must hold for one head: `tiles_per_head` in streamkl_cupy/gpu/launch.py computes the same. When packed,
// segment b owns the slots from begin[b] / tile_rows + b on: always enough for its tiles, and found by bisection.
__device__ __forceinline__ TileIndex packed_tile(const int* cu_seqlens, int batch, i64 rows, i64 slot, int tile_rows) {
  int low = 0, high = batch;  // the last segment (batch: what lies beyond) whose first slot is at most this slot
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (clamp(cu_seqlens[middle], 0, rows) / tile_rows + middle <= slot) low = middle;
    else high = middle - 1;
  }
  TileIndex t;
  t.sequence_index = low;
  const i64 tile = slot - (clamp(cu_seqlens[low], 0, rows) / tile_rows + low);
  t.first_row = tile < 0 ? kMostRows : static_cast<int>(min(tile * tile_rows, static_cast<i64>(kMostRows)));  // < 0: a decreasing vector
  return t;
}

// `linear` counts heads slowest, so that neighbouring blocks share their keys in L2; `longest_first` starts with the last
// rows, which see the most keys when causal.
__device__ __forceinline__ TileIndex locate(const Problem& problem, const int* cu_seqlens, i64 rows, int heads, i64 linear,
                                            int tile_rows, bool longest_first) {
  const bool packed = cu_seqlens != nullptr;
  const i64 tiles = packed ? rows / tile_rows + problem.batch + 1 : ceil_div(rows, tile_rows);
  const i64 head_index = linear / tiles;
  i64 tile = linear - head_index * tiles;
  if (longest_first) tile = tiles - 1 - tile;
  TileIndex t;
  if (packed) {
    t = packed_tile(cu_seqlens, problem.batch, rows, tile, tile_rows);
    t.head = static_cast<int>(head_index);
  } else {
    t.sequence_index = static_cast<int>(head_index / heads);
    t.head = static_cast<int>(head_index % heads);
    t.first_row = static_cast<int>(tile) * tile_rows;
  }
  return t;
}

// Where a sequence's rows of one head begin.
template <typename Element>
__device__ __forceinline__ Element* head_rows(const Matrix& m, int batch_index, i64 head, i64 first_row) {
  return static_cast<Element*>(m.data) + batch_index * m.batch_stride + head * m.head_stride + first_row * m.row_stride;
}
__device__ __forceinline__ i64 row_arrays_offset(const Problem& problem, const Sequence& s, int head) {
  return s.batch_index * problem.row_batch_stride + head * problem.row_head_stride + s.q_begin;
}
