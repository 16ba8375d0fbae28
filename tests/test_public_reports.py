"""What went wrong elsewhere, by its right value here: public reports on attention and divergence code, one kind a test.

Values with many digits were computed in float64. Reports on memory, DLPack, streams and compilers have their tests in
test_arrays.py, test_api.py and gpu/.
"""

import json
import pathlib

import numpy as np
import pytest

import streamkl_cupy as skl
from streamkl_cupy.problem import SIDES

from .oracle import (
    DTYPES,
    KL_FLOOR,
    NUMPY,
    Case,
    check,
    check_gradients,
    make,
    nan_gradients,
    poisoned,
    row_weights,
    run_forward,
    truth,
)

CASES = json.loads((pathlib.Path(__file__).parent / "cases" / "open_cases.json").read_text())
ROUNDING = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float32": 1e-5}


def numbers(values) -> np.ndarray:
    return np.array(values, dtype=float)


def embed(s1, s2, dtype="float32", offset=(0, 0), **options) -> Case:
    """Logits (rows, keys) of both sides as inputs, a sequence for each row; -inf, which comes last, is a key beyond the row's
    length. `offset` (left, right): every logit of side 1 gets left * right on top, exactly."""
    s1, s2 = (np.atleast_2d(numbers(s)) for s in (s1, s2))
    arrays = {}
    for side, s in (("1", s1), ("2", s2)):
        q, k = np.zeros((len(s), 1, 1, 8)), np.zeros((len(s), 1, s.shape[1], 8))
        q[..., 0], k[:, 0, :, 0] = 1, s
        if side == "1":
            q[..., 1], k[..., 1] = offset
        arrays |= {f"q{side}": q.astype(NUMPY[dtype]), f"k{side}": k.astype(NUMPY[dtype])}
    options = {"scale1": 1.0, "scale2": 1.0} | options
    if not np.isfinite(s1).all():
        options["seqlens_k"] = np.isfinite(s1).sum(axis=1).astype(np.int32)
    return Case(arrays, options, "logits")


def run_case(backend, name: str, dtype: str):
    """A case of the file on a device: the run, with float32 gradients, and the axes that the file leaves out."""
    case = CASES[name]
    if "s1" in case:
        problem, at = embed(case["s1"], case["s2"], dtype), (slice(None), 0, 0)
    else:
        options = {"scale1": case["scale"], "scale2": case["scale"]}
        if "cu_seqlens_q" in case:
            options |= {"layout": "thd"} | {n: np.array(case[n], np.int32) for n in ("cu_seqlens_q", "cu_seqlens_k")}
        else:
            options |= {"causal": True, "q_offset": 0 if "top_left" in name else None}
        heads = 1 if "cu_seqlens_q" in case else 0
        arrays = {n: np.expand_dims(numbers(case[n]), (heads,) if heads else (0, 1)).astype(NUMPY[dtype]) for n in SIDES}
        problem, at = Case(arrays, options, name), (0,) if heads else (0, 0)
    run = check(backend, problem, dtype="float32")
    return run, at


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", [name for name in CASES if name != "direction"])
def test_cases(backend, name, dtype):
    """Every number of cases/open_cases.json."""
    case, (run, at) = CASES[name], run_case(backend, name, dtype)
    for field in ("kl", "lse1", "lse2"):
        if field in case:
            np.testing.assert_allclose(backend.get(getattr(run.state, field))[at], numbers(case[field]), 1e-5, 5e-6, err_msg=field)
    for field in case.keys() & {"dS1", "dS2", "dQ1", "dK1", "dQ2", "dK2"}:
        source = f"k{field[2]}" if field[1] == "S" else field[1:].lower()
        got, want = backend.get(getattr(run.grads, source)), numbers(case[field])
        got = got[:, 0, :, 0] if field[1] == "S" else got[:, 0] if "cu_seqlens_q" in case else got[0, 0]
        atol = ROUNDING[dtype] * np.abs(want).max() + 2.0**-126  # one of them is 1e-85
        np.testing.assert_allclose(got, want, rtol=ROUNDING[dtype], atol=atol, err_msg=field)


