"""Wrong arguments: the right kind of error, which names the argument, and nothing is written.

The tables hold for any device, and tests/gpu/test_bad_input.py runs them on one; those called ON_HOST are about values, which are
read on the host alone, and about what only CPU arrays can be.
"""

import dataclasses

import numpy as np
import pytest

import streamkl_cupy as skl

from .producers import Legacy, bfloat16

SIDES = ("q1", "k1", "q2", "k2")
SHAPES = {"q1": (2, 4, 5, 8), "k1": (2, 2, 7, 8), "q2": (2, 4, 5, 16), "k2": (2, 1, 7, 16)}
PACKED = {"q1": (5, 4, 8), "k1": (7, 2, 8), "q2": (5, 4, 16), "k2": (7, 1, 16)}
ENDS = {"cu_seqlens_q": np.array([0, 2, 5], np.int32), "cu_seqlens_k": np.array([0, 3, 7], np.int32)}


def arrays(shapes=SHAPES, **replaced):
    rng = np.random.default_rng(0)
    return {n: rng.normal(size=shapes[n]).astype(np.float32) for n in SIDES} | replaced


def zeros(*shape, dtype=np.float32):
    return np.zeros(shape, dtype)


def ints(*values, dtype=np.int32):
    return np.array(values, dtype)


def poisoned_state(reduction="none"):
    _, state = skl.forward(**arrays(), reduction=reduction)
    for array in (*state.rows, *(state.reduced or ())):
        array[...] = np.nan
    return state


def untouched(state):
    return all(np.isnan(a).all() for a in (*state.rows, *(state.reduced or ())))


INPUTS = [
    ("q1", [1.0], TypeError, "q1 is a list"),
    ("k2", None, TypeError, "k2 is a NoneType|k2 is None"),
    ("q1", None, TypeError, "q1 is a NoneType"),
    ("k1", "k", TypeError, "k1 is a str"),
    ("q2", 1.0, TypeError, "q2 is a float"),
    ("q1", zeros(2, 4, 5, 8, dtype=np.float64), TypeError, "q1 has dtype float64; it takes float16, bfloat16, float32"),
    ("k1", zeros(2, 2, 7, 8, dtype=np.int32), TypeError, "k1 has dtype int32"),
    ("q2", zeros(2, 4, 5, 16, dtype=np.complex64), TypeError, "q2 has dtype complex64"),
    ("q2", bfloat16(zeros(2, 4, 5, 16)), TypeError, "q2 has dtype bfloat16 and q1 float32"),
    ("k2", np.ma.masked_array(zeros(2, 1, 7, 16)), TypeError, "k2 is a masked array"),
    ("k2", Legacy(zeros(2, 1, 7, 16), device=(10, 0)), ValueError, "k2 is on ROCm"),
    ("q1", zeros(4, 5, 8), ValueError, "q1 has shape"),
    ("q1", zeros(2, 4, 5, 0), ValueError, "q1 has head dimension 0"),
    ("q1", zeros(2, 4, 5, 600), ValueError, "q1 has head dimension 600"),
    ("k1", zeros(2, 2, 7, 9), ValueError, "q1 has head dimension 8 and k1 9"),
    ("k1", zeros(3, 2, 7, 8), ValueError, "k1 has batch 3"),
    ("k1", zeros(2, 3, 7, 8), ValueError, "k1 has 3 heads"),
    ("k1", zeros(2, 0, 7, 8), ValueError, "k1 has shape .*, no heads"),
    ("q2", zeros(2, 2, 5, 16), ValueError, "q2 has 2 heads"),
    ("q2", zeros(2, 4, 6, 16), ValueError, "q2 has 6 rows"),
    ("k2", zeros(2, 1, 8, 16), ValueError, "k2 has 8 rows"),
]
INPUTS_ON_HOST = [
    ("q2", zeros(2, 4, 5, 16, dtype=">f4"), TypeError, "q2 has dtype float32 in the other byte order"),
]


@pytest.mark.parametrize(("name", "value", "error", "message"), INPUTS + INPUTS_ON_HOST)
def test_inputs(name, value, error, message):
    state = poisoned_state()
    for function in (skl.forward, skl.workspace_size, skl.warmup, skl.explain):
        with pytest.raises(error, match=message):
            function(**arrays(**{name: value}), **({"out": state} if function is skl.forward else {}))
    assert untouched(state)


