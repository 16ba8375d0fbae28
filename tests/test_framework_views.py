"""Views of every framework on the CPU, as models make them: right by the float64 reference, in q1's framework, inputs untouched."""

import tempfile

import numpy as np
import pytest

import streamkl_cupy as skl

from .gpu.peers import Jax, Torch, put
from .gpu.test_interop import TORCH_VIEWS, check_call
from .oracle import DTYPES, SIDES, make, row_weights
from .problems import NUMPY

SIZES = {"batch": 2, "n": (37, 53), "heads_k": (2, 4)}


class TorchOnHost(Torch):
    where = "cpu"


class JaxOnHost(Jax):
    def device_0(self):
        return self.jax.devices("cpu")[0]


class NumPyArrays:
    name = "numpy"

    def put(self, array):
        return np.array(array, order="C")

    def get(self, array):
        return np.asarray(array)

    def check(self, array, dtype):
        assert type(array) is np.ndarray and array.dtype.name == dtype and array.flags.writeable


HOSTS = {"numpy": NumPyArrays, "torch": lambda: TorchOnHost(None), "jax": lambda: JaxOnHost(None)}


@pytest.fixture(params=list(HOSTS))
def host(request):
    return HOSTS[request.param]()


def check_views(peer, case, look) -> None:
    """Forward and backward on `look` of each input, whose values the case takes over."""
    inputs = {name: look(array) for name, array in put(peer, case).items()}
    values = {n: peer.get(a).astype(case.arrays[n].dtype) for n, a in inputs.items()}
    case = case.with_arrays(**values)
    check_call(peer, case, inputs, row_weights(case))
    for name, array in inputs.items():
        np.testing.assert_array_equal(peer.get(array).astype(case.arrays[name].dtype), values[name])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", TORCH_VIEWS)
def test_torch(kind, dtype):
    check_views(TorchOnHost(None), make(35, dtype, **SIZES), TORCH_VIEWS[kind])


def frozen(array):
    array.flags.writeable = False
    return array


def at_an_odd_address(array):
    """One byte behind where its items could lie."""
    memory = np.zeros(array.nbytes + 1, np.uint8)[1:]
    memory[:] = np.frombuffer(array.tobytes(), np.uint8)
    result = memory.view(array.dtype).reshape(array.shape)
    assert array.itemsize == 1 or not result.flags.aligned
    return result


def mapped(array):
    """In a file, as data sets are."""
    with tempfile.TemporaryFile() as file:
        file.write(array.tobytes())
        file.flush()
        return np.memmap(file, array.dtype, "r", shape=array.shape)


NUMPY_VIEWS = {
    "read-only": frozen,
    "an odd address": at_an_odd_address,
    "a file": mapped,
    "column-major": np.asfortranarray,
    "expanded rows": lambda a: np.broadcast_to(a[:, :, :1], a.shape),
    "a window that slides": lambda a: np.lib.stride_tricks.sliding_window_view(np.concatenate([a, a[..., :1]], -1), a.shape[-1], -1)[
        ..., 1, :
    ],
    "a field of records": lambda a: np.rec.fromarrays([a, a], names="x,y").x,
}


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("kind", NUMPY_VIEWS)
def test_numpy(kind, dtype):
    check_views(NumPyArrays(), make(36, dtype, **SIZES), NUMPY_VIEWS[kind])


