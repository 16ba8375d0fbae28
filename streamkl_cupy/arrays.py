"""Arrays of any framework seen as pointer, shape, strides and dtype.

`view` goes through no capsule for NumPy, CuPy and PyTorch, whose arrays say all of it themselves; anything else with
`__dlpack__` (JAX, ...) is read by `dlpack`. The other way, `as_numpy` makes a NumPy array of a CPU view, without a copy.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from . import dlpack
from .gpu.errors import import_cupy

ITEM_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "int32": 4, "uint8": 1}
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
TAKES = "an array of NumPy, CuPy, PyTorch or JAX, or another with __dlpack__"


class ArrayView(NamedTuple):
    """A borrowed array. `strides` are in elements, `dtype` is a name ("bfloat16"), `device` is ("cpu", 0) or ("cuda", i).

    `framework` is "numpy", "cupy", "torch", "jax" or "dlpack"; `owner` keeps the memory alive.
    """

    pointer: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    device: tuple[str, int]
    readonly: bool
    framework: str
    owner: Any


def view(name: str, array: Any, stream: int | None = None) -> ArrayView:
    """Looks at `array`, the argument called `name`. Nothing is copied, and nobody waits on the host.

    `stream` is the CUDA stream that is going to use it (None: CuPy's current one); a producer that hands out capsules makes it
    wait for the array. TypeError for what is no array or has no memory; ValueError for an array on a device that is not served.
    """
    reader = _reader(type(array))
    if reader is None:
        raise TypeError(f"{name} is a {type(array).__name__}; it takes {TAKES}")
    return reader(name, array, stream)


@functools.lru_cache(maxsize=256)
def _reader(cls: type) -> Callable[[str, Any, int | None], ArrayView] | None:
    """How arrays of a class are read. A framework that is not imported has no arrays here."""
    if issubclass(cls, np.ndarray):
        return _refuse_masked if issubclass(cls, np.ma.MaskedArray) else _view_numpy
    torch = sys.modules.get("torch")
    if torch is not None and issubclass(cls, torch.Tensor):
        # Subclasses that dispatch for themselves (FakeTensor, DTensor, ...) have no memory of their own.
        return _torch_reader(torch) if cls.__torch_dispatch__ is torch.Tensor.__torch_dispatch__ else _refuse_wrapped
    cupy = sys.modules.get("cupy")
    if cupy is not None and issubclass(cls, cupy.ndarray):
        return _view_cupy
    if cls.__module__.partition(".")[0] in ("jax", "jaxlib"):
        return _capsule_reader("jax")
    return _capsule_reader("dlpack") if hasattr(cls, "__dlpack__") and hasattr(cls, "__dlpack_device__") else None


@functools.lru_cache(maxsize=256)
def _dtype_name(dtype: np.dtype) -> str:
    return dtype.name if dtype.isnative else f"{dtype.name} in the other byte order"


def _element_strides(name: str, byte_strides: tuple[int, ...], item_bytes: int) -> tuple[int, ...]:
    for stride in byte_strides:
        if stride % item_bytes:
            raise ValueError(f"{name} has a stride of {stride} bytes; it takes multiples of its items' {item_bytes} bytes")
    return tuple([stride // item_bytes for stride in byte_strides])


def _view_numpy(name: str, array: np.ndarray, stream) -> ArrayView:
    return ArrayView(
        array.__array_interface__["data"][0],
        array.shape,
        _element_strides(name, array.strides, array.dtype.itemsize),
        _dtype_name(array.dtype),
        ("cpu", 0),
        not array.flags.writeable,
        "numpy",
        array,
    )


def _refuse_masked(name: str, array, stream):
    raise TypeError(f"{name} is a masked array; masks are given as seqlens_q, seqlens_k, cu_seqlens_q, cu_seqlens_k, causal or window")


def _view_cupy(name: str, array, stream) -> ArrayView:
    dtype = array.dtype
    strides = _element_strides(name, array.strides, dtype.itemsize)
    return ArrayView(array.data.ptr, array.shape, strides, _dtype_name(dtype), ("cuda", array.data.device_id), False, "cupy", array)


def _refuse_wrapped(name: str, tensor, stream):
    raise TypeError(
        f"{name} is a {type(tensor).__name__}, a tensor without memory of its own; under torch.compile or export wrap the call in "
        "torch.library.custom_op, and of a distributed tensor pass the local one"
    )


@functools.cache
def _torch_reader(torch):
    names = {getattr(torch, n): n for n in ITEM_BYTES}
    on_rocm = torch.version.hip is not None
    cpu = ("cpu", 0)

    def read(name: str, tensor, stream) -> ArrayView:
        device = tensor.device
        kind = device.type
        if kind == "meta":
            raise TypeError(
                f"{name} is a meta tensor, which has no memory; it takes real tensors (under torch.compile wrap the call in "
                "torch.library.custom_op)"
            )
        if kind not in ("cpu", "cuda") or (on_rocm and kind == "cuda"):
            raise ValueError(f"{name} is on {'ROCm' if on_rocm else device}; arrays are taken on the CPU or on CUDA devices")
        try:
            pointer, strides = tensor.data_ptr(), tensor.stride()
        except RuntimeError as error:
            raise TypeError(f"{name} is a tensor without strided memory ({str(error).splitlines()[0]}); it takes {TAKES}") from None
        dtype = tensor.dtype
        if tensor.is_neg():
            raise ValueError(f"{name} is a lazily negated view; it takes its resolve_neg()")
        where = cpu if kind == "cpu" else ("cuda", device.index)
        return ArrayView(pointer, tuple(tensor.shape), strides, names.get(dtype) or str(dtype)[6:], where, False, "torch", tensor)

    return read


@functools.cache
def _capsule_reader(framework: str):
    def read(name: str, array, stream: int | None) -> ArrayView:
        with _explained(name, array):
            device_type, index = array.__dlpack_device__()
        kind = dlpack.KINDS.get(device_type)
        if kind is None:
            said = dlpack.DEVICE_NAMES.get(int(device_type), f"DLPack device type {int(device_type)}")
            raise ValueError(f"{name} is on {said}; arrays are taken on the CPU or on CUDA devices")
        if kind == "cuda" and stream is None:
            stream = import_cupy().cuda.get_current_stream(index).ptr
        with _explained(name, array):
            capsule = dlpack.request(array, None if kind == "cpu" else stream)
            tensor = dlpack.read(capsule)
        where = (kind, index if kind == "cuda" else 0)
        readonly = tensor.readonly or framework == "jax"
        return ArrayView(tensor.pointer, tensor.shape, tensor.strides, tensor.dtype, where, readonly, framework, (array, capsule))

    return read


@contextlib.contextmanager
def _explained(name: str, array):
    """Says which argument it was that gave no capsule: a traced or deleted array of JAX, say."""
    try:
        yield
    except (AttributeError, TypeError, BufferError, NotImplementedError, RuntimeError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise TypeError(
            f"{name} is a {type(array).__name__} that gives no DLPack capsule ({reason}); it takes a concrete array, not deleted or donated"
        ) from error


class _Memory:
    """A view in NumPy's array interface: NumPy keeps this object, and with it the owner, as the base of its array."""

    def __init__(self, view: ArrayView):
        size = ITEM_BYTES[view.dtype]
        self.owner = view.owner
        self.__array_interface__ = {
            "data": (view.pointer, view.readonly),
            "shape": view.shape,
            "strides": tuple(stride * size for stride in view.strides),
            "typestr": "|V2" if view.dtype == "bfloat16" else np.dtype(view.dtype).str,
            "version": 3,
        }


def as_numpy(view: ArrayView) -> np.ndarray:
    """The same memory as a NumPy array. For views on the CPU, of a dtype that some argument takes."""
    if view.framework == "numpy":
        return np.asarray(view.owner)
    dtype = BFLOAT16 if view.dtype == "bfloat16" else np.dtype(view.dtype)
    if 0 in view.shape:
        return np.empty(view.shape, dtype)
    return np.asarray(_Memory(view)).view(dtype)


def is_contiguous(view: ArrayView) -> bool:
    """Whether the elements lie one behind the other in C order; strides of axes of size 1 do not count."""
    if 0 in view.shape or view.strides == dlpack.contiguous_strides(view.shape):
        return True
    step = 1
    for size, stride in zip(reversed(view.shape), reversed(view.strides), strict=True):
        if size > 1 and stride != step:
            return False
        step *= size
    return True


def check_alignment(name: str, view: ArrayView) -> None:
    """ValueError for a device array that kernels could not load item by item. NumPy reads and writes at any address."""
    size = ITEM_BYTES[view.dtype]
    if view.device[0] == "cuda" and view.pointer % size:
        raise ValueError(f"{name} starts at address {view.pointer:#x}; it takes a multiple of its items' {size} bytes")


def byte_span(view: ArrayView) -> tuple[int, int]:
    """First byte, and the one behind the last byte, that the view touches."""
    low = high = 0
    for size, stride in zip(view.shape, view.strides, strict=True):
        if size == 0:
            return view.pointer, view.pointer
        reach = (size - 1) * stride
        low, high = (low + reach, high) if reach < 0 else (low, high + reach)
    size = ITEM_BYTES[view.dtype]
    return view.pointer + low * size, view.pointer + (high + 1) * size


def overlap(one: ArrayView, other: ArrayView) -> bool:
    """Whether two views share a byte: exact, also where they interleave like the parts of a packed QKV tensor."""
    try:  # Only addresses are compared, so this holds for device pointers too.
        return np.shares_memory(np.asarray(_Memory(one)), np.asarray(_Memory(other)), max_work=100_000)
    except np.exceptions.TooHardError:
        return True


def overlaps_itself(view: ArrayView) -> bool:
    """Whether two indices may share memory, as with a stride of 0."""
    reach = 0
    for stride, size in sorted((abs(s), n) for s, n in zip(view.strides, view.shape, strict=True)):
        if size == 0:
            return False
        if size > 1:
            if stride <= reach:
                return True
            reach += (size - 1) * stride
    return False
