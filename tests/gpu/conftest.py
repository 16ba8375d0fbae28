"""NVRTC on an empty cache and kernels written on the spot, for the compiler's tests; the other frameworks, for those of interop."""

import pytest

import streamkl_cupy as skl
from streamkl_cupy.gpu import compile as jit
from streamkl_cupy.gpu import errors

from ..oracle import SIDES
from .peers import PEERS


@pytest.fixture
def nvrtc(tmp_path, monkeypatch):
    """NVRTC with an empty disk cache and an empty memo; skips where there is none."""
    try:
        binding, _ = errors.import_nvrtc()
    except RuntimeError as error:
        pytest.skip(str(error))
    monkeypatch.setenv("STREAMKL_CUPY_CACHE_DIR", str(tmp_path / "cache"))
    jit._built.clear()
    yield binding
    jit._built.clear()


@pytest.fixture
def write(tmp_path):
    """write(name, text) -> path of a source file that `build` takes."""

    def write(name, text):
        path = tmp_path / name
        path.write_text(text)
        return str(path)

    return write


@pytest.fixture(params=list(PEERS))
def peer(request, device):
    return PEERS[request.param](device)


@pytest.fixture
def torch_peer(device):
    return PEERS["torch"](device)


@pytest.fixture
def jax_peer(device):
    return PEERS["jax"](device)


@pytest.fixture
def cupy_peer(device):
    return PEERS["cupy"](device)


@pytest.fixture
def attention_kl(torch_peer):
    """The function of README, for autograd."""
    torch = torch_peer.torch

    class AttentionKL(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q1, k1, q2, k2, options):
            kl, state = skl.forward(q1, k1, q2, k2, **options)
            ctx.problem = state.problem
            ctx.save_for_backward(*state.rows, *state.inputs)
            return kl

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx, grad_kl):
            rows, inputs = skl.RowStats(*ctx.saved_tensors[:5]), skl.Inputs(*ctx.saved_tensors[5:])
            wrt = [name for name, needed in zip(SIDES, ctx.needs_input_grad, strict=False) if needed]
            return *skl.backward(skl.KLState(rows, ctx.problem, inputs), grad_kl, wrt=wrt), None

    return AttentionKL.apply
