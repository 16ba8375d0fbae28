"""How times are taken.

Burst: contenders in turn (A B A B), each call between two CUDA events, after the L2 cache was flushed. The flush also gives the host a
head start, so that what lies between the events is the device's time. A contender stops when its share of the budget is used.

Sustained: blocks of at least half a second, kernel and cuBLAS in turn in one process, so that both settle at the card's power cap;
the figure is the ratio of the medians over the rounds. In shorter blocks a kernel inherits the clock that cuBLAS was throttled to.

Few rows are bound by memory. Their yardstick is a copy within the device's memory, in turn with the call.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

FLUSH_BYTES = 256 << 20
COPY_BYTES = {"cuda": 1 << 30, "cpu": 64 << 20}
BLOCK_SECONDS = 0.55
ROUNDS = 3
GEMM_SIZE = 8192


class Times(NamedTuple):
    """Milliseconds of single calls."""

    calls: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.calls)

    @property
    def spread(self) -> float:
        """Half the distance between the quartiles over the median; 0 for fewer than three calls."""
        if len(self.calls) < 3:
            return 0.0
        low, _, high = statistics.quantiles(self.calls, n=4, method="inclusive")
        return (high - low) / 2 / self.median


class CpuClock:
    """Wall time of synchronous calls."""

    device = "cpu"

    def once(self, call: Callable) -> float:
        start = time.perf_counter()
        call()
        return (time.perf_counter() - start) * 1e3

    def block(self, call: Callable, count: int) -> float:
        return self.once(lambda: [call() for _ in range(count)]) / count

    def flush(self) -> None:
        """The CPU's caches are left as the calls leave them."""


class CudaClock:
    """Device time between events on a stream: without one, the legacy default stream, which PyTorch and CuPy share."""

    device = "cuda"

    def __init__(self, stream=None):
        import cupy

        self._cuda, self._stream = cupy.cuda, stream
        self._start, self._end = cupy.cuda.Event(), cupy.cuda.Event()
        self._scratch = None

    def once(self, call: Callable) -> float:
        return self.block(call, 1)

    def block(self, call: Callable, count: int) -> float:
        """Milliseconds a call, over `count` calls without a pause."""
        self._start.record(self._stream)
        for _ in range(count):
            call()
        self._end.record(self._stream)
        self._end.synchronize()
        return self._cuda.get_elapsed_time(self._start, self._end) / count

    def flush(self) -> None:
        """Overwrites more than the L2 cache. The further passes keep the device busy for 0.2 ms, while the host queues the call."""
        if self._scratch is None:
            self._scratch = self._cuda.alloc(FLUSH_BYTES)
        for value in range(4):
            self._scratch.memset_async(value, FLUSH_BYTES)


def interleaved(clock, calls: dict[str, Callable], seconds: float, repeat: int, estimate_ms: dict[str, float]) -> dict[str, Times]:
    """Times of each call, taken in turn. Each gets an equal share of `seconds`, at least one call, at most `repeat`."""
    share = seconds * 1e3 / len(calls)
    left = {name: max(1, min(repeat, int(share / max(estimate_ms[name], 1e-6)))) for name in calls}
    taken = {name: [] for name in calls}
    while any(left.values()):
        for name, call in calls.items():
            if left[name]:
                clock.flush()
                taken[name].append(clock.once(call))
                left[name] -= 1
    return {name: Times(tuple(times)) for name, times in taken.items()}


class Sustained(NamedTuple):
    """TFLOP/s of kernel and cuBLAS in each round's block."""

    kernel: tuple[float, ...]
    cublas: tuple[float, ...]

    @property
    def ratio(self) -> float:
        return statistics.median(self.kernel) / statistics.median(self.cublas)


def sustained(clock, call: Callable, flop: float, estimate_ms: float, gemm: Gemm) -> Sustained:
    """Alternating blocks of the two, after one of each that settles the clocks and is not counted."""
    counts = [max(1, round(BLOCK_SECONDS * 1e3 / ms + 0.5)) for ms in (estimate_ms, gemm.estimate_ms)]
    rates = ([], [])
    for _ in range(1 + ROUNDS):
        for rate, each, count, work in zip(rates, (call, gemm.call), counts, (flop, gemm.flop), strict=True):
            rate.append(work / clock.block(each, count) / 1e9)
    return Sustained(*(tuple(rate[1:]) for rate in rates))


class Gemm:
    """The yardstick: an 8192^3 bfloat16 product by cuBLAS, through PyTorch."""

    flop = 2 * GEMM_SIZE**3

    def __init__(self, clock: CudaClock):
        import torch

        a, b = (torch.randn(GEMM_SIZE, GEMM_SIZE, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        out = torch.empty_like(a)
        self.call = lambda: torch.mm(a, b, out=out)
        self.call()
        self.estimate_ms = min(clock.once(self.call) for _ in range(5))

    @staticmethod
    def unavailable() -> str | None:
        """Why there is no yardstick, or None."""
        try:
            import torch
        except ImportError:
            return "PyTorch is not installed"
        return None if torch.cuda.is_available() else "PyTorch sees no GPU"


class Copy:
    """The yardstick of what is bound by memory: a copy within it, of which every byte counts twice, read and written."""

    def __init__(self, clock: CpuClock | CudaClock):
        size = COPY_BYTES[clock.device]
        self.bytes = 2 * size
        if clock.device == "cuda":
            import cupy

            source, target = cupy.cuda.alloc(size), cupy.cuda.alloc(size)
            self.call = lambda: target.copy_from_device_async(source, size)
        else:
            import numpy as np

            source, target = np.ones(size, np.uint8), np.ones(size, np.uint8)
            self.call = lambda: np.copyto(target, source)
        self.call()
        self.estimate_ms = min(clock.once(self.call) for _ in range(3))
