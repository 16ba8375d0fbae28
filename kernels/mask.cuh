// Which keys a row sees: one band, clipped to the sequence.
//
//   row i of a sequence sees key j  iff  i < q_valid,  j < k_valid,  i + q_offset - left <= j <= i + q_offset + right
//
// Causal is right = 0; an open side is kOpen. Both ends of the band move one key a row, so that the rows which see some key
// of a tile are one run of rows too, and a tile needs masking only where the band's edges cross it.
#pragma once

struct Band {
  int before;  // row i's first key is i + before, its last i + after
  int after;
  int k_valid;
  int q_valid;

  __device__ __forceinline__ int first_key(int row) const { return min(max(row + before, 0), k_valid); }
  __device__ __forceinline__ int end_key(int row) const { return min(max(row + after + 1, 0), k_valid); }
  // The rows whose band reaches key j are those from first_row(j) to end_row(j) - 1.
  __device__ __forceinline__ int first_row(int key) const { return min(max(key - after, 0), q_valid); }
  __device__ __forceinline__ int end_row(int key) const { return min(max(key - before + 1, 0), q_valid); }
};

__device__ __forceinline__ Band band(const Problem& problem, const Sequence& s) {
  // Beyond kMostRows an edge lies outside the sequence for every row, wherever exactly; sums with a row stay within an int.
  Band b;
  b.before = static_cast<int>(clamp(s.q_offset - problem.window_left, -kMostRows, kMostRows));
  b.after = static_cast<int>(clamp(s.q_offset + problem.window_right, -kMostRows, kMostRows - 2));
  b.k_valid = s.k_valid;
  b.q_valid = s.q_valid;
  return b;
}

struct Span {
  int begin, end;
  __device__ __forceinline__ bool empty() const { return begin >= end; }
};

// Keys that some row in [row_begin, row_end) sees, and keys that all of them see. row_end is at most q_valid.
__device__ __forceinline__ Span keys_seen_by_some(const Band& b, int row_begin, int row_end) {
  if (row_begin >= row_end) return {0, 0};
  return {b.first_key(row_begin), b.end_key(row_end - 1)};
}
__device__ __forceinline__ Span keys_seen_by_all(const Band& b, int row_begin, int row_end) {
  return {b.first_key(row_end - 1), b.end_key(row_begin)};
}

// Rows that see some key in [key_begin, key_end), and rows that see all of them. key_end is at most k_valid.
__device__ __forceinline__ Span rows_seeing_some(const Band& b, int key_begin, int key_end) {
  if (key_begin >= key_end) return {0, 0};
  return {b.first_row(key_begin), b.end_row(key_end - 1)};
}
__device__ __forceinline__ Span rows_seeing_all(const Band& b, int key_begin, int key_end) {
  return {b.first_row(key_end - 1), b.end_row(key_begin)};
}
