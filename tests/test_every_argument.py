"""Every array argument with everything that can be wrong with an array: one table of places, one of faults, and their product.

The error says which argument, what it got and what it takes, and not a byte of any array has changed. `test_bad_input` has the
arguments that are no arrays, and faults of one argument alone.
"""

import dataclasses
import re
from collections.abc import Callable

import numpy as np
import pytest

import streamkl_cupy as skl
from streamkl_cupy.state import RowStats

from .producers import Legacy
from .test_bad_input import ENDS, PACKED, SIDES, fake_cupy, frozen, ints
from .test_bad_input import arrays as make

ROWS = RowStats._fields
VECTORS = {"seqlens_q": ints(5, 3), "seqlens_k": ints(2, 7), "q_offset": ints(2, -1)}


class Call:
    """A good call of one kind with all its arrays, by the names that errors use; `run` calls with them."""

    def __init__(self, kind: str, reduction: str = "none"):
        self.kind, self.reduction = kind, reduction
        self.options = {"layout": "thd"} if kind == "packed" else {}
        self.options |= {"causal": True, "reduction": reduction}
        self.arrays = make(PACKED) | ENDS if kind == "packed" else make() | VECTORS
        _, state = skl.forward(**self.arrays, **self.options)
        self.problem = state.problem
        if kind == "backward":
            self.arrays |= {f"state.rows.{n}": a for n, a in zip(ROWS, state.rows, strict=True)}
            self.arrays |= {f"out.{n}": np.full_like(self.arrays[n], 7) for n in SIDES}
            self.arrays["grad_kl"] = np.ones(1, np.float32) if state.reduced else np.ones((2, 4, 5), np.float32)
            reduced = "state.reduced"
        elif kind == "merge":
            self.arrays = {f"rows_list[{i}].{n}": a.copy() for i in (0, 1) for n, a in zip(ROWS, state.rows, strict=True)}
        else:
            self.arrays |= {f"out.rows.{n}": np.full_like(a, 7) for n, a in zip(ROWS, state.rows, strict=True)}
            reduced = "out.reduced"
        if kind != "merge":
            self.arrays["workspace"] = np.full(64, 7, np.uint8)
            self.arrays |= {f"{reduced}[{i}]": a.copy() for i, a in enumerate(state.reduced or ())}

    def run(self, **replaced):
        a = self.arrays | replaced
        given = {n: a[n] for n in (*SIDES, *VECTORS, *ENDS) if n in a}
        rows = [RowStats(*(a[f"{owner}.{n}"] for n in ROWS)) for owner in self.owners if f"{owner}.kl" in a]
        reduced = tuple(a[n] for n in a if "reduced" in n) or None
        if self.kind == "merge":
            return skl.merge(rows)
        if self.kind == "backward":
            state = skl.KLState(rows[0], self.problem, skl.Inputs(**given), reduced)
            out = skl.Gradients(**{n: a[f"out.{n}"] for n in SIDES})
            return skl.backward(state, a["grad_kl"], wrt=SIDES, out=out, workspace=a["workspace"])
        return skl.forward(**given, **self.options, out=skl.KLState(rows[0], None, None, reduced), workspace=a["workspace"])

    owners = ("out.rows", "state.rows", "rows_list[0]", "rows_list[1]")

    def written(self, name: str) -> bool:
        return name.startswith("out.") or name == "workspace"

    def refused(self, error, name: str, said: str, **replaced) -> None:
        """The message names the argument, says `said` (a pattern), and what is taken; nothing has changed."""
        watched = [a for a in (*self.arrays.values(), *replaced.values()) if isinstance(a, np.ndarray)]
        before = [a.tobytes() for a in watched]
        with pytest.raises(error) as caught:
            self.run(**replaced)
        message = str(caught.value)
        assert re.search(rf"(^|[ ,]){re.escape(name)} ", message), message
        assert re.search(said, message) and re.search(r"\btakes?\b|\buse\b|\btaken\b|\bgiven as\b|\basks for\b", message), message
        assert [a.tobytes() for a in watched] == before


CALLS = [("forward", "none"), ("forward", "mean"), ("packed", "none"), ("backward", "none"), ("backward", "mean"), ("merge", "none")]


def apart(array):
    """The same shape with a gap behind every element."""
    wide = np.zeros((*array.shape, 2), array.dtype)
    wide[..., 0] = array
    return wide[..., 0]


