// Which keys a row sees: one band, clipped to the sequence.
//
//   row i of a sequence sees key j  iff  i < q_valid,  j < k_valid,  i + q_offset - left <= j <= i + q_offset + right
//
// Causal is right = 0; an open side is kOpen. Both ends of the band move one key a row, so that the rows which see some key
// of a tile are one run of rows too, and a tile needs masking only where the band's edges cross it.
#pragma once

struct Band {
  i64 before;   // row i's first key is i + before, its last i + after
  i64 after;
  i64 k_valid;
  i64 q_valid;

  __device__ __forceinline__ i64 first_key(i64 row) const { return clamp(row + before, 0, k_valid); }
  __device__ __forceinline__ i64 end_key(i64 row) const { return clamp(row + after + 1, 0, k_valid); }
  // The rows whose band reaches key j are those from first_row(j) to end_row(j) - 1.
  __device__ __forceinline__ i64 first_row(i64 key) const { return clamp(key - after, 0, q_valid); }
  __device__ __forceinline__ i64 end_row(i64 key) const { return clamp(key - before + 1, 0, q_valid); }
};

__device__ __forceinline__ Band band(const Problem& problem, const Sequence& s) {
  Band b;
  b.before = s.q_offset - problem.window_left;
  b.after = s.q_offset + problem.window_right;
  b.k_valid = s.k_valid;
  b.q_valid = s.q_valid;
  return b;
}

struct Span {
  i64 begin, end;
  __device__ __forceinline__ bool empty() const { return begin >= end; }
};

// Keys that some row in [row_begin, row_end) sees, and keys that all of them see. row_end is at most q_valid.
__device__ __forceinline__ Span keys_seen_by_some(const Band& b, i64 row_begin, i64 row_end) {
  if (row_begin >= row_end) return {0, 0};
  return {b.first_key(row_begin), b.end_key(row_end - 1)};
}
__device__ __forceinline__ Span keys_seen_by_all(const Band& b, i64 row_begin, i64 row_end) {
  return {b.first_key(row_end - 1), b.end_key(row_begin)};
}

// Rows that see some key in [key_begin, key_end), and rows that see all of them. key_end is at most k_valid.
__device__ __forceinline__ Span rows_seeing_some(const Band& b, i64 key_begin, i64 key_end) {
  if (key_begin >= key_end) return {0, 0};
  return {b.first_row(key_begin), b.end_row(key_end - 1)};
}
__device__ __forceinline__ Span rows_seeing_all(const Band& b, i64 key_begin, i64 key_end) {
  return {b.first_row(key_end - 1), b.end_row(key_begin)};
}
