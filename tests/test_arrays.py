"""Views of arrays of every framework, capsules, overlap, and the copies that the kernels need."""

import gc
import subprocess
import sys

import numpy as np
import pytest

from streamkl_cupy import arrays, dlpack, padding
from streamkl_cupy.arrays import as_numpy, view
from streamkl_cupy.frameworks import framework_for, stream_pointer

from .producers import Legacy, ReadOnly, bfloat16

CPU = ("cpu", 0)


def test_numpy_view():
    a = np.arange(24, dtype=np.float32).reshape(2, 3, 4)[:, ::-1, 1:]
    v = view("q1", a)
    assert v == (a.__array_interface__["data"][0], (2, 3, 3), (12, -4, 1), "float32", CPU, False, "numpy", a)
    assert as_numpy(v) is a


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "int32", "uint8"])
def test_numpy_dtypes(dtype):
    assert view("q1", np.zeros((2, 3), dtype)).dtype == dtype


def test_numpy_bfloat16_and_readonly():
    a = bfloat16(np.ones((2, 3)))
    a.flags.writeable = False
    v = view("q1", a)
    assert (v.dtype, v.readonly) == ("bfloat16", True)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("form", ["plain", "transposed", "sliced", "expanded", "parameter", "empty"])
def test_torch_view(dtype, form):
    torch = pytest.importorskip("torch")
    t = torch.arange(24.0).to(getattr(torch, dtype)).reshape(2, 3, 4)
    t = {
        "plain": lambda: t,
        "transposed": lambda: t.transpose(0, 1),
        "sliced": lambda: t[:, 1:, ::2],
        "expanded": lambda: t[:1].expand(5, 3, 4),
        "parameter": lambda: torch.nn.Parameter(t),
        "empty": lambda: t[:0],
    }[form]()
    v = view("q1", t)
    assert (v.shape, v.strides, v.dtype, v.device, v.framework) == (tuple(t.shape), t.stride(), dtype, CPU, "torch")
    assert type(v.shape) is tuple
    got = as_numpy(v)
    assert got.dtype.name == dtype
    np.testing.assert_array_equal(got.astype(np.float32), t.detach().float().numpy())
    if form == "plain":
        got[0, 0, 0] = 7
        assert float(t[0, 0, 0]) == 7


def test_torch_without_memory():
    torch = pytest.importorskip("torch")
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        fake = torch.ones(2, 3)
    for tensor in (fake, torch.ones(2, 3, device="meta")):
        with pytest.raises(TypeError, match=r"q1 .*torch\.library\.custom_op"):
            view("q1", tensor)
    with pytest.raises(TypeError, match="q1"):
        view("q1", torch.ones(2, 3).to_sparse())
    with pytest.raises(TypeError, match="q1"):
        torch.vmap(lambda x: view("q1", x))(torch.ones(2, 3))
    negated = torch.complex(torch.ones(2, 3), torch.ones(2, 3)).conj().imag
    for lazy in (negated, torch.tensor(1 + 2j).conj().imag, torch._neg_view(torch.ones(2, 3)), torch._neg_view(torch.ones(()))):
        assert lazy.is_neg()
        with pytest.raises(ValueError, match=r"q1 is a lazily negated view.*resolve_neg"):
            view("q1", lazy)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_jax_view(dtype):
    jax = pytest.importorskip("jax")
    x = jax.numpy.arange(12.0).reshape(3, 4).astype(dtype)
    v = view("q1", x)
    assert (v.shape, v.strides, v.dtype, v.device, v.readonly, v.framework) == ((3, 4), (4, 1), dtype, CPU, True, "jax")
    got = as_numpy(v)
    assert not got.flags.writeable
    np.testing.assert_array_equal(got.astype(np.float32), np.arange(12.0).reshape(3, 4))
    with pytest.raises(TypeError, match=r"q1 is a .*Tracer"):
        jax.jit(lambda y: view("q1", y) and y)(x)
    x.delete()
    with pytest.raises(TypeError, match=r"q1 .*deleted"):
        view("q1", x)


@pytest.mark.parametrize("thing", [[1.0], (1.0,), 1.0, 3, "q", None, object(), memoryview(b"ab"), np.float32(1)])
def test_no_array(thing):
    with pytest.raises(TypeError, match=f"k2 is a {type(thing).__name__}; it takes an array"):
        view("k2", thing)


