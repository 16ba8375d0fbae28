// What the forward kernels share once they hold a tile of logits: masking, the online update, and writing the rows.
#pragma once

// Where the rows go. The first `whole_tiles` row tiles have a block each. The others, too few to fill the card, have `splits`
// blocks each, over a part of the keys; their rows go to `partial`, compact, splits `partial_stride` apart, and are merged after.
struct ForwardOutput {
  RowStatsArrays rows;
  RowStatsArrays partial;
  i64 partial_stride;
  int whole_tiles;
  int splits;
};

// Which row tile this block works on, over which share of the keys.
struct Share {
  i64 tile;
  int split, splits;
};

__device__ __forceinline__ Share share_of_block(const ForwardOutput& output) {
  const i64 block = blockIdx.x;
  if (block < output.whole_tiles) return {block, 0, 1};
  const i64 beyond = block - output.whole_tiles;
  return {output.whole_tiles + beyond / output.splits, static_cast<int>(beyond % output.splits), output.splits};
}

constexpr float kInfinity = __builtin_bit_cast(float, 0x7f800000);

// Logits of columns outside [begin, end) become -inf, in the lane's upper (0) or lower row of a row block.
template <int kColumnBlocks>
__device__ __forceinline__ void hide_outside(float (&s1)[kColumnBlocks][4], float (&s2)[kColumnBlocks][4], int half, int begin, int end,
                                             const Lane& lane) {
#pragma unroll
  for (int n = 0; n < kColumnBlocks; ++n) {
#pragma unroll
    for (int e = 2 * half; e < 2 * half + 2; ++e) {
      const int column = 8 * n + lane.column + e % 2;
      const bool visible = column >= begin && column < end;
      s1[n][e] = visible ? s1[n][e] : -kInfinity;
      s2[n][e] = visible ? s2[n][e] : -kInfinity;
    }
  }
}

// The same for keys that a row does not see. `first_row` and `first_key` belong to element (0, 0) of the warp's tile.
template <int kRowBlocks, int kColumnBlocks>
__device__ __forceinline__ void hide_unseen(float (&s1)[kRowBlocks][kColumnBlocks][4], float (&s2)[kRowBlocks][kColumnBlocks][4],
                                            const Band& band, int first_row, int first_key, const Lane& lane) {
#pragma unroll
  for (int m = 0; m < kRowBlocks; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = first_row + 16 * m + 8 * half + lane.row;
      hide_outside(s1[m], s2[m], half, band.first_key(row) - first_key, band.end_key(row) - first_key, lane);
    }
  }
}

// Takes a tile of logits into the states of the rows. A tile is summed on its own first: fewer roundings than one long sum.
template <bool kMasked, int kRowBlocks, int kColumnBlocks>
__device__ __forceinline__ void update(OnlineRow (&online)[kRowBlocks][2], const float (&s1)[kRowBlocks][kColumnBlocks][4],
                                       const float (&s2)[kRowBlocks][kColumnBlocks][4], float log2_scale1, float log2_scale2) {
#pragma unroll
  for (int m = 0; m < kRowBlocks; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      OnlineRow& row = online[m][half];
      float top1 = -kInfinity, top2 = -kInfinity;
#pragma unroll
      for (int n = 0; n < kColumnBlocks; ++n) {
        top1 = fmaxf(top1, fmaxf(s1[m][n][2 * half], s1[m][n][2 * half + 1]));
        top2 = fmaxf(top2, fmaxf(s2[m][n][2 * half], s2[m][n][2 * half + 1]));
      }
      const float new_ref1 = fmaxf(row.ref1, ceilf(top1 * log2_scale1)), new_ref2 = fmaxf(row.ref2, ceilf(top2 * log2_scale2));
      if (new_ref1 != row.ref1 || new_ref2 != row.ref2) row.rebase(new_ref1, new_ref2);  // rare after the first tiles

      float sum1 = 0.0f, sum2 = 0.0f, product = 0.0f;
#pragma unroll
      for (int n = 0; n < kColumnBlocks; ++n) {
#pragma unroll
        for (int e = 2 * half; e < 2 * half + 2; ++e) {
          const float x1 = fmaf(s1[m][n][e], log2_scale1, -row.ref1), x2 = fmaf(s2[m][n][e], log2_scale2, -row.ref2);
          const float p1 = exp2_approx(x1), p2 = exp2_approx(x2);
          sum1 += p1;
          sum2 += p2;
          // A hidden key has x1 - x2 = NaN; where p1 is 0 the term is 0 all the same.
          if (!kMasked || p1 > 0.0f) product = fmaf(p1, x1 - x2, product);
        }
      }
      row.sum1 += sum1;
      row.sum2 += sum2;
      row.product += product;
    }
  }
}

// Joins the states that the four lanes of a quad hold for the same row.
__device__ __forceinline__ void join_quad(OnlineRow& row) {
#pragma unroll
  for (int distance = 1; distance < 4; distance *= 2) {
    OnlineRow other;
    other.ref1 = __shfl_xor_sync(0xffffffffu, row.ref1, distance);
    other.sum1 = __shfl_xor_sync(0xffffffffu, row.sum1, distance);
    other.ref2 = __shfl_xor_sync(0xffffffffu, row.ref2, distance);
    other.sum2 = __shfl_xor_sync(0xffffffffu, row.sum2, distance);
    other.product = __shfl_xor_sync(0xffffffffu, row.product, distance);
    row.merge(other);
  }
}

// Writes the rows, once the lanes that share them have joined their states.
template <int kRowBlocks>
__device__ __forceinline__ void write_rows(OnlineRow (&online)[kRowBlocks][2], const Problem& problem, const ForwardOutput& output,
                                           const OwnTile& rows, int tile_rows, int warp_row, const Lane& lane) {
  const Share share = share_of_block(output);
  const bool whole = share.tile < output.whole_tiles;
  const RowStatsArrays& target = whole ? output.rows : output.partial;
  const i64 base = whole ? row_arrays_offset(problem, rows.sequence, rows.head) + rows.begin
                         : share.split * output.partial_stride + (share.tile - output.whole_tiles) * tile_rows;
#pragma unroll
  for (int m = 0; m < kRowBlocks; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      OnlineRow row = online[m][half];
      join_quad(row);
      const int index = warp_row + 16 * m + 8 * half + lane.row;
      if (rows.begin + index >= rows.valid_end) row.clear();
      if (lane.column == 0 && rows.begin + index < rows.end) store(target, base + index, finish(row));
    }
  }
}
