"""Wrong arguments on a device: the tables of tests/test_bad_input.py and what only device arrays can be.

Nothing may be launched, and outputs full of NaN stay as they are, bit for bit.
"""

import contextlib
import sys

import numpy as np
import pytest

import streamkl_cupy as skl

from .. import test_bad_input as tables
from ..producers import Legacy
from ..test_bad_input import SIDES, arrays, ints, replaced, zeros
from ..test_foreign_arguments import FOREIGN

pytestmark = pytest.mark.gpu

ON_HOST = "on cpu and q1 on cuda:0"


def blank(device, array):
    """Device memory with the shape and strides of a host array."""
    items = 1 + sum((n - 1) * s for n, s in zip(array.shape, array.strides, strict=True)) // array.itemsize
    return device.cupy.lib.stride_tricks.as_strided(device.put(zeros(items, dtype=array.dtype)), array.shape, array.strides)


def moved(device, value):
    """A value of the tables with all that is on the host put on the device."""
    if type(value) is np.ndarray:
        return device.put(value) if value.flags.c_contiguous else blank(device, value)
    if isinstance(value, Legacy) and value.device == (1, 0):
        return Legacy(value.array, device=(2, 0))
    if isinstance(value, skl.KLState):
        return skl.KLState(*(moved(device, part) for part in (value.rows, value.problem, value.inputs, value.reduced)))
    if isinstance(value, dict):
        return {name: moved(device, part) for name, part in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(moved(device, part) for part in value))
    return type(value)(moved(device, part) for part in value) if type(value) in (list, tuple) else value


@pytest.fixture(scope="module")
def given(device):
    """given(**replaced) -> keyword arguments of a good call on the device."""
    return lambda shapes=tables.SHAPES, **changes: moved(device, arrays(shapes, **changes))


@contextlib.contextmanager
def refused(device, error, message, *unwritten):
    """The error comes before any launch, and `unwritten` arrays keep their bits."""

    def launched(*arguments, **options):
        raise AssertionError("something was launched")

    before = [device.get(array).tobytes() for array in unwritten]
    with pytest.MonkeyPatch.context() as patch:
        for name, module in list(sys.modules.items()):
            if name.startswith("streamkl_cupy."):
                for function in {"launch", "copy_columns"} & vars(module).keys():
                    if callable(getattr(module, function)):  # `launch` is a module too
                        patch.setattr(module, function, launched)
        with pytest.raises(error, match=message):
            yield
    device.synchronize()
    assert [device.get(array).tobytes() for array in unwritten] == before


def poisoned(given, reduction="none"):
    """A state full of NaN, and its arrays."""
    _, state = skl.forward(**given(), reduction=reduction)
    written = (*state.rows, *(state.reduced or ()))
    for array in written:
        array[...] = np.nan
    return state, written


def poisoned_gradients(state):
    out = skl.backward(state)
    for array in (out.q2, out.k2):
        array[...] = np.nan
    return out


@pytest.mark.parametrize(("name", "value", "error", "message"), tables.INPUTS)
def test_inputs(device, given, name, value, error, message):
    state, written = poisoned(given)
    bad = given(**{name: value})
    with refused(device, error, message, *written):
        skl.forward(**bad, out=state)
    for function in (skl.workspace_size, skl.warmup, skl.explain):
        with refused(device, error, message, *written):
            function(**bad)


@pytest.mark.parametrize(("options", "error", "message"), tables.OPTIONS)
def test_options(device, given, options, error, message):
    state, written = poisoned(given)
    good, options = given(), moved(device, options)
    with refused(device, error, message, *written):
        skl.forward(**good, **options, out=state)
    for function in (skl.workspace_size, skl.warmup, skl.explain):
        with refused(device, error, message):
            function(**good, **options)


@pytest.mark.parametrize(("options", "error", "message"), tables.PACKED_OPTIONS)
def test_packed_options(device, given, options, error, message):
    good, options = given(tables.PACKED), moved(device, options)
    with refused(device, error, message):
        skl.forward(**good, layout="thd", **options)


@pytest.mark.parametrize("name", FOREIGN)
def test_arguments_of_other_libraries(device, given, name):
    good = given()
    with refused(device, TypeError, name):
        skl.forward(**good, **{name: 0.0})


@pytest.mark.parametrize(("change", "error", "message"), tables.OUT_STATES)
def test_out_of_forward(device, given, change, error, message):
    state, written = poisoned(given, "mean")
    good, out = given(), moved(device, change(state))
    with refused(device, error, message, *written):
        skl.forward(**good, reduction="mean", out=out)


def test_out_on_an_input(device, given):
    pool, (state, written) = device.put(np.full(1000, np.nan, np.float32)), poisoned(given)
    good = given() | {"q1": pool[:320].reshape(2, 4, 5, 8)}
    with refused(device, ValueError, r"out\.rows\.kl overlaps q1", pool, *written):
        skl.forward(**good, out=replaced(state, kl=pool[300:340].reshape(2, 4, 5)))


@pytest.mark.parametrize(("workspace", "error", "message"), tables.WORKSPACES)
def test_workspace(device, given, workspace, error, message):
    state, written = poisoned(given)
    good, workspace = given(), moved(device, workspace)
    with refused(device, error, message, *written):
        skl.forward(**good, workspace=workspace, out=state)
    _, state = skl.forward(**good)
    out = poisoned_gradients(state)
    with refused(device, error, message, out.q2, out.k2):
        skl.backward(state, workspace=workspace, out=out)


