"""Masks, infinities, underflow, epsilons: what went wrong elsewhere, by its right value here, one kind of public report a test.

Objective, direction and reduction are in test_public_objective.py, structure in test_public_structure.py. Reports on memory, DLPack,
streams and compilers have their tests in test_arrays.py, test_api.py and gpu/. Values with many digits were computed in float64.
"""

import numpy as np
import pytest

import streamkl_cupy as skl
from streamkl_cupy.checks import SIDES

from .logits import CASES, ROUNDING, embed, numbers
from .oracle import DTYPES, KL_FLOOR, NUMPY, Case, check, make, poisoned, row_weights, run_forward, truth


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
