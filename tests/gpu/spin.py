"""A kernel that keeps a stream busy, so that work on the wrong stream comes too early, and waiting on the host is seen."""

import functools
import tempfile
from pathlib import Path

import numpy as np

from streamkl_cupy.gpu import compile as jit
from streamkl_cupy.gpu.launch import launch

SOURCE = """
extern "C" __global__ void spin(long long nanoseconds) {
  long long start, now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
  do {
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  } while (now - start < nanoseconds);
}
"""


@functools.cache
def _kernel(device_index: int):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "spin.cu"
        path.write_text(SOURCE)
        return jit.load(str(path), "spin", {}, jit.device_info(device_index).arch, device_index)


def spin(stream: int, milliseconds: float, device_index: int = 0) -> None:
    """Occupies a stream, given by its pointer, for that long. The device has to be current."""
    launch(_kernel(device_index), (1,), 1, (np.int64(milliseconds * 1e6),), stream)
