// The online update of the Hopper kernels, without a running maximum: a tile is summed under the references there are, and where its
// sums come out too large for them (as for the first tile, under no reference at all) once more under new ones, from the logits that
// are still there.
#pragma once

// Above this a sum of exponentials asks for a new reference: far from overflow, and exponents of this size cost no precision.
constexpr float kTooLarge = 65536.0f;

template <bool kMasked, int kCount>
__device__ __forceinline__ void update_optimistic(OnlineRow (&online)[2], const float (&s1)[kCount],
                                                  const float (&s2)[kCount], float log2_scale1, float log2_scale2) {
  float sum1[2], sum2[2], product[2];
  auto sum_up = [&] {
#pragma unroll
    for (int half = 0; half < 2; ++half) sum1[half] = sum2[half] = product[half] = 0.0f;
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      const int half = j / 2 % 2;
      const float x1 = fmaf(s1[j], log2_scale1, -online[half].ref1), x2 = fmaf(s2[j], log2_scale2, -online[half].ref2);
      const float p1 = exp2_approx(x1), p2 = exp2_approx(x2);
      sum1[half] += p1;
      sum2[half] += p2;
      // A hidden key has x1 - x2 = NaN; where p1 is 0 the term is 0 all the same.
      if (!kMasked || p1 > 0.0f) product[half] = fmaf(p1, x1 - x2, product[half]);
    }
  };
  sum_up();
  if (__any_sync(0xffffffffu, !(fmaxf(fmaxf(sum1[0], sum1[1]), fmaxf(sum2[0], sum2[1])) < kTooLarge))) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float top1 = -kInfinity, top2 = -kInfinity;
#pragma unroll
      for (int n = 0; n < kCount / 4; ++n) {
        top1 = fmaxf(top1, fmaxf(s1[4 * n + 2 * half], s1[4 * n + 2 * half + 1]));
        top2 = fmaxf(top2, fmaxf(s2[4 * n + 2 * half], s2[4 * n + 2 * half + 1]));
      }
      online[half].rebase(fmaxf(online[half].ref1, ceilf(top1 * log2_scale1)), fmaxf(online[half].ref2, ceilf(top2 * log2_scale2)));
    }
    sum_up();
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    online[half].sum1 += sum1[half];
    online[half].sum2 += sum2[half];
    online[half].product += product[half];
  }
}
