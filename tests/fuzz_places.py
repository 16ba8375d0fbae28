"""How a fuzzed array lies in memory: side by side, turned, with holes, backwards, off its alignment, or with a stride of 0."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

PLACES = ("contiguous", "permuted", "columns apart", "holes", "backwards", "unaligned", "expanded")


class Place(NamedTuple):
    """One of PLACES, with what it takes of chance."""

    how: str
    seed: int


def equal_along(array: np.ndarray, place: Place) -> np.ndarray:
    """The array with the numbers that it can have in its place: with a stride of 0 they repeat along an axis."""
    if place.how != "expanded" or 0 in array.shape:
        return array
    axis = _expanded_axis(array, place)
    return np.repeat(np.take(array, [0], axis), array.shape[axis], axis)


def _expanded_axis(array: np.ndarray, place: Place) -> int:
    return place.seed % (array.ndim - 1)


def put(backend, array: np.ndarray, place: Place, fill=np.nan):
    """The array on the device, in memory of its own as its place says; what lies between its elements is `fill`."""
    rng, axes = np.random.default_rng(place.seed), range(array.ndim)
    if place.how == "contiguous" or 0 in array.shape:
        return backend.put(array)
    if place.how == "expanded":
        base = backend.put(np.take(array, [0], _expanded_axis(array, place)))
        return (np if backend.name == "numpy" else backend.cupy).broadcast_to(base, array.shape)
    order, at = list(axes), [slice(None)] * array.ndim
    sizes = list(array.shape)
    if place.how == "permuted":
        order[:-1] = _another_order(rng, array.ndim - 1)
    elif place.how == "columns apart":
        order = _another_order(rng, array.ndim)
    elif place.how == "unaligned":
        at[-1], sizes[-1] = slice(1, 1 + sizes[-1]), sizes[-1] + int(rng.integers(1, 9))
    elif place.how == "backwards":
        for axis in rng.permutation(array.ndim)[: rng.integers(1, array.ndim + 1)]:
            at[axis] = slice(None, None, -1)
    elif place.how == "holes":  # slices of something larger: packed QKV, every other row
        for axis in axes:
            last = axis == array.ndim - 1  # whose elements stay side by side, and its beginning aligned
            before, after = (int(extra) for extra in (8 * rng.integers(0, 2, 2) if last else rng.integers(0, 3, 2)))
            step = 1 if last else int(rng.integers(1, 3))
            at[axis] = slice(before, before + step * sizes[axis], step)
            sizes[axis] = before + after + step * sizes[axis]
    holder, back = np.full([sizes[axis] for axis in order], fill, array.dtype), [order.index(axis) for axis in axes]
    holder.transpose(back)[tuple(at)] = array
    return backend.put(holder).transpose(back)[tuple(at)]


def _another_order(rng, count: int) -> list[int]:
    order = [int(axis) for axis in rng.permutation(count)]
    return order if order != sorted(order) else order[::-1]
