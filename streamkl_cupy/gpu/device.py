"""What a device is, and which instruction set its kernels are compiled for."""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass

from .errors import import_cupy, import_nvrtc, no_gpu

OLDEST = (8, 0)  # mma.sync on bfloat16 and cp.async


@dataclass(frozen=True)
class DeviceInfo:
    """Sizes are in bytes; `shared_memory_per_block` is the most that a kernel can ask for."""

    name: str
    capability: tuple[int, int]
    arch: str
    multiprocessors: int
    shared_memory_per_block: int
    shared_memory_per_multiprocessor: int


@functools.cache
def device_info(device_index: int) -> DeviceInfo:
    """The properties of a CUDA device. RuntimeError where there is no usable GPU, or one older than compute capability 8.0."""
    cupy = import_cupy()
    try:
        properties = cupy.cuda.runtime.getDeviceProperties(device_index)
    except cupy.cuda.runtime.CUDARuntimeError as error:
        raise no_gpu(error) from error
    capability = (properties["major"], properties["minor"])
    return DeviceInfo(
        name=properties["name"].decode(),
        capability=capability,
        arch=arch_for(capability),
        multiprocessors=properties["multiProcessorCount"],
        shared_memory_per_block=properties["sharedMemPerBlockOptin"],
        shared_memory_per_multiprocessor=properties["sharedMemPerMultiprocessor"],
    )


def arch_for(capability: tuple[int, int], *, accelerated: bool = False) -> str:
    """The architecture to compile for, such as "sm_90"; `accelerated` asks for "sm_90a" and its like, which run on that chip alone.

    A binary runs on its own and on later minor revisions of one major: a revision that NVRTC does not know gets the newest
    of its major that it does. RuntimeError for a GPU older than 8.0 and for a major that NVRTC does not know.

    >>> arch_for((9, 0), accelerated=True)
    'sm_90a'
    """
    capability = tuple(capability)
    name = f"compute capability {capability[0]}.{capability[1]}"
    if capability < OLDEST:
        raise RuntimeError(f"this GPU has {name}; the kernels need 8.0 (Ampere) or later: pass CPU arrays to run the NumPy backend.")
    nvrtc, version = import_nvrtc()
    number = capability[0] * 10 + capability[1]
    known = [a for a in nvrtc.getSupportedArchs() if capability[0] * 10 <= a <= number]
    if not known:
        raise RuntimeError(
            f"this GPU has {name}, which NVRTC {version[0]}.{version[1]} cannot compile for: pip install --upgrade 'streamkl-cupy[cuda13]'."
        )
    if accelerated and max(known) != number:
        raise RuntimeError(f"NVRTC {version[0]}.{version[1]} does not know sm_{number}a: pip install --upgrade 'streamkl-cupy[cuda13]'.")
    return f"sm_{max(known)}" + ("a" if accelerated else "")


os.register_at_fork(after_in_child=device_info.cache_clear)