OPTIONS = [
    ({"layout": "bhdn"}, ValueError, "layout is 'bhdn'"),
    ({"layout": None}, TypeError, "layout is None"),
    ({"layout": "thd"}, ValueError, "q1 has shape"),
    ({"scale1": 0.0}, ValueError, "scale1 is 0"),
    ({"scale1": -1}, ValueError, "scale1 is -1"),
    ({"scale2": float("nan")}, ValueError, "scale2 is nan"),
    ({"scale2": float("inf")}, ValueError, "scale2 is inf"),
    ({"scale2": "1"}, TypeError, "scale2 is a str"),
    ({"scale1": 1e39}, ValueError, "scale1 is 1e\\+39"),
    ({"scale2": 3e38}, ValueError, "scale2 is 3e\\+38"),
    ({"scale1": 10**400}, ValueError, "scale1 is a int beyond float64"),
    ({"scale2": 10**5000}, ValueError, "scale2 is a int beyond float64"),
    ({"scale1": 1e-46}, ValueError, "scale1 is 1e-46"),
    ({"scale2": 1e-39}, ValueError, "scale2 is 1e-39"),
    ({"scale2": np.timedelta64(1)}, TypeError, "scale2 is a timedelta64"),
    ({"scale1": True}, TypeError, "scale1 is a bool"),
    ({"scale1": zeros(1)}, TypeError, "scale1 is a ndarray"),
    ({"causal": "yes"}, TypeError, "causal is a str"),
    ({"causal": None}, TypeError, "causal is a NoneType"),
    ({"causal": 1}, TypeError, "causal is a int"),
    ({"causal": 2}, TypeError, "causal is a int"),
    ({"causal": -1}, TypeError, "causal is a int"),
    ({"causal": np.int64(0)}, TypeError, "causal is a int64"),
    ({"window": 3}, TypeError, "window is 3"),
    ({"window": (1, 2, 3)}, TypeError, "window is"),
    ({"window": (1.5, 2)}, TypeError, "window is"),
    ({"window": (-2, 0)}, ValueError, "window is"),
    ({"q_offset": 1.5}, TypeError, "q_offset is a float"),
    ({"q_offset": "top"}, TypeError, "q_offset is a str"),
    ({"q_offset": True}, TypeError, "q_offset is a bool"),
    ({"q_offset": [0, 1]}, TypeError, "q_offset is a list"),
    ({"q_offset": 1 << 50}, ValueError, "q_offset is"),
    ({"q_offset": ints(0, 1, dtype=np.int64)}, TypeError, "q_offset has dtype int64; it takes int32"),
    ({"q_offset": ints(0, 1, 2)}, ValueError, "q_offset has shape"),
    ({"q_offset": np.array(3, np.int32)}, ValueError, "q_offset has shape"),
    ({"seqlens_q": [5, 5]}, TypeError, "seqlens_q is a list"),
    ({"seqlens_q": ints(5, 5, dtype=np.int64)}, TypeError, "seqlens_q has dtype int64"),
    ({"seqlens_k": ints(5)}, ValueError, "seqlens_k has shape"),
    ({"seqlens_k": ints(1, 9, 2)[::2]}, ValueError, "seqlens_k has stride 2"),
    ({"cu_seqlens_q": ints(0, 1, 2)}, ValueError, "cu_seqlens_q goes with layout 'thd'"),
    ({"reduction": "batchmean"}, ValueError, "reduction is 'batchmean'"),
    ({"reduction": None}, TypeError, "reduction is None"),
]
OPTIONS_ON_HOST = [
    ({"seqlens_k": ints(8, 1)}, ValueError, "seqlens_k .*8"),
    ({"seqlens_q": ints(1, -1)}, ValueError, "seqlens_q .*-1"),
]


@pytest.mark.parametrize(("options", "error", "message"), OPTIONS + OPTIONS_ON_HOST)
def test_options(options, error, message):
    state = poisoned_state()
    with pytest.raises(error, match=message):
        skl.forward(**arrays(), **options, out=state)
    assert untouched(state)
    for function in (skl.workspace_size, skl.warmup, skl.explain):
        with pytest.raises(error, match=message):
            function(**arrays(), **options)


