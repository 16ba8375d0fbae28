"""Loading: the bookkeeping with a stand-in for CuPy, and on a device (marker `gpu`) the kernels themselves."""

import contextlib
import os
import pathlib
import shutil
import subprocess
import sys
import threading
import types

import numpy as np
import pytest

import streamkl_cupy as skl
from streamkl_cupy.gpu import cache, parameters
from streamkl_cupy.gpu import compile as jit

from ..oracle import SIDES, check_gradients, check_rows, make, truth

FILL = """
extern "C" __global__ void fill(float* x, long long n) {
  for (long long i = threadIdx.x; i < n; i += blockDim.x) x[i] = VALUE;
}
"""
SHARED = """
extern "C" __global__ void through_shared(float* x, int n) {
  extern __shared__ float dynamic[];
  __shared__ float fixed[32];
  for (int i = threadIdx.x; i < n; i += blockDim.x) dynamic[i] = i;
  fixed[threadIdx.x % 32] = 1.0f;
  __syncthreads();
  if (threadIdx.x == 0) x[0] = dynamic[n - 1] + fixed[0];
}
"""
ECHO = """
#include "problem.cuh"
extern "C" __global__ void echo(const __grid_constant__ Problem p, long long* integers, float* floats) {
  integers[0] = reinterpret_cast<long long>(p.q1.data);
  integers[1] = p.k2.row_stride;
  integers[2] = reinterpret_cast<long long>(p.rows.logsum2);
  integers[3] = p.window_right;
  integers[4] = p.heads_k2;
  integers[5] = p.q_offset_mode;
  floats[0] = p.scale1;
  floats[1] = p.log2_scale2;
}
"""
OTHER_PROCESS = """
import sys, cupy
from streamkl_cupy.gpu import compile as jit
def refuse(*arguments):
    raise AssertionError("compiled")
jit._compile = refuse
x = cupy.zeros(4, cupy.float32)
jit.load(sys.argv[1], "fill", {"VALUE": "3.0f"}, jit.device_info(0).arch, 0)((1,), (32,), (x, 4))
print(x.get().tolist())
"""


@pytest.fixture(autouse=True)
def nothing_loaded():
    for memo in (jit._modules, jit._kernels):
        memo.clear()
    yield
    for memo in (jit._modules, jit._kernels):
        memo.clear()


class FakeKernel:
    def __init__(self):
        self.max_dynamic_shared_size_bytes = 49152


@pytest.fixture
def fake(nvrtc, monkeypatch):
    """What `load` asks of CuPy, without a GPU. `fake.loaded` lists (device, path)."""

    class DriverError(RuntimeError):
        pass

    state = types.SimpleNamespace(loaded=[], current=[], refuse=False, kernel=FakeKernel())

    @contextlib.contextmanager
    def on_device(index):
        state.current.append(index)
        yield
        state.current.pop()

    class RawModule:
        def __init__(self, path):
            if state.refuse:
                raise DriverError("CUDA_ERROR_NO_BINARY_FOR_GPU: no kernel image is available")
            assert pathlib.Path(path).is_file()
            state.loaded.append((state.current[-1], path))

        def get_function(self, entry):
            return state.kernel

    cuda = types.SimpleNamespace(Device=on_device, driver=types.SimpleNamespace(CUDADriverError=DriverError))
    monkeypatch.setattr(jit, "import_cupy", lambda: types.SimpleNamespace(cuda=cuda, RawModule=RawModule))
    monkeypatch.setattr(jit, "device_info", lambda index: jit.DeviceInfo("Some GPU", (8, 0), "sm_80", 108, 166912, 167936))
    return state


def test_a_kernel_is_loaded_once_per_device(fake, write):
    kernel = write("k.cu", FILL)
    first = jit.load(kernel, "fill", {"VALUE": 1}, "sm_80", 0)
    assert jit.load(kernel, "fill", (("VALUE", 1),), "sm_80", 0) is first
    jit.load(kernel, "fill", {"VALUE": 1}, "sm_80", 1)
    assert [index for index, _ in fake.loaded] == [0, 1]


