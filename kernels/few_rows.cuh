// All query rows that see the same keys, as one tile: row r of it is query r % seqlen_q of head first_head + r / seqlen_q.
//
// In the row arrays they are neighbours, so that the rows of all tiles, one behind the other, are the row arrays. Not for packed
// sequences.
#pragma once

constexpr int kFewRows = 64;

struct FewRows {
  i64 all_rows;  // of all tiles
  int heads;     // of a tile: they share their keys on both sides
  int splits;    // blocks of a tile, each over a part of the keys
};

struct FewRowsTile {
  Sequence sequence;
  Band band;
  int first_head;
  int count;
  i64 first_row;  // in the row arrays

  __device__ __forceinline__ int query(int row) const { return row % sequence.q_rows; }
};

__device__ __forceinline__ FewRowsTile few_rows_tile(const Problem& problem, const FewRows& few, i64 tile) {
  const int tiles = problem.heads / few.heads;  // of a sequence
  FewRowsTile t;
  t.sequence = sequence(problem, static_cast<int>(tile / tiles));
  t.band = band(problem, t.sequence);
  t.first_head = static_cast<int>(tile % tiles) * few.heads;
  t.count = few.heads * t.sequence.q_rows;
  t.first_row = tile * t.count;
  return t;
}

// The rows as an operand in shared memory, by kThreads threads from 0 on, asynchronously; zeros where there are none.
template <typename Element, int kHeadDim, int kThreads>
__device__ __forceinline__ void copy_few_rows_async(u32 operand, const Matrix& queries, int columns, const FewRowsTile& tile) {
  using Layout = TileLayout<Element, kChunk>;
  constexpr int kAccesses = kFewRows * chunks_of(kHeadDim) * Layout::kChunks;
  const Element* first = head_rows<Element>(queries, tile.sequence.batch_index, tile.first_head, 0);
  for (int i = threadIdx.x; i < kAccesses; i += kThreads) {
    const int row = i / Layout::kChunks % kFewRows, chunk = i % Layout::kChunks, c = i / (kFewRows * Layout::kChunks);
    const int column = c * kChunk + chunk * Layout::kPerChunk, query = tile.query(row);
    const bool inside = row < tile.count && query < tile.sequence.q_valid && column < columns;
    const Element* source = inside ? first + row / tile.sequence.q_rows * queries.head_stride + query * queries.row_stride + column : first;
    copy_async_16(operand + c * kFewRows * kChunkRowBytes + Layout::offset(row, chunk), source, inside);
  }
}
