"""Memory that is nearly full: CuPy's and PyTorch's pools side by side, and calls that find none left."""

import contextlib

import numpy as np
import pytest

import streamkl_cupy as skl

from ..oracle import SIDES, check_gradients, check_rows, make, truth
from .peers import PEERS, put

pytestmark = [pytest.mark.gpu, pytest.mark.alone]

SHARE = 0.9
BYTES = 1 << 20


@contextlib.contextmanager
def full(device, torch):
    """Both pools hold half each of nine tenths of the device, in use; and then again all of it idle in PyTorch's pool."""
    pool, runtime = device.cupy.get_default_memory_pool(), device.cupy.cuda.runtime
    torch.cuda.empty_cache()
    pool.free_all_blocks()
    free, total = runtime.memGetInfo()
    each = max(int(free - (1 - SHARE) * total) // 2 // BYTES, 1) * BYTES
    hogs = [torch.empty(each, dtype=torch.uint8, device="cuda:0"), device.cupy.empty(each, np.uint8)]
    try:
        assert runtime.memGetInfo()[0] <= (1 - SHARE) * total + 64 * BYTES
        yield
    finally:
        hogs.clear()
        torch.cuda.empty_cache()
        pool.free_all_blocks()


@pytest.mark.parametrize("name", ["torch", "cupy"])
def test_pools_side_by_side(device, torch_peer, name):
    """A call takes what it says and no more: the last tenth is enough for each framework's, one after the other."""
    peer, case = PEERS[name](device), make(501, "bfloat16", batch=1, heads=8, heads_k=(8, 8), n=(2048, 2300), d=(128, 64), causal=True)
    with full(device, torch_peer.torch):
        for _ in range(3):
            _, state = skl.forward(**put(peer, case), causal=True)
            grads = skl.backward(state, wrt=SIDES)
        expected = truth(case, None, SIDES)
        check_rows(peer, case, state, expected)
        check_gradients(peer, case, grads, expected)


def test_what_one_pool_keeps_idle_is_not_waited_for(device, torch_peer):
    """Memory that PyTorch has freed and kept is not CuPy's: with PyTorch inputs the library takes it, and asks the driver for none."""
    torch, case = torch_peer.torch, make(502, "float16", batch=1, heads=8, heads_k=(8, 8), n=(4096, 512), d=(64, 64))
    inputs = put(torch_peer, case)
    skl.backward(skl.forward(**inputs)[1], wrt=SIDES)
    device.synchronize()
    free = device.cupy.cuda.runtime.memGetInfo()[0]
    for _ in range(5):
        _, state = skl.forward(**inputs)
        grads = skl.backward(state, wrt=SIDES)
        del state, grads
    device.synchronize()
    assert device.cupy.cuda.runtime.memGetInfo()[0] == free and torch.cuda.memory_reserved() > 0


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_call_that_finds_no_memory_leaves_nothing_behind(device, direction):
    """It raises CuPy's own error; when there is memory again, the same call is right."""
    pool = device.cupy.get_default_memory_pool()
    case = make(503, "float16", batch=1, heads=8, heads_k=(8, 8), n=(3000, 300), d=(64, 64))
    inputs = {n: device.put(a) for n, a in case.arrays.items()}
    _, state = skl.forward(**inputs)
    pool.free_all_blocks()
    pool.set_limit(size=pool.total_bytes() + 1024)
    try:
        with pytest.raises(device.cupy.cuda.memory.OutOfMemoryError):
            skl.forward(**inputs) if direction == "forward" else skl.backward(state, wrt=SIDES)
    finally:
        pool.set_limit(size=0)
    _, state = skl.forward(**inputs)
    grads = skl.backward(state, wrt=SIDES)
    expected = truth(case, None, SIDES)
    check_rows(device, case, state, expected)
    check_gradients(device, case, grads, expected)