def test_the_shared_memory_limit_is_raised_and_never_lowered(fake, write):
    kernel = write("k.cu", SHARED)
    for asked, limit in ((0, 49152), (1024, 49152), (100_000, 100_000), (60_000, 100_000)):
        jit.load(kernel, "through_shared", {}, "sm_80", 0, asked)
        assert fake.kernel.max_dynamic_shared_size_bytes == limit


def test_a_cache_emptied_after_compiling_is_filled_again(fake, write):
    kernel = write("k.cu", FILL)
    shutil.rmtree(jit.build(kernel, {"VALUE": 1}, "sm_80").path.parent)
    jit.load(kernel, "fill", {"VALUE": 1}, "sm_80", 0)
    assert len(fake.loaded) == 1


def test_an_entry_that_does_not_exist_is_named(fake, write):
    with pytest.raises(RuntimeError, match=r"no entry 'other': it has \['fill'\]"):
        jit.load(write("k.cu", FILL), "other", {"VALUE": 1}, "sm_80", 0)


def test_a_binary_that_does_not_load_says_what_to_do(fake, write):
    fake.refuse = True
    with pytest.raises(RuntimeError, match=r"does not load on Some GPU.*NO_BINARY_FOR_GPU.*update the NVIDIA driver"):
        jit.load(write("k.cu", FILL), "fill", {"VALUE": 1}, "sm_80", 0)


@pytest.fixture
def cupy(nvrtc):
    """CuPy with a usable device 0; skips where there is none."""
    try:
        jit.device_info(0)
    except RuntimeError as error:
        pytest.skip(str(error))
    import cupy

    return cupy


def filled(cupy, kernel, value, count=100):
    x = cupy.full(count + 1, cupy.nan, cupy.float32)
    jit.load(kernel, "fill", {"VALUE": f"{value}f"}, jit.device_info(0).arch, 0)((1,), (32,), (x, np.int64(count)))
    return bool((x[:count] == value).all()) and bool(cupy.isnan(x[count]))


@pytest.mark.gpu
@pytest.mark.parametrize("value", [0.5, -2.0, 1e30])
def test_a_specialised_kernel_runs(cupy, write, value):
    assert filled(cupy, write("k.cu", FILL), value)