JAX_VIEWS = {
    "as it is": lambda a: a,
    "turned twice": lambda a: a.swapaxes(1, 2).swapaxes(1, 2),
    "every other row": lambda a: a.repeat(2, axis=2)[:, :, ::2],
    "broadcast": lambda a: a[:, :, :1] + 0 * a,
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", JAX_VIEWS)
def test_jax(kind, dtype):
    check_views(JaxOnHost(None), make(37, dtype, **SIZES), JAX_VIEWS[kind])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", ["bhsd", "bshd", "sbhd"])
def test_parts_of_a_packed_projection(host, layout, dtype):
    """(..., 3, H, D) as a fused projection leaves it, queries and keys of both sides; in torch and NumPy without a copy."""
    rng = np.random.default_rng(38)
    shape = {"bhsd": (2, 4, 21, 3, 16), "bshd": (2, 21, 3, 4, 16), "sbhd": (21, 2, 3, 4, 16)}[layout]
    packed = [rng.normal(size=shape).astype(NUMPY[dtype]) for _ in "12"]
    pick = (lambda a, i: a[:, :, :, i]) if layout == "bhsd" else (lambda a, i: a[:, :, i])
    case = make(0, dtype, layout=layout, causal=True).with_arrays(**{n: pick(packed[int(n[1]) - 1], "qk".index(n[0])) for n in SIDES})
    given = [host.put(a) for a in packed]
    inputs = {n: pick(given[int(n[1]) - 1], "qk".index(n[0])) for n in SIDES}
    check_call(host, case, inputs, row_weights(case))


@pytest.mark.parametrize(
    "sizes",
    [
        {"batch": 1, "heads": 1, "heads_k": (1, 1), "n": (1, 1), "d": (1, 1)},
        {"batch": 1, "heads": 4, "n": (1, 53)},
        {"n": (37, 1)},
        {"batch": 0},
        {"n": (0, 53)},
        {"n": (37, 0)},
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_sizes_of_one_and_zero(host, sizes, dtype):
    case = make(39, dtype, **sizes)
    check_call(host, case, put(host, case), row_weights(case))


def test_axes_of_one_with_any_stride():
    torch, case = pytest.importorskip("torch"), make(40, "float32", batch=1, heads=1, heads_k=(1, 1))
    inputs = {n: torch.from_numpy(a.copy()).as_strided(a.shape, (7, 3, a.shape[-1], 1)) for n, a in case.arrays.items()}
    check_call(TorchOnHost(None), case, inputs, row_weights(case))


@pytest.mark.parametrize("dtype", DTYPES)
def test_frameworks_mix(host, dtype):
    """Results follow q1, whatever the other inputs and the weights are."""
    case = make(41, dtype, **SIZES)
    others = [HOSTS[name]() for name in HOSTS]
    inputs = {n: (host if n == "q1" else others[i % 3]).put(case.arrays[n]) for i, n in enumerate(SIDES)}
    weights = row_weights(case)
    check_call(host, case, inputs, weights, device_weights=others[2].put(weights))


def test_what_autograd_knows_stays_as_it_was():
    """Inputs with a history are read by value: no node is added, no gradient is left, none of them is in the results."""
    torch = pytest.importorskip("torch")
    case = make(42, "float32", **SIZES)
    leaves = {n: torch.from_numpy(a.copy()).requires_grad_() for n, a in case.arrays.items()}
    inputs = {n: 1 * leaf for n, leaf in leaves.items()}
    nodes = {n: t.grad_fn for n, t in inputs.items()}
    kl, state = skl.forward(**inputs)
    grads = skl.backward(state, torch.ones_like(kl).requires_grad_(), wrt=SIDES)
    assert not any(t.requires_grad for t in (kl, *state.rows, *grads))
    assert all(inputs[n].grad_fn is nodes[n] and leaves[n].grad is None for n in SIDES)


def test_a_tensor_that_was_deleted_or_is_traced_says_so():
    jax = JaxOnHost(None).jax
    inputs = put(JaxOnHost(None), make(43, "float32", **SIZES))
    for function in (lambda *a: skl.forward(*a)[0], lambda *a: skl.workspace_size(*a)):
        with pytest.raises(TypeError, match=r"q1 is a .*Tracer.*it takes a concrete array"):
            jax.jit(function)(*inputs.values())
    inputs["k2"].delete()
    with pytest.raises(TypeError, match=r"k2 is a ArrayImpl .*it takes a concrete array, not deleted or donated"):
        skl.forward(**inputs)
