"""Arrays of any framework seen as pointer, shape, strides and dtype; allocation and streams in the caller's framework."""

from __future__ import annotations

from typing import Any, NamedTuple


class ArrayView(NamedTuple):
    """A borrowed array. `strides` are in elements, `dtype` is a name ("bfloat16"), `device` is ("cpu", 0) or ("cuda", i)."""

    pointer: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    device: tuple[str, int]
    readonly: bool
    framework: str
    owner: Any
