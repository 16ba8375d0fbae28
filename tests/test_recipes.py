"""The recipes of README.md give the right numbers: each block runs, and what it leaves behind is held to the float64 reference."""

import shutil

import numpy as np
import pytest

import streamkl_cupy as skl
from streamkl_cupy import reference

from .test_readme_examples import blocks, registered_once, section  # noqa: F401

SIDES = ("q1", "k1", "q2", "k2")


def recipe(title: str) -> dict:
    """The names that are there after the block under a bold title has run, behind the first one of the section."""
    text = section("Recipes")
    names: dict = {"__name__": "readme"}
    exec(blocks(text, "python")[0], names)
    exec(blocks(text[text.index(f"**{title}") :], "python")[0], names)
    return names


def use(title: str, words: str, avoid: str = "\0") -> dict:
    """The names that are there after the block of a section of "Use" which has certain words in it."""
    names: dict = {"__name__": "readme"}
    exec(next(code for code in blocks(section(title), "python") if words in code and avoid not in code), names)
    return names


def inputs(names: dict) -> list:
    return [names[n] for n in SIDES]


def near(got, want, tolerance=1e-5):
    got, want = np.asarray(got, np.float64), np.asarray(want)
    assert got.shape == want.shape and np.linalg.norm(got - want) <= tolerance * np.linalg.norm(want)


def test_reverse_kl():
    """KL(student || teacher), and its gradients for the student."""
    names = recipe("Reverse KL")
    q1, k1, q2, k2 = inputs(names)
    near(names["kl"], reference.forward(q2, k2, q1, k1).kl)
    right = reference.backward(q2, k2, q1, k1, wrt=("q1", "k1"))
    near(names["dq_student"], right.q1)
    near(names["dk_student"], right.k1)
    assert not np.allclose(names["kl"], reference.forward(q1, k1, q2, k2).kl, rtol=0.01)


def test_temperature():
    names = recipe("Temperature")
    given, t = inputs(names), names["temperature"]
    softened = [given[0] / t, given[1], given[2] / t, given[3]]
    near(names["kl"], reference.forward(*softened).kl)
    right = reference.backward(*softened, t**2)
    near(names["grads"].q2, right.q2 / t)  # the softened queries are the given ones over t
    near(names["grads"].k2, right.k2)


def test_token_weights():
    names = recipe("Token weights")
    given, weights = inputs(names), names["weights"]
    assert names["row_weights"].strides[1] == 0
    kl = reference.forward(*given).kl
    assert names["loss"] == pytest.approx(float((kl * weights).sum() / weights.sum()), rel=1e-5)
    right = reference.backward(*given, np.broadcast_to(weights / weights.sum(), kl.shape))
    near(names["grads"].q2, right.q2)
    near(names["grads"].k2, right.k2)


def test_float16_loss_scaling():
    names = recipe("Float16 loss scaling")
    halves = [a.astype(np.float16) for a in inputs(names)]
    right = reference.backward(*halves, 1e-9).q2
    near(names["exact"], right, 1e-3)
    near(names["scaled"].astype(np.float64) * 2.0**-30, right, 1e-3)


def test_shards_of_the_keys():
    names = recipe("Shards of the keys")
    given = inputs(names)
    near(names["rows"].kl, reference.forward(*given, causal=True).kl)
    right = reference.backward(*given, causal=True)
    near(names["dq2"], right.q2)
    near(names["dk2"], right.k2)


def test_packed_sequences():
    names = recipe("Packed sequences")
    ends = {"cu_seqlens_q": names["ends"], "cu_seqlens_k": names["ends"]}
    near(names["kl"], reference.forward(*inputs(names), layout="thd", causal=True, **ends).kl)


@pytest.mark.parametrize("side", "12")
def test_gradients_for_the_scales(side):
    """As the table of what the library does not do says, against a difference quotient."""
    names, step = recipe("Reverse KL"), 1e-4
    given, scale = inputs(names), 32**-0.5
    _, state = skl.forward(*given)
    assert "(grads.q1 * q1).sum() / scale1" in section("What it does not do")
    got = (getattr(skl.backward(state, wrt=f"q{side}"), f"q{side}") * names[f"q{side}"]).sum() / scale
    ahead, behind = (reference.forward(*given, **{f"scale{side}": scale * (1 + off)}).kl.sum() for off in (step, -step))
    assert got == pytest.approx((ahead - behind) / (2 * step * scale), rel=1e-4)


