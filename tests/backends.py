"""The two backends behind one adapter: how a test gets arrays onto a device and back, and nothing else."""

from __future__ import annotations

import itertools
import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np

import streamkl_cupy as skl
from streamkl_cupy.arrays import BFLOAT16

COMMON_DIMS = (16, 24)
"""Head dimensions that most tests use. On a GPU they decide what has to be compiled, so tests share them."""


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
    pairs = [COMMON_DIMS, (64, 128), *((d, d) for d in (16, 32, 64, 96, 128, 192, 256, 320))]
    wrts = (("q1", "q2"), ("k1", "k2"), "q1", "k1", "q2", "k2")
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for dtype, (d1, d2), wrt in itertools.product(("float16", BFLOAT16, "float32"), pairs, wrts):
            if d1 == d2 and wrt not in ("q2", "k2"):
                continue
            shapes = ((1, 1, 1, d1), (1, 1, 1, d1), (1, 1, 1, d2), (1, 1, 1, d2))
            pool.submit(lambda shapes=shapes, dtype=dtype, wrt=wrt: _warm(shapes, dtype, wrt))


def _warm(shapes, dtype, wrt) -> None:
    import cupy

    skl.warmup(*(cupy.empty(shape, dtype) for shape in shapes), wrt=wrt)
