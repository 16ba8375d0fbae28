"""Merging row statistics on a GPU: the splits of one call, or a caller's shards."""

from __future__ import annotations

from . import parameters
from .launch import launch, plain_kernel

THREADS = 256
NAMES = parameters.ROW_STATS.names


def launch_merge(first, strides, parts: int, out, count: int, device_index: int, stream: int) -> None:
    """Merges `parts` sets of `count` rows; part i of each array lies i of its stride (in elements) from `first`."""
    function = plain_kernel("forward_merge.cu", "forward_merge", device_index)
    args = (parameters.merge_input(first, strides, count, parts), parameters.row_stats(out))
    launch(function, (min(-(-count // THREADS), 65535),), THREADS, args, stream)


def run(parts, out, shape, stream: int) -> None:
    """Merges the contiguous float32 arrays of any number of shards into `out`, two at a time: they may lie anywhere."""
    count = 1
    for size in shape:
        count *= size
    if count == 0:
        return
    device_index = out["kl"].device[1]
    merged = parts[0]
    for part in parts[1:] or [parts[0]]:
        alone = len(parts) == 1
        strides = [0 if alone else (part[n].pointer - merged[n].pointer) // 4 for n in NAMES]
        launch_merge(merged, strides, 1 if alone else 2, out, count, device_index, stream)
        merged = out
