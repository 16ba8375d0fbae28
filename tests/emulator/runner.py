"""Compiles a kernel with g++ and runs it, one block after another, on NumPy arrays.

    kernel = Emulated("forward_sm80.cu", "forward", {"ELEMENT": "Half", ...})
    kernel.launch((blocks, splits), 128, [problem_record, output_record], shared_bytes, [q1, k1, q2, k2])

The kernel's source is what NVRTC gets, except that ptx_*_emulated.hpp stand for ptx_*.cuh. `printf` works in kernels.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from streamkl_cupy.gpu.source import assemble

HERE = Path(__file__).resolve().parent
CACHE = HERE / "__pycache__"
COMPILER = shutil.which("g++")
# No contraction: the products and sums of the source are rounded one by one, and only `fmaf` is fused.
# No unique symbols: they would be one variable in all the libraries of a process.
OPTIONS = ("-std=c++17", "-O2", "-march=native", "-ffp-contract=off", "-fno-strict-aliasing", "-fno-gnu-unique", "-fPIC", "-shared", "-w")
PTX = re.compile(r'^#line 1 "(ptx_sm\d+)\.cuh"\n.*?(?=^#line )', re.MULTILINE | re.DOTALL)
PARAMETER_ALIGNMENT = 64
"""Of TensorMap; no struct asks for more."""
DYNAMIC_SHARED = re.compile(r"\bextern\s+__shared__\s+(?:__align__\(\w+\)\s+)?([\w\s:]+?)\s+(\w+)\[\];")

CLUSTER = re.compile(r"__cluster_dims__\((\w+), 1, 1\)")
"""Blocks of a cluster, as a constant of the source."""

_lock = threading.Lock()  # a library's block is a global of it


class EmulationError(RuntimeError):
    """The kernel diverged, raced or reached outside its memory; the message says which block, warp and lane."""


class Report(NamedTuple):
    """What a launch counted: accesses of ldmatrix that had to wait for another row of their 8x8 matrix."""

    bank_conflicts: int


class _Launch(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("threads", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("range_count", ctypes.c_uint),
        ("ranges", ctypes.c_void_p),
        ("arguments", ctypes.c_void_p),
    )


def pointer(array: np.ndarray) -> np.uint64:
    """The address of an array's first element, as a kernel argument."""
    return np.uint64(array.ctypes.data)


class Emulated:
    """One kernel, compiled for the CPU; compiled libraries are kept, by content, in this folder's __pycache__.

    `source_name` is a file in kernels/ or a path, `defines` are its macros, and `include_extra` is source that follows it: more
    entries, say. RuntimeError where g++ is missing or rejects the source.
    """

    def __init__(self, source_name: str, entry: str, defines: Mapping[str, int | str] | None = None, include_extra: str = ""):
        self.entry = entry
        source = _emulated_source(assemble(source_name) + include_extra, entry, defines or {})
        library = ctypes.CDLL(str(_compile(source)))
        self._launch = library.emulated_launch
        self._launch.restype = ctypes.c_char_p
        sizes = (ctypes.c_int * 64)()
        self.parameter_sizes = tuple(sizes[: library.emulated_parameter_sizes(sizes)])

    @classmethod
    def of_text(cls, text: str, entry: str, defines: Mapping[str, int | str] | None = None) -> Emulated:
        """The same for source text, which includes the headers of kernels/ by name."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "kernel.cu")
            path.write_text(text)
            return cls(str(path), entry, defines)

    def launch(
        self,
        grid: int | tuple[int, ...],
        block: int | tuple[int, ...],
        args: Sequence,
        shared_bytes: int = 0,
        memory: Sequence[np.ndarray] = (),
    ) -> Report:
        """Runs `grid` blocks of `block` threads (a multiple of 32) to the end.

        Each of `args` is one NumPy value (scalar, record, or array of size 1) that is copied into the parameter at its place.
        `memory` holds the arrays that asynchronous copies may read. Shared memory starts as NaN in every block.
        EmulationError where the kernel does what it must not; TypeError where the arguments do not fit its parameters.
        """
        values = [_bytes(arg) for arg in args]
        if tuple(map(len, values)) != self.parameter_sizes:
            raise TypeError(f"{self.entry} takes parameters of {self.parameter_sizes} bytes and got {tuple(map(len, values))}")
        launch = _Launch(grid=_shape(grid), threads=_shape(block), shared_bytes=shared_bytes)
        if np.prod(launch.threads) % 32:
            raise ValueError(f"block is {block}; the emulator takes whole warps")
        buffers = [_aligned(v) for v in values]
        arguments = (ctypes.c_void_p * max(len(buffers), 1))(*(b.ctypes.data for b in buffers))
        ranges = np.array([_extent(a) for a in memory], np.uint64).reshape(-1, 2)
        launch.ranges, launch.range_count = ranges.ctypes.data, len(ranges)
        launch.arguments = ctypes.addressof(arguments)
        conflicts = ctypes.c_longlong()
        with _lock:
            error = self._launch(ctypes.byref(launch), ctypes.byref(conflicts))
        if error:
            raise EmulationError(f"{self.entry}: {error.decode()}")
        return Report(conflicts.value)


def _bytes(arg) -> bytes:
    if not isinstance(arg, (np.generic, np.ndarray)) or arg.size != 1:
        raise TypeError(f"a kernel argument is {arg!r}; it takes one NumPy value, np.int32(3) or pointer(array) for instance")
    return arg.tobytes()


def _aligned(value: bytes) -> np.ndarray:
    buffer = np.zeros(len(value) + PARAMETER_ALIGNMENT, np.uint8)
    start = -buffer.ctypes.data % PARAMETER_ALIGNMENT
    buffer[start : start + len(value)] = np.frombuffer(value, np.uint8)
    return buffer[start : start + len(value)]


def _extent(array: np.ndarray) -> tuple[int, int]:
    """The addresses of an array's first byte and of the byte after its last."""
    if array.size == 0:
        return (0, 0)
    steps = [(n - 1) * stride for n, stride in zip(array.shape, array.strides, strict=True)]
    first = array.ctypes.data
    return first + sum(s for s in steps if s < 0), first + sum(s for s in steps if s > 0) + array.itemsize


