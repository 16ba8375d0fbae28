"""Arrays of a second device while the first is current: results, streams, scratch and autograd's threads all go there."""

import contextlib

import numpy as np
import pytest

import streamkl_cupy as skl

from ..oracle import SIDES, check_gradients, check_rows, make, row_weights, truth
from .peers import Torch, check_tensor_grads, put
from .spin import spin

pytestmark = pytest.mark.gpu

SIZES = {"batch": 2, "n": (37, 53), "d": (16, 24)}
KINDS = {
    "plain": {},
    "mean": {"reduction": "mean", "causal": True},
    "padded dimensions": {"d": (13, 20)},
    "split keys": {"batch": 1, "n": (5, 6000), "d": (64, 128)},
}


@pytest.fixture(autouse=True)
def two_devices(device):
    if device.cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("needs two GPUs")
    with device.cupy.cuda.Device(0):
        yield
        assert device.cupy.cuda.runtime.getDevice() == 0


class TorchOnSecond(Torch):
    where = "cuda:1"


@pytest.fixture
def second(device):
    return TorchOnSecond(device)


def on_second(device, case):
    with device.cupy.cuda.Device(1):
        arrays = {n: device.put(a) for n, a in case.arrays.items()}
        device.synchronize()
    return arrays


def both(device, case, inputs, **given):
    _, state = skl.forward(**inputs, **case.options, **given)
    return state, skl.backward(state, wrt=SIDES, **given)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("with_workspace", [False, True])
def test_cupy(device, kind, dtype, with_workspace):
    case = make(401, dtype, **(SIZES | KINDS[kind]))
    inputs, given = on_second(device, case), {}
    if with_workspace:
        size = skl.workspace_size(**inputs, **case.options, wrt=SIDES)
        with device.cupy.cuda.Device(1):
            given = {"workspace": device.cupy.empty(size, np.uint8)}
    state, grads = both(device, case, inputs, **given)
    assert {a.device.id for a in (*state.rows, *grads, *(state.reduced or ()))} == {1}
    expected = truth(case, None, SIDES)
    check_rows(device, case, state, expected)
    check_gradients(device, case, grads, expected)


def test_both_devices_in_turn(device):
    """Kernels are loaded for each, and a call finds its own."""
    case = make(402, "float16", **SIZES)
    inputs = [{n: device.put(a) for n, a in case.arrays.items()}, on_second(device, case)]
    expected = truth(case, None, SIDES)
    for index in (0, 1, 0, 1):
        state, grads = both(device, case, inputs[index])
        assert state.kl.device.id == index
        check_rows(device, case, state, expected)
        check_gradients(device, case, grads, expected)
    with pytest.raises(ValueError, match="k2 is on cuda:1 and q1 on cuda:0"):
        skl.forward(**(inputs[0] | {"k2": inputs[1]["k2"]}))
    with pytest.raises(ValueError, match=r"rows_list\[1\]\.kl is on cuda:1"):
        skl.merge([both(device, case, one)[0].rows for one in inputs])


@pytest.mark.parametrize("form", ["current", "given"])
def test_torch_on_a_side_stream(device, second, form):
    """Inputs come late, on a stream of the second device."""
    torch, case = second.torch, make(403, "float16", **SIZES)
    right = put(second, case)
    skl.warmup(**right, wrt=SIDES)
    side = torch.cuda.Stream(device=1)
    late = {n: torch.full_like(t, float("nan")) for n, t in right.items()}
    torch.cuda.synchronize(1)
    with torch.cuda.stream(side), torch.no_grad():
        with device.cupy.cuda.Device(1):
            spin(side.cuda_stream, 60, 1)
        for n, tensor in late.items():
            tensor.copy_(right[n])
    with torch.cuda.stream(side) if form == "current" else contextlib.nullcontext():
        given = {} if form == "current" else {"stream": side}
        state, grads = both(device, case, late, **given)
    side.synchronize()
    expected = truth(case, None, SIDES)
    for array in (*state.rows, *grads):
        assert array.device == torch.device("cuda:1")
    check_rows(second, case, state, expected)
    check_gradients(second, case, grads, expected)


def test_autograd(second, attention_kl):
    """Its thread of the second device calls backward."""
    case = make(404, "bfloat16", **SIZES, causal=True)
    inputs = {n: t.requires_grad_() for n, t in put(second, case).items()}
    weights = row_weights(case)
    (attention_kl(*inputs.values(), {"causal": True}) * second.put(weights)).sum().backward()
    check_tensor_grads(second, case, inputs, weights, SIDES)


def test_jax(device):
    jax = pytest.importorskip("jax")
    gpus = [d for d in jax.devices() if d.platform == "gpu"]
    if len(gpus) < 2:
        pytest.skip("JAX sees fewer than two GPUs")
    case = make(405, "float16", **SIZES)
    state, grads = both(device, case, {n: jax.device_put(a, gpus[1]) for n, a in case.arrays.items()})
    assert {d for a in (*state.rows, *grads) for d in a.devices()} == {gpus[1]}
    expected = truth(case, None, SIDES)
    check_rows(device, case, state, expected)
    check_gradients(device, case, grads, expected)
