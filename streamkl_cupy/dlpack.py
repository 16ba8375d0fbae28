"""Reads a DLPack capsule: pointer, shape, strides, dtype and device, without importing the array into another library.

The capsule is borrowed, not consumed: it keeps its name, its holder keeps it alive, and its own destructor calls the producer's
deleter, once. Both forms are read, `dltensor_versioned` (DLPack 1.x, which knows read-only arrays) and the legacy `dltensor`.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from typing import Any, NamedTuple

LEGACY, VERSIONED = b"dltensor", b"dltensor_versioned"
MAX_VERSION = (1, 0)
READ_ONLY = 1

CPU, CUDA, CUDA_HOST, ROCM, ROCM_HOST, CUDA_MANAGED = 1, 2, 3, 10, 11, 13
DEVICE_NAMES = {4: "OpenCL", 7: "Vulkan", 8: "Metal", ROCM: "ROCm", ROCM_HOST: "ROCm host", 14: "oneAPI", 15: "WebGPU", 16: "Hexagon"}
KINDS = {CPU: "cpu", CUDA_HOST: "cpu", CUDA: "cuda", CUDA_MANAGED: "cuda"}

TYPE_CODES = {0: "int", 1: "uint", 2: "float", 4: "bfloat", 5: "complex"}

# DLTensor: data, device type, device id, ndim, type code, bits, lanes, shape, strides, byte offset.
TENSOR = struct.Struct("=QiiiBBHQQQ")
# DLManagedTensorVersioned: major, minor, manager context, deleter, flags; the DLTensor follows.
VERSIONED_HEADER = struct.Struct("=IIQQQ")

# Function objects of our own: those of ctypes.pythonapi are shared, and other libraries set other argument types on them.
_is_valid = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(("PyCapsule_IsValid", ctypes.pythonapi))
_get_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(("PyCapsule_GetPointer", ctypes.pythonapi))

_unversioned_types: set[type] = set()
"""Producers whose `__dlpack__` does not know `max_version`."""


class Tensor(NamedTuple):
    """What a capsule says. `pointer` includes the byte offset; `strides` are in elements, never NULL."""

    pointer: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    device_type: int
    device_index: int
    readonly: bool


def request(array: Any, stream: int | None):
    """The capsule of `array`. `stream` is the CUDA stream that will read it (None for the CPU): the producer makes that one wait.

    DLPack names the legacy default stream 1, where CUDA says 0; without a stream some producers would wait on the host.
    """
    arguments = {} if stream is None else {"stream": stream or 1}
    cls = type(array)
    if cls not in _unversioned_types:
        try:
            return array.__dlpack__(max_version=MAX_VERSION, **arguments)
        except TypeError:
            capsule = array.__dlpack__(**arguments)
            _unversioned_types.add(cls)
            return capsule
    return array.__dlpack__(**arguments)


def read(capsule) -> Tensor:
    """Reads a capsule that nobody has consumed. BufferError for anything else."""
    readonly, offset = False, 0
    if _is_valid(capsule, VERSIONED):
        address = _get_pointer(capsule, VERSIONED)
        major, minor, _, _, flags = VERSIONED_HEADER.unpack(ctypes.string_at(address, VERSIONED_HEADER.size))
        if major != MAX_VERSION[0]:
            raise BufferError(f"its capsule has DLPack version {major}.{minor}; versions 1.x and the unversioned form are known here")
        readonly, offset = bool(flags & READ_ONLY), VERSIONED_HEADER.size
    elif _is_valid(capsule, LEGACY):
        address = _get_pointer(capsule, LEGACY)
    else:
        raise BufferError(f"__dlpack__ returned {capsule!r}, which is no unconsumed DLPack capsule")
    data, device_type, device_index, ndim, code, bits, lanes, shape_at, strides_at, byte_offset = TENSOR.unpack(
        ctypes.string_at(address + offset, TENSOR.size)
    )
    shape = _integers(shape_at, ndim)
    strides = _integers(strides_at, ndim) if strides_at else contiguous_strides(shape)
    return Tensor(data + byte_offset, shape, strides, _dtype_name(code, bits, lanes), device_type, device_index, readonly)


@functools.lru_cache(maxsize=1024)
def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Element strides of a C-contiguous array.

    >>> contiguous_strides((2, 3, 4))
    (12, 4, 1)
    """
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


def _integers(address: int, count: int) -> tuple[int, ...]:
    return struct.unpack(f"={count}q", ctypes.string_at(address, 8 * count)) if count else ()


def _dtype_name(code: int, bits: int, lanes: int) -> str:
    name = f"{TYPE_CODES[code]}{bits}" if code in TYPE_CODES else f"DLPack type code {code} of {bits} bits"
    return name if lanes == 1 else f"{name}x{lanes}"
