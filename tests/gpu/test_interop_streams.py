"""Streams and graphs: inputs that are late, results that are read at once, calls that nobody waits for."""

import contextlib
import threading
import time

import numpy as np
import pytest

import streamkl_cupy as skl
from streamkl_cupy.frameworks import cupy_stream

from ..oracle import SIDES, check_gradients, check_rows, make, row_weights, truth
from .peers import PEERS, check_tensor_grads, put, put_options
from .spin import spin

pytestmark = pytest.mark.gpu

SIZES = {"batch": 2, "n": (37, 53)}
LATE, LONG = 60, 400  # milliseconds


class CuPyStreams:
    """A stream that does not wait for the default one, and how CuPy fills, copies and waits on it."""

    def __init__(self, peer):
        self.cupy = peer.device.cupy
        self.side = self.cupy.cuda.Stream(non_blocking=True)
        self.pointer = self.side.ptr

    def current(self):
        return self.side

    def fill(self, target, source):
        target[...] = source

    def copy(self, array):
        return array.copy()

    def event(self):
        event = self.side.record()
        return lambda: event.done


class TorchStreams:
    def __init__(self, peer):
        self.torch = peer.torch
        self.side = self.torch.cuda.Stream()
        self.pointer = self.side.cuda_stream

    def current(self):
        return self.torch.cuda.stream(self.side)

    def fill(self, target, source):
        with self.torch.no_grad():
            target.copy_(source)

    def copy(self, tensor):
        return tensor.detach().clone()

    def event(self):
        return self.side.record_event().query


STREAMS = {"cupy": CuPyStreams, "torch": TorchStreams}


def as_torch_stream(pointer):
    return pytest.importorskip("torch").cuda.ExternalStream(pointer)


GIVEN = {
    "current": None,
    "own": lambda streams: streams.side,
    "pointer": lambda streams: streams.pointer,
    "torch's": lambda streams: as_torch_stream(streams.pointer),
    "cupy's": lambda streams: cupy_stream(streams.pointer),
}


@pytest.mark.parametrize("name", STREAMS)
@pytest.mark.parametrize("given", GIVEN)
def test_late_inputs_and_eager_readers(device, name, given):
    """Inputs hold NaN until the stream has been busy for a while; results are copied and overwritten on it at once."""
    peer, case = PEERS[name](device), make(61, "float16", **SIZES, seqlens_k=[53, 20])
    streams, weights = STREAMS[name](peer), row_weights(case)
    right = put(peer, case) | put_options(peer, case) | {"weights": peer.put(weights)}
    late = {
        n: peer.put(np.zeros(np.shape(a), a.dtype) if n == "seqlens_k" else np.full(np.shape(a), np.nan, a.dtype))
        for n, a in host(case, weights)
    }
    skl.warmup(**{n: right[n] for n in (*SIDES, "seqlens_k")}, wrt=SIDES)
    device.synchronize()
    options = {} if given == "current" else {"stream": GIVEN[given](streams)}
    with streams.current():
        spin(streams.pointer, LATE)
        for n, array in late.items():
            streams.fill(array, right[n])
    with streams.current() if given == "current" else contextlib.nullcontext():
        grad_kl = late.pop("weights")
        _, state = skl.forward(**late, **options)
        grads = skl.backward(state, grad_kl, wrt=SIDES, **options)
    with streams.current():
        rows = skl.RowStats(*(streams.copy(array) for array in state.rows))
        copies = skl.Gradients(*(streams.copy(array) for array in grads))
        for array in (*state.rows, *grads):
            streams.fill(array, array * 0)
        done = streams.event()
    device.synchronize()
    assert done()
    expected = truth(case, weights, SIDES)
    check_rows(peer, case, state.with_rows(rows), expected)
    check_gradients(peer, case, copies, expected)


def host(case, weights):
    return (*case.arrays.items(), ("seqlens_k", case.options["seqlens_k"]), ("weights", weights))


