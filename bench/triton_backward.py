"""The StreamKL paper's backward in Triton: a kernel that owns rows of dQ, and one that owns rows of dK and may add to dQ as well.

x_t = c_t s_t - LSE_t is recomputed. Setting 1 trains side 2: dS_2 = g (2^x_2 - 2^x_1). Setting 2 trains side 1:
dS_1 = g 2^x_1 (x_1 - x_2 - KL). Layouts and masks as in triton_kernels.py.
"""

import triton
import triton.language as tl

from .triton_kernels import LN2, load_tile


@triton.jit
def _logit_gradient(x1, x2, kl, SETTING: tl.constexpr):
    """dS / g in the setting's unit: probabilities, or probabilities times base-2 logits."""
    if SETTING == 1:
        return tl.exp2(x2) - tl.exp2(x1)
    return tl.exp2(x1) * (x1 - x2 - kl)


@triton.jit
def _dq_tiles(
    dq, q1, q2, K1, K2, lse1, lse2, kl, lo, hi, rows, offset, Nk, c1, c2, D1: tl.constexpr, D2: tl.constexpr,
    BN: tl.constexpr, SETTING: tl.constexpr, CAUSAL: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    for start in range(lo, hi, BN):
        k1 = load_tile(K1, start, Nk, D1, BN, MASKED)
        k2 = load_tile(K2, start, Nk, D2, BN, MASKED)
        x1 = tl.dot(q1, tl.trans(k1), input_precision=PRECISION) * c1 - lse1[:, None]
        x2 = tl.dot(q2, tl.trans(k2), input_precision=PRECISION) * c2 - lse2[:, None]
        ds = _logit_gradient(x1, x2, kl[:, None], SETTING)
        if MASKED:
            keys = start + tl.arange(0, BN)
            seen = keys[None, :] < Nk
            if CAUSAL:
                seen &= keys[None, :] <= rows[:, None] + offset
            ds = tl.where(seen, ds, 0.0)
        k = k2 if SETTING == 1 else k1
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
    return dq


@triton.jit
def dq_kernel(
    Q1, K1, Q2, K2, LSE1, LSE2, KL, G, DQ, c1, c2, factor, Nq, Nk, offset, D1: tl.constexpr, D2: tl.constexpr,
    SETTING: tl.constexpr, CAUSAL: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Grid (row tiles, BH): each program owns BM rows of dQ. EVEN: BN divides Nk."""
    tile = tl.num_programs(0) - 1 - tl.program_id(0) if CAUSAL else tl.program_id(0)
    bh = tl.program_id(1).to(tl.int64)
    rows = tile * BM + tl.arange(0, BM)
    at = bh * Nq + rows
    q1 = load_tile(Q1 + bh * Nq * D1, tile * BM, Nq, D1, BM, True)
    q2 = load_tile(Q2 + bh * Nq * D2, tile * BM, Nq, D2, BM, True)
    lse1 = tl.load(LSE1 + at, mask=rows < Nq, other=0.0)
    lse2 = tl.load(LSE2 + at, mask=rows < Nq, other=0.0)
    kl = tl.load(KL + at, mask=rows < Nq, other=0.0) / LN2
    weight = tl.load(G + at, mask=rows < Nq, other=0.0) * factor
    K1 += bh * Nk * D1
    K2 += bh * Nk * D2
    hi = Nk
    full = Nk if EVEN else Nk // BN * BN
    if CAUSAL:
        hi = tl.minimum(hi, tl.maximum(tile * BM + BM + offset, 0))
        full = tl.minimum(full, tl.maximum(tile * BM + offset + 1, 0) // BN * BN)
    D: tl.constexpr = D2 if SETTING == 1 else D1
    dq = tl.zeros([BM, D], tl.float32)
    dq = _dq_tiles(dq, q1, q2, K1, K2, lse1, lse2, kl, 0, full, rows, offset, Nk, c1, c2, D1, D2, BN, SETTING, CAUSAL, False, PRECISION)
    if CAUSAL or not EVEN:
        dq = _dq_tiles(dq, q1, q2, K1, K2, lse1, lse2, kl, full, hi, rows, offset, Nk, c1, c2, D1, D2, BN, SETTING, CAUSAL, True, PRECISION)
    out = DQ + at[:, None] * D + tl.arange(0, D)[None, :]
    tl.store(out, (dq * weight[:, None]).to(DQ.dtype.element_ty), mask=rows[:, None] < Nq)


@triton.jit
def _dk_tiles(
    dk, k1, k2, Q1, Q2, LSE1, LSE2, KL, G, DQ, lo, hi, keys, offset, Nq, Nk, c1, c2, factor, D1: tl.constexpr, D2: tl.constexpr,
    BM: tl.constexpr, SETTING: tl.constexpr, CAUSAL: tl.constexpr, MASKED: tl.constexpr, FUSED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    D: tl.constexpr = D2 if SETTING == 1 else D1
    for start in range(lo, hi, BM):
        rows = start + tl.arange(0, BM)
        q1 = load_tile(Q1, start, Nq, D1, BM, MASKED)
        q2 = load_tile(Q2, start, Nq, D2, BM, MASKED)
        # A row past the end has g = 0 and lse = 0, so its column of dS is 0; it needs no mask of its own.
        lse1 = tl.load(LSE1 + rows, mask=rows < Nq, other=0.0)
        lse2 = tl.load(LSE2 + rows, mask=rows < Nq, other=0.0)
        g = tl.load(G + rows, mask=rows < Nq, other=0.0)
        kl = tl.load(KL + rows, mask=rows < Nq, other=0.0) / LN2 if SETTING == 2 else lse1
        x1 = tl.dot(k1, tl.trans(q1), input_precision=PRECISION) * c1 - lse1[None, :]
        x2 = tl.dot(k2, tl.trans(q2), input_precision=PRECISION) * c2 - lse2[None, :]
        ds = _logit_gradient(x1, x2, kl[None, :], SETTING) * g[None, :]
        if MASKED:
            seen = keys[:, None] < Nk
            if CAUSAL:
                seen &= keys[:, None] <= rows[None, :] + offset
            ds = tl.where(seen, ds, 0.0)
        q = q2 if SETTING == 1 else q1
        dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION)
        if FUSED:
            k = k2 if SETTING == 1 else k1
            part = tl.dot(tl.trans(ds.to(k.dtype)), k, input_precision=PRECISION) * factor
            tl.atomic_add(DQ + rows[:, None] * D + tl.arange(0, D)[None, :], part, mask=rows[:, None] < Nq, sem="relaxed")
    return dk


@triton.jit
def dk_kernel(
    Q1, K1, Q2, K2, LSE1, LSE2, KL, G, DK, DQ, c1, c2, factor, Nq, Nk, offset, D1: tl.constexpr, D2: tl.constexpr,
    SETTING: tl.constexpr, CAUSAL: tl.constexpr, EVEN: tl.constexpr, FUSED: tl.constexpr, PRECISION: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Grid (key tiles, BH): each program owns BN rows of dK; FUSED adds its share of dQ to a zeroed float32 DQ. EVEN: both divide."""
    tile = tl.program_id(0)
    bh = tl.program_id(1).to(tl.int64)
    keys = tile * BN + tl.arange(0, BN)
    k1 = load_tile(K1 + bh * Nk * D1, tile * BN, Nk, D1, BN, True)
    k2 = load_tile(K2 + bh * Nk * D2, tile * BN, Nk, D2, BN, True)
    D: tl.constexpr = D2 if SETTING == 1 else D1
    Q1 += bh * Nq * D1
    Q2 += bh * Nq * D2
    DQ += bh * Nq * D
    LSE1 += bh * Nq
    LSE2 += bh * Nq
    KL += bh * Nq
    G += bh * Nq
    lo = 0
    full = 0
    if CAUSAL:
        lo = tl.maximum(tile * BN - offset, 0) // BM * BM
        full = tl.minimum((tl.maximum(tile * BN + BN - 1 - offset, 0) + BM - 1) // BM * BM, Nq)
    if not EVEN:
        full = tl.maximum(full, lo)
    dk = tl.zeros([BN, D], tl.float32)
    if CAUSAL:
        dk = _dk_tiles(
            dk, k1, k2, Q1, Q2, LSE1, LSE2, KL, G, DQ, lo, full, keys, offset, Nq, Nk, c1, c2, factor,
            D1, D2, BM, SETTING, CAUSAL, True, FUSED, PRECISION,
        )  # fmt: skip
    dk = _dk_tiles(
        dk, k1, k2, Q1, Q2, LSE1, LSE2, KL, G, DQ, full, Nq, keys, offset, Nq, Nk, c1, c2, factor,
        D1, D2, BM, SETTING, CAUSAL, not EVEN, FUSED, PRECISION,
    )  # fmt: skip
    out = DK + (bh * Nk + keys)[:, None] * D + tl.arange(0, D)[None, :]
    tl.store(out, (dk * factor).to(DK.dtype.element_ty), mask=keys[:, None] < Nk)
