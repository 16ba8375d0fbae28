"""The StreamKL paper's forward in Triton, written here as a peer: one pass, split over the keys where rows are few.

Per key tile, in base 2 with the scale folded in: x_t = c_t s_t - m_t, l_t = sum 2^x_t, A = sum 2^x_1 (x_1 - x_2). When the maxima
move by d_t, A becomes 2^-d_1 (A + (d_2 - d_1) l_1). KL = (A / l_1 + log2 l_2 - log2 l_1) ln 2. The paper sums S_1 - S_2 unshifted;
this form saves a multiplication an entry.

Tensors are contiguous (BH, N, D), row statistics (BH, N) float32 in base 2, causal order bottom-right. Only boundary tiles are masked.
"""

import triton
import triton.language as tl

LN2 = tl.constexpr(0.6931471805599453)
LOWEST = tl.constexpr(-1.0e30)  # finite, so that no difference of two maxima is a NaN


@triton.jit
def load_tile(base, start, count, D: tl.constexpr, B: tl.constexpr, MASKED: tl.constexpr):
    """Rows start..start+B of a (count, D) matrix, zero beyond its end where MASKED."""
    at = start + tl.arange(0, B)
    pointers = base + at[:, None] * D + tl.arange(0, D)[None, :]
    if MASKED:
        return tl.load(pointers, mask=at[:, None] < count, other=0.0)
    return tl.load(pointers)


