"""The public functions on CPU arrays of every framework: values against the float64 oracle, states, reductions, refills, merging."""

import inspect
import pickle

import numpy as np
import pytest

import streamkl_cupy as skl
from streamkl_cupy import reference

from .producers import Legacy, ReadOnly, bfloat16

SIDES = ("q1", "k1", "q2", "k2")
FRAMEWORKS = ("numpy", "torch", "jax")
SHAPES = {"q1": (2, 6, 5, 8), "k1": (2, 3, 7, 8), "q2": (2, 6, 5, 12), "k2": (2, 2, 7, 12)}
TOLERANCE = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 1.5e-2}


def make(dtype="float32", seed=0, shapes=SHAPES):
    rng = np.random.default_rng(seed)
    arrays = [rng.normal(size=shapes[name]).astype(np.float32) for name in SIDES]
    return [bfloat16(a) if dtype == "bfloat16" else a.astype(dtype) for a in arrays]


def to(framework, array):
    """A NumPy array in another framework, exactly."""
    if framework == "numpy":
        return array
    dtype = array.dtype.name
    plain = array.astype(np.float32) if dtype == "bfloat16" else array
    if framework == "torch":
        torch = pytest.importorskip("torch")
        return torch.from_numpy(plain.copy()).to(getattr(torch, dtype))
    return pytest.importorskip("jax").numpy.asarray(plain).astype(dtype)


def back(array):
    """Any result as float64 in NumPy."""
    if type(array).__module__.startswith("torch"):
        return array.detach().double().numpy()
    return np.asarray(array).astype(np.float64)


def same_framework(framework, array):
    module = {"numpy": "numpy", "torch": "torch", "jax": "jaxlib"}[framework]
    return type(array).__module__.startswith(module)


def close(got, want, tolerance):
    want = np.asarray(want)
    assert np.linalg.norm(back(got) - want) <= tolerance * max(np.linalg.norm(want), 1e-6)


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_frameworks_and_dtypes(framework, dtype):
    arrays = make(dtype)
    inputs = [to(framework, a) for a in arrays]
    wide = [a.astype(np.float64) for a in arrays]
    kl, state = skl.forward(*inputs, causal=True)
    want = reference.forward(*wide, causal=True)
    assert kl is state.kl is state.rows.kl
    assert same_framework(framework, kl) and str(kl.dtype).endswith("float32") and tuple(kl.shape) == (2, 6, 5)
    np.testing.assert_allclose(back(kl), want.kl, rtol=1e-5, atol=5e-6)
    np.testing.assert_allclose(back(state.lse1), want.lse1, rtol=1e-5, atol=5e-6)
    np.testing.assert_allclose(back(state.lse2), want.lse2, rtol=1e-5, atol=5e-6)
    g = np.random.default_rng(1).normal(size=(2, 6, 5)).astype(np.float32)
    grads = skl.backward(state, to(framework, g), wrt=SIDES)
    exact = reference.backward(*wide, g, wrt=SIDES, causal=True)
    for name, array in zip(SIDES, arrays, strict=True):
        got = getattr(grads, name)
        assert same_framework(framework, got) and str(got.dtype).endswith(dtype) and tuple(got.shape) == array.shape
        close(got, getattr(exact, name), TOLERANCE[dtype])
    wider = skl.backward(state, to(framework, g), wrt="k1", dtype="float32")
    assert wider.q1 is wider.q2 is wider.k2 is None and str(wider.k1.dtype).endswith("float32")
    close(wider.k1, exact.k1, 1e-4)


def test_frameworks_mix_on_one_device():
    """Results follow q1."""
    torch = pytest.importorskip("torch")
    q1, k1, q2, k2 = make()
    kl, state = skl.forward(torch.from_numpy(q1), k1, to("jax", q2), Legacy(k2))
    assert isinstance(kl, torch.Tensor)
    np.testing.assert_array_equal(kl.numpy(), skl.forward(q1, k1, q2, k2)[0])
    grads = skl.backward(state, np.ones((2, 6, 5), np.float32))
    assert isinstance(grads.k2, torch.Tensor)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_other_producers_get_numpy(dtype):
    arrays = make(dtype)
    kl, state = skl.forward(Legacy(arrays[0]), ReadOnly(arrays[1]), ReadOnly(arrays[2]), Legacy(arrays[3]))
    want, _ = skl.forward(*arrays)
    assert isinstance(kl, np.ndarray)
    np.testing.assert_array_equal(kl, want)
    assert skl.backward(state).q2.dtype.name == dtype


