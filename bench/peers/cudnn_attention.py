"""cuDNN's attention through PyTorch: not the same computation, but the nearest tuned one, as a companion to the roofline.

softmax(Q1 K1^T) K2 has the forward's two products and one exponential a pair instead of two; its backward has five products.
"""

from __future__ import annotations

from ..cases import Case
from ..data import Data
from . import Prepared, Skip, torch_on_gpu

NAME, DEVICE, COMPANION = "cudnn", "cuda", True
available = torch_on_gpu


def flop(case: Case, direction: str) -> int:
    """Useful operations of attention: 2 products forward, 5 backward."""
    return (2 if direction == "forward" else 5) * 2 * case.pairs * case.head_dim1


def prepare(case: Case, data: Data) -> Prepared:
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    if case.dtype == "float32":
        raise Skip("cuDNN attention takes no float32")
    if case.head_dim1 != case.head_dim2:
        raise Skip("its values have the keys' head dimension here")
    if case.window != (-1, -1):
        raise Skip("no window through PyTorch")
    if case.causal and case.seqlen_q != case.seqlen_k:
        raise Skip("its causal order is top-left where lengths differ")
    data = data.as_torch()
    q, k, v = (x.detach().requires_grad_() for x in (data.q1, data.k1, data.k2))
    upstream = torch.randn_like(q)
    state = []

    def forward():
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=case.causal, enable_gqa=case.kv_heads != case.heads)

    def backward():
        if not state:
            state.append(forward())
        return dict(zip(("q", "k", "v"), torch.autograd.grad(state[0], (q, k, v), upstream, retain_graph=True), strict=True))

    return Prepared(forward, backward, lambda: "attention, not KL: compare TFLOP/s")
