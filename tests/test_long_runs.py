"""A training run of many steps: nothing grows, neither memory on either side nor any cache, and the student learns all along.

Scales, offsets and weights change at every step, and all arrays are new ones, as a framework makes them.
"""

import gc
import sys

import numpy as np
import pytest

import streamkl_cupy as skl

from .problems import make

STEPS = {"numpy": 1_500, "cupy": 10_000}
WARM = {"numpy": 500, "cupy": 2_000}
"""Steps until every pool and cache is as full as it gets."""

SLACK = 2 << 20
"""Bytes of host memory that allocators may take at will. A leak of a state or of 300 bytes a step is more."""

LEARNING_RATE = 4.0
SIZES = {"batch": 1, "heads": 2, "heads_k": (2, 2), "n": (24, 40), "d": (16, 16), "size": 1.5}


def options(step: int) -> dict:
    temperature = 1 + 1e-5 * step
    return {"causal": True, "q_offset": 16 + step % 7, "reduction": "mean", "scale1": 0.25 / temperature, "scale2": 0.25 / temperature}


def resident() -> int:
    """Bytes of memory that the process holds."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def cached() -> int:
    """How many entries all caches of the package hold together."""
    ours = [module for name, module in list(sys.modules.items()) if name.partition(".")[0] == "streamkl_cupy"]
    found = {id(f): f for module in ours for f in vars(module).values() if hasattr(f, "cache_info")}
    return sum(function.cache_info().currsize for function in found.values())


def watch(name: str, losses, device_bytes) -> None:
    """Runs through the steps of a training, `losses`, which hands out functions that read the loss; compares two like moments."""
    readings = []
    for step, loss in enumerate(losses):
        if step == 0:
            first = loss()
        if step in (WARM[name], STEPS[name] - 1):
            gc.collect()
            readings.append((resident(), device_bytes(), cached()))
    (host, on_device, entries), (host_after, on_device_after, entries_after) = readings
    assert host_after - host <= SLACK, f"host memory grew by {host_after - host} bytes"
    assert on_device_after == on_device
    assert entries_after - entries <= 8, f"caches grew from {entries} entries to {entries_after}"
    assert loss() < 0.5 * first


def test_arrays(backend):
    """A float16 student with float32 weights, in NumPy or CuPy."""
    case = make(3, "float16", **SIZES)

    def training():
        q1, k1, q2, k2 = (backend.put(case.arrays[name]) for name in ("q1", "k1", "q2", "k2"))
        weights, one = k2.astype("float32"), backend.put(np.ones((), np.float32))
        for step in range(STEPS[backend.name]):
            kl, state = skl.forward(q1, k1, q2, weights.astype("float16"), **options(step))
            grads = skl.backward(state, one + 1e-6 * step, wrt="k2", dtype="float32")
            weights = weights - LEARNING_RATE * grads.k2
            yield lambda kl=kl: float(backend.get(kl))

    def device_bytes():
        if backend.name == "numpy":
            return 0
        backend.synchronize()
        pool = backend.cupy.get_default_memory_pool()
        return pool.total_bytes(), pool.used_bytes()

    watch(backend.name, training(), device_bytes)


@pytest.mark.parametrize("where", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_torch(where):
    """The same through autograd."""
    torch = pytest.importorskip("torch")
    if where == "cuda" and not torch.cuda.is_available():
        pytest.skip("PyTorch sees no GPU")
    case = make(4, "float32", **SIZES)

    class MeanKL(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q1, k1, q2, k2, step):
            loss, state = skl.forward(q1, k1, q2, k2, **options(step))
            ctx.problem = state.problem
            ctx.save_for_backward(*state.rows, q1, k1, q2, k2)
            return loss

        @staticmethod
        def backward(ctx, grad):
            saved = ctx.saved_tensors
            state = skl.KLState(skl.RowStats(*saved[:5]), ctx.problem, skl.Inputs(*saved[5:]))
            return None, None, None, skl.backward(state, grad, wrt="k2").k2, None

    def training():
        q1, k1, q2, k2 = (torch.tensor(case.arrays[name], device=where) for name in ("q1", "k1", "q2", "k2"))
        optimiser = torch.optim.SGD([k2.requires_grad_()], lr=LEARNING_RATE)
        for step in range(STEPS["cupy" if where == "cuda" else "numpy"]):
            optimiser.zero_grad()
            loss = MeanKL.apply(q1, k1, q2, k2, step)
            loss.backward()
            optimiser.step()
            yield loss.detach().item

    def device_bytes():
        if where == "cpu":
            return 0
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated(), torch.cuda.memory_reserved()

    watch("cupy" if where == "cuda" else "numpy", training(), device_bytes)
