"""From source to binary, without a GPU: what the compiler is given, what it says, and what the user is told when it cannot."""

import os
import struct
import subprocess
import sys
import threading

import numpy as np
import pytest

from streamkl_cupy.gpu import compile as jit
from streamkl_cupy.gpu import device, errors, parameters, source

TINY = 'extern "C" __global__ void tiny(float* x) { x[threadIdx.x] = VALUE; }\n'
SPILLING = """
extern "C" __global__ void __launch_bounds__(1024, 2) spills(float* x) {
  __shared__ float shared[64];
  float y[80];
  for (int i = 0; i < 80; i++) y[i] = x[i * 3];
  shared[threadIdx.x % 64] = y[3];
  __syncthreads();
  for (int i = 0; i < 80; i++) x[i * 5] = y[i] + y[79 - i] * shared[i % 64];
}
extern "C" __global__ void plain(float* x) { x[0] = 1.0f; }
"""


def test_includes_are_put_in_place_once_each(write):
    write("a.cuh", '#pragma once\n#include "b.cuh"\nint a;\n')
    write("b.cuh", "  # pragma once\nint b;\n")
    text = source.assemble(write("k.cu", 'int before;\n#include "a.cuh"\n  #  include "b.cuh"\n#include "a.cuh"\nint after;\n'))
    assert [line for line in text.splitlines() if line.startswith("int")] == ["int before;", "int b;", "int a;", "int after;"]
    assert "include" not in text and "pragma" not in text


def test_a_header_is_found_in_the_kernels_directory_and_brings_its_layout_checks(write):
    text = source.assemble(write("k.cu", '#include "problem.cuh"\n'))
    assert "struct Problem {" in text and "static_assert(sizeof(Problem)" in text
    assert "static_assert" not in source.assemble(write("k.cu", TINY))


def test_a_missing_header_is_named_with_its_place(write):
    with pytest.raises(FileNotFoundError, match=r'k\.cu:2 includes "nowhere\.cuh"'):
        source.assemble(write("k.cu", '\n#include "nowhere.cuh"\n'))
    with pytest.raises(FileNotFoundError, match=r"no kernel source .*nowhere\.cu"):
        source.assemble("nowhere.cu")


def test_compiler_messages_point_at_files_and_lines(nvrtc, write):
    write("wrong.cuh", "#pragma once\n\nint wrong = ;\n")
    kernel = write("k.cu", '\n#include "wrong.cuh"\n' + TINY + "int also_wrong = ;\n")
    with pytest.raises(RuntimeError) as raised:
        jit.build(kernel, {"VALUE": 1}, "sm_80")
    message = str(raised.value)
    assert "wrong.cuh(3): error" in message and "k.cu(4): error" in message
    assert "-arch=sm_80" in message and "\0" not in message


def test_a_failure_is_not_remembered(nvrtc, write):
    with pytest.raises(RuntimeError, match="does not compile"):
        jit.build(write("k.cu", "nonsense"), {"VALUE": 1}, "sm_80")
    assert "tiny" in jit.build(write("k.cu", TINY), {"VALUE": 1}, "sm_80").entries


