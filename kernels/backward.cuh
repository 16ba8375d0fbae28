// What the backward kernels share: logit gradients from kept row statistics, the upstream weights, and writing gradients.
//
//   y_t = log2 P_t = s_t scale_t log2(e) - ref_t - logsum_t
//   dS_2 = g (2^y_2 - 2^y_1)        dS_1 = g 2^y_1 (ln 2 (y_1 - y_2) - KL)          (StreamKL, algorithms 2 and 3)
//   dQ_t = scale_t dS_t K_t         dK_t = scale_t dS_t^T Q_t
//
// Reference and log-sum are subtracted one after the other: their sum would round by as much as 1e-2 where logits are near 2e5.
#pragma once

// Gradients in the shapes of the inputs; a null pointer where none is asked for.
struct GradientOutput {
  Matrix q1, k1, q2, k2;
  int as_float32;  // else in the inputs' element type
  int padding;
};

enum Sides : int { kSide1 = 1, kSide2 = 2 };

// The upstream weight of a row of the row arrays.
__device__ __forceinline__ float row_weight(const RowWeights& w, i64 batch_index, i64 head, i64 row) {
  const i64 at = batch_index * w.batch_stride + head * w.head_stride + row * w.row_stride;
  float value = w.value;
  if (w.data != nullptr) {
    if (w.data_type == 0) value = static_cast<const float*>(w.data)[at];
    else if (w.data_type == 1) value = to_float(static_cast<const double*>(w.data)[at]);
    else if (w.data_type == 2) value = to_float(static_cast<const Half*>(w.data)[at]);
    else value = to_float(static_cast<const BFloat16*>(w.data)[at]);
  }
  return w.factor != nullptr ? value * *w.factor : value;
}

// What multiplies the sum of a query row: scale and weight. A row that sees no key has no gradient, and its weight may be NaN.
__device__ __forceinline__ float row_factor(const RowWeights& weights, const OwnTile& rows, int row, float scale) {
  if (row >= rows.valid_end || rows.band.first_key(row) >= rows.band.end_key(row)) return 0.0f;
  return scale * row_weight(weights, rows.sequence.batch_index, rows.head, rows.sequence.q_begin + row);
}

// Whether an element type has float32's range, so that a weight of any size survives in it.
template <typename Element> constexpr bool kWideExponent = true;
template <> constexpr bool kWideExponent<Half> = false;

// Logits become their gradients for g = 1, in place, for the sides asked for.
template <int kSides>
__device__ __forceinline__ void logit_gradients(float& s1, float& s2, float log2_scale1, float log2_scale2, const RowStats& row) {
  const float y1 = fmaf(s1, log2_scale1, -row.ref1) - row.logsum1, y2 = fmaf(s2, log2_scale2, -row.ref2) - row.logsum2;
  const float p1 = exp2_approx(y1);
  if (kSides & kSide1) s1 = p1 * fmaf(kLn2, y1 - y2, -row.kl);
  if (kSides & kSide2) s2 = exp2_approx(y2) - p1;
}

// Zeroes the gradients of pairs that do not see each other; selected, not multiplied, since they may be NaN.
// `begin` and `end` bound the visible columns of this lane's rows within the tile.
template <int kRowBlocks, int kColumnBlocks>
__device__ __forceinline__ void hide_unseen_rows(float (&d)[kRowBlocks][kColumnBlocks][4], const int (&begin)[kRowBlocks][2],
                                                 const int (&end)[kRowBlocks][2], const Lane& lane) {
#pragma unroll
  for (int m = 0; m < kRowBlocks; ++m) {
#pragma unroll
    for (int n = 0; n < kColumnBlocks; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int column = 8 * n + lane.column + e % 2;
        if (column < begin[m][e / 2] || column >= end[m][e / 2]) d[m][n][e] = 0.0f;
      }
    }
  }
}

// The same where the owned rows are queries and the columns keys; `first_row` and `first_key` belong to element (0, 0).
template <int kRowBlocks, int kColumnBlocks>
__device__ __forceinline__ void hide_keys_unseen(float (&d)[kRowBlocks][kColumnBlocks][4], const Band& band, int first_row, int first_key,
                                                 const Lane& lane) {
  int begin[kRowBlocks][2], end[kRowBlocks][2];
#pragma unroll
  for (int m = 0; m < kRowBlocks; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = first_row + 16 * m + 8 * half + lane.row;
      begin[m][half] = band.first_key(row) - first_key;
      end[m][half] = row < band.q_valid ? band.end_key(row) - first_key : -kMostRows;
    }
  }
  hide_unseen_rows(d, begin, end, lane);
}

// The same where the owned rows are keys and the columns queries.
template <int kRowBlocks, int kColumnBlocks>
__device__ __forceinline__ void hide_queries_unseeing(float (&d)[kRowBlocks][kColumnBlocks][4], const Band& band, int first_key,
                                                      int first_query, const Lane& lane) {
  int begin[kRowBlocks][2], end[kRowBlocks][2];
#pragma unroll
  for (int m = 0; m < kRowBlocks; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int key = first_key + 16 * m + 8 * half + lane.row;
      begin[m][half] = band.first_row(key) - first_query;
      end[m][half] = key < band.k_valid ? band.end_row(key) - first_query : -kMostRows;
    }
  }
  hide_unseen_rows(d, begin, end, lane);
}

