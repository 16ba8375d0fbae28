"""Which keys a row sees: causal, offsets, windows, padded lengths and packed segments, forward and backward, on both backends."""

import numpy as np
import pytest

import streamkl_cupy as skl
from streamkl_cupy.checks import SIDES

from .oracle import check, check_gradients, check_rows, make, nan_gradients, poisoned, row_weights, run_forward, truth

SIZES = [(37, 53), (53, 37), (64, 64), (150, 150), (1, 300)]


@pytest.mark.parametrize("n", SIZES, ids=str)
@pytest.mark.parametrize("q_offset", [None, 0, 7, -9, 1000, -1000, [4, -3, 60]], ids=str)
def test_causal(backend, n, q_offset):
    case = make(1, "float16", n=n, causal=True, q_offset=q_offset)
    check(backend, case, row_weights(case))


WINDOWS = [(0, 0), (5, 0), (0, 5), (5, 7), (-1, 3), (3, -1), (100, 100), (1 << 30, 0)]


@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("q_offset", [None, 11, [4, -30, 60]], ids=str)
def test_windows(backend, window, causal, q_offset):
    case = make(2, "bfloat16", n=(70, 90), window=window, causal=causal, q_offset=q_offset)
    check(backend, case, row_weights(case))


@pytest.mark.parametrize("window", [(200, 0), (64, 64), (1, 300)], ids=str)
def test_windows_over_many_tiles(backend, window):
    case = make(3, "float16", batch=1, heads=2, heads_k=(1, 2), n=(700, 900), window=window)
    check(backend, case, row_weights(case))


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_causal_over_many_tiles(backend, dtype):
    case = make(4, dtype, batch=1, heads=2, heads_k=(1, 2), n=(600, 600), causal=True)
    check(backend, case, row_weights(case))


def test_an_offset_without_a_mask_has_no_effect(backend):
    case = make(5, "float16")
    plain, shifted = (run_forward(backend, c) for c in (case, case.with_options(q_offset=-40)))
    np.testing.assert_array_equal(backend.get(plain.kl), backend.get(shifted.kl))


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_leading_rows_without_keys(backend, dtype, reduction):
    """More rows than keys, aligned at the bottom right: the first rows see nothing."""
    case = make(6, dtype, n=(60, 21), causal=True, reduction=reduction)
    run = check(backend, case)
    kl, lse = backend.get(run.state.kl), backend.get(run.state.rows.logsum1)
    assert not kl[:, :, :39].any() and np.isneginf(lse[:, :, :39]).all() and np.isfinite(lse[:, :, 39:]).all()


LENGTHS = [
    ({"seqlens_k": [53, 1, 20]}, "keys"),
    ({"seqlens_q": [37, 1, 20]}, "rows"),
    ({"seqlens_q": [5, 37, 0], "seqlens_k": [53, 0, 48]}, "both"),
    ({"seqlens_q": [0, 0, 0]}, "no rows"),
    ({"seqlens_k": [0, 0, 0]}, "no keys"),
    ({"seqlens_q": [33, 16, 17], "seqlens_k": [32, 33, 16]}, "near the tiles' edges"),
]


@pytest.mark.parametrize("lengths", [v for v, _ in LENGTHS], ids=[name for _, name in LENGTHS])
@pytest.mark.parametrize("mask", [{}, {"causal": True}, {"causal": True, "q_offset": 3}, {"window": (4, 9)}], ids=str)
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_padded_lengths(backend, lengths, mask, value):
    """Beyond the lengths there may be anything: NaN there leaks nowhere."""
    case = poisoned(make(7, "float16", **lengths, **mask), value)
    check(backend, case, row_weights(case))


SEGMENTS = [
    ({"cu_seqlens_q": [0, 0, 3, 5, 5], "cu_seqlens_k": [0, 4, 6, 9, 12], "n": (5, 12)}, "empty rows"),
    ({"cu_seqlens_q": [0, 4, 6, 9, 12], "cu_seqlens_k": [0, 0, 3, 5, 5], "n": (12, 5)}, "empty keys"),
    ({"cu_seqlens_q": [0, 20, 20, 57], "cu_seqlens_k": [0, 40, 61, 61], "n": (70, 66)}, "tails"),
    ({"cu_seqlens_q": [0, 150, 151, 300], "cu_seqlens_k": [0, 100, 300, 317], "n": (300, 317)}, "long and short"),
    ({"cu_seqlens_q": [0, 0], "cu_seqlens_k": [0, 0], "n": (9, 11)}, "one empty segment"),
    ({"cu_seqlens_q": [0], "cu_seqlens_k": [0], "n": (9, 11)}, "no segments"),
    ({"cu_seqlens_q": list(range(0, 90, 3)), "cu_seqlens_k": list(range(0, 150, 5)), "n": (90, 150)}, "many short ones"),
]


@pytest.mark.parametrize("segments", [v for v, _ in SEGMENTS], ids=[name for _, name in SEGMENTS])
@pytest.mark.parametrize("mask", [{}, {"causal": True}, {"causal": True, "window": (6, -1)}, {"window": (2, 3), "q_offset": 1}], ids=str)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_packed_segments(backend, segments, mask, dtype):
    case = poisoned(make(8, dtype, layout="thd", **segments, **mask))
    check(backend, case, row_weights(case))


