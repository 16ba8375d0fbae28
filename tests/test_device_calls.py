"""The way of a call on CUDA arrays up to the kernels, without a GPU: host memory that says it is on a device, NumPy for kernels.

What is checked is what the kernels are handed: addresses, strides, padded shapes, scratch, streams. `tests/gpu` has the rest.
"""

import re
from types import SimpleNamespace

import numpy as np
import pytest

import streamkl_cupy as skl
from streamkl_cupy import arrays, frameworks, numpy_backend, on_device, reference
from streamkl_cupy.arrays import as_numpy
from streamkl_cupy.state import RowStats

from .producers import Legacy, bfloat16

SIDES = ("q1", "k1", "q2", "k2")
DEVICE = ("cuda", 3)
STREAM = 4096
KERNEL_BYTES = 100


def on_cuda(array):
    return Legacy(array, device=(2, DEVICE[1]))


def aligned(array):
    """A copy at an address that is a multiple of 64."""
    buffer = np.zeros(array.nbytes + 64, np.uint8)
    start = -buffer.__array_interface__["data"][0] % 64
    result = buffer[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    result[...] = array
    return result


class DeviceArrays(frameworks.Framework):
    """Memory for results: host memory, poisoned, as CUDA capsules."""

    name = "dlpack"

    def __init__(self):
        super().__init__(DEVICE)
        self.allocated = []

    def empty(self, shape, dtype):
        array = aligned(frameworks.NumPyArrays(("cpu", 0)).empty(shape, dtype))
        array.view(np.uint8).reshape(-1)[...] = 0xFF
        self.allocated.append(array.nbytes)
        return on_cuda(array)

    def parts(self, whole):
        return [on_cuda(whole.array[i, ...]) for i in range(len(whole.array))]

    def stream(self):
        return STREAM


class Kernels:
    """The numbers of the NumPy backend behind the interface of the kernels; remembers what it was handed."""

    def __init__(self):
        self.calls = []

    def _take(self, problem, views, workspace, allocate):
        for name in SIDES:
            v = views[name]
            assert v.strides[-1] == 1 and v.shape[-1] % 8 == 0 and v.shape == problem.shape(name)
            assert v.pointer % 16 == 0 and all(s * 2 % 16 == 0 for s, n in zip(v.strides[:-1], v.shape, strict=False) if n > 1)
        scratch = allocate(KERNEL_BYTES) if workspace is None else workspace
        assert scratch.shape[0] >= KERNEL_BYTES and scratch.dtype == "uint8"
        as_numpy(scratch)[:KERNEL_BYTES] = 0xEE
        return {name: as_numpy(v) for name, v in views.items()}

    def workspace_bytes(self, problem, *_):
        return KERNEL_BYTES

    def warm(self, problem, *_):
        self.calls.append(("warm", problem, None, None))

    def explain(self, problem, *_):
        return [f"kernels for D {problem.head_dim1}, {problem.head_dim2}"]


class Forward(Kernels):
    def run(self, problem, views, rows, reduced, workspace, stream, *, allocate):
        self.calls.append(("forward", problem, views, stream))
        numpy_backend.forward(problem, self._take(problem, views, workspace, allocate), RowStats(**self._rows(rows)))
        if reduced is not None:
            self.reduce_rows(problem, rows, reduced, workspace, allocate, stream)

    def reduce_rows(self, problem, rows, reduced, workspace, allocate, stream):
        self.calls.append(("reduce", problem, rows, stream))
        rows = RowStats(**self._rows(rows))
        count = max(int((rows.logsum1 > -np.inf).sum()), 1) if problem.reduction == "mean" else 1
        as_numpy(reduced[0])[...] = rows.kl.sum() / count
        as_numpy(reduced[1])[...] = 1 / count

    @staticmethod
    def _rows(rows):
        return {name: as_numpy(v) for name, v in rows.items()}


class Backward(Kernels):
    def run(self, problem, views, rows, weights, reduced, grads, deterministic, workspace, stream, *, allocate):
        self.calls.append(("backward", problem, views, stream))
        inputs = self._take(problem, views, workspace, allocate)
        weight = as_numpy(weights) if isinstance(weights, arrays.ArrayView) else weights
        if problem.reduction == "mean":
            weight = float(1 if weight is None else weight) * float(as_numpy(reduced[1]))
        stats = RowStats(**Forward._rows(rows))
        numpy_backend.backward(problem, inputs, stats, weight, {n: as_numpy(v) for n, v in grads.items()})


@pytest.fixture
def gpu(monkeypatch):
    def copy(target, source, stream):
        width = min(target.shape[-1], source.shape[-1])
        to = as_numpy(target)
        to[..., width:] = 0
        to[..., :width] = as_numpy(source)[..., :width]

    fake = SimpleNamespace(forward=Forward(), backward=Backward(), framework=DeviceArrays())
    monkeypatch.setattr(on_device, "_gpu", lambda: (fake.forward, fake.backward))
    monkeypatch.setattr(on_device, "copy_columns", copy)
    monkeypatch.setattr("streamkl_cupy.inputs.framework_for", lambda name, device: fake.framework)
    stream = SimpleNamespace(ptr=STREAM)
    cupy = SimpleNamespace(cuda=SimpleNamespace(get_current_stream=lambda index: stream))
    monkeypatch.setattr(arrays, "import_cupy", lambda: cupy)
    return fake


def make(d1=16, d2=24, dtype="float16", seed=0):
    rng = np.random.default_rng(seed)
    shapes = {"q1": (2, 4, 5, d1), "k1": (2, 2, 7, d1), "q2": (2, 4, 5, d2), "k2": (2, 1, 7, d2)}
    host = [rng.normal(size=shapes[n]).astype(np.float32) for n in SIDES]
    return [aligned(bfloat16(a) if dtype == "bfloat16" else a.astype(dtype)) for a in host]


def close(got, want, tolerance=2e-2):
    want = np.asarray(want)
    assert np.linalg.norm(got.array.astype(np.float64) - want) <= tolerance * np.linalg.norm(want)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize(("d1", "d2"), [(16, 24), (13, 24), (16, 5), (1, 20)])
@pytest.mark.parametrize("with_workspace", [False, True])
def test_padding(gpu, d1, d2, dtype, with_workspace):
    """Head dimensions that are no multiple of 8: padded for the kernels, scaled by the true one, gradients in the true shape."""
    host = make(d1, d2, dtype)
    inputs = [on_cuda(a) for a in host]
    size = skl.workspace_size(*inputs, causal=True, wrt=SIDES)
    workspace = np.zeros(size + 64, np.uint8)
    options = {"workspace": on_cuda(aligned(workspace[:size]))} if with_workspace else {}
    kl, state = skl.forward(*inputs, causal=True, **options)
    assert state.problem.head_dim1 == d1 and state.problem.scale1 == d1**-0.5
    want = reference.forward(*host, causal=True)
    np.testing.assert_allclose(kl.array, want.kl, rtol=1e-5, atol=5e-6)
    g = np.random.default_rng(1).normal(size=kl.shape).astype(np.float32)
    gpu.framework.allocated.clear()
    grads = skl.backward(state, on_cuda(g), wrt=SIDES, dtype="float32", **options)
    exact = reference.backward(*host, g, wrt=SIDES, causal=True)
    for name, array in zip(SIDES, host, strict=True):
        got = getattr(grads, name)
        assert got.array.shape == array.shape and got.array.dtype == np.float32
        close(got, getattr(exact, name), 1e-4)
    if with_workspace:
        assert len(gpu.framework.allocated) == len(SIDES)  # the gradients, nothing else
        again = skl.backward(state, on_cuda(g), wrt=SIDES, dtype="float32", out=grads, **options)
        assert len(gpu.framework.allocated) == len(SIDES) and again.q2 is grads.q2
    (_, problem, _, _), (_, again, _, _) = gpu.forward.calls[-1], gpu.backward.calls[-1]
    assert problem == again and (problem.head_dim1 % 8, problem.head_dim2 % 8) == (0, 0)


@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("form", ["whole", "rebuilt"])
def test_reductions(gpu, reduction, form):
    host, lengths = make(), np.array([5, 0], np.int32)
    vector = on_cuda(lengths)
    value, state = skl.forward(*(on_cuda(a) for a in host), seqlens_k=vector, reduction=reduction)
    want = reference.forward(*host, seqlens_k=lengths, reduction=reduction)
    assert float(value.array) == pytest.approx(float(want.reduced(reduction)), rel=1e-5)
    if form == "rebuilt":
        state = skl.KLState(state.rows, state.problem, state.inputs)
    calls = len(gpu.forward.calls)
    got = skl.backward(state, 3.0, dtype="float32")
    assert len(gpu.forward.calls) - calls == (1 if form == "rebuilt" and reduction == "mean" else 0)
    close(got.k2, reference.backward(*host, 3.0, seqlens_k=lengths, reduction=reduction).k2, 1e-4)


def test_read_in_place(gpu):
    """Aligned strided inputs reach the kernels as they lie; others through one copy, and only those."""
    rng = np.random.default_rng(2)
    packed = aligned(rng.normal(size=(2, 7, 2, 2, 16)).astype(np.float16))  # B, N, (q, k), H, D
    q1, k1 = packed[:, :, 0], packed[:, :, 1]
    q2, k2 = aligned(rng.normal(size=(2, 7, 2, 16)).astype(np.float16)), rng.normal(size=(2, 7, 16, 2)).astype(np.float16)
    host = [q1, k1, q2, k2.swapaxes(2, 3)]
    inputs = [on_cuda(a) for a in host]
    kl, _ = skl.forward(*inputs, layout="bshd")
    seen = gpu.forward.calls[-1][2]
    for name, array in zip(SIDES[:3], host, strict=False):
        assert seen[name].pointer == array.__array_interface__["data"][0]
        assert seen[name].strides == tuple(s // 2 for s in array.strides)
    assert seen["k2"].pointer != k2.__array_interface__["data"][0]
    np.testing.assert_allclose(kl.array, reference.forward(*host, layout="bshd").kl, rtol=1e-5, atol=5e-6)
    said = str(skl.explain(*inputs, layout="bshd"))
    assert "k2: copied once a call" in said and "last axis" in said and "q2: copied" not in said
    assert skl.workspace_size(*inputs, layout="bshd") == KERNEL_BYTES + 1024
    skl.warmup(*inputs, layout="bshd", wrt="q1")
    assert [c[0] for c in gpu.backward.calls] == ["warm", "warm"]


def test_streams(gpu):
    host = make()
    inputs = [on_cuda(a) for a in host]
    skl.forward(*inputs)
    _, state = skl.forward(*inputs, stream=SimpleNamespace(ptr=77))
    skl.backward(state, stream=0)
    assert [c[3] for c in gpu.forward.calls + gpu.backward.calls] == [STREAM, 77, 0]
    for producer in inputs:
        assert producer.streams == [STREAM, 77, 1]  # DLPack's name of the default stream is 1


def test_refill_allocates_nothing(gpu):
    inputs = [on_cuda(a) for a in make()]
    workspace = on_cuda(aligned(np.zeros(skl.workspace_size(*inputs, reduction="mean", wrt=SIDES), np.uint8)))
    options = {"workspace": workspace}
    _, state = skl.forward(*inputs, reduction="mean")
    grads = skl.backward(state)
    gpu.framework.allocated.clear()
    _, state = skl.forward(*inputs, reduction="mean", out=state, **options)
    skl.backward(state, out=grads, **options)
    assert gpu.framework.allocated == []


def test_bad_calls(gpu):
    host = make()
    inputs = [on_cuda(a) for a in host]
    _, state = skl.forward(*inputs)
    small = on_cuda(aligned(np.zeros(KERNEL_BYTES - 1, np.uint8)))
    askew = on_cuda(aligned(np.zeros(KERNEL_BYTES + 8, np.uint8))[8:])
    calls = len(gpu.forward.calls)
    for workspace, message in ((small, "workspace has 99 bytes; this call takes 100"), (askew, "workspace starts at address")):
        with pytest.raises(ValueError, match=message):
            skl.forward(*inputs, workspace=workspace)
        with pytest.raises(ValueError, match=message):
            skl.backward(state, workspace=workspace)
    for name, bad in (("seqlens_k", np.array([1, 2], np.int32)), ("seqlens_q", np.array([1, 2], np.int32))):
        with pytest.raises(ValueError, match=f"{name} is on cpu and q1 on cuda:3"):
            skl.forward(*inputs, **{name: bad})
    with pytest.raises(ValueError, match="grad_kl is on cpu and q1 on cuda:3"):
        skl.backward(state, np.zeros((2, 4, 5), np.float32))
    with pytest.raises(ValueError, match="k1 is on cpu and q1 on cuda:3"):
        skl.forward(inputs[0], host[1], *inputs[2:])
    odd = on_cuda(np.zeros(9, np.uint8)[1:].view(np.int32))
    with pytest.raises(ValueError, match="seqlens_k starts at address"):
        skl.forward(*inputs, seqlens_k=odd)
    out = skl.Gradients(q2=on_cuda(np.zeros((2, 4, 5, 28), np.float16)[..., :24]))
    with pytest.raises(ValueError, match=re.escape("out.q2 has strides (560, 140, 28, 1)")):
        skl.backward(state, wrt="q2", out=out)
    assert len(gpu.forward.calls) == calls and gpu.backward.calls == []
    assert skl.backward(state, np.float32(2)).q2 is not None


def askew(shape, dtype=np.float32):
    """An array at an address that is no multiple of its items' size."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return on_cuda(aligned(np.zeros(size + 1, np.uint8))[1:].view(dtype).reshape(shape))


def test_addresses_between_items(gpu, monkeypatch):
    """Kernels load whole items: every array that they read or write starts at a multiple of one."""
    monkeypatch.setattr("streamkl_cupy.api.framework_for", lambda name, device: gpu.framework)
    inputs = [on_cuda(a) for a in make()]
    _, state = skl.forward(*inputs, reduction="mean")
    _, plain = skl.forward(*inputs)
    rows, one = askew((2, 4, 5)), askew(())

    def changed(base=state, **parts):
        return skl.KLState(base.rows._replace(**parts), base.problem, base.inputs, base.reduced)

    def reduced(i):
        pair = [*state.reduced]
        pair[i] = one
        return skl.KLState(state.rows, state.problem, state.inputs, tuple(pair))

    calls = [
        ("grad_kl", lambda: skl.backward(plain, rows)),
        ("grad_kl", lambda: skl.backward(state, one)),
        *((f"state.rows.{n}", lambda n=n: skl.backward(changed(**{n: rows}))) for n in RowStats._fields),
        *((f"state.reduced[{i}]", lambda i=i: skl.backward(reduced(i))) for i in (0, 1)),
        *((f"out.rows.{n}", lambda n=n: skl.forward(*inputs, out=changed(plain, **{n: rows}))) for n in RowStats._fields),
        *((f"out.reduced[{i}]", lambda i=i: skl.forward(*inputs, reduction="mean", out=reduced(i))) for i in (0, 1)),
        ("out.q2", lambda: skl.backward(plain, wrt="q2", out=skl.Gradients(q2=askew((2, 4, 5, 24), np.float16)))),
        ("rows_list[1].ref1", lambda: skl.merge([plain.rows, plain.rows._replace(ref1=rows)])),
        ("rows_list[0].kl", lambda: skl.merge([plain.rows._replace(kl=rows)])),
    ]
    launched = len(gpu.forward.calls)
    for name, call in calls:
        with pytest.raises(ValueError, match=re.escape(f"{name} starts at address 0x") + r".* multiple of its items' [24] bytes"):
            call()
    assert len(gpu.forward.calls) == launched and gpu.backward.calls == []


def test_wrong_values_in_device_vectors_are_not_read(gpu, monkeypatch):
    """No host synchronisation: the values belong to the kernels."""
    monkeypatch.setattr(numpy_backend, "check_vectors", None)
    inputs = [on_cuda(a) for a in make()]
    skl.forward(*inputs, seqlens_k=on_cuda(np.array([3, 4], np.int32)))
