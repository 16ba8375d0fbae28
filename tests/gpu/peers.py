"""PyTorch, JAX and CuPy behind one adapter: how a test gets arrays in and out of each, and says what kind they are."""

import os

import numpy as np
import pytest

import streamkl_cupy as skl

from ..oracle import SIDES, check_gradients, truth

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # before JAX starts: it would take three quarters of the memory


class CuPy:
    name = "cupy"

    def __init__(self, device):
        self.device = device

    def put(self, array):
        return self.device.put(array)

    def get(self, array):
        return self.device.get(array)

    def check(self, array, dtype):
        """A result is this framework's own, of that dtype, on device 0."""
        assert isinstance(array, self.device.cupy.ndarray) and array.dtype.name == dtype and array.device.id == 0


class Torch:
    name = "torch"
    where = "cuda:0"

    def __init__(self, device):
        self.torch = pytest.importorskip("torch")
        if self.where != "cpu" and not self.torch.cuda.is_available():
            pytest.skip("PyTorch sees no GPU")

    def put(self, array):
        array = np.array(array, order="C")
        if array.dtype.name == "bfloat16":
            return self.torch.from_numpy(array.view(np.int16)).view(self.torch.bfloat16).to(self.where)
        return self.torch.from_numpy(array).to(self.where)

    def get(self, tensor):
        tensor = tensor.detach().cpu()
        return (tensor.float() if tensor.dtype == self.torch.bfloat16 else tensor).numpy()

    def check(self, tensor, dtype):
        assert type(tensor) is self.torch.Tensor and tensor.dtype == getattr(self.torch, dtype)
        assert tensor.device == self.torch.device(self.where) and not tensor.requires_grad


class Jax:
    name = "jax"

    def __init__(self, device):
        self.jax = pytest.importorskip("jax")
        self.where = self.device_0()

    def device_0(self):
        try:
            return self.jax.devices("gpu")[0]
        except RuntimeError as error:
            pytest.skip(f"JAX sees no GPU: {str(error).splitlines()[0]}")

    def put(self, array):
        return self.jax.device_put(np.array(array, order="C"), self.where)

    def get(self, array):
        return np.asarray(array)

    def check(self, array, dtype):
        assert isinstance(array, self.jax.Array) and array.dtype.name == dtype and array.devices() == {self.where}


PEERS = {"cupy": CuPy, "torch": Torch, "jax": Jax}


def put(peer, case):
    """The inputs of a case."""
    return {name: peer.put(array) for name, array in case.arrays.items()}


def put_options(peer, case):
    """Its options, with vectors as arrays."""
    return {name: peer.put(v) if isinstance(v, np.ndarray) else v for name, v in case.options.items()}


def check_tensor_grads(peer, case, inputs, weights, wrt):
    """What autograd left in the inputs of a case, and only in those that were to get one."""
    grads = skl.Gradients(**{n: inputs[n].grad for n in wrt})
    check_gradients(peer, case, grads, truth(case, weights, wrt))
    assert all(inputs[n].grad is None for n in SIDES if n not in wrt)
