"""Peak extra memory of a call: what it allocates beyond what was there before, outputs included."""

from __future__ import annotations

import re
import tracemalloc
from collections.abc import Callable

WORDS = re.compile(r"out of memory|OutOfMemory|MemoryAllocation|ALLOC_FAILED|RESOURCE_EXHAUSTED")


def peak_extra_bytes(call: Callable, device: str) -> int:
    """The peak during `call()`, from PyTorch's and CuPy's allocators together, or from Python's on the CPU.

    What `call` returns counts, and is dropped afterwards. Memory that a library takes outside both allocators is not seen.
    """
    return _cuda_peak(call) if device == "cuda" else _cpu_peak(call)


def release() -> None:
    """Gives cached blocks of both allocators back to the driver, so that one contender's cache is not another's shortage."""
    import gc

    gc.collect()
    import cupy

    cupy.get_default_memory_pool().free_all_blocks()
    if torch := _torch():
        torch.cuda.empty_cache()


def out_of_memory(error: BaseException) -> bool:
    """Whether an exception of any framework means that the device (or host) memory did not suffice.

    A compiler's or a driver's own error says so in its text alone.
    """
    return isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError" or bool(WORDS.search(str(error)))


def _cuda_peak(call) -> int:
    import cupy

    class Meter(cupy.cuda.MemoryHook):
        """Follows CuPy's pool, which keeps no peak of its own."""

        name = "bench"
        now = peak = 0

        def malloc_postprocess(self, *, mem_size, mem_ptr, **_):
            self.now += mem_size if mem_ptr else 0
            self.peak = max(self.peak, self.now)

        def free_postprocess(self, *, mem_size, **_):
            self.now -= mem_size

    torch = _torch()
    cupy.cuda.runtime.deviceSynchronize()
    before = 0
    if torch:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    with Meter() as meter:
        result = call()
        cupy.cuda.runtime.deviceSynchronize()
        peak = meter.peak + (torch.cuda.max_memory_allocated() - before if torch else 0)
        del result
    return peak


def _cpu_peak(call) -> int:
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        result = call()
        peak = tracemalloc.get_traced_memory()[1] - before
        del result
    finally:
        tracemalloc.stop()
    return peak


def _torch():
    try:
        import torch
    except ImportError:
        return None
    return torch if torch.cuda.is_available() else None