// Logits of a tile become their gradients for g = 1, where the rows are queries; `stats` begins at the warp's first row.
template <int kSides, int kRowBlocks, int kColumnBlocks>
__device__ __forceinline__ void gradients_of_rows(float (&s1)[kRowBlocks][kColumnBlocks][4], float (&s2)[kRowBlocks][kColumnBlocks][4],
                                                  const Problem& problem, const RowStats* stats, const Lane& lane) {
#pragma unroll
  for (int m = 0; m < kRowBlocks; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const RowStats row = stats[16 * m + 8 * half + lane.row];
#pragma unroll
      for (int n = 0; n < kColumnBlocks; ++n) {
#pragma unroll
        for (int e = 2 * half; e < 2 * half + 2; ++e)
          logit_gradients<kSides>(s1[m][n][e], s2[m][n][e], problem.log2_scale1, problem.log2_scale2, row);
      }
    }
  }
}

// What a tile of queries brings along when they are the columns.
struct QueryTerms {
  RowStats stats;
  float g;
};

__device__ __forceinline__ QueryTerms query_terms(const Problem& problem, const RowWeights& weights, const Sequence& s, int head, int query,
                                                  Span queries) {
  if (query < queries.begin || query >= queries.end) return {{0, 0, 0, 0, 0}, 0};
  return {load(problem.rows, row_arrays_offset(problem, s, head) + query), row_weight(weights, s.batch_index, head, s.q_begin + query)};
}

// The largest power of two up to |g|, but not so small that dividing by it overflows: where g is 0, too.
__device__ __forceinline__ float power_of_two_near(float g) {
  return fmaxf(__int_as_float(__float_as_int(g) & 0x7f800000), __int_as_float(8 << 23));
}

// The same for the largest of a warp's values, in every lane.
__device__ __forceinline__ float power_of_two_near_largest(float g) {
  float largest = fabsf(g);
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, distance));
  return power_of_two_near(largest);
}

// The same for the weights of a tile.
template <int kQueries>
__device__ __forceinline__ float weight_unit(const QueryTerms* terms, const Lane& lane) {
  float largest = 0.0f;
#pragma unroll
  for (int i = 0; i < kQueries; i += 32) {
    if (i + lane.index < kQueries) largest = fmaxf(largest, fabsf(terms[i + lane.index].g));
  }
  return power_of_two_near_largest(largest);
}

// Logits of a tile become their gradients, g / unit applied, where the columns are queries.
template <int kSides, int kRowBlocks, int kColumnBlocks>
__device__ __forceinline__ void gradients_of_columns(float (&s1)[kRowBlocks][kColumnBlocks][4], float (&s2)[kRowBlocks][kColumnBlocks][4],
                                                     const Problem& problem, const QueryTerms* terms, float unit, const Lane& lane) {
  const float per_unit = 1.0f / unit;
#pragma unroll
  for (int n = 0; n < kColumnBlocks; ++n) {
#pragma unroll
    for (int odd = 0; odd < 2; ++odd) {
      const QueryTerms query = terms[8 * n + lane.column + odd];
      const float g = query.g * per_unit;
#pragma unroll
      for (int m = 0; m < kRowBlocks; ++m) {
#pragma unroll
        for (int e = odd; e < 4; e += 2) {
          logit_gradients<kSides>(s1[m][n][e], s2[m][n][e], problem.log2_scale1, problem.log2_scale2, query.stats);
          if (kSides & kSide1) s1[m][n][e] *= g;
          if (kSides & kSide2) s2[m][n][e] *= g;
        }
      }
    }
  }
}

template <int kRowBlocks, int kColumnBlocks>
__device__ __forceinline__ void scale_all(float (&values)[kRowBlocks][kColumnBlocks][4], float factor) {
#pragma unroll
  for (int m = 0; m < kRowBlocks; ++m) {
#pragma unroll
    for (int n = 0; n < kColumnBlocks; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) values[m][n][e] *= factor;
    }
  }
}

template <int kRowBlocks, int kColumnBlocks>
__device__ __forceinline__ void clear(float (&values)[kRowBlocks][kColumnBlocks][4]) {
#pragma unroll
  for (int m = 0; m < kRowBlocks; ++m) {
#pragma unroll
    for (int n = 0; n < kColumnBlocks; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) values[m][n][e] = 0.0f;
    }
  }
}

// Writes a warp's accumulators, each row times its factor; rows that take no part (`valid_end` on) become zero.
// `rows` points at the owned head's first row of the sequence, `first_row` is the row of accumulator element (0, 0).
template <typename Element, int kRowBlocks, int kColumnBlocks>
__device__ __forceinline__ void write_gradient(const float (&values)[kRowBlocks][kColumnBlocks][4], const float (&factor)[kRowBlocks][2],
                                               const Matrix& matrix, bool as_float32, const OwnTile& own, i64 sequence_begin,
                                               int first_row, int first_column, int columns, const Lane& lane) {
#pragma unroll
  for (int m = 0; m < kRowBlocks; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = first_row + 16 * m + 8 * half + lane.row;
      if (row >= own.end) continue;
      const i64 at = own.sequence.batch_index * matrix.batch_stride + own.head * matrix.head_stride + (sequence_begin + row) * matrix.row_stride;
#pragma unroll
      for (int n = 0; n < kColumnBlocks; ++n) {
        const int column = first_column + 8 * n + lane.column;
        if (column >= columns) continue;
        const bool valid = row < own.valid_end;
        const float low = valid ? values[m][n][2 * half] * factor[m][half] : 0.0f;
        const float high = valid ? values[m][n][2 * half + 1] * factor[m][half] : 0.0f;
        if (as_float32) *reinterpret_cast<float2*>(static_cast<float*>(matrix.data) + at + column) = make_float2(low, high);
        else store_pair(static_cast<Element*>(matrix.data) + at + column, low, high);
      }
    }
  }
}