def askew(array):
    """Items that lie half an item apart."""
    return np.lib.stride_tricks.as_strided(
        np.zeros(4 * array.size + 8, array.dtype), array.shape, (*array.strides[:-1], array.itemsize + array.itemsize // 2)
    )


@dataclasses.dataclass(frozen=True)
class Fault:
    """How an array is spoilt, which error says so, with which words, and for which arguments it is one."""

    spoil: Callable
    error: type | tuple
    said: str
    where: Callable = lambda call, name, array: True


def must_be_there(call, name, array):
    return name not in (*VECTORS, "grad_kl", "workspace")


def has_axes(call, name, array):
    return array.ndim > 0


def has_a_shape(call, name, array):
    """Arguments with one right shape. That of the rows to merge is their first array's."""
    return array.ndim > 0 and name not in ("workspace", *ENDS, "rows_list[0].kl")


def has_a_rank(call, name, array):
    return name not in ("workspace", "rows_list[0].kl")


def is_flat(call, name, array):
    """Arguments that kernels read or write as one run of memory."""
    return array.ndim > 0 and (name in (*VECTORS, "workspace") or ".rows." in name or "rows_list" in name or name.startswith("cu_"))


def is_first(name):
    return name in ("q1", "rows_list[0].kl")


FAULTS = {
    "None": Fault(lambda a: None, (TypeError, ValueError), "None|missing", must_be_there),
    "a list": Fault(lambda a: a.tolist(), TypeError, "is a list", has_axes),
    "a string": Fault(lambda a: "array", TypeError, "is a str"),
    "an object": Fault(lambda a: object(), TypeError, "is a object"),
    "a masked array": Fault(np.ma.masked_array, TypeError, "is a masked array"),
    "complex numbers": Fault(lambda a: a.astype(np.complex64), TypeError, "has dtype complex64"),
    "64-bit integers": Fault(lambda a: np.zeros_like(a, np.int64), TypeError, "has dtype int64", has_axes),
    "booleans": Fault(lambda a: a.astype(bool), TypeError, "has dtype bool"),
    "the other byte order": Fault(lambda a: a.astype(a.dtype.newbyteorder()), TypeError, "byte order", lambda c, n, a: a.itemsize > 1),
    "one more axis": Fault(lambda a: a[None].copy(), ValueError, "has shape", has_a_rank),
    "one axis less": Fault(lambda a: a[0, ...].copy(), ValueError, "has shape", lambda c, n, a: has_a_shape(c, n, a) and a.size > 1),
    "one more along each axis": Fault(lambda a: np.zeros([n + 1 for n in a.shape], a.dtype), ValueError, "", has_a_shape),
    "an axis of zero": Fault(lambda a: a[:0].copy(), ValueError, "", has_a_shape),
    "gaps": Fault(apart, ValueError, "has stride", is_flat),
    "half strides": Fault(askew, ValueError, "has a stride of", lambda c, n, a: a.ndim > 0 and a.itemsize > 1),
    "read-only": Fault(lambda a: frozen(a.copy()), ValueError, "is read-only", lambda c, n, a: c.written(n)),
    "another library's": Fault(lambda a: Legacy(a.copy()), ValueError, "is an array of dlpack", lambda c, n, a: n.startswith("out.")),
    "a GPU's": Fault(lambda a: Legacy(a.copy(), device=(2, 1)), ValueError, "on cuda:1", lambda c, n, a: not is_first(n)),
    "ROCm's": Fault(lambda a: Legacy(a.copy(), device=(10, 0)), ValueError, "is on ROCm"),
}


def table():
    for kind, reduction in CALLS:
        call = Call(kind, reduction)
        for name, array in call.arrays.items():
            yield from (
                pytest.param(kind, reduction, name, fault, id=f"{kind} {reduction}-{name}-{fault}")
                for fault, row in FAULTS.items()
                if row.where(call, name, array)
            )


@pytest.mark.parametrize(("kind", "reduction", "name", "fault"), list(table()))
def test_every_fault_of_every_array(kind, reduction, name, fault, monkeypatch):
    monkeypatch.setattr("streamkl_cupy.arrays.import_cupy", fake_cupy)
    call, row = Call(kind, reduction), FAULTS[fault]
    call.refused(row.error, name, row.said, **{name: row.spoil(call.arrays[name])})


@pytest.mark.parametrize(("kind", "reduction"), CALLS)
def test_without_a_fault_it_runs(kind, reduction):
    call = Call(kind, reduction)
    call.run()
    assert all(np.isfinite(a).all() for n, a in call.arrays.items() if call.written(n) and "logsum" not in n)


def aligned(size: int):
    """That many bytes, from an address that workspaces may have."""
    memory = np.zeros(size + 16, np.uint8)
    return memory[-memory.__array_interface__["data"][0] % 16 :][:size]


def overlaps():
    for kind, reduction in CALLS[:-1]:
        call = Call(kind, reduction)
        for name in filter(call.written, call.arrays):
            for other in call.arrays:
                if other != name and (not call.written(other) or name < other):
                    yield pytest.param(kind, reduction, name, other, id=f"{kind} {reduction}-{name}-{other}")


@pytest.mark.parametrize(("kind", "reduction", "name", "other"), list(overlaps()))
def test_every_output_on_everything_else(kind, reduction, name, other):
    """One begins within the other, or ends there."""
    call = Call(kind, reduction)
    first, second = call.arrays[name], call.arrays[other]
    pool = aligned(first.nbytes + second.nbytes + 32)
    at = (first.nbytes - 1) // 16 * 16
    pool[at : at + second.nbytes] = second.reshape(-1).view(np.uint8)
    placed = {
        name: pool[: first.nbytes].view(first.dtype).reshape(first.shape),
        other: pool[at : at + second.nbytes].view(second.dtype).reshape(second.shape),
    }
    before = pool.copy()
    with pytest.raises(ValueError, match="overlaps") as caught:
        call.run(**placed)
    said = re.fullmatch(r"(\S+) overlaps (\S+); it takes memory of its own", str(caught.value))
    assert said and {said[1], said[2]} == {name, other}, str(caught.value)
    assert (pool == before).all()
