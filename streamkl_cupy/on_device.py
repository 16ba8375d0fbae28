"""Validated calls on CUDA arrays: the copies that the kernels need, then the kernels."""

from __future__ import annotations

import functools

from . import padding
from .arrays import ITEM_BYTES, ArrayView, byte_span, check_alignment, view
from .checks import SIDES
from .frameworks import cupy_stream
from .gpu.errors import import_cupy
from .padding import Scratch


@functools.cache
def _gpu():
    """The kernels' side, imported where it is first needed: it wants CuPy."""
    import_cupy()
    from .gpu import backward, forward

    return forward, backward


def check_values(problem, views) -> None:
    """Values of device vectors are never read on the host; the kernels clamp them. Their addresses are checked."""
    for name, array in views.items():
        check_alignment(name, array)


def forward_bytes(problem, views) -> int:
    """Bytes of workspace that `forward` takes."""
    kernels = _gpu()[0].workspace_bytes(padding.padded_problem(problem), views["q1"].device[1])
    return padding.copy_bytes(problem, views) + kernels


def backward_bytes(problem, views, wrt, dtype, deterministic) -> int:
    """Bytes of workspace that `backward` takes for gradients in `dtype`."""
    kernels = _gpu()[1].workspace_bytes(padding.padded_problem(problem), wrt, dtype, deterministic, views["q1"].device[1])
    return padding.copy_bytes(problem, views, wrt, dtype) + kernels


def forward(call, rows, reduced) -> None:
    kernels, _ = _gpu()
    scratch = Scratch(call.framework, call.workspace)
    views = padding.readable(call.views, scratch, lambda target, source: copy_columns(target, source, call.stream))
    problem = padding.padded_problem(call.problem)
    kernels.run(problem, views, rows, reduced, scratch.workspace, call.stream, allocate=scratch.allocate)


def backward(call, rows, weights, reduced, grads, deterministic, recompute) -> None:
    """`recompute` says that `reduced` is still to be filled from the rows."""
    forward_kernels, kernels = _gpu()
    scratch = Scratch(call.framework, call.workspace)
    views = padding.readable(call.views, scratch, lambda target, source: copy_columns(target, source, call.stream))
    problem = padding.padded_problem(call.problem)
    targets = dict(grads)
    for name in padding.padded_gradients(call.problem, grads):
        targets[name] = scratch.buffer(grads[name].shape, grads[name].dtype)
    if recompute:
        forward_kernels.reduce_rows(problem, rows, reduced, scratch.workspace, scratch.allocate, call.stream)
    kernels.run(problem, views, rows, weights, reduced, targets, deterministic, scratch.workspace, call.stream, allocate=scratch.allocate)
    for name, target in targets.items():
        if target is not grads[name]:
            copy_columns(grads[name], target, call.stream)


def merge(parts, out, shape, stream: int) -> None:
    import_cupy()
    from .gpu import merge as kernels

    kernels.run(parts, out, shape, stream)


def warm(call, wrt, dtype) -> None:
    """Compiles and loads all that a forward and a backward call launch, the copies among them; runs nothing but those."""
    forward_kernels, kernels = _gpu()
    problem, index = padding.padded_problem(call.problem), call.views["q1"].device[1]
    forward_kernels.warm(problem, index)
    kernels.warm(problem, wrt, dtype, False, index)
    kernels.warm(problem, wrt, dtype, True, index)
    scratch = Scratch(call.framework, None)
    padding.readable(call.views, scratch, lambda target, source: copy_columns(target, source, call.stream))
    for name in padding.padded_gradients(call.problem, wrt):
        shape = call.problem.shape(name)
        target = view("gradient", call.framework.empty(shape, dtype))
        copy_columns(target, scratch.buffer(shape, dtype), call.stream)


def explain(call, wrt, dtype) -> list[str]:
    """Lines on the inputs, the kernels and the workspace."""
    forward_kernels, kernels = _gpu()
    problem, index = padding.padded_problem(call.problem), call.views["q1"].device[1]
    lines, copied = [], padding.input_copies(call.views)
    for name in copied:
        array = call.views[name]
        lines.append(f"{name}: copied once a call, {padding.buffer_bytes(array.shape, array.dtype)} bytes: {padding.reason_to_copy(array)}")
    if not lines:
        lines.append("inputs: read in place")
    in_place = {n: call.views[n] for n in SIDES if n not in copied}
    lines += forward_kernels.explain(problem, index, in_place)
    lines += kernels.explain(problem, wrt, index, in_place)
    for name in padding.padded_gradients(call.problem, wrt):
        size = padding.buffer_bytes(call.problem.shape(name), dtype)
        lines.append(f"gradient of {name}: through a padded buffer of {size} bytes")
    lines.append(
        f"workspace: {forward_bytes(call.problem, call.views)} bytes forward, "
        f"{backward_bytes(call.problem, call.views, wrt, dtype, False)} bytes backward"
    )
    return lines


def copy_columns(target: ArrayView, source: ArrayView, stream: int) -> None:
    """Copies rows between arrays whose last axes differ in length, with zeros behind shorter rows. Bits are copied, not numbers."""
    if 0 in target.shape:
        return
    width = min(target.shape[-1], source.shape[-1])
    with cupy_stream(stream):
        to, given = _words(target), _words(source)
        to[..., :width] = given[..., :width]
        if width < target.shape[-1]:
            to[..., width:] = 0


def _words(array: ArrayView):
    """The memory of a view as a CuPy array of unsigned words: any dtype of one size copies alike."""
    cupy = import_cupy()
    size = ITEM_BYTES[array.dtype]
    low, high = byte_span(array)
    memory = cupy.cuda.MemoryPointer(cupy.cuda.UnownedMemory(low, high - low, array.owner, array.device[1]), array.pointer - low)
    return cupy.ndarray(array.shape, f"u{size}", memory, strides=tuple(stride * size for stride in array.strides))
