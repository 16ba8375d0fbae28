"""The KL kernel of flash-linear-attention (fla-core) over materialised logits: setting 1 only.

It writes the student's logit gradient over its logits during the forward, so its backward is two products: compare the sums.
"""

from __future__ import annotations

from ..cases import Case
from ..data import Data
from . import Prepared, Skip, torch_on_gpu
from .torch_eager import hidden_pairs

NAME, DEVICE, COMPANION = "fla", "cuda", False


def available() -> str | None:
    if reason := torch_on_gpu():
        return reason
    try:
        _kernel()
    except Exception as error:  # it raises many kinds where Triton or the card does not suit it
        return f"fla-core does not import: {type(error).__name__}: {(str(error) or 'no message').splitlines()[0][:80]}"
    return None


def _kernel():
    """The module that holds the kernel: fla-core 0.6 moved it into a package."""
    import importlib

    try:
        return importlib.import_module("fla.modules.fused_kl_div.ops")
    except ModuleNotFoundError:
        return importlib.import_module("fla.modules.fused_kl_div")


def prepare(case: Case, data: Data) -> Prepared:
    import torch
    import triton

    kernels = _kernel()
    if set(case.wrt) - {"q2", "k2"}:
        raise Skip("its gradient is the student's (setting 1) alone")
    if case.kv_heads != case.heads:
        raise Skip("it takes one logit matrix a query head; no shared key heads here")
    data = data.as_torch()
    flat = [x.flatten(0, 1) for x in data.inputs]
    scale1, scale2 = case.scales
    hidden = hidden_pairs(case, data.q1.device)
    count, keys = case.rows, case.seqlen_k
    zero = torch.zeros((), device="cuda", dtype=data.q1.dtype)
    state = {}

    def logits(q, k, scale):
        out = torch.baddbmm(zero, q, k.mT, beta=0, alpha=scale)
        return out if hidden is None else out.masked_fill_(hidden, torch.finfo(out.dtype).min)

    @torch.no_grad()
    def forward():
        state.clear()
        teacher, student = logits(flat[0], flat[1], scale1), logits(flat[2], flat[3], scale2)
        kl = torch.empty(count, device="cuda", dtype=torch.float32)
        block = min(kernels.MAX_FUSED_SIZE, triton.next_power_of_2(keys))
        kernels.kl_div_kernel[(count,)](
            logits=student, target_logits=teacher, loss=kl, s_logits=keys, s_loss=1, reduction="none", N=count, V=keys, BV=block,
            num_warps=kernels.STATIC_WARPS,
        )  # fmt: skip
        state["ds"] = student
        return kl.view(case.batch, case.heads, case.seqlen_q)

    @torch.no_grad()
    def backward():
        if not state:
            forward()
        weight = (data.grad_kl * scale2).flatten(0, 1)[..., None]
        grads = {}
        if "q2" in case.wrt:
            grads["q2"] = (torch.bmm(state["ds"], flat[3]) * weight).to(flat[3].dtype).view(case.shape("q2"))
        if "k2" in case.wrt:
            grads["k2"] = torch.bmm(state["ds"].mT, (flat[2] * weight).to(flat[2].dtype)).view(case.shape("k2"))
        return grads

    return Prepared(forward, backward, lambda: "its forward writes the logit gradient too")
