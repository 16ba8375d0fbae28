"""Arrays of PyTorch, JAX and CuPy on a device: in as they lie, out in q1's framework, right by the float64 reference."""

import contextlib
import gc

import numpy as np
import pytest

import streamkl_cupy as skl

from ..oracle import DTYPES, SIDES, check_gradients, check_rows, make, row_weights, truth
from .peers import PEERS, check_tensor_grads, put, put_options

pytestmark = pytest.mark.gpu

SIZES = {"batch": 2, "n": (37, 53)}


def check_call(peer, case, inputs, weights=None, *, wrt=SIDES, dtype=None, options=None, device_weights=None, **given):
    """Forward and backward; results are of `peer`, whatever the inputs are, and right."""
    options = put_options(peer, case) if options is None else options
    kl, state = skl.forward(**inputs, **options, **given)
    if device_weights is None and weights is not None:
        device_weights = peer.put(weights)
    grads = skl.backward(state, device_weights, wrt=wrt, dtype=dtype, **given)
    for array in (kl, *state.rows):
        peer.check(array, "float32")
    expected = truth(case, weights, wrt, dtype)
    check_rows(peer, case, state, expected)
    for name in wrt:
        peer.check(getattr(grads, name), dtype or case.dtype)
    check_gradients(peer, case, grads, expected)
    return state, grads


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", [{}, {"causal": True, "reduction": "mean"}], ids=["plain", "causal mean"])
def test_framework(peer, dtype, options):
    case = make(31, dtype, **SIZES, **options)
    check_call(peer, case, put(peer, case), None if options else row_weights(case))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_float32_gradients(peer, dtype):
    case = make(32, dtype, **SIZES, seqlens_q=[37, 20], seqlens_k=[11, 53])
    check_call(peer, case, put(peer, case), row_weights(case, dtype=dtype), dtype="float32")


def test_packed(peer):
    case = make(33, "bfloat16", layout="thd", n=(90, 70), causal=True, cu_seqlens_q=[0, 40, 40, 90], cu_seqlens_k=[0, 60, 65, 70])
    check_call(peer, case, put(peer, case))


def test_scalars_on_the_device(peer):
    case = make(34, "float16", **SIZES, reduction="sum")
    check_call(peer, case, put(peer, case), np.float32(0.25))


def _as_parameter(tensor):
    from torch.nn import Parameter

    return Parameter(tensor.clone())


TORCH_VIEWS = {
    "transposed rows": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
    "last axis not contiguous": lambda t: t.transpose(2, 3).contiguous().transpose(2, 3),
    "a slice of a packed tensor": lambda t: t.repeat(1, 1, 1, 3)[..., t.shape[-1] : 2 * t.shape[-1]],
    "every second row": lambda t: t.repeat_interleave(2, dim=2)[:, :, ::2],
    "an odd offset": lambda t: t.new_empty(t.numel() + 1)[1:].view(t.shape).copy_(t),
    "expanded heads": lambda t: t[:, :1].expand(t.shape),
    "expanded batch": lambda t: t[:1].expand(t.shape),
    "requires grad": lambda t: t.clone().requires_grad_(),
    "result of a differentiable function": lambda t: t.clone().requires_grad_() * 0.5,
    "parameter": _as_parameter,
}


@pytest.mark.parametrize("kind", TORCH_VIEWS)
def test_torch_views(torch_peer, kind):
    case = make(35, "bfloat16", **SIZES, heads_k=(2, 4))
    inputs = {name: TORCH_VIEWS[kind](tensor) for name, tensor in put(torch_peer, case).items()}
    case = case.with_arrays(**{n: torch_peer.get(t).astype(case.arrays[n].dtype) for n, t in inputs.items()})
    check_call(torch_peer, case, inputs, row_weights(case))


CUPY_VIEWS = {
    "transposed rows": lambda cp, a: cp.ascontiguousarray(a.swapaxes(1, 2)).swapaxes(1, 2),
    "last axis not contiguous": lambda cp, a: cp.ascontiguousarray(a.swapaxes(2, 3)).swapaxes(2, 3),
    "backwards": lambda cp, a: a[:, :, ::-1],
    "broadcast": lambda cp, a: cp.broadcast_to(a[:, :1], a.shape),
}


@pytest.mark.parametrize("kind", CUPY_VIEWS)
def test_cupy_views(device, cupy_peer, kind):
    case = make(36, "float16", **SIZES, heads_k=(2, 4))
    inputs = {name: CUPY_VIEWS[kind](device.cupy, array) for name, array in put(cupy_peer, case).items()}
    case = case.with_arrays(**{n: device.get(a) for n, a in inputs.items()})
    check_call(cupy_peer, case, inputs, row_weights(case))


@pytest.mark.parametrize("dims", [(13, 20), (1, 24)], ids=str)
def test_head_dimensions_that_are_padded(peer, dims):
    case = make(37, "float16", **SIZES, d=dims)
    check_call(peer, case, put(peer, case), row_weights(case))