PACKED_OPTIONS = [
    ({}, ValueError, "cu_seqlens_q is missing"),
    ({"cu_seqlens_q": ENDS["cu_seqlens_q"]}, ValueError, "cu_seqlens_k is missing"),
    (ENDS | {"cu_seqlens_k": [0, 3, 7]}, TypeError, "cu_seqlens_k is a list"),
    (ENDS | {"cu_seqlens_k": ints(0, 7)}, ValueError, "cu_seqlens_k has 2 entries"),
    (ENDS | {"cu_seqlens_q": ints(0, 2, 5, dtype=np.int64)}, TypeError, "cu_seqlens_q has dtype int64"),
    (ENDS | {"cu_seqlens_q": zeros(0, dtype=np.int32)}, ValueError, "cu_seqlens_q has shape"),
    (ENDS | {"seqlens_q": ints(1, 1)}, ValueError, "seqlens_q goes with the padded layouts"),
]
PACKED_OPTIONS_ON_HOST = [
    (ENDS | {"cu_seqlens_q": ints(1, 2, 5)}, ValueError, "cu_seqlens_q .*1"),
    (ENDS | {"cu_seqlens_k": ints(0, 4, 3)}, ValueError, "cu_seqlens_k .*4 to 3"),
    (ENDS | {"cu_seqlens_k": ints(0, 4, 8)}, ValueError, "cu_seqlens_k .*8"),
]


@pytest.mark.parametrize(("options", "error", "message"), PACKED_OPTIONS + PACKED_OPTIONS_ON_HOST)
def test_packed_options(options, error, message):
    for function in (skl.forward, skl.workspace_size, skl.warmup, skl.explain):
        with pytest.raises(error, match=message):
            function(**arrays(PACKED), layout="thd", **options)


def replaced(state, **rows):
    return skl.KLState(state.rows._replace(**rows), state.problem, state.inputs, state.reduced)


def repeated(array, *times):
    """A writable view with strides of 0."""
    return np.lib.stride_tricks.as_strided(array, (*times, *array.shape), (0,) * len(times) + array.strides)


def frozen(array):
    array.flags.writeable = False
    return array


OUT_STATES = [
    (lambda s: s.rows, TypeError, "out is a RowStats"),
    (lambda s: (1, 2), TypeError, "out is a tuple"),
    (lambda s: replaced(s, kl=zeros(2, 4, 6)), ValueError, r"out.rows.kl has shape \(2, 4, 6\)"),
    (lambda s: replaced(s, ref1=zeros(2, 4, 5, dtype=np.float64)), TypeError, "out.rows.ref1 has dtype float64"),
    (lambda s: replaced(s, ref2=zeros(2, 4, 10)[..., ::2]), ValueError, "out.rows.ref2 has strides"),
    (lambda s: replaced(s, logsum2=s.rows.kl), ValueError, "out.rows.kl overlaps out.rows.logsum2"),
    (lambda s: replaced(s, logsum2=[1.0]), TypeError, "out.rows.logsum2 is a list"),
    (lambda s: replaced(s, kl=Legacy(zeros(2, 4, 5))), ValueError, "out.rows.kl is an array of dlpack"),
    (lambda s: skl.KLState(s.rows, s.problem, s.inputs), ValueError, "out has no reduced value"),
    (lambda s: skl.KLState(s.rows, s.problem, s.inputs, (s.reduced[0],)), TypeError, "out.reduced"),
    (lambda s: skl.KLState(s.rows, s.problem, s.inputs, (s.reduced[0], zeros(1))), ValueError, r"out.reduced\[1\] has shape"),
    (lambda s: skl.KLState(s.rows, s.problem, s.inputs, (s.reduced[0],) * 2), ValueError, "out.reduced.0. overlaps out.reduced.1."),
]
OUT_STATES_ON_HOST = [
    (lambda s: replaced(s, logsum1=frozen(zeros(2, 4, 5))), ValueError, "out.rows.logsum1 is read-only"),
]


@pytest.mark.parametrize(("change", "error", "message"), OUT_STATES + OUT_STATES_ON_HOST)
def test_out_of_forward(change, error, message):
    state = poisoned_state("mean")
    with pytest.raises(error, match=message):
        skl.forward(**arrays(), reduction="mean", out=change(state))
    assert untouched(state)


def test_out_on_an_input():
    pool = np.full(1000, np.nan, np.float32)
    state = poisoned_state()
    q1 = pool[:320].reshape(2, 4, 5, 8)
    with pytest.raises(ValueError, match=r"out\.rows\.kl overlaps q1"):
        skl.forward(**arrays(q1=q1), out=replaced(state, kl=pool[300:340].reshape(2, 4, 5)))
    assert untouched(state) and np.isnan(pool).all()