def test_few_rows_and_many_keys():
    names = recipe("Few rows, many keys")
    q1, k1, q2, k2 = inputs(names)
    near(skl.forward(q1[:, :, -2:], k1, q2[:, :, -2:], k2, causal=True)[0], names["kl"])
    near(names["kl"], reference.forward(q1, k1, q2, k2, causal=True).kl[:, :, -2:])


def wide(tensor):
    return tensor.detach().cpu().float().numpy()


def test_autograd_function():
    torch = pytest.importorskip("torch")
    names = use("PyTorch", "torch.autograd.Function")
    given = [wide(t) for t in inputs(names)]
    right = reference.backward(*given, 1 / names["kl"].numel(), causal=True)
    near(wide(names["kl"]), reference.forward(*given, causal=True).kl)
    near(wide(names["q2"].grad), right.q2, 1e-2)
    near(wide(names["k2"].grad), right.k2, 1e-2)
    compiled = torch.compile(lambda *a: names["attention_kl"](*a, {"causal": True}).mean(), backend="aot_eager")
    near(wide(compiled(*inputs(names))), wide(names["kl"]).mean())


@pytest.fixture(scope="module")
def operators():
    pytest.importorskip("torch")
    return use("PyTorch", "custom_op")


def test_custom_operators_have_the_right_gradients(operators):
    given = [wide(t) for t in inputs(operators)]
    given[2] = wide((2 * operators["q2"]).detach())
    right = reference.backward(*given, 1 / given[0][..., 0].size, causal=True)
    near(wide(operators["q2"].grad), 2 * right.q2, 1e-2)
    near(wide(operators["k2"].grad), right.k2, 1e-2)


@pytest.mark.filterwarnings("ignore")
def test_custom_operators_are_what_torch_takes_them_for(operators):
    """Schema, fake tensors, autograd registration, and tracing under dynamic shapes, by PyTorch's own check of operators."""
    torch = operators["torch"]
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    given = [t.detach().requires_grad_(n in ("q2", "k2")) for n, t in zip(SIDES, inputs(operators), strict=True)]
    torch.library.opcheck(operators["kl_forward"], (*given, True), test_utils=checks)
    kl, others = (t.detach() for t in operators["kl_forward"](*given, True))
    arguments = (torch.ones_like(kl), kl, others, *(t.detach() for t in given), True)
    torch.library.opcheck(operators["kl_backward"], arguments, test_utils=checks)


@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++, which inductor compiles with")
@pytest.mark.filterwarnings("ignore")
def test_custom_operators_under_inductor(operators):
    """The default backend of `torch.compile`, the whole graph at once."""
    torch = operators["torch"]
    loss = torch.compile(lambda *a: operators["kl_forward"](a[0], a[1], 2 * a[2], a[3], True)[0].mean(), fullgraph=True)
    given = [t.detach().clone().requires_grad_(n in ("q2", "k2")) for n, t in zip(SIDES, inputs(operators), strict=True)]
    loss(*given).backward()
    near(wide(given[2].grad), wide(operators["q2"].grad), 1e-2)
    near(wide(given[3].grad), wide(operators["k2"].grad), 1e-2)


@pytest.mark.parametrize("words", ["register_dataclass", "pure_callback"])
def test_jax(words):
    """`jax.custom_vjp`, outside `jit` and under it."""
    pytest.importorskip("jax")
    names = use("JAX", words)
    given = names["inputs"] if words == "pure_callback" else inputs(names)
    given = [np.asarray(a).astype(np.float64) for a in given]
    kl = reference.forward(*given, causal=True).kl
    right = reference.backward(*given, 1 / kl.size, causal=True)
    near(names["loss"], kl.mean())
    near(names["dq2"], right.q2, 1e-2)
    near(names["dk2"], right.k2, 1e-2)
