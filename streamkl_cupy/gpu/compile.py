"""From a kernel's source to a function on a device: assemble, compile through NVRTC, keep in the disk cache, load.

`build` needs no GPU; `load` does. Both are safe to call from any thread, and compile one specialisation once.
STREAMKL_CUPY_DEBUG=1 prints every specialisation that a process uses (source, registers, ptxas log) to stderr.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from . import cache
from .cubin import complete, entry_points
from .device import DeviceInfo, arch_for, device_info
from .errors import import_cupy, import_nvrtc
from .source import assemble, kernels_directory

__all__ = ["Compiled", "DeviceInfo", "EntryReport", "arch_for", "build", "device_info", "load"]

DEBUG_VARIABLE = "STREAMKL_CUPY_DEBUG"
ACCELERATED_NVRTC = (12, 9)  # the first whose ptxas leaves the wgmma kernels as they are written
CACHING_NVRTC = (12, 9)  # the first with a cache of its own, in the driver
CACHE_FORMAT = 1

Defines = Mapping[str, int | str] | tuple[tuple[str, int | str], ...]


@dataclass(frozen=True)
class EntryReport:
    """What ptxas says of one entry point: registers a thread, bytes of static shared memory, bytes of spill stores plus loads
    a thread (with those of the functions that it calls). None where it said nothing."""

    registers: int | None = None
    spill_bytes: int | None = None
    shared_bytes: int | None = None


@dataclass(frozen=True)
class Compiled:
    """One specialisation: the ELF binary, the file that holds it, and the compiler's log with what was read out of it."""

    source_name: str
    arch: str
    defines: tuple[tuple[str, int | str], ...]
    cubin: bytes
    path: Path
    log: str
    entries: dict[str, EntryReport]
    from_cache: bool


class _Once:
    """A memo whose values are made once, by the first thread that asks; the others wait for it and no one else."""

    def __init__(self):
        self.clear()
        os.register_at_fork(after_in_child=self.clear)

    def clear(self) -> None:
        self._values, self._locks, self._lock = {}, {}, threading.Lock()

    def get(self, key, make):
        value = self._values.get(key)
        if value is not None:
            return value
        with self._lock:
            lock = self._locks.setdefault(key, threading.Lock())
        with lock:
            if key not in self._values:
                self._values[key] = make()
            return self._values[key]

    def forget(self, key) -> None:
        self._values.pop(key, None)


_built, _modules, _kernels = _Once(), _Once(), _Once()


def build(source_name: str, defines: Defines, arch: str) -> Compiled:
    """Compiles kernels/`source_name` for `arch` with a macro for each of `defines`, or takes it from the disk cache.

    RuntimeError where NVRTC is missing, cannot compile for `arch`, or rejects the source (with its log).

    >>> build("forward_merge.cu", {}, "sm_80").entries["forward_merge"].registers  # doctest: +SKIP
    32
    """
    pairs = _pairs(defines)
    return _built.get((source_name, pairs, arch), lambda: _build(source_name, pairs, arch))


def load(source_name: str, entry: str, defines: Defines, arch: str, device: int, shared_bytes: int = 0):
    """The `cupy.RawKernel` of one specialisation on a device, allowed `shared_bytes` of dynamic shared memory.

    Launch it with `device` current. RuntimeError as in `build`, and where the binary does not load.
    """
    pairs = _pairs(defines)
    key = (device, source_name, entry, pairs, arch, shared_bytes)
    return _kernels.get(key, lambda: _load(source_name, entry, pairs, arch, device, shared_bytes))


def _pairs(defines: Defines) -> tuple[tuple[str, int | str], ...]:
    return tuple(sorted(defines.items() if isinstance(defines, Mapping) else defines))


def _build(source_name: str, defines, arch: str) -> Compiled:
    nvrtc, version = import_nvrtc()
    _check_arch(arch, nvrtc, version)
    options = [
        f"-arch={arch}",
        "-std=c++17",
        "--device-as-default-execution-space",
        "--ptxas-options=-v",
        # What NVRTC takes from its own cache comes without ptxas' report and warnings.
        *(["--no-cache"] if version >= CACHING_NVRTC else []),
        *(f"-D{name}={int(value) if isinstance(value, bool) else value}" for name, value in defines),
    ]
    source = assemble(source_name)
    key = hashlib.sha256(json.dumps([CACHE_FORMAT, source, arch, options, version]).encode()).hexdigest()
    entry = cache.read(key)
    from_cache = entry is not None
    if entry is None:
        cubin, log = _compile(nvrtc, source_name, source, options)
        entry = cache.write(key, cubin, log), cubin, log
    path, cubin, log = entry
    compiled = Compiled(source_name, arch, defines, cubin, path, log, _reports(cubin, log), from_cache)
    if os.environ.get(DEBUG_VARIABLE, "0") not in ("", "0"):
        _print(compiled)
    return compiled