def test_expanded_weights(torch_peer):
    """What autograd hands to backward after a sum: one number with strides of 0."""
    case = make(38, "float16", **SIZES)
    weights = np.full(case.geometry().row_shape, 0.5, np.float32)
    one = torch_peer.put(np.float32(0.5)).reshape(1, 1, 1).expand(weights.shape)
    check_call(torch_peer, case, put(torch_peer, case), weights, device_weights=one)


def test_inference_mode(torch_peer):
    case = make(39, "float16", **SIZES)
    with torch_peer.torch.inference_mode():
        check_call(torch_peer, case, put(torch_peer, case))


@pytest.mark.parametrize("frameworks", ["torch cupy cupy torch", "cupy torch torch cupy", "jax cupy torch jax", "torch jax jax cupy"])
def test_mixed_frameworks(device, frameworks):
    """The first one, q1's, is that of the results."""
    case = make(40, "bfloat16", **SIZES, seqlens_k=[53, 17])
    peers = [PEERS[name](device) for name in frameworks.split()]
    inputs = {name: peer.put(case.arrays[name]) for name, peer in zip(SIDES, peers, strict=True)}
    weights = row_weights(case)
    check_call(peers[0], case, inputs, weights, options=put_options(peers[1], case), device_weights=peers[1].put(weights))


@pytest.mark.parametrize("argument", [*SIDES[1:], "seqlens_k", "grad_kl"])
def test_a_tensor_on_the_host_is_refused(torch_peer, argument):
    case = make(41, "float16", **SIZES, seqlens_k=[53, 17])
    arguments = put(torch_peer, case) | put_options(torch_peer, case)
    match = rf"{argument} is on cpu and q1 on cuda:0"
    if argument == "grad_kl":
        _, state = skl.forward(**arguments)
        with pytest.raises(ValueError, match=match):
            skl.backward(state, torch_peer.torch.ones(2, 4, 37))
    else:
        with pytest.raises(ValueError, match=match):
            skl.forward(**(arguments | {argument: arguments[argument].cpu()}))


def test_q1_alone_on_the_host_is_refused(torch_peer):
    case = make(41, "float16", **SIZES)
    inputs = put(torch_peer, case)
    with pytest.raises(ValueError, match="k1 is on cuda:0 and q1 on cpu"):
        skl.forward(**(inputs | {"q1": inputs["q1"].cpu()}))


@pytest.mark.parametrize("name", ["cupy", "torch"])
@pytest.mark.parametrize("dtype", [None, "float32"])
def test_results_are_refilled(device, name, dtype):
    """out= takes the arrays of an earlier call, and gradients that are views of a larger array of the caller's."""
    peer, case, other = PEERS[name](device), make(42, "bfloat16", **SIZES), make(43, "bfloat16", **SIZES)
    kl, state = skl.forward(**put(peer, other))
    target = skl.backward(state, wrt=SIDES, dtype=dtype)
    wide = {
        n: peer.put(np.full((*array.shape[:-1], 64), 7, target.q1.dtype if name == "cupy" else np.float32))
        for n, array in case.arrays.items()
    }
    if name == "torch":
        wide = {n: tensor.to(target.q1.dtype) for n, tensor in wide.items()}
    out = skl.Gradients(**{n: wide[n][..., 16 : 16 + case.arrays[n].shape[-1]] for n in SIDES})
    kl_again, state_again = skl.forward(**put(peer, case), out=state)
    assert state_again.rows is state.rows and kl_again is state.rows.kl and kl_again is kl
    grads = skl.backward(state_again, wrt=SIDES, dtype=dtype, out=out)
    assert all(getattr(grads, n) is getattr(out, n) for n in SIDES)
    expected = truth(case, None, SIDES, dtype)
    check_rows(peer, case, state_again, expected)
    check_gradients(peer, case, grads, expected)
    for n, array in case.arrays.items():
        around = peer.get(wide[n]).astype(np.float32)
        assert (around[..., :16] == 7).all() and (around[..., 16 + array.shape[-1] :] == 7).all()


def test_arrays_of_jax_are_not_written(jax_peer):
    case = make(44, "float16", **SIZES)
    inputs = put(jax_peer, case)
    _, state = skl.forward(**inputs)
    with pytest.raises(ValueError, match=r"out\.rows\.kl is read-only, as all arrays of JAX are"):
        skl.forward(**inputs, out=state)


def test_states_are_rebuilt_in_another_framework(device, torch_peer, cupy_peer):
    """Rows saved from CuPy go on in PyTorch."""
    case = make(45, "float16", **SIZES, reduction="mean")
    _, state = skl.forward(**put(cupy_peer, case), reduction="mean")
    rows = skl.RowStats(*(torch_peer.put(device.get(array)) for array in state.rows))
    again = skl.KLState(rows, state.problem, skl.Inputs(**put(torch_peer, case)))
    grads = skl.backward(again, wrt=SIDES)
    torch_peer.check(grads.q2, "float16")
    check_gradients(torch_peer, case, grads, truth(case, None, SIDES))


