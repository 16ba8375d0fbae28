"""The Triton peer's autotuner: every candidate of a kernel timed on a problem of the same kind, the fastest kept.

Not `triton.autotune`: that times whole problems, minutes at half a million keys. Here sizes are cut at TUNED_SIZE, and choices of an
earlier run on the same card and Triton version, which the result files keep, are taken over.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

TUNED_SIZE = 8192

# (BM, BN, warps, stages). Tiles beyond a card's shared memory or registers fail or lose, and drop out.
CANDIDATES = {
    "forward": (
        (128, 64, 4, 3),
        (128, 64, 4, 2),
        (128, 64, 8, 3),
        (64, 64, 4, 3),
        (64, 64, 4, 2),
        (128, 128, 8, 2),
        (64, 128, 4, 3),
        (64, 128, 4, 2),
    ),
    "forward few": ((16, 64, 4, 3), (16, 128, 4, 3), (32, 64, 4, 3), (32, 128, 4, 2), (64, 64, 4, 3), (64, 128, 4, 2)),
    "dq": ((128, 64, 8, 2), (128, 64, 8, 3), (64, 64, 4, 2), (64, 64, 4, 3), (128, 128, 8, 2), (64, 128, 8, 2)),
    "dq few": ((16, 64, 4, 3), (16, 128, 4, 3), (32, 64, 4, 3), (64, 64, 4, 3)),
    "dk": ((64, 128, 8, 2), (64, 128, 8, 3), (64, 64, 4, 2), (64, 64, 4, 3), (32, 128, 8, 3), (32, 64, 4, 3)),
    "dk few": ((16, 64, 4, 2), (16, 128, 8, 2), (32, 64, 4, 3), (64, 64, 4, 2)),
    "fused": ((64, 128, 8, 2), (64, 64, 4, 2), (32, 128, 8, 3), (32, 64, 4, 3)),
    "fused few": ((16, 64, 4, 2), (16, 128, 8, 2), (32, 64, 4, 3), (32, 128, 8, 2), (64, 64, 4, 2), (64, 128, 8, 2)),
}

choices: dict[str, tuple[int, int, int, int]] = {}
"""The fastest candidate by key, of this process and of the result files that `adopt` was given."""


def adopt(earlier: dict[str, list[int]]) -> None:
    """Takes over choices of an earlier run on the same card and Triton version."""
    choices.update({key: tuple(config) for key, config in earlier.items()})


def choose(kernel: str, key: str, launch: Callable[[tuple[int, int, int, int]], None]) -> tuple[int, int, int, int]:
    """The fastest candidate of `kernel` for `key`; `launch(config)` runs one on the tuning problem."""
    key = f"{kernel} {key}"
    if key not in choices:
        _compile_ahead(launch, CANDIDATES[kernel])
        times = {config: _time(launch, config) for config in CANDIDATES[kernel]}
        times = {config: ms for config, ms in times.items() if ms is not None}
        if not times:
            raise RuntimeError(f"no tile of the Triton kernel {kernel!r} runs on this card")
        choices[key] = min(times, key=times.get)
    return choices[key]


def _compile_ahead(launch, configs) -> None:
    """Launches every candidate once, compiling on all cores: a tile takes a second to compile and a millisecond to run."""
    import torch

    device = torch.cuda.current_device()

    def attempt(config):
        torch.cuda.set_device(device)
        # What fails here fails again where it is timed.
        with contextlib.suppress(Exception):
            launch(config)

    attempt(configs[0])  # alone: it makes the tuning problem
    with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
        list(pool.map(attempt, configs[1:]))
    torch.cuda.synchronize()


def _time(launch, config) -> float | None:
    """Milliseconds, the least of three calls after the one that compiles; None where the tile does not fit the card."""
    import torch
    from triton.compiler.errors import CompilationError
    from triton.runtime.errors import OutOfResources, PTXASError

    try:
        launch(config)
    except (OutOfResources, CompilationError, PTXASError):
        return None
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    best = float("inf")
    for _ in range(3):
        start.record()
        launch(config)
        end.record()
        end.synchronize()
        best = min(best, start.elapsed_time(end))
    return best
