"""What the library is measured against: one module each, all optional.

A module has NAME; DEVICE, "cuda" or "cpu"; COMPANION, True for a yardstick that computes something else; `available()`, None or the
reason why it cannot run; and `prepare(case, data)`, which gives `Prepared` calls or raises `Skip` with the reason.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

MODULES = {
    "triton": "triton_streamkl",
    "compile": "torch_compiled",
    "torch": "torch_eager",
    "chunked": "torch_chunked",
    "fla": "fla_fused",
    "cupy": "cupy_unfused",
    "cudnn": "cudnn_attention",
    "dense": "numpy_dense",
}


class Skip(Exception):
    """Why a peer sits this case out."""


class Prepared(NamedTuple):
    """`forward()` gives the KL of every row, `backward()` a dict of gradients; the first backward makes the state that it needs."""

    forward: Callable[[], Any]
    backward: Callable[[], dict]
    note: Callable[[], str] = lambda: ""


def load(name: str):
    """The module of a peer by its name on the command line."""
    return importlib.import_module(f".{MODULES[name]}", __name__)


def torch_on_gpu() -> str | None:
    """Why PyTorch cannot run here, or None."""
    try:
        import torch
    except ImportError:
        return "PyTorch is not installed"
    return None if torch.cuda.is_available() else "PyTorch sees no GPU"
