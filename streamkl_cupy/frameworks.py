"""Where results come from: allocation, the current stream, and the way back into the caller's framework.

PyTorch inputs allocate through PyTorch, on either kind of device. CPU arrays of other frameworks get NumPy memory and CUDA
arrays memory of CuPy's pool; JAX then receives that memory as its own arrays, without a copy.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import sys
import threading
from typing import Any

import numpy as np

from .arrays import BFLOAT16, ArrayView, view
from .gpu.errors import import_cupy

NOTHING = contextlib.nullcontext()


@functools.lru_cache(maxsize=64)
def framework_for(name: str, device: tuple[str, int]) -> Framework:
    """The framework that allocates for an array of framework `name` on `device`."""
    if name == "torch":
        return TorchArrays(device)
    if device[0] == "cpu":
        return JaxOnHost(device) if name == "jax" else NumPyArrays(device)
    return JaxOnDevice(device) if name == "jax" else CuPyArrays(device)


class Framework:
    """Arrays on one device. `name` is the framework that results are in; `empty` may hand out another one's until `deliver`."""

    name: str

    def __init__(self, device: tuple[str, int]):
        self.device = device

    def empty(self, shape: tuple[int, ...], dtype: str) -> Any:
        raise NotImplementedError

    def empty_parts(self, count: int, shape: tuple[int, ...]) -> list[tuple[Any, ArrayView]]:
        """`count` float32 arrays of one shape, out of one allocation, each with its view."""
        whole = self.empty((count, *shape), "float32")
        first = view("whole", whole)
        step = 4 * first.strides[0]
        shared = shape, first.strides[1:], "float32", self.device, False, first.framework
        return [(part, ArrayView(first.pointer + i * step, *shared, part)) for i, part in enumerate(self.parts(whole))]

    def parts(self, whole) -> Any:
        return whole

    def empty_bytes(self, count: int) -> ArrayView:
        return view("scratch", self.empty((count,), "uint8"))

    def deliver(self, array, like) -> Any:
        """The array as the caller gets it; `like` is his q1."""
        return array

    def stream(self) -> int:
        """Pointer of the current CUDA stream; 0 on the CPU."""
        return 0

    def current(self, stream: int | None):
        """A context in which the device is current, and `stream` too where the caller chose one."""
        return NOTHING

    def hold(self, views, stream: int) -> None:
        """Keeps borrowed capsules alive until `stream` has got this far."""


class NumPyArrays(Framework):
    name = "numpy"

    def empty(self, shape, dtype):
        return np.empty(shape, BFLOAT16 if dtype == "bfloat16" else dtype)

    def parts(self, whole):
        # Indexed with an ellipsis: a 0-d part stays an array.
        return [whole[i, ...] for i in range(whole.shape[0])]


class JaxOnHost(NumPyArrays):
    name = "jax"

    def deliver(self, array, like):
        return sys.modules["jax"].device_put(array, like.device)


class TorchArrays(Framework):
    name = "torch"

    def __init__(self, device):
        super().__init__(device)
        self.torch = sys.modules["torch"]
        kind, self.index = device
        self.on_cuda = kind == "cuda"
        self.torch_device = self.torch.device(kind, self.index) if self.on_cuda else self.torch.device("cpu")

    def empty(self, shape, dtype):
        return self.torch.empty(shape, dtype=getattr(self.torch, dtype), device=self.torch_device)

    def parts(self, whole):
        return whole.unbind(0)

    def stream(self):
        return self.torch.cuda.current_stream(self.torch_device).cuda_stream if self.on_cuda else 0

    def current(self, stream):
        if not self.on_cuda:
            return NOTHING
        if stream is None:
            return _current_device(self.index)
        cuda = self.torch.cuda  # whose ExternalStream(0) would be a new stream, not the default one
        chosen = cuda.ExternalStream(stream, device=self.torch_device) if stream else cuda.default_stream(self.torch_device)
        return cuda.stream(chosen)


class CuPyArrays(Framework):
    name = "cupy"

    def __init__(self, device):
        super().__init__(device)
        self.cupy = import_cupy()
        self.index = device[1]
        self.in_flight, self.lock = collections.deque(), threading.Lock()

    def empty(self, shape, dtype):
        return self.cupy.empty(shape, BFLOAT16 if dtype == "bfloat16" else dtype)

    def parts(self, whole):
        return [whole[i] for i in range(whole.shape[0])]

    def stream(self):
        return self.cupy.cuda.get_current_stream(self.index).ptr

    def current(self, stream):
        if stream is None:
            return _current_device(self.index)
        contexts = contextlib.ExitStack()
        contexts.enter_context(self.cupy.cuda.Device(self.index))
        contexts.enter_context(cupy_stream(stream))
        return contexts

    def hold(self, views, stream):
        """A producer such as JAX uses the memory again, on a stream of its own, as soon as the last capsule is gone.

        What is done with is let go of at the next call with capsules.
        """
        owners = [v.owner for v in views if v is not None and v.framework in ("jax", "dlpack")]
        if not owners or (launch := cupy_stream(stream)).is_capturing():
            return
        with self.lock:
            while self.in_flight and self.in_flight[0][0].done:
                self.in_flight.popleft()
            self.in_flight.append((launch.record(self.cupy.cuda.Event(disable_timing=True)), owners))


class JaxOnDevice(CuPyArrays):
    name = "jax"

    def empty_parts(self, count, shape):
        # Each on its own: XLA wants arrays that start at an aligned address.
        arrays = [self.empty(shape, "float32") for _ in range(count)]
        return [(array, view("part", array)) for array in arrays]

    def deliver(self, array, like):
        jax = sys.modules["jax"]
        try:
            return jax.dlpack.from_dlpack(array)
        except BufferError:  # CuPy versions that do not export bfloat16
            words = jax.dlpack.from_dlpack(array.view(np.uint16))
            return jax.lax.bitcast_convert_type(words, jax.numpy.bfloat16)


def _current_device(index: int):
    cuda = import_cupy().cuda
    return NOTHING if cuda.runtime.getDevice() == index else cuda.Device(index)


class _StreamProtocol:
    def __init__(self, pointer: int):
        self.pointer = pointer

    def __cuda_stream__(self):
        return (0, self.pointer)


def cupy_stream(pointer: int):
    """A stream that somebody else owns, as CuPy's."""
    return import_cupy().cuda.Stream.from_external(_StreamProtocol(pointer))


def stream_pointer(stream) -> int | None:
    """The caller's `stream` argument as a pointer: an int, a stream of CuPy or PyTorch, or an object with `__cuda_stream__`."""
    if stream is None:
        return None
    pointer = stream
    for attribute in ("ptr", "cuda_stream"):
        pointer = getattr(stream, attribute, pointer)
    if hasattr(stream, "__cuda_stream__"):
        protocol = stream.__cuda_stream__
        pointer = (protocol() if callable(protocol) else protocol)[1]
    if isinstance(pointer, bool) or not isinstance(pointer, int):
        raise TypeError(
            f"stream is a {type(stream).__name__}; it takes a stream of CuPy or PyTorch, its pointer as an int, or None for the current one"
        )
    if pointer < 0:
        raise ValueError(f"stream is {pointer}; it takes the pointer of a CUDA stream")
    return pointer
