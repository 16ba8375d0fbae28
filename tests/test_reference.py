"""The float64 oracle against hand-checked public cases and against finite differences of itself."""

import json
import pathlib

import numpy as np
import pytest

from streamkl_cupy import reference

CASES = json.loads((pathlib.Path(__file__).parent / "cases" / "open_cases.json").read_text())


def embed(logits):
    """Logits of one row as q = [1, 0, ...], k_j = [s_j, 0, ...] with scale 1."""
    s = np.array([float(x) for x in logits])
    q, k = np.zeros((1, 1, 1, 8)), np.zeros((1, 1, len(s), 8))
    q[..., 0], k[0, 0, :, 0] = 1, np.where(np.isfinite(s), s, 0)
    return q, k, int(np.isfinite(s).sum())


@pytest.mark.parametrize("name", ["both_masked_key", "student_underflow_unclipped", "setting2_p1_underflow"])
def test_logit_cases(name):
    case = CASES[name]
    (q1, k1, seen), (q2, k2, _) = embed(case["s1"]), embed(case["s2"])
    options = {"scale1": 1.0, "scale2": 1.0, "seqlens_k": np.array([seen])}
    result = reference.forward(q1, k1, q2, k2, **options)
    np.testing.assert_allclose(result.kl[0, 0], case["kl"], rtol=1e-12)
    grads = reference.backward(q1, k1, q2, k2, wrt=("k1", "k2"), **options)
    for side in "12":
        if f"dS{side}" in case:
            got = getattr(grads, f"k{side}")[0, 0, :, 0]
            np.testing.assert_allclose(got, case[f"dS{side}"][0], rtol=1e-9, atol=1e-80)


@pytest.mark.parametrize("name", [n for n in CASES if n.startswith("causal")])
def test_causal_cases(name):
    case = CASES[name]
    arrays = [np.array(case[n])[None, None] for n in ("q1", "k1", "q2", "k2")]
    options = {"causal": True, "scale1": case["scale"], "scale2": case["scale"], "q_offset": 0 if "top_left" in name else None}
    result = reference.forward(*arrays, **options)
    np.testing.assert_allclose(result.kl[0, 0], case["kl"], rtol=1e-12, atol=1e-15)
    np.testing.assert_allclose(result.lse1[0, 0], np.array(case["lse1"], dtype=float), rtol=1e-12)
    grads = reference.backward(*arrays, wrt=("q1", "k1", "q2", "k2"), **options)
    for n in ("q1", "k1", "q2", "k2"):
        np.testing.assert_allclose(getattr(grads, n)[0, 0], case["d" + n.upper()], rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("window", [(-1, -1), (2, 1)])
@pytest.mark.parametrize("causal", [False, True])
def test_finite_differences(causal, window):
    rng = np.random.default_rng(7)
    names, dims = ("q1", "k1", "q2", "k2"), ((4, 5, 3), (2, 6, 3), (4, 5, 2), (1, 6, 2))
    arrays = [rng.normal(size=(2, *d)) for d in dims]
    options = {"causal": causal, "window": window, "seqlens_k": np.array([6, 4]), "scale2": 0.7}
    g = rng.normal(size=(2, 4, 5))
    grads = reference.backward(*arrays, g, wrt=names, **options)
    for i, name in enumerate(names):
        step = rng.normal(size=arrays[i].shape)
        moved = [[a + sign * 1e-5 * step if j == i else a for j, a in enumerate(arrays)] for sign in (1, -1)]
        up, down = (float((g * reference.forward(*m, **options).kl).sum()) for m in moved)
        assert (up - down) / 2e-5 == pytest.approx(float((getattr(grads, name) * step).sum()), rel=1e-6, abs=1e-9)


def test_empty_rows_and_packing():
    case = CASES["varlen_zero_len_none"]
    arrays = [np.array(case[n], dtype=float)[:, None] for n in ("q1", "k1", "q2", "k2")]
    options = {
        "layout": "thd",
        "cu_seqlens_q": case["cu_seqlens_q"],
        "cu_seqlens_k": case["cu_seqlens_k"],
        "scale1": case["scale"],
        "scale2": case["scale"],
    }
    np.testing.assert_allclose(reference.forward(*arrays, **options).kl[0], case["kl"], rtol=1e-12, atol=1e-15)
    grads = reference.backward(*arrays, **options)
    np.testing.assert_allclose(grads.q2[:, 0], case["dQ2"], rtol=1e-10, atol=1e-14)
    np.testing.assert_allclose(grads.k2[:, 0], case["dK2"], rtol=1e-10, atol=1e-14)