WORKSPACES = [
    ([0] * 64, TypeError, "workspace is a list"),
    (zeros(64), TypeError, "workspace has dtype float32; it takes uint8"),
    (zeros(64, dtype=np.uint8)[::2], ValueError, "workspace has strides"),
]
WORKSPACES_ON_HOST = [
    (frozen(zeros(64, dtype=np.uint8)), ValueError, "workspace is read-only"),
    (Legacy(zeros(64, dtype=np.uint8), device=(2, 0)), ValueError, "workspace is on cuda:0 and q1 on cpu"),
]


@pytest.mark.parametrize(("workspace", "error", "message"), WORKSPACES + WORKSPACES_ON_HOST)
def test_workspace(workspace, error, message, monkeypatch):
    monkeypatch.setattr("streamkl_cupy.arrays.import_cupy", fake_cupy)
    state = poisoned_state()
    with pytest.raises(error, match=message):
        skl.forward(**arrays(), workspace=workspace, out=state)
    assert untouched(state)
    _, state = skl.forward(**arrays())
    with pytest.raises(error, match=message):
        skl.backward(state, workspace=workspace)


def fake_cupy():
    """Only as much as viewing a capsule of a CUDA array asks for."""
    from types import SimpleNamespace

    return SimpleNamespace(cuda=SimpleNamespace(get_current_stream=lambda index: SimpleNamespace(ptr=0)))


def test_workspace_on_an_input():
    q1 = arrays()["q1"]
    with pytest.raises(ValueError, match="workspace overlaps q1"):
        skl.forward(**arrays(q1=q1), workspace=q1.reshape(-1).view(np.uint8)[64:128])


def test_stream_with_cpu_arrays():
    for stream, error in ((0, ValueError), (-1, ValueError), ("0", TypeError), (True, TypeError)):
        with pytest.raises(error, match="stream is"):
            skl.forward(**arrays(), stream=stream)
        _, state = skl.forward(**arrays())
        with pytest.raises(error, match="stream is"):
            skl.backward(state, stream=stream)
        with pytest.raises(error, match="stream is"):
            skl.merge([state.rows], stream=stream)


@pytest.mark.parametrize(("make", "given"), [(skl.RowStats, 6), (skl.RowStats, 4), (skl.KLState, 2), (skl.KLState, 5), (skl.Gradients, 5)])
def test_constructors_take_their_own_number_of_parts(make, given):
    with pytest.raises(TypeError, match="argument"):
        make(*range(given))


@pytest.mark.parametrize("name", SIDES[1:])
def test_two_devices(name, monkeypatch):
    monkeypatch.setattr("streamkl_cupy.arrays.import_cupy", fake_cupy)
    other = Legacy(arrays()[name], device=(2, 1))
    with pytest.raises(ValueError, match=f"{name} is on cuda:1 and q1 on cpu"):
        skl.forward(**arrays(**{name: other}))
    with pytest.raises(ValueError, match="seqlens_k is on cuda:1 and q1 on cpu"):
        skl.forward(**arrays(), seqlens_k=Legacy(ints(1, 2), device=(2, 1)))


def test_tensors_without_memory():
    torch = pytest.importorskip("torch")
    with pytest.raises(TypeError, match=r"k1 is a meta tensor.*torch\.library\.custom_op"):
        skl.forward(**arrays(k1=torch.zeros(2, 2, 7, 8, device="meta")))


def test_lazily_negated_tensors():
    torch = pytest.importorskip("torch")
    _, state = skl.forward(**arrays())
    with pytest.raises(ValueError, match=r"grad_kl is a lazily negated view.*resolve_neg"):
        skl.backward(state, torch.tensor(1 + 2j).conj().imag)
    with pytest.raises(ValueError, match=r"k1 is a lazily negated view.*resolve_neg"):
        skl.forward(**arrays(k1=torch._neg_view(torch.ones(2, 2, 7, 8))))


def test_out_of_jax():
    jax = pytest.importorskip("jax")
    given = {n: jax.numpy.asarray(a) for n, a in arrays().items()}
    _, state = skl.forward(**given)
    with pytest.raises(ValueError, match=r"out\.rows\.kl is read-only, as all arrays of JAX are"):
        skl.forward(**given, out=state)
    grads = skl.backward(state)
    with pytest.raises(ValueError, match=r"out\.q2 is read-only, as all arrays of JAX are"):
        skl.backward(state, out=grads)


