"""Everything is dropped as soon as the calls return, long before the device has run them, and its memory filled with NaN."""

import numpy as np
import pytest

import streamkl_cupy as skl

from ..oracle import SIDES, check_gradients, check_rows, make, row_weights, truth
from .peers import PEERS, put, put_options
from .spin import spin
from .test_interop_streams import STREAMS

pytestmark = pytest.mark.gpu

BUSY = 300  # milliseconds
KINDS = {
    "plain": {"batch": 2, "n": (37, 53)},
    "copied inputs": {"batch": 2, "n": (37, 53), "d": (13, 20)},
    "split keys": {"batch": 1, "n": (5, 6000), "d": (128, 128)},
    "lengths": {"batch": 2, "n": (37, 53), "seqlens_k": [53, 20], "causal": True, "q_offset": [3, -1]},
    "fused": {"batch": 2, "n": (600, 700), "d": (128, 128), "causal": True},
}


def fill_what_is_free(peer, arrays) -> list:
    """Arrays of NaN in the sizes of those that are gone: pools hand out the same memory again, behind the stream's work."""
    return [array * 0 + float("nan") for array in arrays for _ in range(4)]


@pytest.mark.parametrize("name", STREAMS)
@pytest.mark.parametrize("kind", KINDS)
def test_inputs_states_and_scratch(device, name, kind):
    peer, case = PEERS[name](device), make(701, "float16", **KINDS[kind])
    streams, weights = STREAMS[name](peer), row_weights(case)
    right, options, right_weights = put(peer, case), put_options(peer, case), peer.put(weights)
    skl.warmup(**right, **options, wrt=SIDES)
    device.synchronize()
    with streams.current():
        spin(streams.pointer, BUSY)
        inputs = {n: streams.copy(a) for n, a in right.items()}
        vectors = {n: streams.copy(v) if hasattr(v, "shape") else v for n, v in options.items()}
        _, state = skl.forward(**inputs, **vectors)
        grads = skl.backward(state, streams.copy(right_weights), wrt=SIDES)
        rows, grads = skl.RowStats(*(streams.copy(a) for a in state.rows)), skl.Gradients(*(streams.copy(g) for g in grads))
        done = streams.event()
        del inputs, vectors, state, _
        noise = fill_what_is_free(peer, [*right.values(), *rows])
        assert not done(), "the device was done before anything was dropped"
    device.synchronize()
    assert len(noise) == 4 * 9
    expected = truth(case, weights, SIDES)
    check_rows(peer, case, skl.KLState(rows, None, None), expected)
    check_gradients(peer, case, grads, expected)


def test_merged_shards(device, cupy_peer):
    """The shards' rows go, the merged ones stay."""
    case = make(702, "float32", batch=2, n=(37, 53))
    inputs, side = put(cupy_peer, case), device.cupy.cuda.Stream(non_blocking=True)
    cuts = (slice(0, 20), slice(20, 20), slice(20, 53))
    halves = [{n: a if n[0] == "q" else device.cupy.ascontiguousarray(a[:, :, cut]) for n, a in inputs.items()} for cut in cuts]
    skl.merge([skl.forward(**half)[1].rows for half in halves])
    device.synchronize()
    with side:
        spin(side.ptr, BUSY)
        merged = skl.merge([skl.forward(**half)[1].rows for half in halves])
        noise = [device.cupy.full_like(merged.kl, np.nan) for _ in range(40)]
    device.synchronize()
    assert len(noise) == 40
    check_rows(cupy_peer, case, skl.KLState(merged, None, None), truth(case))
