"""The emulated instructions of ptx_sm90.cuh: layouts against the PTX ISA, lateness, and that what kernels must not do is reported."""

import re

import ml_dtypes
import numpy as np
import pytest

from streamkl_cupy.gpu.source import kernels_directory

from . import Emulated, EmulationError, pointer, tensor_maps
from .runner import HERE

TYPES = {"Half": np.dtype(np.float16), "BFloat16": np.dtype(ml_dtypes.bfloat16)}
ROWS, COLUMNS = 128, 128
"""Of the input: two boxes of 64 columns each way."""
BAR, TILE = 4 * 16384, 16384
SHARED_BYTES = BAR + 64

HEAD = """
#include "problem.cuh"
#include "ptx_sm80.cuh"
#include "ptx_sm90.cuh"
extern "C" __global__ void kernel(const __grid_constant__ TensorMap map, float* to, const u32* from, int n) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const u32 base = shared_address(shared), bar = base + BAR;
  const int t = threadIdx.x;
  float d[32] = {};
  u32 a[4] = {1, 2, 3, 4};
  auto bring = [&](int tile, int c, int row) { copy_box_4d(base + tile * TILE, &map, bar, c, row, 0, 0); };
  auto store_d = [&](int which) { for (int i = 0; i < 32; ++i) to[(which * 128 + t) * 32 + i] = d[i]; };
  if (t == 0) barrier_init(bar, 1), barrier_init(bar + 8, 128), barrier_init(bar + 16, 0), proxy_fence();
  __syncthreads();
"""


def compiled(body, element="BFloat16"):
    return Emulated.of_text(f"{HEAD}{body}\n}}", "kernel", {"ELEMENT": element, "BAR": BAR, "TILE": TILE})


def run(kernel, x, threads=128, n=0, size=8, registers=None, box=64):
    """Runs on boxes of x; returns what the kernel leaves in `to`, by thread."""
    encoded = tensor_maps.encode(x.ctypes.data, "bfloat16", (x.shape[1], x.shape[0], 1, 1), (2 * x.shape[1], 16, 16), box)
    result = np.full((size, 128, 32), -1, np.float32)
    registers = np.zeros(1, np.uint32) if registers is None else registers
    kernel.launch(1, threads, [encoded, pointer(result), pointer(registers), np.int32(n)], SHARED_BYTES, [x])
    return result