@pytest.mark.gpu
@pytest.mark.parametrize("share", ["4 KiB", "48 KiB", "49 KiB", "64 KiB", "largest"])
def test_dynamic_shared_memory(cupy, write, share):
    most = jit.device_info(0).shared_memory_per_block - 1024  # beside the kernel's own
    size = most if share == "largest" else int(share.split()[0]) * 1024
    kernel = jit.load(write("k.cu", SHARED), "through_shared", {}, jit.device_info(0).arch, 0, size)
    x = cupy.zeros(1, cupy.float32)
    kernel((1,), (128,), (x, np.int32(size // 4)), shared_mem=size)
    assert x.get()[0] == size // 4


@pytest.mark.gpu
def test_more_shared_memory_than_the_device_has(cupy, write):
    with pytest.raises(RuntimeError, match=r"does not load on .* bytes of dynamic shared memory"):
        jit.load(write("k.cu", SHARED), "through_shared", {}, jit.device_info(0).arch, 0, jit.device_info(0).shared_memory_per_block + 1)


@pytest.mark.gpu
def test_a_binary_for_another_generation_does_not_load(cupy, write):
    other = "sm_80" if jit.device_info(0).capability[0] != 8 else "sm_90"
    with pytest.raises(RuntimeError, match="does not load on"):
        jit.load(write("k.cu", FILL), "fill", {"VALUE": 1}, other, 0)


@pytest.mark.gpu
def test_the_device_and_ptxas_agree(cupy, write):
    kernel, arch = write("k.cu", SHARED), jit.device_info(0).arch
    report = jit.build(kernel, {}, arch).entries["through_shared"]
    loaded = jit.load(kernel, "through_shared", {}, arch, 0)
    assert loaded.num_regs == report.registers and loaded.local_size_bytes == 0
    assert report.shared_bytes <= loaded.shared_size_bytes <= report.shared_bytes + 1024


@pytest.mark.gpu
def test_device_info_is_the_device_s(cupy):
    info, attributes = jit.device_info(0), cupy.cuda.Device(0).attributes
    assert f"{info.capability[0]}{info.capability[1]}" == cupy.cuda.Device(0).compute_capability
    assert info.multiprocessors == attributes["MultiProcessorCount"]
    assert info.shared_memory_per_block == attributes["MaxSharedMemoryPerBlockOptin"]
    assert info.shared_memory_per_multiprocessor == attributes["MaxSharedMemoryPerMultiprocessor"]


@pytest.mark.gpu
def test_a_device_that_does_not_exist(cupy):
    with pytest.raises(RuntimeError, match="no such device"):
        jit.device_info(cupy.cuda.runtime.getDeviceCount())


@pytest.mark.gpu
def test_architectures_for_one_chip_load_on_it(cupy, write):
    if jit.device_info(0).capability != (9, 0):
        pytest.skip("needs compute capability 9.0")
    x = cupy.zeros(4, cupy.float32)
    arch = jit.arch_for((9, 0), accelerated=True)
    jit.load(write("k.cu", FILL), "fill", {"VALUE": "3.0f"}, arch, 0)((1,), (32,), (x, np.int64(4)))
    assert x.get().tolist() == [3.0] * 4


@pytest.mark.gpu
def test_a_second_process_starts_from_the_disk(cupy, write):
    kernel = write("k.cu", FILL)
    assert filled(cupy, kernel, 3.0)
    done = subprocess.run([sys.executable, "-c", OTHER_PROCESS, kernel], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[3.0, 3.0, 3.0, 3.0]"


@pytest.mark.gpu
def test_many_threads_load_at_once(cupy, write):
    kernel, results = write("k.cu", FILL), []
    together = threading.Barrier(8)

    def work(value):
        together.wait()
        results.append(filled(cupy, kernel, value))

    threads = [threading.Thread(target=work, args=(float(n % 2),)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [True] * 8


@pytest.mark.gpu
@pytest.mark.parametrize("damage", ["truncated", "another kernel's"])
def test_a_damaged_entry_is_rebuilt_and_runs(cupy, write, damage):
    kernel, arch = write("k.cu", FILL), jit.device_info(0).arch
    compiled = jit.build(kernel, {"VALUE": "3.0f"}, arch)
    compiled.path.write_bytes(compiled.cubin[:-100] if damage == "truncated" else jit.build(kernel, {"VALUE": "4.0f"}, arch).cubin)
    jit._built.clear()
    assert filled(cupy, kernel, 3.0)


@pytest.mark.gpu
def test_an_unwritable_cache_still_runs(cupy, write, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path / "file" / "cache"))
    monkeypatch.setattr(cache, "_warned", False)
    kernel = write("k.cu", FILL)
    with pytest.warns(RuntimeWarning, match="cannot be written to"):
        assert filled(cupy, kernel, 3.0)
    assert filled(cupy, kernel, 4.0)


@pytest.mark.gpu
def test_a_loaded_kernel_outlives_its_file(cupy, write):
    kernel = write("k.cu", FILL)
    assert filled(cupy, kernel, 3.0)
    shutil.rmtree(cache.directory())
    assert filled(cupy, kernel, 3.0) and filled(cupy, kernel, 4.0)


@pytest.mark.gpu
def test_a_kernel_runs_on_a_stream_and_in_a_graph(cupy, write):
    kernel = jit.load(write("k.cu", FILL), "fill", {"VALUE": "3.0f"}, jit.device_info(0).arch, 0)
    x, stream = cupy.zeros(4, cupy.float32), cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device(0).synchronize()
    with stream:
        stream.begin_capture()
        kernel((1,), (32,), (x, np.int64(4)))
        graph = stream.end_capture()
        graph.launch()
    stream.synchronize()
    assert x.get().tolist() == [3.0] * 4


@pytest.mark.gpu
def test_a_problem_arrives_as_it_was_filled(cupy, write):
    p = np.zeros((), parameters.PROBLEM)
    p["q1"]["data"], p["k2"]["row_stride"], p["rows"]["logsum2"] = 1 << 40, 1 << 33, 1 << 41
    p["window_right"], p["heads_k2"], p["q_offset_mode"], p["scale1"], p["log2_scale2"] = 1 << 40, 7, 2, 0.25, 0.75
    integers, floats = cupy.zeros(6, cupy.int64), cupy.zeros(2, cupy.float32)
    jit.load(write("k.cu", ECHO), "echo", {}, jit.device_info(0).arch, 0)((1,), (1,), (p, integers, floats))
    assert integers.get().tolist() == [1 << 40, 1 << 33, 1 << 41, 1 << 40, 7, 2] and floats.get().tolist() == [0.25, 0.75]


@pytest.mark.gpu
def test_subnormal_numbers_are_kept(cupy, write):
    kernel = write("k.cu", 'extern "C" __global__ void halve(float* x) { x[0] = x[0] * 0.5f; }\n')
    x = cupy.asarray([2.0**-140], cupy.float32)
    jit.load(kernel, "halve", {}, jit.device_info(0).arch, 0)((1,), (1,), (x,))
    assert x.get()[0] == 2.0**-141


@pytest.mark.gpu
def test_every_device_loads_its_own(cupy, write):
    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("needs two GPUs")
    kernel = write("k.cu", SHARED)
    for index in (0, 1):
        loaded = jit.load(kernel, "through_shared", {}, jit.device_info(index).arch, index, 64 * 1024)
        with cupy.cuda.Device(index):
            x = cupy.zeros(1, cupy.float32)
            loaded((1,), (128,), (x, np.int32(16384)), shared_mem=64 * 1024)
            assert x.get()[0] == 16384


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_fork_after_cuda_began_is_told_to_spawn(cupy, write):
    assert filled(cupy, write("k.cu", FILL), 3.0)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            jit.device_info(0)
            os.write(writer, b"no error")
        except RuntimeError as error:
            os.write(writer, str(error).encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert b"'spawn'" in os.read(reader, 4096)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("deterministic", [False, True])
def test_after_warmup_nothing_is_compiled_or_loaded(device, monkeypatch, dtype, deterministic):
    from streamkl_cupy.gpu import launch

    def refuse(*arguments):
        raise AssertionError(f"loaded after warmup: {arguments}")

    launch.kernel.cache_clear()
    launch.plain_kernel.cache_clear()
    case = make(111, dtype, n=(37, 5000), d=(40, 72), reduction="mean")
    given = {n: device.put(a) for n, a in case.arrays.items()}
    skl.warmup(**given, reduction="mean", wrt=SIDES)
    with monkeypatch.context() as patch:
        patch.setattr(jit, "_load", refuse)
        _, state = skl.forward(**given, reduction="mean")
        grads = skl.backward(state, wrt=SIDES, deterministic=deterministic)
    expected = truth(case, None, SIDES)
    check_rows(device, case, state, expected)
    check_gradients(device, case, grads, expected)


@pytest.mark.gpu
def test_explaining_loads_nothing(device, monkeypatch):
    monkeypatch.setattr(jit, "_load", lambda *arguments: pytest.fail("something was loaded"))
    said = str(skl.explain(*(device.cupy.empty((1, 2, 40, 56), "float16") for _ in range(4)), causal=True, wrt=SIDES))
    assert "forward" in said and "backward" in said and jit.device_info(0).name in said