@pytest.mark.parametrize("drift", ["order", "size", "type"])
def test_a_struct_that_drifts_from_its_dtype_does_not_compile(nvrtc, write, monkeypatch, drift):
    fields = [(n, parameters.MATRIX[n]) for n in parameters.MATRIX.names]
    if drift == "order":
        fields[1], fields[2] = fields[2], fields[1]
    elif drift == "size":
        fields.append(("data_again", np.uint64))
        fields = fields[:3] + fields[4:]
        fields.append(("row_stride", np.int32))
    else:
        fields[3] = ("row_stride", np.dtype((np.int32, 2)))
    kernel = write("k.cu", '#include "problem.cuh"\n' + TINY)
    jit.build(kernel, {"VALUE": 1}, "sm_80")
    jit._built.clear()
    monkeypatch.setitem(parameters.STRUCTS, "Matrix", np.dtype(fields, align=True))
    with pytest.raises(RuntimeError, match=r"layout_checks\(\d+\): error"):
        jit.build(kernel, {"VALUE": 1}, "sm_80")


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_89", "sm_90", "sm_90a", "sm_100", "sm_120"])
def test_every_architecture_gives_a_whole_elf_file(nvrtc, write, arch):
    compiled = jit.build(write("k.cu", TINY), {"VALUE": "2.5f"}, arch)
    assert compiled.cubin[:4] == b"\x7fELF" and compiled.path.read_bytes() == compiled.cubin
    section_table, section_size, section_count = (
        *struct.unpack_from("<Q", compiled.cubin, 40),
        *struct.unpack_from("<HH", compiled.cubin, 58),
    )
    assert len(compiled.cubin) >= section_table + section_size * section_count
    assert f"'tiny' for '{arch}'" in compiled.log


def test_the_report_of_ptxas_is_read_for_every_entry(nvrtc, write):
    entries = jit.build(write("k.cu", SPILLING), {}, "sm_80").entries
    assert set(entries) == {"spills", "plain"}
    assert entries["spills"].registers == 32 and entries["spills"].spill_bytes > 0 and entries["spills"].shared_bytes == 256
    assert 0 < entries["plain"].registers < 32 and entries["plain"].spill_bytes == 0 and entries["plain"].shared_bytes == 0


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_120"])
def test_entries_are_known_without_the_compiler_s_log(nvrtc, write, monkeypatch, arch):
    """NVRTC's own cache gives binaries without a log. Functions that are no kernels are no entries."""
    monkeypatch.setattr(jit, "_log", lambda *arguments: "")
    called = "__device__ __noinline__ float called(float x) { return x * x + 1; }\n"
    kernel = write("k.cu", called + SPILLING + 'extern "C" __global__ void calls(float* x) { x[0] = called(x[1]); }\n')
    nothing_said = jit.EntryReport(registers=None, spill_bytes=None, shared_bytes=None)
    assert jit.build(kernel, {}, arch).entries == dict.fromkeys(("calls", "plain", "spills"), nothing_said)


@pytest.mark.parametrize("version, option", [((12, 8), False), ((12, 9), True), ((13, 0), True)])
def test_nvrtc_s_own_cache_is_left_out(nvrtc, write, monkeypatch, version, option):
    seen, compile_really = [], jit._compile
    monkeypatch.setattr(jit, "_compile", lambda *arguments: seen.extend(arguments[-1]) or compile_really(*arguments))
    monkeypatch.setattr(jit, "import_nvrtc", lambda: (nvrtc, version))
    jit.build(write("k.cu", TINY), {"VALUE": 1}, "sm_80")
    assert ("--no-cache" in seen) is option


def test_defines_specialise_in_any_order_and_form(nvrtc, write):
    kernel = write(
        "k.cu",
        "static_assert(sizeof(TYPE) == 2 && COUNT == 3 && FLAG == 1);\n"
        'extern "C" __global__ void typed(TYPE* x) { x[0] = COUNT + FLAG; }\n',
    )
    one = jit.build(kernel, {"TYPE": "unsigned short", "COUNT": 3, "FLAG": True}, "sm_80")
    other = jit.build(kernel, (("FLAG", True), ("COUNT", 3), ("TYPE", "unsigned short")), "sm_80")
    assert other is one


def test_no_option_gives_up_exact_arithmetic(nvrtc, write, monkeypatch):
    """Subnormal inputs count, and the kernels say themselves where an approximate instruction will do."""
    seen, compile_really = [], jit._compile
    monkeypatch.setattr(jit, "_compile", lambda *arguments: seen.extend(arguments[-1]) or compile_really(*arguments))
    jit.build(write("k.cu", TINY), {"VALUE": 1}, "sm_80")
    assert "-arch=sm_80" in seen and "-std=c++17" in seen and "-DVALUE=1" in seen
    assert not [option for option in seen if "fast" in option or "ftz" in option or "prec" in option or option.startswith("-I")]


