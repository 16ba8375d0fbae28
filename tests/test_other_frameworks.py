"""TensorFlow and PaddlePaddle on the CPU, through the capsules that they hand out; results are NumPy's, which both take back.

Skipped where they are not installed. They do not load into one process: the first that a test wants wins, and `-k` chooses.
"""

import sys

import numpy as np
import pytest

import streamkl_cupy as skl

from .oracle import DTYPES, SIDES, check_gradients, check_rows, make, row_weights, truth

SIZES = {"batch": 2, "n": (37, 53)}


def load(name: str, other: str):
    if other in sys.modules:
        pytest.skip(f"{name} does not load beside {other}")
    return pytest.importorskip(name)


class TensorFlow:
    name = "numpy"

    def __init__(self):
        self.tf = load("tensorflow", "paddle")

    def put(self, array):
        with self.tf.device("CPU:0"):
            return self.tf.identity(self.tf.constant(array))

    def take(self, array):
        return self.tf.constant(array)

    def host(self, tensor):
        return tensor.numpy()


class Paddle:
    name = "numpy"

    def __init__(self):
        self.paddle = load("paddle", "tensorflow")
        self.paddle.set_device("cpu")

    def put(self, array):
        plain = array.astype(np.float32) if array.dtype.name == "bfloat16" else array
        return self.paddle.to_tensor(plain).astype(array.dtype.name)

    def take(self, array):
        return self.put(array)

    def host(self, tensor):
        return tensor.astype("float32").numpy()


PEERS = {"tensorflow": TensorFlow, "paddle": Paddle}


@pytest.fixture(params=list(PEERS))
def peer(request):
    return PEERS[request.param]()


class OnHost:
    """How the checks read results."""

    @staticmethod
    def get(array):
        return np.asarray(array)


def check_call(peer, case, inputs, weights=None, **options):
    vectors = {n: peer.put(v) if isinstance(v, np.ndarray) else v for n, v in case.options.items()}
    kl, state = skl.forward(**inputs, **vectors)
    grads = skl.backward(state, None if weights is None else peer.put(weights), wrt=SIDES, **options)
    assert type(kl) is np.ndarray and all(g.dtype.name == case.dtype for g in grads)
    expected = truth(case, weights, SIDES)
    check_rows(OnHost, case, state, expected)
    check_gradients(OnHost, case, grads, expected)
    np.testing.assert_array_equal(peer.host(peer.take(kl)), kl)
    np.testing.assert_array_equal(peer.host(peer.take(grads.q2)).astype(np.float32), grads.q2.astype(np.float32))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", [{}, {"causal": True, "seqlens_k": [53, 20]}], ids=str)
def test_in_and_out(peer, dtype, options):
    case = make(61, dtype, **SIZES, **options)
    check_call(peer, case, {n: peer.put(a) for n, a in case.arrays.items()}, row_weights(case))


@pytest.mark.parametrize("dtype", DTYPES)
def test_packed(peer, dtype):
    case = make(62, dtype, layout="thd", n=(37, 53), cu_seqlens_q=[0, 11, 11, 37], cu_seqlens_k=[0, 20, 31, 53], causal=True)
    check_call(peer, case, {n: peer.put(a) for n, a in case.arrays.items()}, row_weights(case))


@pytest.mark.parametrize("sizes", [{"n": (0, 5)}, {"n": (5, 0)}, {"batch": 1, "heads": 1, "heads_k": (1, 1), "n": (1, 1)}], ids=str)
def test_sizes_of_zero_and_one(peer, sizes):
    case = make(63, "float32", **sizes)
    check_call(peer, case, {n: peer.put(a) for n, a in case.arrays.items()})


@pytest.mark.parametrize("dtype", DTYPES)
def test_turned_tensors(dtype):
    """PaddlePaddle's views have strides."""
    peer, case = Paddle(), make(64, dtype, **SIZES)
    inputs = {n: peer.put(a).transpose([0, 2, 1, 3]).contiguous().transpose([0, 2, 1, 3]) for n, a in case.arrays.items()}
    check_call(peer, case, inputs, row_weights(case))


def test_tensors_with_a_history():
    peer, case = Paddle(), make(65, "float32", **SIZES)
    inputs = {n: peer.put(a) for n, a in case.arrays.items()}
    inputs["q2"].stop_gradient = False
    with pytest.raises(TypeError, match=r"q2 .*detach\(\)"):
        skl.forward(**inputs)
    check_call(peer, case, inputs | {"q2": inputs["q2"].detach()})


def test_variables_are_no_arrays():
    peer, case = TensorFlow(), make(66, "float32", **SIZES)
    inputs = {n: peer.put(a) for n, a in case.arrays.items()}
    variable = peer.tf.Variable(inputs["k2"])
    with pytest.raises(TypeError, match="k2 is a ResourceVariable; it takes an array"):
        skl.forward(**(inputs | {"k2": variable}))
    check_call(peer, case, inputs | {"k2": variable.value()})


def test_traced_tensors():
    peer = TensorFlow()
    inputs = [peer.put(a) for a in make(67, "float32", **SIZES).arrays.values()]
    with pytest.raises(TypeError, match="q1 is a SymbolicTensor"):
        peer.tf.function(lambda *given: skl.forward(*given)[0], autograph=False)(*inputs)


def test_a_custom_gradient():
    """`tf.custom_gradient` around the two calls, in eager mode."""
    peer, case = TensorFlow(), make(68, "float32", **SIZES)
    tf = peer.tf

    @tf.custom_gradient
    def attention_kl(q1, k1, q2, k2):
        kl, state = skl.forward(q1, k1, q2, k2)
        return tf.constant(kl), lambda grad: tuple(tf.constant(g) for g in skl.backward(state, grad, wrt=SIDES))

    inputs, weights = [peer.put(a) for a in case.arrays.values()], row_weights(case)
    with tf.GradientTape() as tape:
        tape.watch(inputs)
        loss = tf.reduce_sum(attention_kl(*inputs) * weights)
    grads = skl.Gradients(*(g.numpy() for g in tape.gradient(loss, inputs)))
    check_gradients(OnHost, case, grads, truth(case, weights, SIDES))


def test_a_layer_of_paddle():
    """`paddle.autograd.PyLayer` around the two calls."""
    peer, case = Paddle(), make(69, "float32", **SIZES)
    paddle = peer.paddle

    class AttentionKL(paddle.autograd.PyLayer):
        @staticmethod
        def forward(ctx, *inputs):
            kl, ctx.state = skl.forward(*(x.detach() for x in inputs))
            return paddle.to_tensor(kl)

        @staticmethod
        def backward(ctx, grad):
            return tuple(paddle.to_tensor(g) for g in skl.backward(ctx.state, grad.detach(), wrt=SIDES))

    inputs, weights = [peer.put(a) for a in case.arrays.values()], row_weights(case)
    for x in inputs:
        x.stop_gradient = False
    (AttentionKL.apply(*inputs) * peer.put(weights)).sum().backward()
    grads = skl.Gradients(*(x.grad.numpy() for x in inputs))
    check_gradients(OnHost, case, grads, truth(case, weights, SIDES))
