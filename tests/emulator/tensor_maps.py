"""What stands for the driver's tensor maps: a struct that mbarriers.hpp reads, under the same restrictions."""

from __future__ import annotations

import struct

import numpy as np

MAP_BYTES = 128
MAGIC = int.from_bytes(b"ensormap", "little")


def encode(pointer: int, dtype: str, sizes, steps, tile_rows: int) -> np.ndarray:
    """Stands for `streamkl_cupy.gpu.tensor_map._map`. RuntimeError where the driver would refuse."""
    if pointer % 16 or any(step % 16 or not 0 < step < 1 << 40 for step in steps):
        raise RuntimeError(f"a tensor map at {pointer:#x} with strides {steps}; it takes multiples of 16 bytes below 2^40")
    if not all(0 < size <= 1 << 32 for size in sizes) or not 0 < tile_rows <= 256 or dtype not in ("float16", "bfloat16"):
        raise RuntimeError(f"a tensor map of {dtype} with sizes {sizes} and {tile_rows} rows a box")
    packed = struct.pack("<10Q", MAGIC, pointer, *sizes, *steps, tile_rows)
    return np.frombuffer(packed.ljust(MAP_BYTES, b"\0"), f"V{MAP_BYTES}")
