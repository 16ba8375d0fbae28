"""CuPy without a kernel of one's own: cuBLAS products and elementwise passes over whole float32 logit matrices."""

from __future__ import annotations

import numpy as np

from ..cases import Case
from ..data import Data
from . import Prepared, Skip

NAME, DEVICE, COMPANION = "cupy", "cuda", False
CUDA_TYPE = {"float32": 0, "float16": 2, "bfloat16": 14}
COMPUTE_FLOAT32, DEFAULT_ALGORITHM = 68, -1


def available() -> str | None:
    try:
        import cupy  # noqa: F401
        from cupy_backends.cuda.libs import cublas  # noqa: F401
    except ImportError as error:
        return f"CuPy's cuBLAS does not load: {str(error).splitlines()[0]}"
    return None


def prepare(case: Case, data: Data) -> Prepared:
    import cupy

    if case.kv_heads != case.heads:
        raise Skip("no shared key heads here")
    data = data.as_cupy()
    dtype = data.q1.dtype
    q1, k1, q2, k2 = (x.reshape(-1, *x.shape[2:]) for x in data.inputs)
    hidden = _hidden(case)
    weight = data.grad_kl.reshape(-1, case.seqlen_q, 1)
    alive = None if hidden is None else ~hidden.all(axis=1)

    def log_p(q, k, scale):
        logits = _product(q, k, transpose_b=True, dtype=cupy.float32)
        logits *= np.float32(scale)
        if hidden is not None:
            cupy.copyto(logits, np.float32(-1e30), where=hidden)
        logits -= logits.max(axis=-1, keepdims=True)
        logits -= cupy.log(cupy.exp(logits).sum(axis=-1, keepdims=True))
        return logits

    def both():
        log_p1, log_p2 = log_p(q1, k1, case.scales[0]), log_p(q2, k2, case.scales[1])
        p1 = cupy.exp(log_p1)
        log_p1 -= log_p2
        kl = (p1 * log_p1).sum(axis=-1)
        return p1, log_p2, log_p1, kl if alive is None else kl * alive

    def forward():
        return both()[-1].reshape(case.batch, case.heads, case.seqlen_q)

    def backward():
        p1, log_p2, gap, kl = both()
        grads = {}
        for side, q, k, scale in (("1", q1, k1, case.scales[0]), ("2", q2, k2, case.scales[1])):
            if not {f"q{side}", f"k{side}"} & set(case.wrt):
                continue
            ds = p1 * (gap - kl[..., None]) if side == "1" else cupy.exp(log_p2) - p1
            ds *= weight * np.float32(scale)
            if hidden is not None:
                cupy.copyto(ds, np.float32(0), where=hidden)
            ds = ds.astype(dtype)
            if f"q{side}" in case.wrt:
                grads[f"q{side}"] = _product(ds, k, dtype=dtype).reshape(case.shape(f"q{side}"))
            if f"k{side}" in case.wrt:
                grads[f"k{side}"] = _product(ds, q, transpose_a=True, dtype=dtype).reshape(case.shape(f"k{side}"))
        return grads

    return Prepared(forward, backward)


def _product(a, b, *, transpose_a=False, transpose_b=False, dtype):
    """Batched op(a) op(b) by cuBLAS with float32 accumulation: `cupy.matmul` takes no bfloat16 and rounds its result to the inputs' dtype."""
    import cupy
    from cupy_backends.cuda.libs import cublas

    m, k = a.shape[:0:-1] if transpose_a else a.shape[1:]
    n = b.shape[1] if transpose_b else b.shape[2]
    out = cupy.empty((a.shape[0], m, n), dtype)
    one, zero = np.array(1, np.float32), np.array(0, np.float32)
    kinds = [CUDA_TYPE[np.dtype(x.dtype).name] for x in (b, a, out)]
    # cuBLAS is column-major: it computes out^T = op(b)^T op(a)^T from the same memory.
    cublas.gemmStridedBatchedEx(
        cupy.cuda.device.get_cublas_handle(), int(transpose_b), int(transpose_a), n, m, k,
        one.ctypes.data, b.data.ptr, kinds[0], b.shape[2], b.shape[1] * b.shape[2],
        a.data.ptr, kinds[1], a.shape[2], a.shape[1] * a.shape[2],
        zero.ctypes.data, out.data.ptr, kinds[2], n, m * n, a.shape[0], COMPUTE_FLOAT32, DEFAULT_ALGORITHM,
    )  # fmt: skip
    return out


def _hidden(case: Case):
    if not case.masked:
        return None
    import cupy

    first, end = (cupy.asarray(x)[:, None] for x in case.visible(np.arange(case.seqlen_q)))
    columns = cupy.arange(case.seqlen_k)[None, :]
    return (columns < first) | (columns >= end)
