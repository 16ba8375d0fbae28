"""Clusters of two blocks in the emulator: arrivals in the other block, boxes for both, and what must be reported."""

import numpy as np
import pytest

from . import Emulated, EmulationError, pointer, tensor_maps
from .test_hopper_instructions import values

SHARED_BYTES = 16384 + 64

HEAD = """
#include "problem.cuh"
#include "ptx_sm80.cuh"
#include "ptx_sm90.cuh"
constexpr int kBlocks = 2;
extern "C" __global__ void __cluster_dims__(kBlocks, 1, 1) kernel(const __grid_constant__ TensorMap map, float* to) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const u32 base = shared_address(shared), full = base + 16384, empty = full + 8, rank = cluster_rank();
  if (threadIdx.x == 0) barrier_init(full, 1), barrier_init(empty, 2), barrier_init_fence(), proxy_fence();
  cluster_sync();
"""

EXCHANGE = """
  for (u32 step = 0; step < 3; ++step) {
    if (threadIdx.x == 0) {
      barrier_arrive_expect(full, 16384);
      copy_box_4d_to_both(base + 8192 * rank, &map, full, 0, 64 * (1 - rank), 0, 0);
    }
    barrier_wait(full, step % 2);
    if (threadIdx.x < 64) to[(blockIdx.x * 3 + step) * 64 + threadIdx.x] =
        __uint_as_float(*reinterpret_cast<const u16*>(shared + 8192 * HALF + 128 * threadIdx.x) << 16);
    __syncthreads();
    if (threadIdx.x < 2) barrier_arrive_in(empty, threadIdx.x);
    barrier_wait(empty, step % 2);
  }
  cluster_sync();
"""


def launch(body, blocks=4):
    kernel = Emulated.of_text(f"{HEAD}{body}\n}}", "kernel", {"ELEMENT": "BFloat16"})
    x = values()
    encoded = tensor_maps.encode(x.ctypes.data, "bfloat16", (x.shape[1], x.shape[0], 1, 1), (2 * x.shape[1], 16, 16), 64)
    result = np.full((blocks, 3, 64), np.nan, np.float32)
    kernel.launch(blocks, 64, [encoded, pointer(result)], SHARED_BYTES, [x])
    return x, result


@pytest.mark.parametrize("half", [0, 1])
def test_each_block_brings_half_of_what_both_read(half):
    """Block 1's box lies in the second half and block 0's in the first, in both blocks; row r's first element is r's swizzled start."""
    x, result = launch(EXCHANGE.replace("HALF", str(half)))
    rows = np.arange(64)
    columns = 8 * (rows % 8)  # what the 128-byte swizzle puts first
    want = x[64 * (1 - half) + rows, columns].astype(np.float32)
    np.testing.assert_array_equal(result, np.broadcast_to(want, result.shape))


def test_a_block_may_return_before_the_barrier_of_its_cluster():
    _, result = launch("if (rank == 0) return; cluster_sync(); if (threadIdx.x == 0) to[blockIdx.x * 192] = 1.0f;")
    np.testing.assert_array_equal(result[:, 0, 0], [np.nan, 1, np.nan, 1])


def test_arrival_in_a_block_that_has_returned():
    with pytest.raises(EmulationError, match="the other block has returned"):
        launch("if (rank == 0) return; cluster_sync(); if (threadIdx.x == 0) barrier_arrive_in(empty, 0);")


def test_missing_arrival_is_reported_with_both_blocks_stuck():
    with pytest.raises(EmulationError, match="lacks 2 of 2 arrivals"):
        launch("barrier_wait(empty, 0);")


def test_odd_grid():
    with pytest.raises(EmulationError, match="clusters of 2"):
        launch("", blocks=3)