BACKWARD = [
    ({"grad_kl": "1"}, TypeError, "grad_kl is a str"),
    ({"grad_kl": [1.0]}, TypeError, "grad_kl is a list"),
    ({"grad_kl": True}, TypeError, "grad_kl is a bool"),
    ({"grad_kl": 1j}, TypeError, "grad_kl is a complex"),
    ({"grad_kl": 1e39}, ValueError, "grad_kl is 1e\\+39"),
    ({"grad_kl": np.float64(-1e39)}, ValueError, "grad_kl is -1e\\+39"),
    ({"grad_kl": 10**400}, ValueError, "grad_kl is a int beyond float64"),
    ({"grad_kl": np.str_("3")}, TypeError, "grad_kl has dtype <U1"),
    ({"grad_kl": np.complex64(1)}, TypeError, "grad_kl has dtype complex64"),
    ({"grad_kl": np.datetime64(3, "s")}, TypeError, "grad_kl has dtype datetime64"),
    ({"grad_kl": np.timedelta64(3, "s")}, TypeError, "grad_kl has dtype timedelta64"),
    ({"grad_kl": zeros(2, 4, 5, dtype=np.int32)}, TypeError, "grad_kl has dtype int32"),
    ({"grad_kl": zeros(2, 4)}, ValueError, r"grad_kl has shape \(2, 4\); it takes a scalar or \(2, 4, 5\)"),
    ({"grad_kl": zeros(2, 4, 1)}, ValueError, "grad_kl has shape"),
    ({"grad_kl": zeros(2)}, ValueError, "grad_kl has shape"),
    ({"wrt": "v"}, ValueError, "wrt has 'v'"),
    ({"wrt": ()}, ValueError, "wrt is empty"),
    ({"wrt": ("q2", 3)}, TypeError, "wrt has 3"),
    ({"wrt": None}, TypeError, "wrt is a NoneType"),
    ({"wrt": 3}, TypeError, "wrt is a int"),
    ({"wrt": b"q2"}, TypeError, "wrt is a bytes"),
    ({"wrt": {"q2": True}}, TypeError, "wrt is a dict"),
    ({"dtype": "float16"}, TypeError, "dtype is float16; it takes float32$"),
    ({"dtype": np.float64}, TypeError, "dtype is float64"),
    ({"dtype": 3}, TypeError, "dtype is 3"),
    ({"deterministic": "no"}, TypeError, "deterministic is a str"),
    ({"deterministic": 1}, TypeError, "deterministic is a int"),
    ({"deterministic": None}, TypeError, "deterministic is a NoneType"),
]
BACKWARD_ON_HOST = [
    ({"grad_kl": np.array(True)}, TypeError, "grad_kl has dtype bool"),
    ({"grad_kl": np.ma.masked_array(1.0)}, TypeError, "grad_kl is a masked array"),
    ({"grad_kl": np.array(None)}, TypeError, "grad_kl has dtype object"),
    ({"grad_kl": np.array(1e39)}, ValueError, "grad_kl is 1e\\+39"),
    ({"grad_kl": Legacy(zeros(2, 4, 5), device=(2, 0))}, ValueError, "grad_kl is on cuda:0 and q1 on cpu"),
]


@pytest.mark.parametrize(("options", "error", "message"), BACKWARD + BACKWARD_ON_HOST)
def test_backward(options, error, message):
    _, state = skl.forward(**arrays())
    out = skl.backward(state)
    for array in (out.q2, out.k2):
        array[...] = np.nan
    with pytest.raises(error, match=message):
        skl.backward(state, **options, out=out)
    assert np.isnan(out.q2).all() and np.isnan(out.k2).all()


@pytest.mark.parametrize(("options", "error", "message"), [row for row in BACKWARD if not {"grad_kl"} & row[0].keys()])
def test_options_of_backward_where_a_call_is_planned(options, error, message):
    takes = {skl.workspace_size: {"wrt", "deterministic"}, skl.warmup: {"wrt", "dtype"}, skl.explain: {"wrt", "dtype"}}
    for function, names in takes.items():
        if options.keys() <= names and not (function is skl.workspace_size and options.get("wrt", 0) is None):
            with pytest.raises(error, match=message):
                function(**arrays(), **options)


