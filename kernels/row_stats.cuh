// The online state of one query row: both softmax denominators and the KL numerator, in one pass over the keys.
//
//   x_t = s_t * scale_t * log2(e) - ref_t      l_t = sum 2^x_t      a = sum 2^x_1 (x_1 - x_2)
//   KL  = (a / l_1 + log2 l_2 - log2 l_1) * ln 2
//
// (StreamKL, equations 5 to 8, made shift-invariant: the paper's acc / l1 + LSE2 - LSE1 cancels when logits share an offset.)
// A reference is an integer at or above the largest logit seen, so every rescale is by an exact power of two. When ref_1 moves
// by d_1 and ref_2 by d_2:  a = 2^-d_1 (a + (d_2 - d_1) l_1),  l_t = 2^-d_t l_t.
// streamkl_cupy/online_rows.py holds the same mathematics, under the same names, for NumPy arrays.
#pragma once

constexpr float kLn2 = 0.693147180559945309f;
// Below any logit, and finite: differences of two references are never NaN. A state with l_1 = 0 has seen no key.
constexpr float kNoReference = -1.7e38f;

// 2^-d for an integer d >= 0, exactly; 0 where that is below the normal numbers.
__device__ __forceinline__ float power_of_two(float minus_d) {
  const float clamped = fmaxf(minus_d, -127.0f);
  return __int_as_float((static_cast<int>(clamped) + 127) << 23);
}

struct OnlineRow {
  float ref1, sum1;
  float ref2, sum2;
  float product;  // a

  __device__ __forceinline__ void clear() {
    ref1 = ref2 = kNoReference;
    sum1 = sum2 = product = 0.0f;
  }

  // Moves the references up to at least these.
  __device__ __forceinline__ void rebase(float new_ref1, float new_ref2) {
    const float d1 = new_ref1 - ref1, d2 = new_ref2 - ref2;
    const float shrink1 = power_of_two(-d1), shrink2 = power_of_two(-d2);
    // (d2 - d1) is huge when this is the first key: sum1 is 0 then, and the product stays 0.
    product = shrink1 * fmaf(d2 - d1, sum1, product);
    sum1 *= shrink1;
    sum2 *= shrink2;
    ref1 = new_ref1;
    ref2 = new_ref2;
  }

  __device__ __forceinline__ void merge(OnlineRow other) {
    const float new_ref1 = fmaxf(ref1, other.ref1), new_ref2 = fmaxf(ref2, other.ref2);
    rebase(new_ref1, new_ref2);
    other.rebase(new_ref1, new_ref2);
    sum1 += other.sum1;
    sum2 += other.sum2;
    product += other.product;
  }
};

// What is kept of a row: KL in nats, references, and base-2 logarithms of the sums. A row that saw no key: 0, 0, -inf.
struct RowStats {
  float kl, ref1, logsum1, ref2, logsum2;
};

// Splits a normal positive sum into its exponent, returned, and its mantissa's logarithm, below 1: a large one would round by more.
__device__ __forceinline__ float whole_log2(float sum, float& fraction) {
  fraction = log2f(__int_as_float((__float_as_int(sum) & 0x007fffff) | 0x3f800000));
  return static_cast<float>((__float_as_int(sum) >> 23) - 127);
}

__device__ __forceinline__ RowStats finish(const OnlineRow& r) {
  if (r.sum1 == 0.0f) return {0.0f, 0.0f, -__int_as_float(0x7f800000), 0.0f, -__int_as_float(0x7f800000)};
  float logsum1, logsum2;
  const float whole1 = whole_log2(r.sum1, logsum1), whole2 = whole_log2(r.sum2, logsum2);
  return {(r.product / r.sum1 + ((whole2 - whole1) + (logsum2 - logsum1))) * kLn2, r.ref1 + whole1, logsum1, r.ref2 + whole2, logsum2};
}

__device__ __forceinline__ void store(const RowStatsArrays& rows, i64 index, const RowStats& row) {
  rows.kl[index] = row.kl;
  rows.ref1[index] = row.ref1;
  rows.logsum1[index] = row.logsum1;
  rows.ref2[index] = row.ref2;
  rows.logsum2[index] = row.logsum2;
}

__device__ __forceinline__ RowStats load(const RowStatsArrays& rows, i64 index) {
  return {rows.kl[index], rows.ref1[index], rows.logsum1[index], rows.ref2[index], rows.logsum2[index]};
}

// A kept row as a state again. References that others supply need not be integers, nor their sums be near 1: both are put
// right here, so that `rebase` stays exact.
__device__ __forceinline__ OnlineRow reopen(const RowStats& row) {
  OnlineRow r;
  r.clear();
  if (row.logsum1 == -__int_as_float(0x7f800000)) return r;
  const float logsum1 = row.logsum1 + (row.ref1 - rintf(row.ref1)), logsum2 = row.logsum2 + (row.ref2 - rintf(row.ref2));
  const float whole1 = ceilf(logsum1), whole2 = ceilf(logsum2);
  r.ref1 = rintf(row.ref1) + whole1;
  r.ref2 = rintf(row.ref2) + whole2;
  r.sum1 = exp2f(logsum1 - whole1);
  r.sum2 = exp2f(logsum2 - whole2);
  r.product = (row.kl / kLn2 + ((logsum1 - whole1) - (logsum2 - whole2))) * r.sum1;
  return r;
}
