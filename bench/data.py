"""Random normal inputs (never zeros: they run faster) in the framework that the measured calls take."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from .cases import ITEM_BYTES, SIDES, Case


@dataclass(frozen=True)
class Data:
    """The four inputs and the gradient of each row's KL, float32, between 0.5 and 1.5."""

    framework: str
    q1: Any
    k1: Any
    q2: Any
    k2: Any
    grad_kl: Any

    @property
    def inputs(self) -> tuple:
        return (self.q1, self.k1, self.q2, self.k2)

    def as_torch(self) -> Data:
        """The same memory as torch tensors."""
        if self.framework == "torch":
            return self
        import torch

        return Data("torch", *(torch.from_dlpack(array) for array in (*self.inputs, self.grad_kl)))

    def as_cupy(self) -> Data:
        """The same memory as CuPy arrays."""
        if self.framework == "cupy":
            return self
        import cupy

        return Data("cupy", *(cupy.from_dlpack(array) for array in (*self.inputs, self.grad_kl)))


def make(case: Case, device: str, framework: str | None = None, seed: int = 0) -> Data:
    """Inputs on "cpu" (NumPy) or "cuda": torch tensors where PyTorch sees the GPU, CuPy arrays elsewhere, or the framework named."""
    if device == "cpu":
        return _numpy(case, seed, "numpy", _rounded)
    framework = framework or cuda_framework()
    if framework == "torch":
        return _torch(case, seed)
    return _numpy(case, seed, "cupy", _on_device)


def cuda_framework() -> str:
    try:
        import torch
    except ImportError:
        return "cupy"
    return "torch" if torch.cuda.is_available() else "cupy"


def to_host(array) -> np.ndarray:
    """float64 on the host, whatever the framework."""
    if hasattr(array, "detach"):
        return array.detach().double().cpu().numpy()
    if hasattr(array, "get"):
        array = array.get()
    return np.asarray(array).astype(np.float64)


def input_bytes(case: Case) -> int:
    return sum(int(np.prod(case.shape(name))) for name in SIDES) * ITEM_BYTES[case.dtype]


def _torch(case: Case, seed: int) -> Data:
    import torch

    generator = torch.Generator("cuda").manual_seed(seed)
    dtype = getattr(torch, case.dtype)
    arrays = [torch.randn(case.shape(name), generator=generator, device="cuda", dtype=dtype) for name in SIDES]
    rows = (case.batch, case.heads, case.seqlen_q)
    return Data("torch", *arrays, torch.rand(rows, generator=generator, device="cuda") + 0.5)


def _numpy(case: Case, seed: int, framework: str, place) -> Data:
    rng = np.random.default_rng(seed)
    arrays = [place(rng.standard_normal(case.shape(name), dtype=np.float32), case.dtype) for name in SIDES]
    return Data(
        framework, *arrays, place(rng.random((case.batch, case.heads, case.seqlen_q), dtype=np.float32) + np.float32(0.5), "float32")
    )


def _on_device(array: np.ndarray, dtype: str):
    import cupy

    array = _rounded(array, dtype)
    result = cupy.empty(array.shape, array.dtype)
    result.set(array)
    return result


def _rounded(array: np.ndarray, dtype: str) -> np.ndarray:
    if dtype == "bfloat16":
        import ml_dtypes

        return array.astype(ml_dtypes.bfloat16)
    return array.astype(dtype, copy=False)