def test_read_only_inputs():
    arrays = make()
    want = skl.forward(*arrays)[0]
    for a in arrays:
        a.flags.writeable = False
    np.testing.assert_array_equal(skl.forward(*arrays)[0], want)


def test_torch_tensors_that_require_grad():
    torch = pytest.importorskip("torch")
    inputs = [torch.nn.Parameter(torch.from_numpy(a)) for a in make()]
    kl, state = skl.forward(*inputs)
    assert not kl.requires_grad
    assert not skl.backward(state, torch.ones_like(kl)).q2.requires_grad
    with torch.inference_mode():
        np.testing.assert_array_equal(skl.forward(*inputs)[0].numpy(), kl.numpy())


def test_torch_autograd_function():
    """The recipe: a Function around the two calls; autograd sends a gradient of stride 0."""
    torch = pytest.importorskip("torch")
    seen = []

    class RowKL(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q1, k1, q2, k2):
            kl, ctx.state = skl.forward(q1, k1, q2, k2)
            return kl

        @staticmethod
        def backward(ctx, grad):
            seen.append(grad.stride())
            grads = skl.backward(ctx.state, grad)
            return None, None, grads.q2, grads.k2

    arrays = make()
    inputs = [torch.from_numpy(a).requires_grad_(name in ("q2", "k2")) for name, a in zip(SIDES, arrays, strict=True)]
    (3 * RowKL.apply(*inputs).sum()).backward()
    exact = reference.backward(*arrays, 3.0)
    assert seen == [(0, 0, 0)]
    close(inputs[2].grad, exact.q2, 1e-5)
    close(inputs[3].grad, exact.k2, 1e-5)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_strided_inputs(framework):
    """Parts of a packed QKV projection, transposed: read where they lie."""
    rng = np.random.default_rng(3)
    packed = [rng.normal(size=(2, 6, 2, 3, 8)).astype(np.float32) for _ in "12"]  # B, N, (q, k), H, D
    arrays = [packed[i][:, :, j].swapaxes(1, 2) for i in (0, 1) for j in (0, 1)]
    if framework == "torch":
        given = [to(framework, packed[i])[:, :, j].transpose(1, 2) for i in (0, 1) for j in (0, 1)]
        assert not given[0].is_contiguous()
    else:
        given = [to(framework, a) for a in arrays]
    kl, state = skl.forward(*given)
    np.testing.assert_allclose(back(kl), reference.forward(*arrays).kl, rtol=1e-5, atol=5e-6)
    close(skl.backward(state).k2, reference.backward(*arrays).k2, 1e-5)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_packed_vectors(framework):
    rng = np.random.default_rng(4)
    shapes = {"q1": (9, 4, 8), "k1": (11, 2, 8), "q2": (9, 4, 16), "k2": (11, 4, 16)}
    arrays = [rng.normal(size=shapes[n]).astype(np.float32) for n in SIDES]
    vectors = {
        "cu_seqlens_q": np.array([0, 4, 4, 9], np.int32),
        "cu_seqlens_k": np.array([0, 5, 9, 11], np.int32),
        "q_offset": np.array([1, 0, -2], np.int32),
    }
    options = {"layout": "thd", "causal": True}
    kl, state = skl.forward(*(to(framework, a) for a in arrays), **options, **{n: to(framework, v) for n, v in vectors.items()})
    want = reference.forward(*arrays, **options, **vectors)
    assert tuple(kl.shape) == (4, 9) and state.problem.q_offset == "vector"
    np.testing.assert_allclose(back(kl), want.kl, rtol=1e-5, atol=5e-6)
    exact = reference.backward(*arrays, **options, **vectors)
    close(skl.backward(state).k2, exact.k2, 1e-5)


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("grad", ["none", "number", "array", "array of one", "numpy scalar"])
def test_reductions(framework, reduction, grad):
    arrays, lengths = make(), np.array([5, 0], np.int32)  # 2 * 6 * 5 rows, 30 of which see keys
    options = {"reduction": reduction, "seqlens_k": lengths}
    inputs = [to(framework, a) for a in arrays]
    value, state = skl.forward(*inputs, reduction=reduction, seqlens_k=to(framework, lengths))
    want = reference.forward(*arrays, **options)
    assert want.visible_rows == 30
    assert same_framework(framework, value) and tuple(value.shape) == () and str(value.dtype).endswith("float32")
    assert float(value) == pytest.approx(float(want.reduced(reduction)), rel=1e-5)
    assert tuple(state.kl.shape) == (2, 6, 5)
    upstream = {
        "none": None,
        "number": 1,
        "array": to(framework, np.ones((), np.float32)),
        "array of one": to(framework, np.ones(1, np.float32)),
        "numpy scalar": np.float16(1),
    }[grad]
    exact = reference.backward(*arrays, **options)
    close(skl.backward(state, upstream).k2, exact.k2, 1e-5)
    rebuilt = skl.KLState(state.rows, state.problem, state.inputs)
    close(skl.backward(rebuilt, upstream).k2, exact.k2, 1e-5)


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_reduction_without_visible_rows(reduction):
    arrays = make()
    value, state = skl.forward(*arrays, reduction=reduction, seqlens_k=np.zeros(2, np.int32))
    assert float(value) == 0
    assert not skl.backward(state).k2.any()


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("form", ["plain", "expanded", "transposed", "scalar"])
def test_upstream_gradients(framework, dtype, form):
    if framework == "jax" and dtype == "float64":
        pytest.skip("JAX has no float64 by default")
    arrays = make()
    g = np.random.default_rng(5).integers(-8, 8, size=(2, 6, 5)).astype(np.float32)
    g = {"plain": g, "expanded": np.broadcast_to(g[:, :1, :1], g.shape), "transposed": g, "scalar": g[0, 0, 0]}[form]
    given = bfloat16(g) if dtype == "bfloat16" else np.asarray(g).astype(dtype)
    given = to(framework, given)
    if form == "expanded" and framework == "torch":
        given = given[:, :1, :1].expand(2, 6, 5)
        assert given.stride()[1:] == (0, 0)
    if form == "transposed" and framework != "jax":
        given = given.swapaxes(0, 2).reshape(5, 6, 2) + 0 if framework == "numpy" else given.permute(2, 1, 0).contiguous()
        given = given.swapaxes(0, 2)
    _, state = skl.forward(*(to(framework, a) for a in arrays))
    close(skl.backward(state, given).q2, reference.backward(*arrays, g).q2, 1e-5)