@pytest.mark.parametrize("name", STREAMS)
@pytest.mark.parametrize("options", [{}, {"reduction": "mean", "causal": True}, {"seqlens_k": [53, 20]}], ids=["plain", "mean", "lengths"])
def test_nobody_waits_on_the_host(device, name, options):
    peer, case = PEERS[name](device), make(62, "float16", **SIZES, **options)
    streams = STREAMS[name](peer)
    inputs = put(peer, case) | put_options(peer, case)
    with streams.current():
        for busy in (0, LONG):
            device.synchronize()
            spin(streams.pointer, busy)
            began = time.perf_counter()
            _, state = skl.forward(**inputs)
            grads = skl.backward(state, wrt=SIDES)
            skl.merge([state.rows, state.rows])
            done, took = streams.event(), time.perf_counter() - began
            waited = done()
        device.synchronize()
    assert not waited and took < LONG / 2000, f"the calls took {took:.3f} s"
    expected = truth(case, None, SIDES)
    check_rows(peer, case, state, expected)
    check_gradients(peer, case, grads, expected)


@pytest.mark.parametrize("wrt", [SIDES, ("q2", "k2")], ids=" ".join)
def test_autograd_on_a_side_stream(device, torch_peer, attention_kl, wrt):
    """Autograd calls backward from a thread of its own, on the stream of forward."""
    torch, case = torch_peer.torch, make(63, "bfloat16", **SIZES, causal=True)
    streams, weights = TorchStreams(torch_peer), row_weights(case)
    right, right_weights = put(torch_peer, case), torch_peer.put(weights)
    skl.warmup(**right, causal=True, wrt=wrt)
    device.synchronize()
    with streams.current():
        inputs = {n: torch.full_like(t, float("nan"), requires_grad=n in wrt) for n, t in right.items()}
        late = torch.full_like(right_weights, float("nan"))
        spin(streams.pointer, LATE)
        for n, tensor in inputs.items():
            streams.fill(tensor, right[n])
        kl = attention_kl(*inputs.values(), {"causal": True})
        spin(streams.pointer, LATE)
        streams.fill(late, right_weights)
        (kl * late).sum().backward()
        for n in wrt:
            inputs[n].grad = inputs[n].grad.clone()
    device.synchronize()
    check_tensor_grads(torch_peer, case, inputs, weights, wrt)


def test_a_late_producer_in_jax(device):
    """A computation of JAX that still runs is waited for on the device."""
    peer, case = PEERS["jax"](device), make(64, "bfloat16", **SIZES)
    jax, jnp = peer.jax, peer.jax.numpy

    @jax.jit
    def produce(x, inputs):
        x = jax.lax.fori_loop(0, 200, lambda _, y: jnp.tanh(y @ y) * 0.01, x)
        return {n: a + (jnp.sum(x) * 0).astype(a.dtype) for n, a in inputs.items()}

    inputs, x = put(peer, case), peer.put(np.full((2048, 2048), 1e-3, np.float32))
    for _ in range(2):  # the second time everything is compiled, and the call comes while it still computes
        _, state = skl.forward(**produce(x, inputs))
        grads = skl.backward(state, wrt=SIDES)
        sums = [np.asarray(jnp.sum(a.astype(jnp.float32))) for a in (state.kl, grads.q2)]
    assert np.isfinite(sums).all()
    expected = truth(case, None, SIDES)
    check_rows(peer, case, state, expected)
    check_gradients(peer, case, grads, expected)


def test_jax_waits_for_late_results(device):
    """Results that are still being computed on CuPy's stream when JAX gets them; the inputs are dropped meanwhile."""
    peer, case = PEERS["jax"](device), make(65, "float16", **SIZES)
    side = device.cupy.cuda.Stream(non_blocking=True)
    skl.warmup(**put(peer, case), wrt=SIDES)
    with side:
        spin(side.ptr, LATE)
        inputs = put(peer, case)
        kl, _ = skl.forward(**inputs)
        del inputs, _
        others = [peer.jax.numpy.full((2, 4, 53, 24), np.nan, np.float16) for _ in range(20)]
        doubled = kl * 2
    np.testing.assert_allclose(np.asarray(doubled), 2 * truth(case).rows.kl, rtol=2e-5, atol=2e-5)
    assert len(others) == 20


def test_the_default_stream_of_each_thread(device):
    case = make(66, "float16", **SIZES)
    inputs = {n: device.put(a) for n, a in case.arrays.items()}
    device.synchronize()
    with device.cupy.cuda.Stream.ptds:
        _, state = skl.forward(**inputs)
        grads = skl.backward(state, wrt=SIDES)
    device.synchronize()
    expected = truth(case, None, SIDES)
    check_rows(device, case, state, expected)
    check_gradients(device, case, grads, expected)