def test_the_debug_switch_prints_source_path_log_and_registers(nvrtc, write, monkeypatch, capsys):
    kernel = write("k.cu", TINY)
    jit.build(kernel, {"VALUE": 1}, "sm_80")
    assert capsys.readouterr().err == ""
    monkeypatch.setenv("STREAMKL_CUPY_DEBUG", "1")
    jit.build(kernel, {"VALUE": 2}, "sm_80")
    jit._built.clear()
    jit.build(kernel, {"VALUE": 1}, "sm_80")
    printed = capsys.readouterr().err
    assert printed.count(kernel) == 2 and "compiled: " in printed and "from the cache: " in printed
    assert "EntryReport(registers=" in printed and "ptxas info" in printed and "'VALUE': 2" in printed


@pytest.mark.parametrize("arch", ["90", "sm90", "compute_80", "", "sm_90b"])
def test_a_name_that_is_no_architecture_is_a_value_error(nvrtc, arch):
    with pytest.raises(ValueError, match="arch: got"):
        jit.build("forward_sm80.cu", {}, arch)


def test_an_architecture_that_nvrtc_does_not_know(nvrtc, write):
    with pytest.raises(RuntimeError, match=r"NVRTC \d+\.\d+ cannot compile for sm_350: pip install"):
        jit.build(write("k.cu", TINY), {"VALUE": 1}, "sm_350")


def test_an_nvrtc_too_old_for_the_hopper_kernels(nvrtc, write, monkeypatch):
    monkeypatch.setattr(jit, "import_nvrtc", lambda: (nvrtc, (12, 4)))
    with pytest.raises(RuntimeError, match=r"sm_90a need NVRTC 12\.9 or later, and this is NVRTC 12\.4: pip install"):
        jit.build(write("k.cu", TINY), {"VALUE": 1}, "sm_90a")
    assert jit.build(write("k.cu", TINY), {"VALUE": 1}, "sm_90").arch == "sm_90"


def test_without_cupy_the_extras_are_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    jit._built.clear()
    for call in (lambda: jit.build("forward_sm80.cu", {}, "sm_80"), lambda: jit.arch_for((9, 0)), errors.import_cupy):
        with pytest.raises(RuntimeError, match=r"need CuPy.*streamkl-cupy\[cuda13\].*\[cuda12\]"):
            call()


def test_without_nvrtc_the_extras_are_named(nvrtc, monkeypatch):
    class Absent:
        @staticmethod
        def getVersion():
            raise RuntimeError('Failure finding "libnvrtc.so.13":\n No such file')

    monkeypatch.setattr(sys.modules["cupy.cuda"], "nvrtc", Absent)
    with pytest.raises(RuntimeError, match=r"finds no NVRTC.*libnvrtc\.so\.13.*streamkl-cupy\[cuda13\].*\[cuda12\]") as raised:
        jit.build("forward_sm80.cu", {}, "sm_80")
    assert "\n" not in str(raised.value)


@pytest.fixture
def known_archs(monkeypatch):
    class Nvrtc:
        @staticmethod
        def getSupportedArchs():
            return (75, 80, 86, 87, 88, 89, 90, 100, 103, 110, 120, 121)

    monkeypatch.setattr(device, "import_nvrtc", lambda: (Nvrtc, (13, 0)))


@pytest.mark.parametrize(
    "capability, arch",
    [
        ((8, 0), "sm_80"),
        ((8, 6), "sm_86"),
        ((8, 9), "sm_89"),
        ((9, 0), "sm_90"),
        ((10, 0), "sm_100"),
        ((10, 3), "sm_103"),
        ((12, 0), "sm_120"),
        ((10, 5), "sm_103"),
        ((12, 9), "sm_121"),
    ],
)
def test_the_architecture_of_a_capability(known_archs, capability, arch):
    assert device.arch_for(capability) == arch


