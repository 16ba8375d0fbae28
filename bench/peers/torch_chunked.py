"""PyTorch over chunks of query rows, what people run at long context: logits of one chunk at a time, recomputed in the backward.

The gradients are written out, which is faster than autograd with checkpoints, and a causal chunk reads only the keys that it sees.
"""

from __future__ import annotations

from ..cases import Case
from ..data import Data
from . import Prepared, torch_on_gpu
from .torch_eager import hidden_pairs

NAME, DEVICE, COMPANION = "chunked", "cuda", False
available = torch_on_gpu
CHUNK_BYTES = 1 << 30
"""Of one float32 logit matrix of a chunk; about six of them live at once."""


def prepare(case: Case, data: Data) -> Prepared:
    import torch

    data = data.as_torch()
    group = case.heads // case.kv_heads
    k1, k2 = (k.repeat_interleave(group, dim=1) if group > 1 else k for k in (data.k1, data.k2))
    rows_at_once = max(1, min(case.seqlen_q, CHUNK_BYTES // (4 * case.batch * case.heads * case.seqlen_k)))
    chunks = [slice(at, min(at + rows_at_once, case.seqlen_q)) for at in range(0, case.seqlen_q, rows_at_once)]

    def keys_of(rows):
        import numpy as np

        first, end = case.visible(np.array([rows.start, rows.stop - 1]))
        return slice(int(first[0]), max(int(end[1]), int(first[0]) + 1))

    def log_p(q, k, scale, hidden):
        logits = torch.matmul(q, k.mT) * scale
        if hidden is not None:
            logits = logits.masked_fill(hidden, torch.finfo(logits.dtype).min)
        return torch.log_softmax(logits, dim=-1, dtype=torch.float32)

    def chunk(rows):
        keys = keys_of(rows)
        hidden = hidden_pairs(case, data.q1.device, rows, keys)
        pair = [log_p(q[:, :, rows], k[:, :, keys], s, hidden) for q, k, s in zip((data.q1, data.q2), (k1, k2), case.scales, strict=True)]
        p1 = pair[0].exp()
        gap = pair[0] - pair[1]
        return keys, p1, pair[1], gap, (p1 * gap).sum(-1)

    @torch.no_grad()
    def forward():
        return torch.cat([chunk(rows)[-1] for rows in chunks], dim=-1)

    @torch.no_grad()
    def backward():
        shapes = {"k1": k1.shape, "k2": k2.shape}
        grads = {name: torch.zeros(shapes[name], device=data.q1.device) for name in case.wrt if name[0] == "k"}
        grads |= {name: torch.empty_like(getattr(data, name)) for name in case.wrt if name[0] == "q"}
        for rows in chunks:
            keys, p1, log_p2, gap, kl = chunk(rows)
            g = data.grad_kl[:, :, rows, None]
            for side, scale, q, k in (("1", case.scales[0], data.q1, k1), ("2", case.scales[1], data.q2, k2)):
                if not {f"q{side}", f"k{side}"} & set(case.wrt):
                    continue
                ds = g * p1 * (gap - kl[..., None]) if side == "1" else g * (log_p2.exp() - p1)
                ds = (ds * scale).to(q.dtype)
                if f"q{side}" in grads:
                    grads[f"q{side}"][:, :, rows] = torch.matmul(ds, k[:, :, keys])
                if f"k{side}" in grads:
                    grads[f"k{side}"][:, :, keys] += torch.matmul(ds.mT, q[:, :, rows])
        return {name: _fold(grad, group).to(data.q1.dtype) if name[0] == "k" else grad for name, grad in grads.items()}

    return Prepared(forward, backward, lambda: f"{rows_at_once} rows a chunk")


def _fold(grad, group: int):
    b, h, n, d = grad.shape
    return grad if group == 1 else grad.view(b, h // group, group, n, d).sum(2)