@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_refill(framework):
    first, second = make(seed=1), make(seed=2)
    _, state = skl.forward(*(to(framework, a) for a in first), reduction="mean")
    grads = skl.backward(state, dtype="float32")
    for array in (*state.rows, *state.reduced, grads.q2, grads.k2):
        array[...] = np.nan
    inputs = [to(framework, a) for a in second]
    value, refilled = skl.forward(*inputs, causal=True, scale1=0.5, reduction="mean", out=state)
    assert all(a is b for a, b in zip(refilled.rows, state.rows, strict=True)) and value is state.reduced[0]
    assert refilled.inputs.q1 is inputs[0]
    want = reference.forward(*second, causal=True, scale1=0.5)
    assert float(value) == pytest.approx(float(want.reduced("mean")), rel=1e-5)
    np.testing.assert_allclose(back(state.rows.kl), want.kl, rtol=1e-5, atol=5e-6)
    again = skl.backward(refilled, out=grads, dtype="float32")
    assert again.q2 is grads.q2 and again.k2 is grads.k2
    exact = reference.backward(*second, causal=True, scale1=0.5, reduction="mean")
    close(grads.q2, exact.q2, 1e-5)
    close(grads.k2, exact.k2, 1e-5)


def test_refill_parts_of_a_packed_buffer():
    """Outputs that interleave without touching each other are fine."""
    shapes = {n: (2, 3, 6, 8) for n in SIDES}
    arrays = make(shapes=shapes)
    packed = np.full((2, 3, 2, 6, 8), np.nan, np.float32)
    _, state = skl.forward(*arrays)
    skl.backward(state, out=skl.Gradients(q2=packed[:, :, 0], k2=packed[:, :, 1]))
    exact = reference.backward(*arrays)
    close(packed[:, :, 0], exact.q2, 1e-5)
    close(packed[:, :, 1], exact.k2, 1e-5)


def test_out_keeps_what_is_not_asked_for():
    _, state = skl.forward(*make())
    out = skl.backward(state, wrt=SIDES)
    out.k1[...] = 7
    got = skl.backward(state, wrt=("q2",), out=out)
    assert got.k1 is None and got.q2 is out.q2 and (out.k1 == 7).all()


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_state_from_saved_parts(framework):
    arrays = make()
    _, state = skl.forward(*(to(framework, a) for a in arrays), causal=True, window=(3, -1))
    saved = pickle.loads(pickle.dumps(([np.asarray(a) for a in state.rows], state.problem)))
    rows, problem = skl.RowStats(*(to(framework, a) for a in saved[0])), saved[1]
    assert problem == state.problem and hash(problem) == hash(state.problem)
    rebuilt = skl.KLState(rows, problem, skl.Inputs(*(to(framework, a) for a in arrays)))
    np.testing.assert_array_equal(back(skl.backward(rebuilt, 2.0).k2), back(skl.backward(state, 2.0).k2))