def _shape(shape: int | tuple[int, ...]) -> tuple[int, int, int]:
    return (*((shape,) if isinstance(shape, (int, np.integer)) else shape), 1, 1)[:3]


def _emulated_source(source: str, entry: str, defines: Mapping[str, int | str]) -> str:
    source = PTX.sub(lambda match: _emulated_ptx(f"{match[1]}_emulated.hpp"), source)
    source = DYNAMIC_SHARED.sub(r"\1* const \2 = reinterpret_cast<\1*>(emulated::block.shared);", source)
    macros = "".join(f"#define {name} {int(value) if isinstance(value, bool) else value}\n" for name, value in sorted(defines.items()))
    cluster = CLUSTER.search(source)
    cluster = cluster[1] if cluster else 1
    calls = f"""
#line 1 "emulated_launch"
using EmulatedEntry = emulated::Entry<&{entry}>;
extern "C" int emulated_parameter_sizes(int* sizes) {{ return EmulatedEntry::sizes(sizes); }}
extern "C" const char* emulated_launch(const emulated::Launch* launch, long long* bank_conflicts) {{
  return emulated::launch<EmulatedEntry>(*launch, {cluster}, bank_conflicts);
}}
"""
    return f'#include "cuda.hpp"\n{macros}{source}{calls}'


def _emulated_ptx(name: str) -> str:
    return f'#line 1 "{name}"\n{(HERE / name).read_text()}\n'


@functools.lru_cache(maxsize=1)
def _toolchain() -> str:
    """The compiler and what -march=native means here, and the headers that every kernel is compiled with."""
    if COMPILER is None:
        raise RuntimeError("there is no g++, which compiles the kernels for the CPU")
    target = subprocess.run([COMPILER, "-march=native", "-Q", "--help=target", "--version"], capture_output=True, text=True).stdout
    return target + "".join(path.read_text() for path in sorted(HERE.glob("*.hpp")))


def _compile(source: str) -> Path:
    key = hashlib.sha256("\0".join((_toolchain(), *OPTIONS, source)).encode()).hexdigest()[:32]
    library = CACHE / f"{key}.so"
    if library.exists():
        return library
    CACHE.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as folder:
        made = Path(folder, library.name)
        command = [COMPILER, *OPTIONS, f"-I{HERE}", "-x", "c++", "-", "-o", str(made)]
        result = subprocess.run(command, input=source, capture_output=True, text=True)
        if result.returncode:
            raise RuntimeError(f"g++ rejects the emulated source:\n{result.stderr}")
        os.replace(made, library)
    return library
