"""Host time of a call, by framework of the inputs, and what the replay of a captured graph adds to the kernels' own time.

A call returns before the device has finished, so its host time is Python and driver work alone. Calls come in batches with a
synchronisation between, so that a full launch queue never makes one wait.
"""

from __future__ import annotations

import os
import statistics
import time

import streamkl_cupy as skl

from .cases import Case
from .data import Data, make
from .runner import new_row
from .timing import CudaClock

BATCH, BATCHES = 20, 15
FRAMEWORKS = {"cpu": ("numpy", "torch"), "cuda": ("cupy", "torch", "jax")}
CAPTURED_CALLS = 20


def measure(case: Case, framework: str, device: str) -> dict:
    """A row of host times in microseconds: first call, steady state, and steady state with `out` and `workspace` given."""
    row = new_row(case, "both", "host")
    row["framework"] = framework
    try:
        data = _data(case, framework, device)
    except ImportError:
        row["skipped"][framework] = f"{framework} is not installed"
        return row
    except Exception as error:
        row["skipped"][framework] = (
            f"no {framework} arrays here: {type(error).__name__}: {(str(error) or 'no message').splitlines()[0][:120]}"
        )
        return row
    try:
        state, grads = _times(row, case, data, framework, _waiter(device))
        if framework == "cupy":
            row["graph"] = _graph(case, data, state, grads)
    except Exception as error:
        row["skipped"]["streamkl"] = f"failed: {type(error).__name__}: {(str(error) or 'no message').splitlines()[0][:120]}"
    return row


def _times(row: dict, case: Case, data: Data, framework: str, wait):
    times = row["results"][framework] = {}
    start = time.perf_counter()
    _, state = skl.forward(*data.inputs, **case.options)
    times["forward_first_us"] = (time.perf_counter() - start) * 1e6
    start = time.perf_counter()
    grads = skl.backward(state, data.grad_kl, wrt=case.wrt)
    times["backward_first_us"] = (time.perf_counter() - start) * 1e6
    times["forward_us"] = _steady(lambda: skl.forward(*data.inputs, **case.options), wait)
    times["backward_us"] = _steady(lambda: skl.backward(state, data.grad_kl, wrt=case.wrt), wait)
    if framework != "jax":  # its arrays are read-only
        refill = _refilling(case, data, state, grads)
        times["forward_refill_us"] = _steady(refill[0], wait)
        times["backward_refill_us"] = _steady(refill[1], wait)
    return state, grads


def _steady(call, wait) -> float:
    batches = []
    for _ in range(BATCHES):
        wait()
        start = time.perf_counter()
        for _ in range(BATCH):
            call()
        batches.append((time.perf_counter() - start) / BATCH * 1e6)
    wait()
    return statistics.median(batches)


def _refilling(case: Case, data: Data, state, grads):
    size = max(skl.workspace_size(*data.inputs, wrt=case.wrt, **case.options), 1)
    workspace = _bytes(data.framework, size)
    return (
        lambda: skl.forward(*data.inputs, **case.options, out=state, workspace=workspace),
        lambda: skl.backward(state, data.grad_kl, wrt=case.wrt, out=grads, workspace=workspace),
    )


def _graph(case: Case, data: Data, state, grads) -> dict:
    """Microseconds a forward and backward in a captured graph: its kernels' own time, and what a replay adds to that.

    One graph holds a single pair of calls, one holds many; the difference between them is kernels alone.
    """
    import cupy

    skl.warmup(*data.inputs, wrt=case.wrt, **case.options)
    calls = _refilling(case, data, state, grads)
    stream = cupy.cuda.Stream(non_blocking=True)
    graphs = []
    with stream:
        for call in calls:
            call()
        for count in (1, CAPTURED_CALLS):
            stream.begin_capture()
            for _ in range(count):
                for call in calls:
                    call()
            graphs.append(stream.end_capture())
        stream.synchronize()
        clock = CudaClock(stream)
        one, many = (_replay_us(clock, graph, stream) for graph in graphs)
    kernels = (many - one) / (CAPTURED_CALLS - 1)
    return {"kernels_us": kernels, "replay_adds_us": one - kernels}


def _replay_us(clock, graph, stream) -> float:
    replay = lambda: graph.launch(stream)  # noqa: E731
    clock.block(replay, 5)
    return statistics.median(clock.block(replay, 20) for _ in range(5)) * 1e3


def _data(case: Case, framework: str, device: str) -> Data:
    if device == "cpu":
        data = make(case, "cpu")
        return data if framework == "numpy" else _cpu_torch(data)
    if framework == "jax":
        # Otherwise it takes three quarters of the card at once.
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
        import jax

        data = make(case, "cuda", "cupy")
        return Data("jax", *(jax.dlpack.from_dlpack(array) for array in (*data.inputs, data.grad_kl)))
    if framework == "torch":
        import torch  # noqa: F401
    return make(case, "cuda", framework)


def _cpu_torch(data: Data) -> Data:
    import torch

    def tensor(array):
        return torch.from_numpy(array.astype("float32")).to(getattr(torch, array.dtype.name))

    return Data("torch", *(tensor(array) for array in (*data.inputs, data.grad_kl)))


def _bytes(framework: str, size: int):
    if framework == "torch":
        import torch

        return torch.empty(size, dtype=torch.uint8, device="cuda" if torch.cuda.is_available() else "cpu")
    if framework == "cupy":
        import cupy

        return cupy.empty(size, cupy.uint8)
    import numpy as np

    return np.empty(size, np.uint8)


def _waiter(device: str):
    if device == "cpu":
        return lambda: None
    import cupy

    return cupy.cuda.runtime.deviceSynchronize