def test_state_pickles_whole():
    _, state = skl.forward(*make(), reduction="mean")
    again = pickle.loads(pickle.dumps(state))
    np.testing.assert_array_equal(skl.backward(again).q2, skl.backward(state).q2)


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_shards_of_keys(framework, reduction):
    """Gradients with merged rows: each shard has its own dK, and dQ adds up."""
    arrays = make()
    lengths = np.array([7, 4], np.int32)
    q1, k1, q2, k2 = arrays
    options = {"causal": True, "reduction": reduction}
    whole_options = {**options, "q_offset": 2, "seqlens_k": lengths}
    states, bounds = [], [(0, 3), (3, 4), (4, 7)]
    for begin, end in bounds:
        keys = slice(begin, end)
        clipped = np.clip(lengths - begin, 0, end - begin).astype(np.int32)
        given = [to(framework, a) for a in (q1, k1[:, :, keys], q2, k2[:, :, keys])]
        states.append(skl.forward(*given, **options, q_offset=2 - begin, seqlens_k=to(framework, clipped))[1])
    rows = skl.merge([s.rows for s in states])
    assert same_framework(framework, rows.kl)
    want = reference.forward(*arrays, **whole_options)
    np.testing.assert_allclose(back(rows.kl), want.kl, rtol=1e-5, atol=5e-6)
    np.testing.assert_allclose(back(rows.lse2), want.lse2, rtol=1e-5, atol=5e-6)
    g = 2.0 if reduction == "mean" else np.random.default_rng(6).normal(size=(2, 6, 5)).astype(np.float32)
    given = g if reduction == "mean" else to(framework, g)
    parts = [skl.backward(s.with_rows(rows), given, wrt=SIDES) for s in states]
    exact = reference.backward(*arrays, g, wrt=SIDES, **whole_options)
    for name in ("q1", "q2"):
        close(sum(back(getattr(p, name)) for p in parts), getattr(exact, name), 1e-5)
    for name in ("k1", "k2"):
        close(np.concatenate([back(getattr(p, name)) for p in parts], axis=2), getattr(exact, name), 1e-5)


