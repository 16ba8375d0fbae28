// Logit gradients on Hopper, from four numbers a query row.
//
//   x_t = s_t scale_t log2(e) - ref_t        with all that is whole of ref_t + logsum_t in ref_t, so that 2^x_t is below 2
//   dS_2 = 2^x_2 w_2 - 2^x_1 w_1             w_t = g 2^-logsum_t
//   dS_1 = 2^x_1 w_1 ((x_1 - x_2) - c)       w_1 = g ln 2 2^-logsum_1,  c = (logsum_1 - logsum_2) + KL / ln 2
//
// That is backward.cuh's form with everything that a row decides moved out of the pairs. The two products of dS_2 are rounded apart:
// where both sides are equal it is exactly 0.
#pragma once

// float16's small numbers are coarse: there dS_2, at most g, is raised out of their range. dS_1 has no such bound; it is kept where
// it does not overflow before the gradient itself would: weights divided by a power of two that is no smaller.
template <typename Element, int kSide>
constexpr float kRaise = kWideExponent<Element> ? 1.0f : (kSide == 2 ? 0x1p12f : 0x1p-1f);

struct alignas(16) RowTerms {
  float ref1, ref2;
  float w1;
  float last;  // w_2 for side 2, c for side 1
};

// `g` is the row's weight in the unit of the caller's choice. A row that sees no key contributes nothing.
template <int kSide>
__device__ __forceinline__ RowTerms row_terms(const RowStats& row, float g) {
  if (row.logsum1 == -__int_as_float(0x7f800000)) return {0.0f, 0.0f, 0.0f, 0.0f};
  const float whole1 = floorf(row.logsum1), whole2 = floorf(row.logsum2);  // 0 in what `finish` keeps
  const float ref1 = row.ref1 + whole1, ref2 = row.ref2 + whole2, logsum1 = row.logsum1 - whole1, logsum2 = row.logsum2 - whole2;
  const float w1 = g * exp2f(-logsum1);
  if (kSide == 2) return {ref1, ref2, w1, g * exp2f(-logsum2)};
  return {ref1, ref2, w1 * kLn2, (logsum1 - logsum2) + row.kl / kLn2};
}

// The gradient of side kSide's logit.
template <int kSide>
__device__ __forceinline__ float logit_gradient(float s1, float s2, float log2_scale1, float log2_scale2, const RowTerms& row) {
  const float x1 = fmaf(s1, log2_scale1, -row.ref1), x2 = fmaf(s2, log2_scale2, -row.ref2);
  if (kSide == 2) return __fmul_rn(exp2_approx(x2), row.last) - __fmul_rn(exp2_approx(x1), row.w1);
  return exp2_approx(x1) * row.w1 * ((x1 - x2) - row.last);
}

// Side kSide's logits of a tile whose rows are queries become their gradients, in place; `terms` begins at the warp's first row.
template <int kSide, int kColumnBlocks>
__device__ __forceinline__ void gradients_by_row(float (&s1)[1][kColumnBlocks][4], float (&s2)[1][kColumnBlocks][4], float log2_scale1,
                                                 float log2_scale2, const RowTerms* terms, const Lane& lane) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const RowTerms row = terms[8 * half + lane.row];
#pragma unroll
    for (int n = 0; n < kColumnBlocks; ++n) {
#pragma unroll
      for (int e = 2 * half; e < 2 * half + 2; ++e)
        (kSide == 1 ? s1 : s2)[0][n][e] = logit_gradient<kSide>(s1[0][n][e], s2[0][n][e], log2_scale1, log2_scale2, row);
    }
  }
}

// The same in two parts, for logits that come one side after the other: first what the other
// side's alone decide, in place, and then the gradient, where side kSide's logits were. A lane's rows are `rows[0]` and `rows[1]`.
template <int kSide, int kColumnBlocks>
__device__ __forceinline__ void gradients_first(float (&other)[1][kColumnBlocks][4], float log2_scale, const RowTerms (&rows)[2]) {
#pragma unroll
  for (int n = 0; n < kColumnBlocks; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const RowTerms& row = rows[e / 2];
      float& s = other[0][n][e];
      s = kSide == 2 ? __fmul_rn(exp2_approx(fmaf(s, log2_scale, -row.ref1)), row.w1) : fmaf(s, log2_scale, -row.ref2) + row.last;
    }
  }
}
template <int kSide, int kColumnBlocks>
__device__ __forceinline__ void gradients_second(float (&s1)[1][kColumnBlocks][4], float (&s2)[1][kColumnBlocks][4], float log2_scale,
                                                 const RowTerms (&rows)[2]) {
#pragma unroll
  for (int n = 0; n < kColumnBlocks; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const RowTerms& row = rows[e / 2];
      if (kSide == 2) {
        s2[0][n][e] = __fmul_rn(exp2_approx(fmaf(s2[0][n][e], log2_scale, -row.ref2)), row.last) - s1[0][n][e];
      } else {
        const float x1 = fmaf(s1[0][n][e], log2_scale, -row.ref1);
        s1[0][n][e] = exp2_approx(x1) * row.w1 * (x1 - s2[0][n][e]);
      }
    }
  }
}