# Masks, infinities, underflow and epsilons


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("beyond", ["-inf", "inf", "nan"])
def test_a_key_masked_on_both_sides_gives_no_nan(backend, dtype, beyond):
    """p-e-w/heretic#348, google-deepmind/optax#1786: 0 * (-inf - -inf)."""
    case = embed([1, 2, "-inf"], [2, 1, "-inf"], dtype)
    for side in "12":
        case.arrays[f"k{side}"][:, :, 2] = float(beyond)
    run = check(backend, case, dtype="float32")
    np.testing.assert_allclose(backend.get(run.kl).ravel(), 0.46211715726, rtol=1e-5)
    for side, want in (("2", [0.46211716, -0.46211716, 0]), ("1", [-0.39322387, 0.39322387, 0])):
        np.testing.assert_allclose(backend.get(getattr(run.grads, f"k{side}"))[0, 0, :, 0], want, rtol=ROUNDING[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_clipping_of_small_probabilities(backend, dtype):
    """cudnn-frontend#1136, cudnn-frontend#297, Megatron-LM#4055: a logarithm clipped at -100 gives 49.3, and no gradient where the
    student's probability underflows."""
    run = check(backend, embed([0, 0], [0, -200], dtype), dtype="float32")
    np.testing.assert_allclose(backend.get(run.kl).ravel(), 99.306852819440055, rtol=1e-5)
    np.testing.assert_allclose(backend.get(run.grads.k2)[0, 0, :, 0], [0.5, -0.5], rtol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_student_that_underflows_as_the_first_side(backend, dtype):
    """Soup#719, huggingface/trl#5594: the reverse KL is finite, its gradient was NaN."""
    run = check(backend, embed([0, -200], [0, 0], dtype), dtype="float32")
    np.testing.assert_allclose(backend.get(run.kl).ravel(), 0.69314718056, rtol=1e-5)
    np.testing.assert_allclose(backend.get(run.grads.k1)[0, 0, :, 0], [0, 0], atol=1e-7)
    np.testing.assert_allclose(backend.get(run.grads.k2)[0, 0, :, 0], [-0.5, 0.5], rtol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_fully_masked_row_poisons_nothing(backend, dtype):
    """pytorch#41508, pytorch#196170, allennlp#890: one row without keys, and every gradient was NaN."""
    case = poisoned(make(1, dtype, batch=2, heads=1, heads_k=(1, 1), n=(4, 4), causal=True, q_offset=[0, -1]))
    run = check(backend, case, row_weights(case))
    kl, lse = backend.get(run.kl), backend.get(run.state.lse1)
    assert kl[1, 0, 0] == 0 and np.isneginf(lse[1, 0, 0]) and np.isfinite(lse).sum() == 7
    assert not backend.get(run.grads.q1)[1, 0, 0].any() and not backend.get(run.grads.k2)[1, 0, 3].any()
    alone = make(1, dtype, batch=2, heads=1, heads_k=(1, 1), n=(4, 4), causal=True, q_offset=[0, 0])
    np.testing.assert_array_equal(kl[0], backend.get(run_forward(backend, alone).kl)[0])


@pytest.mark.parametrize("dtype", DTYPES)
def test_more_rows_than_keys_at_the_bottom_right(backend, dtype):
    """flash-attention#1778, flashinfer#4401, #4451, #4452: the leading rows see nothing, and were NaN."""
    case = make(2, dtype, n=(5, 2), causal=True)
    run = check(backend, case, row_weights(case))
    kl, lse = backend.get(run.kl), backend.get(run.state.lse2)
    assert not kl[..., :3].any() and np.isneginf(lse[..., :3]).all() and np.isfinite(lse[..., 3:]).all()
    np.testing.assert_allclose(kl[..., 3], 0, atol=5e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_both_alignments_of_the_causal_mask(backend, dtype):
    """flash-attention#951, #517, #282: two rows of five keys see all five at the bottom right, two at the top left."""
    for name, want in (("bottom_right", [0.46588488, 2.15482703]), ("top_left", [0, 0.12011451])):
        run, at = run_case(backend, f"causal_2x5_{name}", dtype)
        np.testing.assert_allclose(backend.get(run.kl)[at], want, rtol=1e-5, atol=5e-6)


def test_masked_keys_contribute_nothing_to_the_kl(backend):
    """Megatron-LM, KL from dense scores: a clamped target times (log eps - -inf) is +inf at every causally masked key."""
    case = make(3, "float16", n=(9, 30), causal=True, q_offset=0)
    run = check(backend, poisoned(case, np.inf))
    assert np.isfinite(backend.get(run.kl)).all()
    assert not backend.get(run.grads.k1)[:, :, 9:].any() and not backend.get(run.grads.k2)[:, :, 9:].any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_padded_row_is_zero(backend, dtype):
    """pytorch#103749, transformers#38690, #48363: backends disagree on padded rows, 0 or NaN. Six rows, the last one padding."""
    case = poisoned(make(4, dtype, batch=1, heads=2, heads_k=(1, 2), n=(6, 10), seqlens_q=[5]))
    run = check(backend, case, row_weights(case))
    assert not backend.get(run.kl)[:, :, 5].any() and np.isneginf(backend.get(run.state.lse1)[:, :, 5]).all()
    assert not backend.get(run.grads.q1)[:, :, 5].any() and not backend.get(run.grads.q2)[:, :, 5].any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("offset", [(0, 0), (96, 104), (496, 496)], ids=str)
def test_no_negative_kl(backend, dtype, offset):
    """transformers#3040: negative KL from attention maps; flashinfer#4267: logits of -2.45e5. A student that is nearly there."""
    rng = np.random.default_rng(5)
    s = np.round(rng.normal(size=(20, 300)) * 8) / 8
    near = s + np.where(rng.random(s.shape) < 0.05, 1 / 8, 0)
    equal = embed(s, s, dtype)
    assert not backend.get(check(backend, equal, dtype="float32").kl).any()
    case = embed(s, near, dtype, offset)
    kl = backend.get(run_forward(backend, case).kl)
    assert kl.min() >= KL_FLOOR
    np.testing.assert_allclose(kl, truth(case).rows.kl, rtol=1e-5, atol=5e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_inputs_are_not_overwritten(backend, dtype):
    """flash-linear-attention, fused_kl_div: gradients were written over the logits."""
    case = make(6, dtype, causal=True)
    run = check(backend, case, row_weights(case))
    for name, array in run.inputs.items():
        assert backend.get(array).tobytes() == case.arrays[name].tobytes(), name


@pytest.mark.parametrize("dtype", DTYPES)
def test_denominators_are_natural_logarithms_and_minus_infinity_for_empty_rows(backend, dtype):
    """flash-attention#978, pytorch#134650, pytorch#181645: +inf in some libraries, base 2 in others."""
    state = run_forward(backend, embed([[0, 0, 0, 0], ["-inf"] * 4], [[1, 1, 1, 1], ["-inf"] * 4], dtype)).state
    np.testing.assert_allclose(backend.get(state.lse1).ravel(), [np.log(4), -np.inf], rtol=1e-6)
    np.testing.assert_allclose(backend.get(state.lse2).ravel(), [1 + np.log(4), -np.inf], rtol=1e-6)


@pytest.mark.parametrize("name", ["softcap", "attn_mask", "sinks", "eps"])
def test_what_is_not_supported_is_not_ignored(backend, name):
    """sgl-kernel-xpu#491: softcap was accepted, and did nothing."""
    inputs = {n: backend.put(a) for n, a in make(7).arrays.items()}
    with pytest.raises(TypeError, match=name):
        skl.forward(**inputs, **{name: 5.0})


@pytest.mark.parametrize("dtype", DTYPES)
def test_negative_logits_are_no_mask(backend, dtype):
    """TextBrewer, att_ce_loss: a teacher's probability was dropped wherever its logit was negative."""
    run = check(backend, embed([-1, -2], [0, 0], dtype), dtype="float32")
    p = np.array([0.7310585786, 0.2689414214])
    np.testing.assert_allclose(backend.get(run.grads.k2)[0, 0, :, 0], 0.5 - p, rtol=ROUNDING[dtype])
    np.testing.assert_allclose(backend.get(run.kl).ravel(), (p * np.log(2 * p)).sum(), rtol=1e-5)


# Objective, direction, reduction


def test_direction(backend):
    """verl#7806, trl#3043, trl#4935: teacher and student swapped. KL(P1 || P2): the first two arguments are the teacher's."""
    teacher, student = np.log([0.9, 0.1]), np.log([0.6, 0.4])
    for first, second, name in ((teacher, student, "kl_teacher_student"), (student, teacher, "kl_student_teacher")):
        kl = backend.get(run_forward(backend, embed(first, second)).kl).ravel()
        np.testing.assert_allclose(kl, CASES["direction"][name], rtol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_mean_is_over_rows(backend, dtype):
    """deit#61, pytorch#2259, pytorch#14457, ActionCLIP#24: `mean` was divided by the number of keys as well."""
    case = make(8, dtype, batch=2, heads=3, heads_k=(3, 1), n=(4, 8))
    rows = backend.get(check(backend, case).kl).astype(float)
    for reduction, want in (("sum", rows.sum()), ("mean", rows.sum() / 24)):
        value = check(backend, case.with_options(reduction=reduction)).kl
        np.testing.assert_allclose(float(backend.get(value)), want, rtol=1e-6)


def test_all_keys_count(backend):
    """PaddleFleet#1682: a warm-up scored the columns up to a cap only. PaddleFleet#1753: shared memory grew with their number."""
    case = make(9, "bfloat16", batch=1, heads=1, heads_k=(1, 1), n=(3, 9000), causal=True)
    run = check(backend, case)
    np.testing.assert_array_equal(backend.get(run.grads.k2)[0, 0].astype(float).any(axis=-1), True)
    flat = run_forward(backend, case.with_arrays(q1=case.arrays["q1"] * 0, q2=case.arrays["q2"] * 0)).state
    np.testing.assert_allclose(backend.get(flat.lse1).ravel(), np.log([8998, 8999, 9000]), rtol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_over_micro_batches_add_up(backend, dtype):
    """Megatron-LM#4070: the loss was not scaled by the number of micro-batches. grad(a g) = a grad(g), and batches are independent."""
    case = make(10, dtype, batch=4, causal=True)
    whole = skl.backward(run_forward(backend, case).state, 1 / 4, wrt=SIDES, dtype="float32")
    for half in (slice(0, 2), slice(2, 4)):
        run = run_forward(backend, case.with_arrays(**{name: array[half] for name, array in case.arrays.items()}))
        part = skl.backward(run.state, 1 / 2, wrt=SIDES, dtype="float32")
        for name in SIDES:
            got, want = backend.get(getattr(part, name)) / 2, backend.get(getattr(whole, name))[half]
            assert np.linalg.norm(got - want) <= ROUNDING[dtype] * np.linalg.norm(want), name


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_over_two_calls_add_up(backend, dtype):
    """Megatron-LM#3674: too small by the number of context-parallel ranks. Query shards need an offset, and nothing else."""
    case = make(11, dtype, n=(64, 80), causal=True, reduction="sum")
    whole = check(backend, case)
    parts = []
    for begin, end in ((0, 24), (24, 64)):
        arrays = {name: case.arrays[name][:, :, begin:end] for name in ("q1", "q2")}
        parts.append(check(backend, case.with_arrays(**arrays).with_options(q_offset=16 + begin), dtype="float32"))
    total = float(backend.get(whole.kl))
    assert abs(sum(float(backend.get(part.kl)) for part in parts) - total) <= 1e-5 * total
    for name in ("k1", "k2"):
        together = sum(backend.get(getattr(part.grads, name)) for part in parts)
        want = truth(case, None, (name,)).grads[name]
        assert np.linalg.norm(together - want) <= ROUNDING[dtype] * np.linalg.norm(want), name


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_packing_changes_no_loss(backend, reduction):
    """Megatron-LM#4894, optipfair#34: padded or packed, over the same tokens; padding is no part of a mean."""
    q, k = np.array([7, 37, 20], np.int32), np.array([53, 11, 30], np.int32)
    padded = poisoned(make(12, "float16", reduction=reduction, seqlens_q=q, seqlens_k=k, causal=True))
    arrays = {}
    for name, array in padded.arrays.items():
        lengths = q if name[0] == "q" else k
        arrays[name] = np.concatenate([array[b, :, :n].swapaxes(0, 1) for b, n in enumerate(lengths)])
    ends = {f"cu_seqlens_{side}": np.concatenate([[0], np.cumsum(n)]).astype(np.int32) for side, n in (("q", q), ("k", k))}
    packed = Case(arrays, {"layout": "thd", "causal": True, "reduction": reduction} | ends, "packed")
    runs = [check(backend, case, 0.5) for case in (padded, packed)]
    values = [float(backend.get(run.kl)) for run in runs]
    np.testing.assert_allclose(values[0], values[1], rtol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_small_kl_still_has_a_gradient(backend, dtype):
    """verl#7806: a KL clamped at 0 has no gradient there. P2 - P1 at a student that is off by 2^-8 in one logit: KL 2e-6."""
    step = 2.0**-8
    run = check(backend, embed([0.0, 0.0], [0.0, step], dtype), dtype="float32")
    p = 1 / (1 + np.exp(-step))
    np.testing.assert_allclose(backend.get(run.grads.k2)[0, 0, :, 0], [0.5 - p, p - 0.5], rtol=2e-3)


def test_no_two_sizes_are_equal(backend):
    """maxtext#3364: equal sizes hid a wrong broadcast."""
    case = make(13, "float32", batch=3, heads=12, heads_k=(4, 2), n=(37, 53), d=(16, 24))
    assert len({3, 12, 4, 2, 37, 53, 16, 24}) == 8
    check(backend, case, row_weights(case))


@pytest.mark.parametrize("d", [8, 12])
def test_relation_heads(backend, d):
    """unilm#349, #354: hidden states split into 6 relation heads, teacher 16 wide, student 8 or 12; queries and keys are one tensor.
    "bshd" is the reshaped hidden state as it is; "bhsd" needs the transpose that was forgotten there."""
    rng = np.random.default_rng(14)
    hidden = {"1": rng.normal(size=(2, 33, 6 * 16)), "2": rng.normal(size=(2, 33, 6 * d))}
    split = {side: h.astype(np.float16).reshape(2, 33, 6, -1) for side, h in hidden.items()}
    case = Case({name: split[name[1]] for name in SIDES}, {"layout": "bshd"}, "relations")
    turned = Case({name: split[name[1]].swapaxes(1, 2) for name in SIDES}, {}, "relations, turned")
    on_device = {side: backend.put(array) for side, array in split.items()}
    one = check(backend, case, inputs={name: on_device[name[1]] for name in SIDES})
    other = check(backend, turned, inputs={name: on_device[name[1]].swapaxes(1, 2) for name in SIDES})
    np.testing.assert_allclose(backend.get(one.kl), backend.get(other.kl), rtol=1e-5, atol=1e-5)


# Structure


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_key_that_every_query_chooses(backend, dtype):
    """cudnn-frontend#385: the gradients of one key from many queries were lost or doubled. 24 heads of 40 equal rows share it."""
    case = make(15, dtype, batch=1, heads=1, heads_k=(1, 1), n=(1, 30))
    one = check(backend, case, dtype="float32")
    many = {name: np.broadcast_to(case.arrays[name], (1, 24, 40, case.arrays[name].shape[-1])) for name in ("q1", "q2")}
    all_rows = check(backend, case.with_arrays(**many), dtype="float32")
    for name in ("k1", "k2"):
        got, want = backend.get(getattr(all_rows.grads, name)), 960 * backend.get(getattr(one.grads, name))
        assert np.linalg.norm(got - want) <= ROUNDING[dtype] * np.linalg.norm(want), name


@pytest.mark.parametrize("mask", [{}, {"causal": True}], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_segments_without_rows_or_keys(backend, dtype, mask):
    """flash-attention#2562, #2568, #2421, #1537, #1713: faults, NaN, or gradients that were never written.
    The reported segments, an eighth as long."""
    ends = {"cu_seqlens_q": [0, 0, 1208, 2048, 2048], "cu_seqlens_k": [0, 2538, 4280, 5120, 8192]}
    ends = {name: [n // 8 for n in values] for name, values in ends.items()}
    case = poisoned(make(16, dtype, layout="thd", heads=2, heads_k=(1, 2), n=(256, 1024), **ends, **mask))
    run = check(backend, case)
    for name in ("k1", "k2"):
        grad = backend.get(getattr(run.grads, name)).astype(float)
        assert not grad[:317].any() and not grad[640:].any(), name


@pytest.mark.parametrize("d", [192, 256])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_wide_heads_have_a_backward(backend, d, dtype):
    """flash-attention#2902, #51, #1306: shared memory of the backward overflowed at 192 and 256; results differed at 256."""
    case = make(17, dtype, batch=1, heads=3, heads_k=(1, 3), n=(97, 130), d=(d, d), causal=True)
    check(backend, case, row_weights(case))


def test_heads_that_are_no_power_of_two(backend):
    """PaddleFleet#1938, xformers#1027: 24 heads of 576 columns, one key head ("12 is not a valid Repetition")."""
    case = make(18, "bfloat16", batch=1, heads=24, heads_k=(1, 8), n=(11, 70), d=(576, 128), causal=True)
    check(backend, case, row_weights(case))


def test_image_patches(backend):
    """Attention transfer between vision transformers: 12 heads of 64, 197 patches, no mask, float16."""
    case = make(19, "float16", batch=1, heads=12, heads_k=(12, 12), n=(197, 197), d=(64, 64), reduction="mean")
    check(backend, case)


@pytest.mark.parametrize("wrong", ["float16", "float64", "bfloat16"])
def test_buffers_of_a_wrong_dtype_are_refused_before_anything_is_written(backend, wrong):
    """cudnn-frontend#571, #572: misaligned stores, garbage, NaN, and inputs already overwritten when the error came."""
    case = make(20, "float32")
    run = run_forward(backend, case)
    out = nan_gradients(backend, case)
    out = out._replace(k2=backend.put(np.full(case.arrays["k2"].shape, np.nan, NUMPY[wrong])))
    with pytest.raises(TypeError, match="k2"):
        skl.backward(run.state, wrt=SIDES, out=out)
    assert all(np.isnan(backend.get(array).astype(np.float32)).all() for array in out)
    for name, array in run.inputs.items():
        np.testing.assert_array_equal(backend.get(array), case.arrays[name])


@pytest.mark.parametrize("form", ["rows", "scalar"])
def test_weights_of_zero_give_zeros(backend, form):
    """Megatron-LM#5643: a coefficient of 0 gave no gradient at all, and data-parallel training stopped."""
    case = make(21, "bfloat16")
    grads = check(backend, case, np.zeros((3, 4, 37), np.float32) if form == "rows" else 0.0).grads
    assert all(array is not None and not backend.get(array).any() for array in grads)


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
def test_no_valid_row_at_all(backend, reduction):
    """attention-gym#378, Megatron-LM#6910: the path without valid rows had no gradient, or a mean of NaN."""
    case = poisoned(make(22, "float16", seqlens_k=[0, 0, 0], reduction=reduction))
    run = check(backend, case)
    assert not backend.get(run.kl).any() and not any(backend.get(array).any() for array in run.grads)


def test_gradients_that_nobody_asked_for_are_not_made(backend):
    """Megatron-LM#5099: gigabytes of zeros for a teacher that is never trained."""
    run = run_forward(backend, make(23, "float16"))
    grads = skl.backward(run.state)
    assert grads.q1 is None and grads.k1 is None and grads.q2 is not None and grads.k2 is not None


@pytest.mark.parametrize("d", [(128, 64), (256, 256)], ids=str)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_deterministic_means_the_same_bits(backend, d, dtype):
    """flash-attention#2244, #1306: deterministic=True, and dQ still moved by 1e-4."""
    case = make(24, dtype, batch=1, heads=4, heads_k=(2, 2), n=(130, 200), d=d, causal=True)
    run, weight = run_forward(backend, case), backend.put(row_weights(case))
    first, *others = (skl.backward(run.state, weight, wrt=SIDES, deterministic=True) for _ in range(6))
    check_gradients(backend, case, first, truth(case, row_weights(case), SIDES))
    for other in others:
        for name in SIDES:
            assert backend.get(getattr(other, name)).tobytes() == backend.get(getattr(first, name)).tobytes(), name