def test_packed_segments_have_offsets_of_their_own(backend):
    ends = {"cu_seqlens_q": [0, 9, 9, 30], "cu_seqlens_k": [0, 25, 30, 60]}
    case = poisoned(make(9, "float16", layout="thd", n=(30, 60), causal=True, q_offset=[3, 0, -5], **ends))
    check(backend, case, row_weights(case))


@pytest.mark.parametrize("mask", [{"window": (5, 3), "q_offset": 20}, {"causal": True, "q_offset": -4}, {"window": (0, 2)}], ids=str)
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_what_no_row_sees_may_be_nan(backend, mask, dtype):
    """Keys outside every window, rows whose window has no key."""
    case = poisoned(make(10, dtype, n=(50, 120), **mask))
    assert any(np.isnan(a.astype(np.float32)).any() for a in case.arrays.values())
    check(backend, case, row_weights(case))


@pytest.mark.parametrize("layout", ["bhsd", "thd"])
def test_a_weight_of_nan_on_rows_that_see_nothing_does_no_harm(backend, layout):
    """The upstream gradient of a padded row is anybody's guess."""
    extra = {"seqlens_q": [20, 0, 37], "seqlens_k": [53, 8, 0]}
    if layout == "thd":
        extra = {"cu_seqlens_q": [0, 10, 25], "cu_seqlens_k": [0, 0, 40]}
    case = make(11, "float16", layout=layout, **extra)
    run, weight = run_forward(backend, case), row_weights(case)
    expected = truth(case, weight, SIDES)
    weight = np.where(np.isneginf(expected.rows.lse1), np.nan, weight).astype(np.float32)
    grads = skl.backward(run.state, backend.put(weight), wrt=SIDES, out=nan_gradients(backend, case))
    check_gradients(backend, case, grads, expected)


def test_a_full_length_is_no_length(backend):
    """The same bits with and without a vector that hides nothing."""
    case = make(12, "float16", causal=True)
    full = case.with_options(seqlens_q=np.full(3, 37, np.int32), seqlens_k=np.full(3, 53, np.int32))
    plain, masked = (run_forward(backend, c) for c in (case, full))
    np.testing.assert_array_equal(backend.get(plain.kl), backend.get(masked.kl))
    for a, b in zip(*(skl.backward(r.state, wrt=SIDES) for r in (plain, masked)), strict=True):
        np.testing.assert_array_equal(backend.get(a).view(np.uint16), backend.get(b).view(np.uint16))


def test_a_masked_element_leaves_the_others_alone(backend):
    """One sequence of a batch without keys: the others have the same bits as without it."""
    case = make(13, "float16")
    plain = run_forward(backend, case)
    masked = run_forward(backend, case.with_options(seqlens_k=np.array([53, 0, 53], np.int32)))
    kl = [backend.get(r.kl) for r in (plain, masked)]
    grads = [skl.backward(r.state, wrt=SIDES) for r in (plain, masked)]
    for element in (0, 2):
        np.testing.assert_array_equal(kl[0][element], kl[1][element])
        for a, b in zip(*grads, strict=True):
            np.testing.assert_array_equal(backend.get(a)[element].view(np.uint16), backend.get(b)[element].view(np.uint16))
    assert not kl[1][1].any() and not any(backend.get(g)[1].any() for g in grads[1])


@pytest.mark.gpu
@pytest.mark.parametrize(
    "wrong",
    [
        {"seqlens_k": [1000, -5, 53]},
        {"seqlens_q": [1000, -5, 37]},
        {"q_offset": [2**31 - 1, -(2**31), 0], "causal": True},
        {"q_offset": [2**31 - 1, -(2**31), 0], "window": (3, 3)},
    ],
    ids=str,
)
def test_wrong_lengths_on_a_device_stay_inside_the_arrays(device, wrong):
    """They are not read on the host; the kernels clamp them."""
    case = make(14, "float16", **wrong)
    run = run_forward(device, case)
    grads = skl.backward(run.state, wrt=SIDES, out=nan_gradients(device, case))
    clamped = {name: np.clip(v, 0, 37 if name[-1] == "q" else 53).astype(np.int32) for name, v in case.options.items() if "seqlens" in name}
    clamped = case.with_options(**clamped)
    expected = truth(clamped, wrt=SIDES)
    check_rows(device, clamped, run.state, expected)
    check_gradients(device, clamped, grads, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("ends", [[0, 500, 1000], [-7, 10, 30], [20, 10, 30], [0, 40, 20]], ids=str)
@pytest.mark.parametrize("name", ["cu_seqlens_q", "cu_seqlens_k"])
def test_wrong_segments_on_a_device_stay_inside_the_arrays(device, name, ends):
    """Wrong numbers, but finite ones, and no access outside."""
    right = {"cu_seqlens_q": [0, 10, 30], "cu_seqlens_k": [0, 20, 40]}
    case = make(15, "float16", layout="thd", n=(30, 40), causal=True, **(right | {name: ends}))
    inputs = {n: device.put(a) for n, a in case.arrays.items()}
    vectors = {n: device.put(v) for n, v in case.options.items() if n.startswith("cu")}
    kl, state = skl.forward(**inputs, layout="thd", causal=True, **vectors)
    grads = skl.backward(state, wrt=SIDES)
    device.synchronize()
    assert device.get(kl).shape == (4, 30) and all(device.get(g).size for g in grads)
