"""The same function under `torch.compile`."""

from __future__ import annotations

import functools

from ..cases import Case
from ..data import Data
from . import Prepared, torch_on_gpu
from .torch_eager import autograd_calls, row_kl

NAME, DEVICE, COMPANION = "compile", "cuda", False


def available() -> str | None:
    if reason := torch_on_gpu():
        return reason
    try:
        import triton  # noqa: F401
    except ImportError:
        return "torch.compile needs Triton, which is not installed"
    return None


def prepare(case: Case, data: Data) -> Prepared:
    import torch
    import torch._functorch.config

    # A timed backward runs many times on one graph, so its buffers may not be given away.
    torch._functorch.config.donated_buffer = False
    # Every shape is compiled for itself. Beyond its limits PyTorch would run the function uncompiled, and say so in a warning only.
    torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit = 10_000
    return autograd_calls(_compiled(), case, data)


@functools.cache
def _compiled():
    """One compiled function a process: it recompiles itself for new shapes and finds old ones again."""
    import torch

    return torch.compile(row_kl, dynamic=False, fullgraph=True)