def _check_arch(arch: str, nvrtc, version: tuple[int, int]) -> None:
    number = re.fullmatch(r"sm_(\d+)([af]?)", arch)
    if number is None:
        raise ValueError(f"arch: got {arch!r}, takes a name such as 'sm_80' or 'sm_90a'.")
    have = f"NVRTC {version[0]}.{version[1]}"
    if number[2] and version < ACCELERATED_NVRTC:
        raise RuntimeError(
            f"kernels for {arch} need NVRTC 12.9 or later, and this is {have}: pip install --upgrade 'streamkl-cupy[cuda12]'."
        )
    if int(number[1]) not in nvrtc.getSupportedArchs():
        raise RuntimeError(f"{have} cannot compile for {arch}: pip install --upgrade 'streamkl-cupy[cuda13]'.")


def _compile(nvrtc, source_name: str, source: str, options: list[str]) -> tuple[bytes, str]:
    program = nvrtc.createProgram(source, Path(source_name).name, [], [])
    try:
        nvrtc.compileProgram(program, options)
        return complete(nvrtc.getCUBIN(program)), _log(nvrtc, program)
    except nvrtc.NVRTCError as error:
        raise RuntimeError(f"{source_name} does not compile with {' '.join(options)} ({error}):\n{_log(nvrtc, program)}") from error
    finally:
        nvrtc.destroyProgram(program)


def _log(nvrtc, program) -> str:
    return nvrtc.getProgramLog(program).rstrip("\0\n ")


def _reports(cubin: bytes, log: str) -> dict[str, EntryReport]:
    """Every kernel in the binary, with what ptxas printed of it with -v, if it did."""
    reports = dict.fromkeys(entry_points(cubin), EntryReport())
    for part in log.split("Compiling entry function '")[1:]:
        name = part[: part.index("'")]
        registers = re.search(r"Used (\d+) registers", part)
        shared = re.search(r"(\d+) bytes smem", part)
        if registers and name in reports:
            reports[name] = EntryReport(
                registers=int(registers[1]),
                spill_bytes=sum(int(n) for n in re.findall(r"(\d+) bytes spill", part)),
                shared_bytes=int(shared[1]) if shared else 0,
            )
    return reports


def _print(compiled: Compiled) -> None:
    how = "from the cache" if compiled.from_cache else "compiled"
    print(
        f"streamkl_cupy: {kernels_directory() / compiled.source_name} for {compiled.arch}, {dict(compiled.defines)}",
        f"  {how}: {compiled.path}",
        *(f"  {name}: {report}" for name, report in compiled.entries.items()),
        compiled.log,
        sep="\n",
        file=sys.stderr,
    )


def _load(source_name: str, entry: str, defines, arch: str, device: int, shared_bytes: int):
    cupy = import_cupy()
    info = device_info(device)
    compiled = build(source_name, defines, arch)
    if not compiled.path.is_file():  # the cache was emptied since
        _built.forget((source_name, defines, arch))
        compiled = build(source_name, defines, arch)
    if entry not in compiled.entries:
        raise RuntimeError(f"{source_name} has no entry {entry!r}: it has {sorted(compiled.entries)}.")
    with cupy.cuda.Device(device):
        try:
            module = _modules.get((device, compiled.path), lambda: cupy.RawModule(path=str(compiled.path)))
            kernel = module.get_function(entry)
            allowed = kernel.max_dynamic_shared_size_bytes  # loads it
            if shared_bytes:
                kernel.max_dynamic_shared_size_bytes = max(shared_bytes, allowed)
        except (cupy.cuda.driver.CUDADriverError, FileNotFoundError) as error:
            raise RuntimeError(
                f"{source_name}, compiled for {arch}, does not load on {info.name} with {shared_bytes} bytes of dynamic shared memory ({error}): "
                f"update the NVIDIA driver, or delete {compiled.path.parent}."
            ) from error
    return kernel