def test_merge_of_one_and_of_rows_without_keys():
    _, state = skl.forward(*make())
    _, empty = skl.forward(*make(), seqlens_k=np.zeros(2, np.int32))
    for rows in ([state.rows], [empty.rows, state.rows], [state.rows, empty.rows]):
        merged = skl.merge(iter(rows))
        np.testing.assert_allclose(merged.kl, state.kl, rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(merged.lse1, state.lse1, rtol=1e-6)
    assert not skl.merge([empty.rows, empty.rows]).kl.any()


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize("zero", ["B", "Nq", "Nk"])
def test_sizes_of_zero(framework, zero, reduction):
    b, n_q, n_k = (0 if zero == "B" else 2), (0 if zero == "Nq" else 5), (0 if zero == "Nk" else 7)
    shapes = {"q1": (b, 6, n_q, 8), "k1": (b, 3, n_k, 8), "q2": (b, 6, n_q, 12), "k2": (b, 2, n_k, 12)}
    inputs = [to(framework, a) for a in make(shapes=shapes)]
    kl, state = skl.forward(*inputs, causal=True, reduction=reduction)
    assert tuple(kl.shape) == ((b, 6, n_q) if reduction == "none" else ()) and not back(kl).any()
    assert tuple(state.lse1.shape) == (b, 6, n_q) and np.isneginf(back(state.lse1)).all()
    grads = skl.backward(state, wrt=SIDES)
    for name in SIDES:
        got = back(getattr(grads, name))
        assert got.shape == shapes[name] and not got.any()
    assert not back(skl.merge([state.rows] * 2).kl).any()


@pytest.mark.parametrize("segments", [0, 1, 3])
def test_packed_sizes_of_zero(segments):
    ends = np.zeros(segments + 1, np.int32)
    q, k = np.zeros((0, 4, 8), np.float32), np.zeros((0, 2, 8), np.float32)
    kl, state = skl.forward(q, k, q, k, layout="thd", cu_seqlens_q=ends, cu_seqlens_k=ends, causal=True)
    assert kl.shape == (4, 0)
    assert skl.backward(state, wrt=SIDES).k1.shape == (0, 2, 8)


def test_inputs_are_never_written():
    arrays = make()
    copies = [a.copy() for a in arrays]
    _, state = skl.forward(*arrays, causal=True)
    skl.backward(state, wrt=SIDES)
    assert all((a == b).all() for a, b in zip(arrays, copies, strict=True))


@pytest.mark.parametrize("wrt", ["k1", ("k2", "q1"), {"q2"}, ["q1", "k1", "q2", "k2"], {"q1": 0}.keys()])
def test_wrt(wrt):
    _, state = skl.forward(*make())
    names = {wrt} if isinstance(wrt, str) else set(wrt)
    grads = skl.backward(state, wrt=wrt)
    assert {n for n in SIDES if getattr(grads, n) is not None} == names


def test_wrt_from_an_iterator():
    """Read once."""
    inputs = make()
    _, state = skl.forward(*inputs)
    grads = skl.backward(state, wrt=(n for n in ("k2", "q1")))
    assert [n for n in SIDES if getattr(grads, n) is not None] == ["q1", "k2"]
    assert skl.workspace_size(*inputs, wrt=iter(SIDES)) == 0
    assert "k1" in str(skl.explain(*inputs, wrt=iter(["k1"])))


@pytest.mark.parametrize("grad", [np.float16(2), np.int8(2), np.array(2, np.uint16), bfloat16(np.array(2.0)), bfloat16(np.array(2.0))[()]])
def test_host_scalars(grad):
    _, state = skl.forward(*make())
    np.testing.assert_array_equal(skl.backward(state, grad).q2, skl.backward(state, 2).q2)


@pytest.mark.parametrize("grad", [np.inf, np.float32(-np.inf), np.nan])
def test_upstream_numbers_that_are_not_finite_go_through(grad):
    _, state = skl.forward(*make())
    with np.errstate(invalid="ignore"):
        assert not np.isfinite(skl.backward(state, grad).q2).any()


@pytest.mark.parametrize("scale", [1.2e-38, 2.3e38])
def test_extreme_scales_are_taken(scale):
    zero = np.zeros((1, 1, 2, 8), np.float32)
    assert not skl.forward(zero, zero, zero, zero, scale1=scale, scale2=scale)[0].any()


def test_dtype_names():
    import ml_dtypes

    _, state = skl.forward(*make("bfloat16"))
    spellings = ["float32", np.float32, np.dtype("float32"), "bfloat16", ml_dtypes.bfloat16]
    for module in ("torch", "jax.numpy"):
        try:
            library = __import__(module, fromlist=["float32"])
        except ImportError:
            continue
        spellings += [library.float32, library.bfloat16]
    for dtype in spellings:
        assert skl.backward(state, dtype=dtype).q2.dtype.name in str(dtype)


def test_scales_default_and_given():
    arrays = make()
    _, state = skl.forward(*arrays)
    assert (state.problem.scale1, state.problem.scale2) == (8**-0.5, 12**-0.5)
    np.testing.assert_allclose(
        skl.forward(*arrays, scale1=np.float32(0.5), scale2=2)[0], reference.forward(*arrays, scale1=0.5, scale2=2).kl, rtol=1e-5, atol=5e-6
    )


def test_workspace_warmup_and_explain():
    arrays = make()
    assert skl.workspace_size(*arrays) == skl.workspace_size(*arrays, causal=True, wrt=SIDES) == 0
    assert skl.warmup(*arrays, reduction="mean", wrt="q2", dtype="float32") is None
    said = str(skl.explain(*arrays, causal=True, q_offset=3, window=(4, -1), reduction="sum", wrt="k1"))
    for words in ("NumPy", "causal", "q_offset 3", "window (4, -1)", "reduction sum", "k1", "bytes", "on cpu"):
        assert words in said
    workspace = np.full(64, 7, np.uint8)
    _, state = skl.forward(*arrays, workspace=workspace)
    skl.backward(state, workspace=workspace, deterministic=True)


def test_signatures():
    """The table of options is the same everywhere."""
    options = inspect.signature(skl.Problem.check).parameters
    forward = inspect.signature(skl.forward).parameters
    for name in options:
        assert forward[name].default == options[name].default
    assert list(forward) == [*options, "out", "workspace", "stream", "foreign"]