@pytest.mark.parametrize("name", STREAMS)
def test_many_threads_each_on_its_stream(device, name):
    peer = PEERS[name](device)
    cases = [make(70 + i, "float16", **SIZES, causal=bool(i % 2)) for i in range(6)]
    expected, inputs = [truth(case, None, SIDES) for case in cases], [put(peer, case) for case in cases]
    device.synchronize()
    together, results = threading.Barrier(len(cases)), [None] * len(cases)

    def work(i):
        streams = STREAMS[name](peer)
        together.wait()
        with streams.current():
            for _ in range(10):
                _, state = skl.forward(**inputs[i], causal=bool(i % 2))
                results[i] = state, skl.backward(state, wrt=SIDES)
            device.cupy.cuda.runtime.streamSynchronize(streams.pointer)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(cases))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for case, right, result in zip(cases, expected, results, strict=True):
        assert result is not None, "a thread failed"
        check_rows(peer, case, result[0], right)
        check_gradients(peer, case, result[1], right)


GRAPHS = {
    "plain": {"batch": 2, "n": (37, 53)},
    "causal mean": {"batch": 2, "n": (130, 257), "d": (64, 128), "causal": True, "reduction": "mean"},
    "split keys": {"batch": 1, "n": (5, 6000), "d": (128, 128)},
    "padded dimensions": {"batch": 2, "n": (37, 53), "d": (13, 20)},
    "lengths": {"batch": 2, "n": (37, 53), "seqlens_k": [53, 20], "seqlens_q": [5, 37]},
}


@pytest.mark.parametrize("name", STREAMS)
@pytest.mark.parametrize("kind", GRAPHS)
def test_graphs(device, name, kind):
    """Captured with out and workspace, launched again on other contents."""
    peer, cases = PEERS[name](device), [make(seed, "float16", **GRAPHS[kind]) for seed in (81, 82, 83)]
    streams, given = STREAMS[name](peer), [put(peer, case) | put_options(peer, case) for case in cases]
    buffers = {n: streams.copy(a) for n, a in given[0].items() if hasattr(a, "shape")}
    arguments = given[0] | buffers
    device.synchronize()
    with streams.current():
        skl.warmup(**arguments, wrt=SIDES)
        _, state = skl.forward(**arguments)
        grads = skl.backward(state, wrt=SIDES)
        workspace = peer.put(np.full(skl.workspace_size(**arguments, wrt=SIDES), 255, np.uint8))
    device.synchronize()

    def calls():
        skl.forward(**arguments, out=state, workspace=workspace)
        skl.backward(state, wrt=SIDES, out=grads, workspace=workspace)

    replay = capture(peer, streams, calls)
    for case, values in zip(cases, given, strict=True):
        with streams.current():
            for n, array in buffers.items():
                streams.fill(array, values[n])
            for array in (*state.rows, *grads, *(state.reduced or ())):
                array[...] = np.nan
            replay()
        device.synchronize()
        expected = truth(case, None, SIDES)
        check_rows(peer, case, state, expected)
        check_gradients(peer, case, grads, expected, f"graph on seed {case.note}")


def capture(peer, streams, calls):
    """A function that launches the captured calls on the current stream."""
    if peer.name == "torch":
        graph = peer.torch.cuda.CUDAGraph()
        with peer.torch.cuda.graph(graph, stream=streams.side, capture_error_mode="thread_local"):
            calls()
        return graph.replay
    with streams.side:
        streams.side.begin_capture()
        try:
            calls()
        finally:
            graph = streams.side.end_capture()
    return lambda: graph.launch(streams.side)


def test_a_graph_that_allocates_through_torch(device, torch_peer):
    torch, cases = torch_peer.torch, [make(seed, "bfloat16", batch=2, n=(130, 257), d=(64, 128), causal=True) for seed in (84, 85)]
    streams, given = TorchStreams(torch_peer), [put(torch_peer, case) for case in cases]
    buffers = {n: t.clone() for n, t in given[0].items()}
    with streams.current():
        skl.backward(skl.forward(**buffers, causal=True)[1], wrt=SIDES)
    device.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=streams.side, capture_error_mode="thread_local"):
        _, state = skl.forward(**buffers, causal=True)
        grads = skl.backward(state, wrt=SIDES)
    for case, values in zip(cases, given, strict=True):
        with streams.current():
            for n, tensor in buffers.items():
                tensor.copy_(values[n])
            graph.replay()
        device.synchronize()
        expected = truth(case, None, SIDES)
        check_rows(torch_peer, case, state, expected)
        check_gradients(torch_peer, case, grads, expected)
