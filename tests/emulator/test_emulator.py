"""The emulator itself: collectives and conversions against NumPy and the PTX ISA, and that it reports what kernels must not do."""

import ml_dtypes
import numpy as np
import pytest

from . import Emulated, EmulationError, pointer

HEAD = '#include "problem.cuh"\n#include "ptx_sm80.cuh"\n'
SHARED = (
    'extern "C" __global__ void kernel(const u16* from, float* to, int n) {\nextern __shared__ __align__(128) unsigned char shared[];\n'
)
TYPES = {"Half": np.dtype(np.float16), "BFloat16": np.dtype(ml_dtypes.bfloat16)}
TWO_WARPS, SHARED_BYTES = 64, 2048


def compiled(body):
    """A kernel of (from, to, n) with shared memory, in whose body `t` is the thread and `base` the address of shared memory."""
    return Emulated.of_text(f"{HEAD}{SHARED}const int t = threadIdx.x;\nconst u32 base = shared_address(shared);\n{body}\n}}", "kernel")


def run(body, values):
    result = np.full(4096, -1, np.float32)
    compiled(body).launch(1, TWO_WARPS, [pointer(values), pointer(result), np.int32(0)], SHARED_BYTES, [values])
    return result


SHUFFLES = """
const float x = t * 3 + 1;
to[t] = __shfl_sync(~0u, x, 5); to[64 + t] = __shfl_xor_sync(~0u, x, 9); to[128 + t] = __shfl_down_sync(~0u, x, 3);
to[192 + t] = __shfl_up_sync(~0u, x, 4); to[256 + t] = __shfl_sync(~0u, x, t % 7, 8); to[320 + t] = __shfl_down_sync(~0u, x, 2, 4);
to[384 + t] = __any_sync(~0u, t == 40); to[448 + t] = __all_sync(~0u, t < 40); to[512 + t] = __ballot_sync(~0u, t % 32 == 3 || t == 33);
to[576 + t] = static_cast<float>(__shfl_xor_sync(~0u, 1.0 / 3.0 + t, 1) == 1.0 / 3.0 + (t ^ 1));
"""