def test_architectures_for_one_chip_alone(known_archs):
    assert device.arch_for((9, 0), accelerated=True) == "sm_90a"
    with pytest.raises(RuntimeError, match="does not know sm_105a"):
        device.arch_for((10, 5), accelerated=True)


@pytest.mark.parametrize("capability", [(6, 1), (7, 5), (3, 5)])
def test_a_gpu_that_is_too_old(capability):
    with pytest.raises(RuntimeError, match=rf"this GPU has compute capability {capability[0]}\.{capability[1]}; the kernels need 8\.0"):
        device.arch_for(capability)


def test_a_gpu_that_is_newer_than_nvrtc(known_archs):
    with pytest.raises(RuntimeError, match=r"capability 14\.0, which NVRTC 13\.0 cannot compile for: pip install --upgrade"):
        device.arch_for((14, 0))


@pytest.mark.parametrize(
    "said, fix",
    [
        ("cudaErrorInsufficientDriver: CUDA driver version is insufficient", "no NVIDIA driver here"),
        ("cudaErrorNoDevice: no CUDA-capable device is detected", "make a GPU visible"),
        ("cudaErrorInvalidDevice: invalid device ordinal", "no such device"),
        ("cudaErrorInitializationError: initialization error", "'spawn'"),
    ],
)
def test_no_usable_gpu_says_what_to_do(nvrtc, monkeypatch, said, fix):
    import cupy

    class Refusal(cupy.cuda.runtime.CUDARuntimeError):
        def __init__(self):
            self.status = 0

        def __str__(self):
            return said

    def refuse(index):
        raise Refusal()

    monkeypatch.setattr(cupy.cuda.runtime, "getDeviceProperties", refuse)
    device.device_info.cache_clear()
    with pytest.raises(RuntimeError, match="no usable GPU") as raised:
        jit.load("forward_sm80.cu", "forward", {}, "sm_80", 0)
    assert fix in str(raised.value) and said in str(raised.value)


def test_device_info_is_asked_for_once(nvrtc, monkeypatch):
    import cupy

    asked = []

    def properties(index):
        asked.append(index)
        return {
            "name": b"Some GPU",
            "major": 9,
            "minor": 0,
            "multiProcessorCount": 132,
            "sharedMemPerBlockOptin": 232448,
            "sharedMemPerMultiprocessor": 233472,
        }

    monkeypatch.setattr(cupy.cuda.runtime, "getDeviceProperties", properties)
    device.device_info.cache_clear()
    assert jit.device_info(3) == jit.DeviceInfo("Some GPU", (9, 0), "sm_90", 132, 232448, 233472)
    assert jit.device_info(3).name == "Some GPU" and asked == [3]
    device.device_info.cache_clear()


def test_importing_touches_neither_cupy_nor_cuda():
    code = "import sys, streamkl_cupy.gpu.compile; print(sorted(m for m in sys.modules if m.startswith(('cupy', 'torch', 'jax'))))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # forking beside threads is what this is about
def test_a_fork_taken_while_another_thread_compiles_is_not_stuck(nvrtc, write, monkeypatch):
    kernel = write("k.cu", TINY)
    inside, go_on = threading.Event(), threading.Event()
    compile_really = jit._compile

    def wait_and_compile(*arguments):
        inside.set()
        go_on.wait(30)
        return compile_really(*arguments)

    monkeypatch.setattr(jit, "_compile", wait_and_compile)
    thread = threading.Thread(target=jit.build, args=(kernel, {"VALUE": 1}, "sm_80"))
    thread.start()
    assert inside.wait(30)
    child = os.fork()
    if child == 0:
        go_on.set()
        try:
            os._exit(0 if "tiny" in jit.build(kernel, {"VALUE": 1}, "sm_80").entries else 1)
        finally:
            os._exit(2)
    go_on.set()
    thread.join(30)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
