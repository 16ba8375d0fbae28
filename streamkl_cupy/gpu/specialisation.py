"""One kernel in one shape: what a row of the tile tables says, and which row a device takes."""

from __future__ import annotations

from dataclasses import dataclass

from .device import DeviceInfo

HEAD_DIM_CLASSES = (16, 32, 64, 96, 128, 192, 256)
"""Head dimensions are padded in shared memory to one of these; wider ones, and float32, go through the chunked kernels."""

ELEMENTS = {"float16": "Half", "bfloat16": "BFloat16", "float32": "float"}
STATS_BYTES, TERMS_BYTES = 20, 24
RESERVED_BYTES = 1024
"""Shared memory that the system takes of every block."""


@dataclass(frozen=True)
class Tile:
    """A block owns `warps * row_blocks * 16` rows; the other side streams by, `streamed` rows at a time, in `stages` slices."""

    warps: int
    row_blocks: int
    streamed: int
    stages: int
    min_blocks: int
    reason: str
    result: int = 0

    @property
    def rows(self) -> int:
        return 16 * self.row_blocks * self.warps

    @property
    def threads(self) -> int:
        return 32 * self.warps


@dataclass(frozen=True)
class Specialisation:
    """One kernel in one shape: what is compiled, how it is launched, and how much it may spill (bytes of stores and loads)."""

    source: str
    entry: str
    tile: Tile
    defines: tuple[tuple[str, int | str], ...]
    shared_bytes: int
    spill_budget: int
    accelerated: bool = False
    """Compiled for sm_90a, and given tensor maps of what streams by."""
    other_threads: int = 0
    """Of warpgroups that own no rows: they copy, or add up."""

    @property
    def threads(self) -> int:
        return self.tile.threads + self.other_threads


def head_dim_class(head_dim: int) -> int:
    return next(c for c in HEAD_DIM_CLASSES if c >= head_dim)


def choose(rows: list[Specialisation], device: DeviceInfo) -> Specialisation:
    def warps(row: Specialisation) -> int:
        blocks = device.shared_memory_per_multiprocessor // (row.shared_bytes + RESERVED_BYTES)
        return min(blocks, row.tile.min_blocks) * row.tile.warps

    fitting = [row for row in rows if row.shared_bytes <= device.shared_memory_per_block]
    if not fitting:
        least = min(row.shared_bytes for row in rows)
        raise RuntimeError(
            f"{rows[0].entry} needs {least} bytes of shared memory a block; {device.name} has {device.shared_memory_per_block}"
        )
    most = max(map(warps, fitting))
    return next(row for row in fitting if warps(row) == most)