def test_shuffles_and_votes():
    t = np.arange(64)
    lane, warp = t % 32, t // 32 * 32
    expected = [
        (warp + 5) * 3 + 1,
        (t ^ 9) * 3 + 1,
        np.where(lane + 3 < 32, t + 3, t) * 3 + 1,
        np.where(lane >= 4, t - 4, t) * 3 + 1,
        (t // 8 * 8 + t % 7) * 3 + 1,
        np.where(t % 4 + 2 < 4, t + 2, t) * 3 + 1,
        t >= 32,
        t < 32,
        np.where(t < 32, 8, 8 + 2),
        np.ones(64),
    ]
    np.testing.assert_array_equal(
        run(SHUFFLES, np.zeros(8, np.uint16))[: 64 * len(expected)].reshape(-1, 64), np.array(expected, np.float32)
    )


def test_grid_block_and_static_shared_memory():
    text = """
    __device__ int sum_of_block(int value) {
      __shared__ int values[64];
      const int t = threadIdx.x + blockDim.x * threadIdx.y;
      values[t] = value;
      __syncthreads();
      int sum = 0;
      for (int i = 0; i < 64; ++i) sum += values[i];
      return sum;
    }
    extern "C" __global__ void kernel(int* sums, float* total) {
      const int block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
      sums[block] = sum_of_block(static_cast<int>(block + threadIdx.x + 100 * threadIdx.y));
      atomicAdd(total, 1.0f);
    }"""
    sums, total = np.zeros((4, 3, 2), np.int32), np.zeros(1, np.float32)
    Emulated.of_text(text, "kernel").launch((2, 3, 4), (16, 4), [pointer(sums), pointer(total)])
    np.testing.assert_array_equal(sums.ravel(), 64 * np.arange(24) + 4 * sum(range(16)) + 16 * 100 * 6)
    assert total[0] == 24 * 64


@pytest.mark.parametrize("name", TYPES)
def test_conversions(name):
    text = HEAD + (
        'extern "C" __global__ void kernel(const u16* all, float* floats, const float* values, u32* packed, int n) {\n'
        f"for (int i = threadIdx.x; i < 65536; i += 32) floats[i] = to_float({name}{{all[i]}});\n"
        f"for (int i = threadIdx.x; i < n; i += 32) packed[i] = pack({name}(), values[i], values[n - 1 - i]);\n}}"
    )
    everything, floats = np.arange(65536, dtype=np.uint16), np.zeros(65536, np.float32)
    rng = np.random.default_rng(1)
    every_float = everything.view(TYPES[name]).astype(np.float32)
    finite = np.sort(every_float[np.isfinite(every_float)])
    with np.errstate(over="ignore"):
        ties = (finite[1:] / 2 + finite[:-1] / 2).astype(np.float32)
        values = np.concatenate([ties, np.nextafter(ties, np.float32(np.inf)), finite, [np.inf, -np.inf, 65519.996, 65520, 3.4e38, 1e-45]])
        values = np.concatenate([values, rng.normal(size=1000), rng.normal(size=1000) * 1e-6]).astype(np.float32)
        expected = values.astype(TYPES[name]).view(np.uint16)
    packed = np.zeros(values.size, np.uint32)
    args = [pointer(everything), pointer(floats), pointer(values), pointer(packed), np.int32(values.size)]
    Emulated.of_text(text, "kernel").launch(1, 32, args)
    np.testing.assert_array_equal(floats, every_float)
    np.testing.assert_array_equal(packed & 0xFFFF, expected)
    np.testing.assert_array_equal(packed >> 16, expected[::-1])


def test_exp2_approx_flushes():
    values = np.array([-np.inf, -127, -126, -1, 0, 1, 127.5, 128, 1e-40, np.nan], np.float32)
    result = run("to[t] = exp2_approx(reinterpret_cast<const float*>(from)[t]);", np.pad(values, (0, 64)).view(np.uint16))[: values.size]
    np.testing.assert_allclose(result, [0, 0, 2.0**-126, 0.5, 1, 2, 2.0**127.5, np.inf, 1, np.nan], rtol=1e-6)


@pytest.mark.parametrize("name", TYPES)
def test_mma_has_the_fragments_of_the_ptx_isa(name):
    """The coordinates as PTX ISA 9.7.14 (mma.m16n8k16, 16-bit operands) gives them for element i of lane l."""
    text = HEAD + (
        'extern "C" __global__ void kernel(const u32* a, const u32* b, float* d) {\n'
        "const u32 mine[4] = {a[4 * threadIdx.x], a[4 * threadIdx.x + 1], a[4 * threadIdx.x + 2], a[4 * threadIdx.x + 3]};\n"
        f"mma_16x8x16({name}(), *reinterpret_cast<float(*)[4]>(d + 4 * threadIdx.x), mine, b[2 * threadIdx.x], b[2 * threadIdx.x + 1]);\n}}"
    )
    rng = np.random.default_rng(2)
    a, b, c = (rng.normal(size=shape) for shape in ((16, 16), (16, 8), (16, 8)))
    a, b, c = a.astype(TYPES[name]), b.astype(TYPES[name]), c.astype(np.float32)
    lane, i = np.arange(32)[:, None], np.arange(8)[None, :]
    group, within = lane // 4, lane % 4
    a_lanes = a[group + np.where((i < 2) | ((i >= 4) & (i < 6)), 0, 8), within * 2 + (i & 1) + np.where(i >= 4, 8, 0)]
    j = i[:, :4]
    b_lanes = b[within * 2 + (j & 1) + np.where(j >= 2, 8, 0), group + 0 * j]
    d_row, d_column = group + np.where(j < 2, 0, 8), within * 2 + (j & 1)
    d = np.ascontiguousarray(c[d_row, d_column])
    a_lanes, b_lanes = np.ascontiguousarray(a_lanes), np.ascontiguousarray(b_lanes)
    Emulated.of_text(text, "kernel").launch(1, 32, [pointer(a_lanes), pointer(b_lanes), pointer(d)])
    exact = c + a.astype(np.float64) @ b.astype(np.float64)
    np.testing.assert_allclose(d, exact[d_row, d_column], rtol=0, atol=1e-5)


@pytest.mark.parametrize("transposed", [False, True])
def test_ldmatrix(transposed):
    """Lane l's register i holds row l / 4, columns 2 (l % 4) and the next, of matrix i (of its transpose)."""
    body = f"""
    for (int i = t; i < 1024; i += 64) reinterpret_cast<u16*>(shared)[i] = from[i];
    __syncthreads();
    if (t >= 32) return;
    u32 r[4];
    load_matrix_x4{"_transposed" if transposed else ""}(r, base + 16 * ((5 * t + 3) % 64));
    for (int i = 0; i < 4; ++i) to[8 * t + 2 * i] = r[i] & 0xffff, to[8 * t + 2 * i + 1] = r[i] >> 16;
    """
    values = np.arange(1024, dtype=np.uint16)
    result = run(body, values)[:256].reshape(32, 4, 2)
    lane, matrix, half = np.arange(32)[:, None, None], np.arange(4)[None, :, None], np.arange(2)[None, None, :]
    row, column = lane // 4, lane % 4 * 2 + half
    if transposed:
        row, column = column, row
    np.testing.assert_array_equal(result, 8 * ((5 * (8 * matrix + row) + 3) % 64) + column)


def test_bank_conflicts_are_counted():
    kernel = compiled("u32 r[4];\nload_matrix_x4(r, base + n * (t % 8));")
    for stride, conflicts in ((16, 0), (48, 0), (32, 4), (128, 7)):
        source = np.zeros(8, np.uint16)
        report = kernel.launch(1, 32, [pointer(source), pointer(source), np.int32(stride)], SHARED_BYTES)
        assert report.bank_conflicts == 4 * conflicts, stride


COPY = "copy_async_16(base + 16 * t, from + 8 * t, t != 7);\ncopy_async_commit();\n"
READ = "u32 r[4];\nload_matrix_x4(r, base + 16 * {});\n"
WAIT = "copy_async_wait<0>();\n"


def test_copies_take_place_when_waited_for():
    body = (
        COPY
        + "to[t] = shared[16 * t]; copy_async_wait<1>(); to[64 + t] = shared[16 * t];\ncopy_async_wait<0>(); to[128 + t] = shared[16 * t];"
    )
    result = run(body, np.arange(1, 513, dtype=np.uint16))[:192].reshape(3, 64)
    np.testing.assert_array_equal(result[:2], 255)  # the poison
    np.testing.assert_array_equal(result[2], np.where(np.arange(64) == 7, 0, (8 * np.arange(64) + 1) % 256))


def test_groups_are_waited_for_in_their_order():
    """An empty group counts, and a copy that is not committed belongs to none."""
    body = """
    copy_async_16(base + 32 * t, from, true); copy_async_commit(); copy_async_commit();
    copy_async_wait<2>(); to[t] = shared[32 * t];
    copy_async_16(base + 32 * t + 16, from, true);
    copy_async_wait<1>(); to[64 + t] = shared[32 * t];
    copy_async_wait<0>(); to[128 + t] = shared[32 * t + 16];
    copy_async_commit(); copy_async_wait<0>(); to[192 + t] = shared[32 * t + 16];
    """
    result = run(body, np.full(8, 3, np.uint16))[:256].reshape(4, 64)
    np.testing.assert_array_equal(result, np.array([255, 3, 255, 3])[:, None] + np.zeros(64))


FAULTS = {
    COPY + "__syncthreads();" + READ.format("t"): "while a cp.async to it is in flight",
    COPY + WAIT + READ.format("(t % 32)"): "warp 1, lane 31: load_matrix_x4 reads shared address 0, which warp 0 wrote after the last",
    READ.format("(t ^ 32)")
    + "if (t >= 32) "
    + COPY: "warp 1, lane 31: cp.async writes shared address 1008, which another warp read after the last",
    COPY + COPY: "another cp.async to it is in flight",
    COPY
    + WAIT
    + "if (t >= 32) copy_async_16(base + 16 * (t - 32), from, true);": "cp.async writes shared address 0, which warp 0 wrote after the last",
    "copy_async_16(base, from + 8 * 64, t == 0);": "outside the arrays of the launch",
    "copy_async_16(base, from - 1, t == 0);": "outside the arrays of the launch",
    "copy_async_16(base, from + 1, t == 0);": "no multiple of 16 bytes",
    "copy_async_16(base + 2040 * (t == 0), from, false);": "no multiple of 16",
    "copy_async_16(base + 2048, from, false);": "beyond the block's 2048 bytes",
    "u32 r[4]; load_matrix_x4(r, base + 2048);": "beyond the block's 2048 bytes",
    "if (t == 3) shared[2050] = 1;": "byte 2050 of 2048 of shared memory",
    "int other; if (t == 3) shared_address(&other);": "outside the dynamic shared memory",
    "if (t != 37) __syncwarp();": "31 lanes of warp 1 wait at __syncwarp, and lane 5 has returned",
    "if (t == 37) __syncthreads(); else __syncwarp();": "31 lanes of warp 1 wait at __syncwarp, and lane 5 waits at __syncthreads",
    "if (t == 3) __syncwarp(); else __shfl_sync(~0u, t, 0);": "it comes to __syncwarp while 3 other lanes of the warp wait at __shfl_sync",
    "if (t < 32) __syncthreads();": "32 threads wait at __syncthreads, and lane 0 of warp 1 has returned",
    "__shfl_sync(0xffffu, t, 0);": "with mask 0000ffff: only the full mask is emulated",
}


@pytest.fixture(scope="module")
def faulty():
    """A kernel that does fault n."""
    return compiled("switch (n) {\n" + "\n".join(f"case {n}: {{ {body} }} break;" for n, body in enumerate(FAULTS)) + "\n}")


@pytest.mark.parametrize("n", range(len(FAULTS)))
def test_faults_are_reported(faulty, n):
    """Races, accesses outside, and divergence; the launch ends where it would hang."""
    source, result = np.zeros(4096 + 8, np.uint16), np.zeros(64, np.float32)
    source = source[-source.ctypes.data % 16 // 2 :]
    with pytest.raises(EmulationError, match=list(FAULTS.values())[n]):
        faulty.launch(1, TWO_WARPS, [pointer(source), pointer(result), np.int32(n)], SHARED_BYTES, [source[: 8 * 64]])


def test_after_a_failure_the_next_launch_is_sound():
    kernel = compiled("if (n == 0 && t == 5) return;\n__syncthreads();\nto[t] = n;")
    source, result = np.zeros(8, np.uint16), np.zeros(64, np.float32)
    for n in (0, 4, 0, 7):
        args = [pointer(source), pointer(result), np.int32(n)]
        if n == 0:
            with pytest.raises(EmulationError, match="lane 5 of warp 0 has returned"):
                kernel.launch(1, 64, args, SHARED_BYTES)
        else:
            kernel.launch(1, 64, args, SHARED_BYTES)
            assert (result == n).all()


def test_arguments_are_checked():
    kernel = compiled("to[t] = n;")
    value = np.zeros(64, np.float32)
    with pytest.raises(TypeError, match=r"parameters of \(8, 8, 4\) bytes and got \(8, 8, 8\)"):
        kernel.launch(1, 64, [pointer(value), pointer(value), np.int64(3)])
    with pytest.raises(TypeError, match="it takes one NumPy value"):
        kernel.launch(1, 64, [pointer(value), value, np.int32(3)])
    with pytest.raises(TypeError, match="it takes one NumPy value"):
        kernel.launch(1, 64, [pointer(value), pointer(value), 3])
    with pytest.raises(ValueError, match="whole warps"):
        kernel.launch(1, 48, [pointer(value), pointer(value), np.int32(3)])
    with pytest.raises(RuntimeError, match=r"g\+\+ rejects the emulated source:\n.*\nkernel\.cu:7:.*nonsense"):
        compiled("nonsense(t);")