def test_odd_numpy():
    with pytest.raises(TypeError, match="q1 is a masked array"):
        view("q1", np.ma.masked_array([1.0]))
    with pytest.raises(ValueError, match="q1 has a stride of 5 bytes"):
        view("q1", np.zeros(4, np.dtype([("a", "u1"), ("b", "<f4")]))["b"])
    assert "byte order" in view("q1", np.zeros(4, ">f4")).dtype


@pytest.mark.parametrize("producer", [Legacy, ReadOnly])
@pytest.mark.parametrize("make", [np.ascontiguousarray, lambda a: a[:, ::2], lambda a: a[:0], lambda a: a[:1, None, :1], bfloat16])
def test_capsule(producer, make):
    a = make(np.arange(24, dtype=np.float32).reshape(4, 6))
    p = producer(a, byte_offset=16)
    v = view("q1", p)
    assert (v.shape, v.dtype, v.device, v.framework) == (a.shape, a.dtype.name, CPU, "dlpack")
    assert v.readonly is (producer is ReadOnly)
    got = as_numpy(v)
    np.testing.assert_array_equal(got, a)
    assert p.streams == [None]
    view_pointer = v.pointer
    assert view_pointer == a.__array_interface__["data"][0]
    del v
    gc.collect()
    assert p.deleted == (1 if a.size == 0 else 0)  # an array of that memory keeps the capsule
    del got
    gc.collect()
    assert (p.deleted, p.exports) == (1, set())


def test_capsule_without_strides():
    a = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    v = view("q1", Legacy(a, null_strides=True))
    assert v.strides == (12, 4, 1)
    np.testing.assert_array_equal(as_numpy(v), a)


def test_capsule_leaks_nothing():
    p = Legacy(np.zeros((2, 3), np.float32))
    for _ in range(1000):
        view("q1", p)
    assert (p.deleted, p.exports) == (1000, set())


@pytest.mark.parametrize(("code", "said"), [(10, "ROCm"), (14, "oneAPI"), (77, "DLPack device type 77")])
def test_capsule_on_another_device(code, said):
    with pytest.raises(ValueError, match=f"q1 is on {said}"):
        view("q1", Legacy(np.zeros(2, np.float32), device=(code, 0)))


def test_pinned_memory_is_cpu():
    assert view("q1", Legacy(np.zeros(2, np.float32), device=(3, 1))).device == CPU


@pytest.mark.parametrize("device", [(2, 1), (13, 1)])
@pytest.mark.parametrize(("launch", "asked"), [(0, 1), (1, 1), (2, 2), (140_000, 140_000)])
def test_capsule_stream(device, launch, asked):
    """The producer is told which stream reads, in DLPack's convention; it never gets None, which may synchronise."""
    p = Legacy(np.zeros((2, 3), np.float32), device=device)
    assert view("q1", p, launch).device == ("cuda", 1)
    assert p.streams == [asked]


def test_capsule_of_a_later_version():
    p = ReadOnly(np.zeros(2, np.float32))
    p.version = (2, 0)
    with pytest.raises(TypeError, match=r"q1 .*version 2\.0"):
        view("q1", p)


def test_consumed_capsule():
    capsule = np.zeros(3).__dlpack__()

    class Once:
        def __dlpack_device__(self):
            return (1, 0)

        def __dlpack__(self, **_):
            return capsule

    np.from_dlpack(Once())
    with pytest.raises(TypeError, match=r"q1 .*unconsumed"):
        view("q1", Once())


def test_contiguous():
    a = np.zeros((2, 1, 3, 4), np.float32)
    assert arrays.is_contiguous(view("a", a))
    assert arrays.is_contiguous(view("a", a[:, :, ::5][:, :, :1, :])) is False
    assert arrays.is_contiguous(view("a", np.broadcast_to(a[:1, :, :1, :1], (1, 1, 1, 1))))
    assert arrays.is_contiguous(view("a", a[:, :, :0]))
    assert not arrays.is_contiguous(view("a", a.swapaxes(0, 2)))
    assert dlpack.contiguous_strides(()) == ()