def values(element="BFloat16", shape=(ROWS, COLUMNS), seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(TYPES[element])


def matrix(result):
    """Accumulators of m64n64 by the PTX ISA."""
    t, i = np.arange(128)[:, None], np.arange(32)[None, :]
    out = np.full((64, 64), np.nan)
    out[16 * (t // 32) + t % 32 // 4 + 8 * (i // 2 % 2), 8 * (i // 4) + 2 * (t % 4) + i % 2] = result
    return out


def test_every_function_is_emulated():
    def functions(path):
        return set(re.findall(r"^\s*(?:__device__ __forceinline__|.*\binline) \w+ (\w+)\(", path.read_text(), re.MULTILINE))

    real = functions(kernels_directory() / "ptx_sm90.cuh")
    assert len(real) > 15 and real <= functions(HERE / "ptx_sm90_emulated.hpp")


def test_boxes_are_swizzled_and_clipped():
    """16-byte piece p of row r lies at piece p ^ r % 8; what is outside the array is zero, on every side."""
    body = """
    if (t == 0) barrier_arrive_expect(bar, 64 * 128), copy_box_4d(base + 8192, &map, bar, n, from[0], 0, 0);
    barrier_wait(bar, 0);
    for (int i = t; i < 4096; i += 128) to[i] = to_float(reinterpret_cast<BFloat16*>(shared + 8192)[i]);
    """
    x, kernel = values(shape=(100, 72)), compiled(body)
    for column, row in ((0, 0), (64, 0), (0, 60), (64, 99), (0, -10), (-8, 5), (72, 0)):
        got = run(kernel, x, n=column, registers=np.array([row], np.int32).view(np.uint32)).reshape(-1)[:4096].reshape(64, 8, 8)
        wide = np.zeros((300, 300), np.float32)
        wide[100:200, 100:172] = x.astype(np.float32)
        expected = wide[100 + row : 164 + row, 100 + column : 164 + column].reshape(64, 8, 8)
        r, p = np.arange(64)[:, None], np.arange(8)[None, :]
        np.testing.assert_array_equal(got[r, p ^ r % 8], expected, err_msg=str((column, row)))


BRING = """
  if (t == 0) {
    barrier_arrive_expect(bar, 4 * 64 * 128);
    for (int i = 0; i < 4; ++i) copy_box_4d(base + i / 2 * TILE + i % 2 * 8192, &map, bar, i % 2 * 64, i / 2 * 64, 0, 0);
  }
  barrier_wait(bar, 0);
"""
"""Rows 0 to 63 in tile 0 and 64 to 127 in tile 1, each as two chunks of 64 columns."""

PRODUCTS = {
    "both by rows of what is summed over": (
        "wgmma(ELEMENT(), d, left + k / 4 * 512 + k % 4 * 2, right + k / 4 * 512 + k % 4 * 2, k > 0)",
        8,
        16,
        "x @ y.T",
    ),
    "B transposed": ("wgmma<1>(ELEMENT(), d, left + k * 2, right + k * 128, k > 0)", 4, 8192, "x[:, :64] @ y[:, :64]"),
    "A transposed": ("wgmma<0, 1>(ELEMENT(), d, left + k * 128, right + k * 2, k > 0)", 4, 8192, "x[:, :64].T @ y[:, :64].T"),
    "both transposed": ("wgmma<1, 1>(ELEMENT(), d, left + k * 128, right + 512 + k * 128, k > 0)", 4, 8192, "x[:, :64].T @ y[:, 64:]"),
    "onto what there is": ("wgmma(ELEMENT(), d, left + k * 2, right + k * 2, 1)", 4, 16, "t + x[:, :64] @ y[:, :64].T"),
}


@pytest.fixture(scope="module", params=TYPES)
def products(request):
    """The element, and a kernel that makes product n."""
    cases = "".join(
        f"case {n}: left = wgmma_descriptor(base, {chunk_bytes}), right = wgmma_descriptor(base + TILE, {chunk_bytes});"
        f"for (int k = 0; k < {steps}; ++k) {call}; break;\n"
        for n, (call, steps, chunk_bytes, _) in enumerate(PRODUCTS.values())
    )
    body = f"""{BRING}
    for (int i = 0; i < 32; ++i) d[i] = t;
    u64 left, right;
    wgmma_fence();
    switch (n) {{ {cases} }}
    wgmma_commit(); store_d(0); wgmma_wait<0>(); store_d(1);
    """
    return request.param, compiled(body, request.param)


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_from_shared_memory(products, name):
    element, kernel = products
    x = values(element)
    result = run(kernel, x, n=list(PRODUCTS).index(name))
    wide = x.astype(np.float64)
    thread = matrix(np.arange(128)[:, None] + np.zeros(32))
    assert np.isnan(result[0]).all(), "accumulators in flight"
    right = eval(PRODUCTS[name][3], {"x": wide[:64], "y": wide[64:], "t": thread})
    np.testing.assert_allclose(matrix(result[1]), right, rtol=0, atol=1e-4)


def test_wide_products():
    """n = 128: the transposed operand's second 64 columns lie in the next chunk."""
    body = f"""{BRING}
    float wide[64];
    const u64 left = wgmma_descriptor(base), right = wgmma_descriptor(base + TILE, 8192);
    wgmma_fence();
    for (int k = 0; k < 4; ++k) wgmma<1>(ELEMENT(), wide, left + k * 2, right + k * 128, k > 0);
    wgmma_commit(); wgmma_wait<0>();
    for (int half = 0; half < 2; ++half) for (int i = 0; i < 32; ++i) d[i] = wide[32 * half + i], to[(half * 128 + t) * 32 + i] = d[i];
    """
    x = values()
    result, wide = run(compiled(body), x), x.astype(np.float64)
    np.testing.assert_allclose(np.hstack([matrix(r) for r in result[:2]]), wide[:64, :64] @ wide[64:], rtol=0, atol=1e-4)


def test_products_from_registers_read_them_late():
    """By the fragments of the PTX ISA; registers that change before the wait count as they are then."""
    body = f"""{BRING}
    for (int i = 0; i < 4; ++i) a[i] = from[4 * t + i];
    wgmma_fence(); wgmma(ELEMENT(), d, a, wgmma_descriptor(base + TILE), 0); wgmma_commit();
    if (n) a[1] = 0;
    wgmma_wait<0>(); store_d(0);
    """
    x, left, kernel = values(), values(shape=(64, 16), seed=1), compiled(body)
    t, i, high = np.arange(128)[:, None, None], np.arange(4)[None, :, None], np.arange(2)[None, None, :]
    rows, columns = 16 * (t // 32) + t % 32 // 4 + 8 * (i % 2), 2 * (t % 4) + high + 8 * (i // 2)
    fragments = np.ascontiguousarray(left[rows, columns]).view(np.uint32)
    right = x[64:, :16].astype(np.float64).T
    for overwritten in (0, 1):
        if overwritten:
            left[rows[:, 1], columns[:, 1]] = 0
        result = run(kernel, x, n=overwritten, registers=fragments)
        np.testing.assert_allclose(matrix(result[0]), left.astype(np.float64) @ right, rtol=0, atol=1e-4)


def test_groups_complete_in_their_order():
    body = f"""{BRING}
    float e[32] = {{}};
    const u64 x = wgmma_descriptor(base), y = wgmma_descriptor(base + TILE);
    wgmma_fence();
    wgmma(ELEMENT(), d, x, y, 0); wgmma_commit();
    wgmma(ELEMENT(), e, x + 2, y + 2, 0); wgmma_commit();
    wgmma_wait<1>(); store_d(0);
    for (int i = 0; i < 32; ++i) d[i] = e[i];
    store_d(1);
    wgmma_wait<0>();
    for (int i = 0; i < 32; ++i) d[i] = e[i];
    store_d(2);
    """
    x = values()
    result, wide = run(compiled(body), x), x.astype(np.float64)
    np.testing.assert_allclose(matrix(result[0]), wide[:64, :16] @ wide[64:, :16].T, rtol=0, atol=1e-4)
    assert np.isnan(result[1]).all()
    np.testing.assert_allclose(matrix(result[2]), wide[:64, 16:32] @ wide[64:, 16:32].T, rtol=0, atol=1e-4)


def test_boxes_arrive_late():
    body = """
    auto first = [&] { return to_float(*reinterpret_cast<BFloat16*>(shared)); };
    if (t == 0) {
      store_shared_16(base, 0), proxy_fence(), barrier_arrive_expect(bar, 64 * 128), bring(0, 0, 0);
      to[0] = first(), barrier_wait(bar, 0), to[1] = first();
    }
    """
    x = values()
    result = run(compiled(body), x).reshape(-1)
    assert np.isnan(result[0]) and result[1] == x[0, 0]


def test_reductions_and_stored_matrices():
    """stmatrix lays fragments out as ldmatrix finds them; the bulk reduction adds them to memory once they are waited for."""
    body = """
    u32 m[4] = {from[t], from[t + 32], from[t + 64], from[t + 96]}, back[4];
    if (t < 32) {
      store_matrix_x4(base + 16 * t, m);
      load_matrix_x4(back, base + 16 * t);
      for (int i = 0; i < 4; ++i) to[1024 + 32 * i + t] = back[i] == m[i];
    }
    for (int i = 0; i < 4; ++i) reinterpret_cast<float*>(shared + TILE)[4 * t + i] = 4 * t + i;
    proxy_fence();
    named_barrier<5, 128>();
    if (t == 0) {
      bulk_reduce_add_f32(to, base + TILE, 1024), bulk_commit();
      bulk_reduce_add_f32(to + 256, base + TILE + 1024, 1024), bulk_commit();
      bulk_wait_read<1>(), to[2048] = to[0], to[2049] = to[256];
    }
    """
    registers = np.random.default_rng(3).integers(0, 2**32, 128, np.uint32)
    result = run(compiled(body), values(), registers=registers).reshape(-1)
    assert result[1024 : 1024 + 128].all()
    np.testing.assert_array_equal(result[:512], np.arange(512) - 1)
    assert result[2048] == -1 and result[2049] == -1


ISSUE = BRING + "wgmma_fence(); wgmma(ELEMENT(), d, a, wgmma_descriptor(base), 0); wgmma_commit(); "
FAULTS = {
    "barrier_wait(bar, 0);": "no thread can run: warp 0 waits at barrier_wait of the mbarrier at shared address 65536 with parity 0, "
    "which lacks 1 of 1 arrivals and 0 bytes; warp 1 waits",
    "if (t == 0) barrier_arrive_expect(bar, 64 * 128 + 16), bring(0, 0, 0); barrier_wait(bar, 0);": "lacks 0 of 1 arrivals and 16 bytes",
    "if (t < 96) named_barrier<3, 128>();": "warp 0 waits at named_barrier 3, where 96 of 128 threads are",
    "if (t < 64) named_barrier<3, 128>(); else named_barrier<3, 64>();": "and others came to it with",
    "if (t < 2) barrier_arrive(bar + 16);": "was made for 0 arrivals",
    "if (t == 0) barrier_arrive_expect(bar, 16), barrier_arrive(bar);": "all 1 arrivals of this phase have come",
    "barrier_arrive(bar + 24);": "there is no mbarrier at shared address 65560",
    "if (t == 0) *reinterpret_cast<int*>(shared + BAR) = 0, barrier_arrive(bar);": "something was stored over the mbarrier",
    "if (t == 0) bring(0, 0, 0);": "the block ends while 1 boxes are on their way",
    "if (t == 0) bring(0, 0, 0), bring(0, 64, 0);": "copy_box_4d at shared address 0 while a cp.async to it is in flight",
    "if (t == 0) store_shared_16(base + 32, 0), bring(0, 0, 0);": "address 32, which warp 0, lane 0 stored to without a proxy_fence since",
    "if (t == 0) bulk_reduce_add_f32(to, base + 8, 16);": "all are multiples of 16",
    ISSUE: "without having waited for 1 wgmmas",
    "wgmma(ELEMENT(), d, a, wgmma_descriptor(base), 0);": "without a wgmma_fence",
    "wgmma_fence(); wgmma(ELEMENT(), d, a, wgmma_descriptor(base + (t > 70) * 8192), 0); wgmma_commit(); wgmma_wait<0>();": "wgmma number 0 "
    "differs from that of other threads",
    "wgmma_fence(); if (t != 77) wgmma(ELEMENT(), d, a, wgmma_descriptor(base), 0); wgmma_commit(); wgmma_wait<0>();": "wgmma_commit number 0 "
    "after 0 products",
    "wgmma_fence(); if (t == 77) return; wgmma(ELEMENT(), d, a, wgmma_descriptor(base), 0); wgmma_commit(); wgmma_wait<0>();": "waits at "
    "wgmma_wait, and lane 13 of warp 2 has not issued the wgmmas",
    ISSUE + "d[3] = 0; wgmma_wait<0>();": "accumulator 3 was overwritten",
    "store_shared_16(base + 128 * t, 0);"
    + ISSUE.replace(BRING, "")
    + "wgmma_wait<0>();": "wgmma at shared address 0, which warp 0, lane 0 stored to without a proxy_fence since",
    "if (t == 0) for (int i = 0; i < 4; ++i) bring(i, 0, 0);\n"
    "for (int i = 0; i < 4; ++i) wgmma_fence(), wgmma(ELEMENT(), d, a, wgmma_descriptor(base + i * TILE), 0), wgmma_commit();\n"
    "wgmma_wait<0>();": "wgmma at shared address .* while a cp.async to it is in flight",
    "wgmma_fence(); wgmma(ELEMENT(), d, a, wgmma_descriptor(base + 128), 0); wgmma_commit(); wgmma_wait<0>();": "in the first of eight rows",
    "wgmma_fence(); wgmma(ELEMENT(), d, a, wgmma_descriptor(base + 65536), 0); wgmma_commit(); wgmma_wait<0>();": "of 65600",
    "registers_take<256>(); if (t >= 128) registers_give<264>();": "a multiple of 8 from 24 to 256",
}


@pytest.fixture(scope="module")
def faulty():
    """A kernel that does fault n."""
    return compiled("switch (n) {\n" + "\n".join(f"case {n}: {{ {body} }} break;" for n, body in enumerate(FAULTS)) + "\n}")


@pytest.mark.parametrize("n", range(len(FAULTS)))
def test_faults_are_reported(faulty, n):
    """Deadlocks, races and divergence; the launch ends where it would hang."""
    with pytest.raises(EmulationError, match=list(FAULTS.values())[n]):
        run(faulty, values(), threads=128 if n < len(FAULTS) - 1 else 256, n=n)


def test_registers_of_all_warpgroups():
    kernel = compiled(
        "if (n == 0) { if (t < 128) registers_take<168>(); else registers_give<88>(); } else if (t < 128) registers_take<168>();"
    )
    run(kernel, values(), threads=512, n=0)
    with pytest.raises(EmulationError, match="the warpgroups take 70656 registers, and the block was launched with 65536"):
        run(kernel, values(), threads=512, n=1)


def test_boxes_stay_inside_the_arrays():
    x = values()
    with pytest.raises(EmulationError, match="outside the arrays of the launch"):
        encoded = tensor_maps.encode(x.ctypes.data, "bfloat16", (COLUMNS, ROWS + 1, 1, 1), (2 * COLUMNS, 16, 16), 64)
        kernel = compiled("if (t == 0) bring(0, 0, 100);")
        kernel.launch(1, 128, [encoded, np.uint64(0), np.uint64(0), np.int32(0)], SHARED_BYTES, [x])
    with pytest.raises(RuntimeError, match="multiples of 16 bytes"):
        tensor_maps.encode(x.ctypes.data, "float16", (64, 64, 1, 1), (120, 16, 16), 64)