@triton.jit
def _forward_tiles(
    m1, l1, a, m2, l2, q1, q2, K1, K2, lo, hi, rows, offset, Nk, c1, c2,
    D1: tl.constexpr, D2: tl.constexpr, BN: tl.constexpr, CAUSAL: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    for start in range(lo, hi, BN):
        k1 = load_tile(K1, start, Nk, D1, BN, MASKED)
        s1 = tl.dot(q1, tl.trans(k1), input_precision=PRECISION)
        k2 = load_tile(K2, start, Nk, D2, BN, MASKED)
        s2 = tl.dot(q2, tl.trans(k2), input_precision=PRECISION)
        if MASKED:
            keys = start + tl.arange(0, BN)
            seen = keys[None, :] < Nk
            if CAUSAL:
                seen &= keys[None, :] <= rows[:, None] + offset
            s1 = tl.where(seen, s1, -float("inf"))
            s2 = tl.where(seen, s2, -float("inf"))
        n1 = tl.maximum(m1, tl.max(s1, 1) * c1)
        n2 = tl.maximum(m2, tl.max(s2, 1) * c2)
        x1 = s1 * c1 - n1[:, None]
        x2 = s2 * c2 - n2[:, None]
        p1 = tl.exp2(x1)
        p2 = tl.exp2(x2)
        gap = x1 - x2
        if MASKED:
            gap = tl.where(seen, gap, 0.0)
        r1 = tl.exp2(m1 - n1)
        r2 = tl.exp2(m2 - n2)
        a = r1 * (a + ((n2 - m2) - (n1 - m1)) * l1) + tl.sum(p1 * gap, 1)
        l1 = l1 * r1 + tl.sum(p1, 1)
        l2 = l2 * r2 + tl.sum(p2, 1)
        m1 = n1
        m2 = n2
    return m1, l1, a, m2, l2


@triton.jit
def _finish(KL, LSE1, LSE2, at, mask, m1, l1, a, m2, l2):
    some = l1 > 0
    kl = (a / tl.where(some, l1, 1.0) + tl.log2(tl.where(some, l2, 1.0)) - tl.log2(tl.where(some, l1, 1.0))) * LN2
    tl.store(KL + at, tl.where(some, kl, 0.0), mask=mask)
    tl.store(LSE1 + at, m1 + tl.log2(l1), mask=mask)
    tl.store(LSE2 + at, m2 + tl.log2(l2), mask=mask)


@triton.jit
def forward_kernel(
    Q1, K1, Q2, K2, KL, LSE1, LSE2, PARTS, c1, c2, BH, Nq, Nk, offset, chunk,
    D1: tl.constexpr, D2: tl.constexpr, CAUSAL: tl.constexpr, SPLIT: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Grid (row tiles, BH, splits). With SPLIT, five partial statistics a row go to PARTS (5, splits, BH, Nq)."""
    tile = tl.num_programs(0) - 1 - tl.program_id(0) if CAUSAL else tl.program_id(0)  # heaviest first
    bh = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    rows = tile * BM + tl.arange(0, BM)
    q1 = load_tile(Q1 + bh * Nq * D1, tile * BM, Nq, D1, BM, True)
    q2 = load_tile(Q2 + bh * Nq * D2, tile * BM, Nq, D2, BM, True)
    K1 += bh * Nk * D1
    K2 += bh * Nk * D2

    lo = split * chunk
    hi = tl.minimum(lo + chunk, Nk)
    full = hi if EVEN else tl.minimum(hi, Nk // BN * BN)
    if CAUSAL:
        hi = tl.minimum(hi, tl.maximum(tile * BM + BM + offset, 0))
        full = tl.minimum(full, tl.maximum(tile * BM + offset + 1, 0) // BN * BN)
    full = tl.maximum(full, lo)

    m1 = tl.full([BM], LOWEST, tl.float32)
    m2 = tl.full([BM], LOWEST, tl.float32)
    l1 = tl.zeros([BM], tl.float32)
    l2 = tl.zeros([BM], tl.float32)
    a = tl.zeros([BM], tl.float32)
    m1, l1, a, m2, l2 = _forward_tiles(
        m1, l1, a, m2, l2, q1, q2, K1, K2, lo, full, rows, offset, Nk, c1, c2, D1, D2, BN, CAUSAL, False, PRECISION
    )
    if CAUSAL or not EVEN:
        m1, l1, a, m2, l2 = _forward_tiles(
            m1, l1, a, m2, l2, q1, q2, K1, K2, full, hi, rows, offset, Nk, c1, c2, D1, D2, BN, CAUSAL, True, PRECISION
        )

    at = bh * Nq + rows
    if SPLIT:
        plane = tl.num_programs(2).to(tl.int64) * BH * Nq
        at += split.to(tl.int64) * BH * Nq
        tl.store(PARTS + at, m1, mask=rows < Nq)
        tl.store(PARTS + plane + at, l1, mask=rows < Nq)
        tl.store(PARTS + 2 * plane + at, a, mask=rows < Nq)
        tl.store(PARTS + 3 * plane + at, m2, mask=rows < Nq)
        tl.store(PARTS + 4 * plane + at, l2, mask=rows < Nq)
    else:
        _finish(KL, LSE1, LSE2, at, rows < Nq, m1, l1, a, m2, l2)


@triton.jit
def merge_kernel(PARTS, KL, LSE1, LSE2, count, splits, BLOCK: tl.constexpr, SPLITS: tl.constexpr):
    """The partial statistics of `count` = BH * Nq rows, merged; SPLITS is the next power of two."""
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    which = tl.arange(0, SPLITS)
    at = which[:, None].to(tl.int64) * count + rows[None, :]
    mask = (which[:, None] < splits) & (rows[None, :] < count)
    plane = splits.to(tl.int64) * count
    m1 = tl.load(PARTS + at, mask=mask, other=LOWEST)
    l1 = tl.load(PARTS + plane + at, mask=mask, other=0.0)
    a = tl.load(PARTS + 2 * plane + at, mask=mask, other=0.0)
    m2 = tl.load(PARTS + 3 * plane + at, mask=mask, other=LOWEST)
    l2 = tl.load(PARTS + 4 * plane + at, mask=mask, other=0.0)
    n1 = tl.max(m1, 0)
    n2 = tl.max(m2, 0)
    r1 = tl.exp2(m1 - n1[None, :])
    r2 = tl.exp2(m2 - n2[None, :])
    a = tl.sum(r1 * (a + ((n2[None, :] - m2) - (n1[None, :] - m1)) * l1), 0)
    _finish(KL, LSE1, LSE2, rows, rows < count, n1, tl.sum(r1 * l1, 0), a, n2, tl.sum(r2 * l2, 0))