@pytest.mark.parametrize("grad", [zeros(2, 4, 5), zeros(2)])
@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_rows_of_gradients_after_a_reduction(reduction, grad):
    _, state = skl.forward(**arrays(), reduction=reduction)
    with pytest.raises(ValueError, match=f"grad_kl has shape .*; after reduction='{reduction}' it takes a scalar"):
        skl.backward(state, grad)


OUT_GRADIENTS = [
    (lambda g, s: {"q2": g.q2}, TypeError, "out is a dict"),
    (lambda g, s: g._replace(k2=None), ValueError, "out.k2 is None"),
    (lambda g, s: g._replace(k2=3), TypeError, "out.k2 is a int"),
    (lambda g, s: g._replace(k2=g.k2.astype(np.float16)), TypeError, "out.k2 has dtype float16; it takes float32"),
    (lambda g, s: g._replace(k2=g.k2[:, :, :6]), ValueError, "out.k2 has shape"),
    (lambda g, s: g._replace(k2=repeated(zeros(7, 16), 2, 1)), ValueError, "out.k2 has strides"),
    (lambda g, s: g._replace(k2=s.inputs.k2), ValueError, "out.k2 overlaps k2"),
    (lambda g, s: g._replace(k2=g.q2[:, :1, :, :].reshape(-1)[:0]), ValueError, "out.k2 has shape"),
    (lambda g, s: g._replace(k2=Legacy(zeros(2, 1, 7, 16))), ValueError, "out.k2 is an array of dlpack"),
]
OUT_GRADIENTS_ON_HOST = [
    (lambda g, s: g._replace(k2=frozen(g.k2.copy())), ValueError, "out.k2 is read-only"),
]


@pytest.mark.parametrize(("change", "error", "message"), OUT_GRADIENTS + OUT_GRADIENTS_ON_HOST)
def test_out_of_backward(change, error, message):
    _, state = skl.forward(**arrays())
    out = skl.backward(state)
    for array in (out.q2, out.k2):
        array[...] = np.nan
    inputs = [a.copy() for a in state.inputs[:4]]
    with pytest.raises(error, match=message):
        skl.backward(state, out=change(out, state))
    assert np.isnan(out.q2).all() and np.isnan(out.k2).all()
    assert all((a == b).all() for a, b in zip(inputs, state.inputs[:4], strict=True))


def test_out_of_backward_on_rows_and_weights():
    shapes = {n: (2, 4, 5, 8) for n in SIDES}
    _, state = skl.forward(**arrays(shapes))
    pool = np.zeros(1000, np.float32)
    out = skl.Gradients(q2=pool[:320].reshape(2, 4, 5, 8))
    with pytest.raises(ValueError, match=r"out\.q2 overlaps grad_kl"):
        skl.backward(state, pool[310:350].reshape(2, 4, 5), wrt="q2", out=out)
    with pytest.raises(ValueError, match=r"out\.q2 overlaps state\.rows\.kl"):
        skl.backward(replaced(state, kl=pool[310:350].reshape(2, 4, 5)), wrt="q2", out=out)
    both = skl.Gradients(q2=pool[:320].reshape(2, 4, 5, 8), k2=pool[8:328].reshape(2, 4, 5, 8))
    with pytest.raises(ValueError, match=r"out\.q2 overlaps out\.k2"):
        skl.backward(state, out=both)
    assert not pool.any()


@pytest.mark.parametrize("at", [0, 1])
def test_out_of_backward_on_the_reduced(at):
    shapes = {n: (2, 4, 5, 8) for n in SIDES}
    _, state = skl.forward(**arrays(shapes), reduction="mean")
    pool = np.zeros(320, np.float32)
    reduced = [*state.reduced]
    reduced[at] = pool[7:8].reshape(())
    state = skl.KLState(state.rows, state.problem, state.inputs, tuple(reduced))
    with pytest.raises(ValueError, match=rf"out\.q2 overlaps state\.reduced\[{at}\]"):
        skl.backward(state, wrt="q2", out=skl.Gradients(q2=pool.reshape(2, 4, 5, 8)))
    assert not pool.any()


def other_problem(state, **fields):
    return dataclasses.replace(state, problem=dataclasses.replace(state.problem, **fields))


