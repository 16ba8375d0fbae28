"""The two backends behind one adapter: how a test gets arrays onto a device and back, and nothing else."""

from __future__ import annotations

import itertools
import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np

import streamkl_cupy as skl
from streamkl_cupy.arrays import BFLOAT16
from streamkl_cupy.checks import SIDES

COMMON_DIMS = (16, 24)
"""Head dimensions that most tests use. On a GPU they decide what has to be compiled, so tests share them."""

WIDE_DIMS = (257, 264, 320, 512, 575, 576)
MIXED_DIMS = ((8, 256), (256, 16), (12, 8), (24, 16), (33, 128), (64, 576), (576, 512), (1, 300), (96, 192))
"""Head dimensions above 256, and pairs of classes that differ."""


class NumPyBackend:
    name = "numpy"

    def put(self, array):
        """A contiguous copy of a NumPy array on the device."""
        return np.array(array, order="C")

    def get(self, array):
        """Any result as a NumPy array."""
        return np.asarray(array)

    def bytes(self, count: int):
        """A workspace full of NaN bit patterns."""
        return self.put(np.full(count, 0xFF, np.uint8))

    def synchronize(self) -> None:
        pass


class CuPyBackend(NumPyBackend):
    name = "cupy"

    def __init__(self):
        import cupy

        self.cupy = cupy

    def put(self, array):
        array = np.array(array, order="C")
        result = self.cupy.empty(array.shape, array.dtype)
        if array.size:
            result.set(array)
        return result

    def get(self, array):
        return array.get() if isinstance(array, self.cupy.ndarray) else np.asarray(array)

    def synchronize(self) -> None:
        self.cupy.cuda.Device().synchronize()


def compile_ahead() -> None:
    """Compiles, on all cores, what the tests are going to launch most: one after the other it would take longer than the tests.

    Errors are left to the tests, which meet them again.
    """
    common = itertools.product([COMMON_DIMS], ((2, 1), (2, 2)), (SIDES, *SIDES))
    others = [(64, 128), *MIXED_DIMS, *((d, d) for d in (16, 32, 64, 96, 128, 192, 256, 320))]
    others = itertools.product(others, [(2, 1)], (SIDES, ("q2", "k2")))
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for (dims, heads_k, wrt), dtype in itertools.product((*common, *others), ("float16", BFLOAT16, "float32")):
            heads = dict(zip(SIDES, (4, heads_k[0], 4, heads_k[1]), strict=True))
            pool.submit(_warm, [(1, heads[name], 1, dims[int(name[1]) - 1]) for name in SIDES], dtype, wrt)


def _warm(shapes, dtype, wrt) -> None:
    import cupy

    skl.warmup(*(cupy.empty(shape, dtype) for shape in shapes), wrt=wrt)