def test_merging(peer):
    case = make(46, "float16", **SIZES)
    inputs = put(peer, case)
    halves = [{n: a if n[0] == "q" else a[:, :, part] for n, a in inputs.items()} for part in (slice(0, 24), slice(24, 53))]
    states = [skl.forward(**half)[1] for half in halves]
    merged = skl.merge([state.rows for state in states])
    peer.check(merged.kl, "float32")
    check_rows(peer, case, states[0].with_rows(merged), truth(case))


@pytest.mark.parametrize("wrt", [SIDES, ("q2", "k2"), ("k1",)], ids=" ".join)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_autograd(torch_peer, attention_kl, wrt, dtype):
    case = make(47, dtype, **SIZES, causal=True)
    inputs = {n: t.requires_grad_(n in wrt) for n, t in put(torch_peer, case).items()}
    weights = row_weights(case)
    (attention_kl(*inputs.values(), {"causal": True}) * torch_peer.put(weights)).sum().backward()
    check_tensor_grads(torch_peer, case, inputs, weights, wrt)


def test_autograd_has_no_second_derivative(torch_peer, attention_kl):
    inputs = [t.requires_grad_() for t in put(torch_peer, make(48, "float32", **SIZES)).values()]
    (grad,) = torch_peer.torch.autograd.grad(attention_kl(*inputs, {}).square().sum(), inputs[2], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


def test_an_optimiser_lowers_the_divergence(torch_peer, attention_kl):
    """Many steps through autograd and the caching allocator: a student of one dimension less a head learns."""
    torch = torch_peer.torch
    inputs = put(torch_peer, make(49, "float32", **SIZES, d=(16, 16)))
    student = [inputs["q2"].requires_grad_(), inputs["k2"].requires_grad_()]
    optimiser, losses = torch.optim.Adam(student, lr=0.05), []
    for _ in range(30):
        optimiser.zero_grad()
        loss = attention_kl(inputs["q1"], inputs["k1"], *student, {"reduction": "mean"})
        loss.backward()
        optimiser.step()
        losses.append(loss.detach())
    losses = [float(loss) for loss in losses]
    assert all(np.isfinite(losses)) and losses[-1] < 0.3 * losses[0]


def test_jax_custom_vjp(jax_peer):
    jax, case = jax_peer.jax, make(50, "bfloat16", **SIZES, causal=True, reduction="mean")
    states = []

    @jax.custom_vjp
    def attention_kl(*inputs):
        return skl.forward(*inputs, causal=True, reduction="mean")[0]

    def forward(*inputs):
        kl, state = skl.forward(*inputs, causal=True, reduction="mean")
        states.append(state)
        return kl, ()

    attention_kl.defvjp(forward, lambda _, grad_kl: tuple(skl.backward(states.pop(), grad_kl, wrt=SIDES)))
    loss, grads = jax.value_and_grad(attention_kl, argnums=(0, 1, 2, 3))(*put(jax_peer, case).values())
    jax_peer.check(loss, "float32")
    check_gradients(jax_peer, case, skl.Gradients(*grads), truth(case, None, SIDES))


def test_memory_comes_from_q1_s_framework(device, torch_peer):
    """PyTorch inputs allocate through PyTorch, others through CuPy's pool."""
    gc.collect()
    torch, pool, case = torch_peer.torch, device.cupy.get_default_memory_pool(), make(51, "float16", batch=1, n=(4000, 60))
    given, mine = put(torch_peer, case), {n: device.put(a) for n, a in case.arrays.items()}
    for inputs, grown, idle in (
        (given, torch.cuda.memory_allocated, pool.used_bytes),
        (mine, pool.used_bytes, torch.cuda.memory_allocated),
    ):
        before, idle_before = grown(), idle()
        _, state = skl.forward(**inputs)
        grads = skl.backward(state, wrt=SIDES)
        assert grown() - before >= 5 * 4 * 4 * 4000 and idle() == idle_before
        del _, state, grads


def test_a_second_device_while_the_first_is_current(device):
    cp = device.cupy
    if cp.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("needs two GPUs")
    case = make(52, "float16", **SIZES)
    with cp.cuda.Device(1):
        inputs = {n: device.put(a) for n, a in case.arrays.items()}
    with contextlib.ExitStack() as stack:
        stack.enter_context(cp.cuda.Device(0))
        _, state = skl.forward(**inputs)
        grads = skl.backward(state, wrt=SIDES)
        assert state.kl.device.id == grads.q1.device.id == 1
    expected = truth(case, None, SIDES)
    check_rows(device, case, state, expected)
    check_gradients(device, case, grads, expected)