def test_workspace_on_an_input(device, given):
    good, (state, written) = given(), poisoned(given, "mean")
    size = skl.workspace_size(**good, reduction="mean", wrt=SIDES)
    memory = device.bytes(size + 1280)
    good["q1"] = memory[:1280].view(np.float32).reshape(2, 4, 5, 8)
    with refused(device, ValueError, "workspace overlaps q1", memory, *written):
        skl.forward(**good, reduction="mean", workspace=memory[1024 : 1024 + size], out=state)


@pytest.mark.parametrize("less", [1, "all"])
def test_a_workspace_that_is_too_small(device, given, less):
    good, (state, written) = given(), poisoned(given, "mean")
    size = skl.workspace_size(**good, reduction="mean")
    workspace = device.bytes(size - 1 if less == 1 else 0)
    with refused(device, ValueError, rf"workspace has {workspace.size} bytes; this call takes {size}", workspace, *written):
        skl.forward(**good, reduction="mean", workspace=workspace, out=state)


def test_a_workspace_that_is_askew(device, given):
    good, (state, written) = given(), poisoned(given)
    workspace = device.bytes(4104)[8:]
    with refused(device, ValueError, "workspace starts at address", workspace, *written):
        skl.forward(**good, workspace=workspace, out=state)


@pytest.mark.parametrize(("options", "error", "message"), tables.BACKWARD)
def test_backward(device, given, options, error, message):
    _, state = skl.forward(**given())
    out, options = poisoned_gradients(state), moved(device, options)
    with refused(device, error, message, out.q2, out.k2):
        skl.backward(state, **options, out=out)


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_rows_of_gradients_after_a_reduction(device, given, reduction):
    _, state = skl.forward(**given(), reduction=reduction)
    out, rows = poisoned_gradients(state), device.put(zeros(2, 4, 5))
    with refused(device, ValueError, f"after reduction='{reduction}' it takes a scalar", out.q2, out.k2):
        skl.backward(state, rows, out=out)


@pytest.mark.parametrize(("change", "error", "message"), tables.OUT_GRADIENTS)
def test_out_of_backward(device, given, change, error, message):
    _, state = skl.forward(**given())
    out = poisoned_gradients(state)
    bad = moved(device, change(out, state))
    with refused(device, error, message, out.q2, out.k2, *state.inputs[:4]):
        skl.backward(state, out=bad)


def test_out_that_cannot_be_written_in_place(device, given):
    _, state = skl.forward(**given())
    out = poisoned_gradients(state)
    memory = device.put(np.full((2, 4, 5, 17), np.nan, np.float32))
    with refused(device, ValueError, r"out\.q2 has strides \(340, 85, 17, 1\)", memory, out.k2):
        skl.backward(state, out=out._replace(q2=memory[..., :16]))


@pytest.mark.parametrize(("change", "error", "message"), tables.STATES)
def test_states(device, given, change, error, message):
    _, state = skl.forward(**given())
    out = poisoned_gradients(state)
    bad = moved(device, change(state))
    with refused(device, error, message, out.q2, out.k2):
        skl.backward(bad, out=out)


@pytest.mark.parametrize(("change", "error", "message"), tables.MERGES)
def test_merge(device, given, change, error, message):
    _, state = skl.forward(**given())
    bad = moved(device, change(state.rows))
    with refused(device, error, message, *state.rows):
        skl.merge(bad)


@pytest.mark.parametrize("name", SIDES[1:])
def test_one_input_on_the_host(device, given, name):
    state, written = poisoned(given)
    bad = given() | {name: arrays()[name]}
    with refused(device, ValueError, f"{name} is {ON_HOST}", *written):
        skl.forward(**bad, out=state)


@pytest.mark.parametrize("name", ["seqlens_q", "seqlens_k", "q_offset"])
def test_a_vector_on_the_host(device, given, name):
    good, (state, written) = given(), poisoned(given)
    with refused(device, ValueError, f"{name} is {ON_HOST}", *written):
        skl.forward(**good, **{name: ints(1, 2)}, out=state)


def test_outputs_on_the_host(device, given):
    good, (state, written) = given(), poisoned(given)
    with refused(device, ValueError, f"out.rows.kl is {ON_HOST}", *written):
        skl.forward(**good, out=replaced(state, kl=zeros(2, 4, 5)))
    with refused(device, ValueError, f"workspace is {ON_HOST}", *written):
        skl.forward(**good, workspace=zeros(4096, dtype=np.uint8), out=state)
    _, state = skl.forward(**good)
    out = poisoned_gradients(state)
    with refused(device, ValueError, f"out.k2 is {ON_HOST}", out.q2, out.k2):
        skl.backward(state, out=out._replace(k2=zeros(2, 1, 7, 16)))
    with refused(device, ValueError, f"grad_kl is {ON_HOST}", out.q2, out.k2):
        skl.backward(state, zeros(2, 4, 5), out=out)


def test_a_vector_that_is_askew(device, given):
    good, (state, written) = given(), poisoned(given)
    askew = device.bytes(9)[1:].view(np.int32)
    with refused(device, ValueError, "seqlens_k starts at address", *written):
        skl.forward(**good, seqlens_k=askew, out=state)


@pytest.mark.parametrize("stream", ["0", True, -1, 1.5])
def test_streams(device, given, stream):
    good, (state, written) = given(), poisoned(given)
    with refused(device, (TypeError, ValueError), "stream is", *written):
        skl.forward(**good, stream=stream, out=state)


def test_a_good_call_after_all(device, given):
    """Errors leave nothing behind."""
    kl, state = skl.forward(**given())
    want = skl.forward(**arrays())[0]
    np.testing.assert_allclose(device.get(kl), want, rtol=1e-5, atol=1e-5)
    assert np.isfinite(device.get(skl.backward(state).q2)).all()