STATES = [
    (lambda s: s.rows, TypeError, "state is a RowStats"),
    (lambda s: None, TypeError, "state is a NoneType"),
    (lambda s: skl.KLState(tuple(s.rows), s.problem, s.inputs), TypeError, "state.rows is a tuple"),
    (lambda s: skl.KLState(s.rows, "bhsd", s.inputs), TypeError, "state.problem is a str"),
    (lambda s: skl.KLState(s.rows, s.problem, s.inputs[:4]), TypeError, "state.inputs is a tuple"),
    (lambda s: skl.KLState(s.rows, s.problem, s.inputs._replace(k2=None)), TypeError, "k2 is None"),
    (lambda s: skl.KLState(s.rows, s.problem, s.inputs._replace(k1=zeros(2, 4, 7, 8))), ValueError, "state.inputs make"),
    (lambda s: skl.KLState(s.rows, s.problem, s.inputs._replace(seqlens_k=ints(1, 1))), ValueError, "state.inputs make"),
    (lambda s: other_problem(s, scale1=-1.0), ValueError, "scale1 is -1.0"),
    (lambda s: other_problem(s, scale2="1"), TypeError, "scale2 is a str"),
    (lambda s: other_problem(s, layout="bhdn"), ValueError, "layout is 'bhdn'"),
    (lambda s: other_problem(s, reduction=None), TypeError, "reduction is None"),
    (lambda s: other_problem(s, causal=1), TypeError, "causal is a int"),
    (lambda s: other_problem(s, window=(-2, 0)), ValueError, "window is"),
    (lambda s: other_problem(s, q_offset=0.5), TypeError, "q_offset is a float"),
    (lambda s: other_problem(s, q_offset="vector"), ValueError, "state.inputs make"),
    (lambda s: other_problem(s, heads=3), ValueError, "state.inputs make"),
    (lambda s: other_problem(s, dtype="float16"), ValueError, "state.inputs make"),
    (lambda s: other_problem(s, has_seqlens_q=True), ValueError, "state.inputs make"),
    (lambda s: s.with_rows(None), TypeError, "state.rows is a NoneType"),
    (lambda s: replaced(s, kl=zeros(2, 4, 6)), ValueError, "state.rows.kl has shape"),
    (lambda s: replaced(s, kl=zeros(2, 4, 5, dtype=np.float16)), TypeError, "state.rows.kl has dtype float16"),
    (lambda s: replaced(s, ref1=zeros(2, 4, 10)[..., ::2]), ValueError, "state.rows.ref1 has strides"),
]


@pytest.mark.parametrize(("change", "error", "message"), STATES)
def test_states(change, error, message):
    _, state = skl.forward(**arrays())
    with pytest.raises(error, match=message):
        skl.backward(change(state))


@pytest.mark.parametrize("reduced", [3, "mean", (zeros(),), (zeros(), zeros(), zeros()), {"value": 1}], ids=str)
def test_reduced_values_of_a_state(reduced):
    _, state = skl.forward(**arrays(), reduction="mean")
    out = skl.Gradients(q2=np.full((2, 4, 5, 16), np.nan, np.float32))
    with pytest.raises(TypeError, match=r"state\.reduced is .*; it takes None or \(value, factor\)"):
        skl.backward(dataclasses.replace(state, reduced=reduced), wrt="q2", out=out)
    assert np.isnan(out.q2).all()


MERGES = [
    (lambda r: r, TypeError, "rows_list is a RowStats; it takes a list"),
    (lambda r: 3, TypeError, "rows_list is a int"),
    (lambda r: [], ValueError, "rows_list is empty"),
    (lambda r: [r, tuple(r)], TypeError, r"rows_list\[1\] is a tuple"),
    (lambda r: [r, r._replace(kl=zeros(2, 4, 6))], ValueError, r"rows_list\[1\].kl has shape"),
    (lambda r: [r._replace(ref2=zeros(2, 4, 5, dtype=np.float64))], TypeError, r"rows_list\[0\].ref2 has dtype float64"),
    (lambda r: [r, r._replace(ref2=zeros(2, 4, 10)[..., ::2])], ValueError, r"rows_list\[1\].ref2 has strides"),
    (lambda r: [r, r._replace(kl=None)], TypeError, r"rows_list\[1\].kl is a NoneType"),
]


@pytest.mark.parametrize(("change", "error", "message"), MERGES)
def test_merge(change, error, message):
    _, state = skl.forward(**arrays())
    with pytest.raises(error, match=message):
        skl.merge(change(state.rows))
