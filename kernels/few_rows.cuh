// All query rows that see the same keys, as one tile: row r of it is query r % q_rows of head first_head + r / q_rows. In the row
// arrays they are neighbours. Not for packed sequences.
#pragma once

constexpr int kFewRows = 64;

struct FewRowsTile {
  Sequence sequence;
  Band band;
  int first_head, heads;
};

// `heads` of a tile divide the problem's; tiles count heads first, then sequences.
__device__ __forceinline__ FewRowsTile few_rows_tile(const Problem& problem, int tile, int heads) {
  const int tiles = problem.heads / heads;  // of a sequence
  FewRowsTile t;
  t.sequence = sequence(problem, tile / tiles);
  t.band = band(problem, t.sequence);
  t.first_head = tile % tiles * heads;
  t.heads = heads;
  return t;
}

struct QueryRow {
  int head, index;
  Span keys;  // that it sees: none where there is no such row
};

__device__ __forceinline__ QueryRow query_row(const FewRowsTile& tile, int row) {
  const int head = row / tile.sequence.q_rows, index = row % tile.sequence.q_rows;
  const bool valid = head < tile.heads && index < tile.sequence.q_valid;
  return {tile.first_head + head, index, valid ? Span{tile.band.first_key(index), tile.band.end_key(index)} : Span{0, 0}};
}

// One side's queries as an operand, by kThreads threads from 0 on, asynchronously. A row that sees nothing may hold NaN: zeros.
template <typename Element, int kHeadDim, int kThreads>
__device__ __forceinline__ void copy_few_rows_async(u32 operand, const Matrix& queries, const FewRowsTile& tile, int columns) {
  constexpr int kPieces = chunks_of(kHeadDim) * kChunkRowBytes / 16;
  for (int i = threadIdx.x; i < kFewRows * kPieces; i += kThreads) {
    const int row = i / kPieces, piece = i % kPieces;
    const QueryRow query = query_row(tile, row);
    const bool inside = !query.keys.empty() && 8 * piece < columns;
    const Element* from = head_rows<Element>(queries, tile.sequence.batch_index, inside ? query.head : 0, inside ? query.index : 0);
    copy_async_16(operand + piece / 8 * kFewRows * kChunkRowBytes + TileLayout<Element, kChunk>::offset(row, piece % 8),
                  from + (inside ? 8 * piece : 0), inside);
  }
}