def test_overlap_is_exact():
    packed = np.zeros((4, 3, 8), np.float32)
    q, k, v = (view("a", packed[:, i]) for i in range(3))
    assert arrays.byte_span(q)[1] > arrays.byte_span(k)[0]
    assert not arrays.overlap(q, k) and not arrays.overlap(q, v)
    assert arrays.overlap(q, view("a", packed[2:, 0, ::-1]))
    assert not arrays.overlap(view("a", packed[..., 0::2]), view("a", packed[..., 1::2]))
    low, high = arrays.byte_span(view("a", packed[::-1]))
    assert (low, high - low) == (packed.__array_interface__["data"][0], packed.nbytes)


def test_overlap_with_itself():
    a = np.zeros((4, 6), np.float32)
    for ok in (a, a.T, a[::2, ::-1], a[:1], a[:0], np.broadcast_to(a[:1], (1, 6))):
        assert not arrays.overlaps_itself(view("a", ok))
    windows = np.lib.stride_tricks.sliding_window_view(a, 3, axis=1)
    for bad in (np.broadcast_to(a[:1], (4, 6)), windows):
        assert arrays.overlaps_itself(view("a", bad))


@pytest.mark.parametrize(
    ("shape", "make", "reason"),
    [
        ((2, 2, 5, 16), lambda a: a, None),
        ((2, 5, 2, 16), lambda a: a.swapaxes(1, 2), None),
        ((2, 5, 3, 2, 16), lambda a: a[:, :, 1], None),
        ((2, 2, 5, 24), lambda a: a[..., 8:], None),
        ((2, 2, 5, 24), lambda a: a[..., 4:20], "first row"),
        ((2, 2, 5, 20), lambda a: a[..., :16], "not all aligned"),
        ((2, 1, 1, 20), lambda a: a[:1, ..., :16], None),
        ((2, 2, 16, 5), lambda a: a.swapaxes(2, 3), "last axis"),
        ((2, 2, 5, 16), lambda a: a[:, :, ::-1], "backwards"),
        ((2, 2, 5, 20), lambda a: a, "20 padded to 24"),
        ((2, 2, 0, 16), lambda a: a, None),
    ],
)
def test_what_is_copied(shape, make, reason):
    aligned = np.zeros(np.prod(shape) + 64, np.float16)
    start = -(aligned.__array_interface__["data"][0] // 2) % 32
    got = padding.reason_to_copy(view("q1", make(aligned[start : start + np.prod(shape)].reshape(shape))))
    assert got is None if reason is None else reason in got


def test_allocation():
    f = framework_for("numpy", CPU)
    assert f.empty((2, 3), "bfloat16").dtype.name == "bfloat16"
    parts = f.empty_parts(5, (2, 3))
    for array, v in parts:
        array[...] = 3
        assert (as_numpy(v) == 3).all() and v.shape == (2, 3) and arrays.is_contiguous(v)
        assert view("a", array).pointer == v.pointer
    assert len({v.pointer for _, v in parts}) == 5
    assert [a.shape for a, _ in f.empty_parts(2, ())] == [(), ()]
    assert [a.shape for a, _ in f.empty_parts(2, (0, 3))] == [(0, 3), (0, 3)]


def test_torch_allocation():
    torch = pytest.importorskip("torch")
    f = framework_for("torch", CPU)
    for array, v in f.empty_parts(5, (2, 3)):
        array.fill_(4)
        assert isinstance(array, torch.Tensor) and (as_numpy(v) == 4).all() and view("a", array).pointer == v.pointer
    assert f.empty((2,), "bfloat16").dtype == torch.bfloat16


class CudaStream:
    def __init__(self, pointer):
        self.pointer = pointer

    def __cuda_stream__(self):
        return (0, self.pointer)


def test_stream_argument():
    cupy_like, torch_like = type("S", (), {"ptr": 12})(), type("S", (), {"cuda_stream": 13})()
    assert [stream_pointer(s) for s in (None, 0, 2, cupy_like, torch_like, CudaStream(14))] == [None, 0, 2, 12, 13, 14]
    for bad in ("0", 1.5, True, object()):
        with pytest.raises(TypeError, match="stream"):
            stream_pointer(bad)
    with pytest.raises(ValueError, match="stream"):
        stream_pointer(-1)


def test_import_touches_no_cuda_state():
    code = """
import sys, numpy as np
import streamkl_cupy as skl
q = np.zeros((1, 1, 2, 8), np.float32)
kl, state = skl.forward(q, q, q, q)
skl.backward(state)
assert not {"cupy", "torch", "jax", "cupy_backends"} & set(sys.modules), sorted(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
