"""The one copy that inputs may need on a GPU, and where it lies.

Kernels read rows of 16-byte pieces: the last axis contiguous, every row aligned, the head dimension a multiple of 8. Inputs
that are not so are copied once a call, zeros behind each row; gradients of a padded head dimension are written to a padded
buffer and copied back. The scales keep the caller's head dimension.
"""

from __future__ import annotations

import dataclasses

from .arrays import ITEM_BYTES, ArrayView
from .checks import SIDES
from .dlpack import contiguous_strides
from .problem import Problem

PIECE = 8
"""Elements that a head dimension is a multiple of in the kernels."""

ALIGNMENT_BYTES = 16
WORKSPACE_ALIGNMENT_BYTES = 256


def padded(head_dim: int) -> int:
    return -(-head_dim // PIECE) * PIECE


def reason_to_copy(view: ArrayView) -> str | None:
    """Why an input cannot be read in place, None if it can."""
    if view.shape[-1] % PIECE:
        return f"head dimension {view.shape[-1]} padded to {padded(view.shape[-1])}"
    if 0 in view.shape:
        return None
    return misalignment(view)


def misalignment(view: ArrayView) -> str | None:
    """Why rows of this array are no 16-byte pieces, None if they are."""
    if view.strides[-1] != 1:
        return "its last axis is not contiguous"
    if view.pointer % ALIGNMENT_BYTES:
        return "its first row is not aligned to 16 bytes"
    elements = ALIGNMENT_BYTES // ITEM_BYTES[view.dtype]
    for size, stride in zip(view.shape[:-1], view.strides[:-1], strict=True):
        if size > 1 and (stride % elements or stride < 0):
            return "its rows are not all aligned to 16 bytes" if stride >= 0 else "an axis runs backwards"
    return None


def padded_problem(problem: Problem) -> Problem:
    """The problem as the kernels see it."""
    dims = padded(problem.head_dim1), padded(problem.head_dim2)
    if dims == (problem.head_dim1, problem.head_dim2):
        return problem
    return dataclasses.replace(problem, head_dim1=dims[0], head_dim2=dims[1])


def padded_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (*shape[:-1], padded(shape[-1]))


def buffer_bytes(shape: tuple[int, ...], dtype: str) -> int:
    """Bytes that a padded buffer takes of a workspace."""
    size = ITEM_BYTES[dtype]
    for n in padded_shape(shape):
        size *= n
    return -(-size // WORKSPACE_ALIGNMENT_BYTES) * WORKSPACE_ALIGNMENT_BYTES


def input_copies(views) -> list[str]:
    """The inputs that have to be copied."""
    return [name for name in SIDES if reason_to_copy(views[name])]


def padded_gradients(problem: Problem, wrt) -> list[str]:
    """The gradients that go through a padded buffer."""
    return [name for name in wrt if problem.shape(name)[-1] % PIECE]


def copy_bytes(problem: Problem, views, wrt=(), dtype: str = "float32") -> int:
    """Bytes of workspace that the copies of a call take."""
    inputs = sum(buffer_bytes(views[name].shape, problem.dtype) for name in input_copies(views))
    return inputs + sum(buffer_bytes(problem.shape(name), dtype) for name in padded_gradients(problem, wrt))


class Scratch:
    """Device memory for the length of a call: from the caller's workspace, or else allocated in his framework."""

    def __init__(self, framework, workspace: ArrayView | None):
        self.framework, self.workspace = framework, workspace
        self.owned = []

    def allocate(self, count: int) -> ArrayView:
        """`count` bytes, uint8."""
        if self.workspace is None:
            buffer = self.framework.empty_bytes(count)
            self.owned.append(buffer)
            return buffer
        whole = self.workspace
        self.workspace = whole._replace(pointer=whole.pointer + count, shape=(whole.shape[0] - count,))
        return whole._replace(shape=(count,))

    def buffer(self, shape: tuple[int, ...], dtype: str) -> ArrayView:
        """An uninitialised padded buffer for an array of this shape."""
        shape = padded_shape(shape)
        return self.allocate(buffer_bytes(shape, dtype))._replace(shape=shape, strides=contiguous_strides(shape), dtype=dtype)


def readable(views, scratch: Scratch, copy) -> dict[str, ArrayView]:
    """The views with each input that cannot be read in place replaced by its copy, which `copy(target, source)` makes."""
    result = dict(views)
    for name in input_copies(views):
        result[name] = scratch.buffer(views[name].shape, views[name].dtype)
        copy(result[name], views[name])
    return result
