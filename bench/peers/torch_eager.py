"""PyTorch as it is written first: two logit matrices, two log-softmaxes, the sum; autograd for the backward."""

from __future__ import annotations

from ..cases import SIDES, Case
from ..data import Data
from . import Prepared, torch_on_gpu

NAME, DEVICE, COMPANION = "torch", "cuda", False
available = torch_on_gpu


def prepare(case: Case, data: Data) -> Prepared:
    return autograd_calls(row_kl, case, data)


def row_kl(q1, k1, q2, k2, scale1: float, scale2: float, hidden):
    """KL of every row from materialised logits, in the inputs' dtype up to the softmax and float32 from there; `hidden` is a mask."""
    import torch

    def log_p(q, k, scale):
        k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
        logits = torch.matmul(q, k.mT) * scale
        if hidden is not None:
            # The lowest finite number, not -inf: two of those differ by NaN.
            logits = logits.masked_fill(hidden, torch.finfo(logits.dtype).min)
        return torch.log_softmax(logits, dim=-1, dtype=torch.float32)

    log_p1, log_p2 = log_p(q1, k1, scale1), log_p(q2, k2, scale2)
    return (log_p1.exp() * (log_p1 - log_p2)).sum(-1)


def autograd_calls(function, case: Case, data: Data) -> Prepared:
    """Calls of a differentiable function of `row_kl`'s signature. The forward keeps what the backward needs, as in training."""
    import torch

    data = data.as_torch()
    leaves = {name: getattr(data, name).detach().requires_grad_(name in case.wrt) for name in SIDES}
    hidden = hidden_pairs(case, data.q1.device)
    state = []

    def forward():
        return function(*leaves.values(), *case.scales, hidden)

    def backward():
        if not state:
            state.append(forward())
        grads = torch.autograd.grad(state[0], [leaves[name] for name in case.wrt], data.grad_kl, retain_graph=True)
        return dict(zip(case.wrt, grads, strict=True))

    return Prepared(forward, backward)


def hidden_pairs(case: Case, device, rows: slice = slice(None), keys: slice = slice(None)):
    """Bool (rows, keys), True where a row does not see a key; None without a mask."""
    if not case.masked:
        return None
    import torch

    i = torch.arange(case.seqlen_q, device=device)[rows, None] + (case.seqlen_k - case.seqlen_q)
    j = torch.arange(case.seqlen_k, device=device)[None, keys]
    left, right = case.window
    hidden = torch.zeros((i.shape[0], j.shape[1]), dtype=torch.bool, device=device)
    if case.causal or right >= 0:
        hidden |= j > i + (0 if case.causal else right)
    if left >= 0:
        hidden |= j < i - left
    return hidden
