"""The online state of rows against the dense formula in float64."""

import numpy as np
import pytest
from scipy.special import log_softmax, logsumexp

from streamkl_cupy.online_rows import NO_REFERENCE, OnlineRows, finish, power_of_two, reopen
from streamkl_cupy.state import LN2, RowStats

LOG2_E = 1 / LN2


def state_of(s1, s2):
    """The state of rows that have seen the natural-log logits s1, s2 of shape (rows, keys), keys perhaps none."""
    online = OnlineRows.clear(len(s1))
    if s1.shape[1]:
        x1, x2 = s1 * LOG2_E, s2 * LOG2_E
        online.rebase(np.ceil(x1.max(axis=1)), np.ceil(x2.max(axis=1)))
        x1, x2 = x1 - online.ref1[:, None], x2 - online.ref2[:, None]
        online.sum1, online.sum2 = np.exp2(x1).sum(axis=1), np.exp2(x2).sum(axis=1)
        online.product = (np.exp2(x1) * (x1 - x2)).sum(axis=1)
    return online


def check(rows, s1, s2, rtol=1e-9, atol=1e-9):
    log_p1, log_p2 = log_softmax(s1, axis=1), log_softmax(s2, axis=1)
    np.testing.assert_allclose(rows.kl, (np.exp(log_p1) * (log_p1 - log_p2)).sum(axis=1), rtol, atol)
    np.testing.assert_allclose(rows.lse1, logsumexp(s1, axis=1), rtol)
    np.testing.assert_allclose(rows.lse2, logsumexp(s2, axis=1), rtol)


@pytest.mark.parametrize("offset", [0.0, 1e3, -1e4])
def test_merge_of_shards_is_the_whole(offset):
    rng = np.random.default_rng(1)
    s1, s2 = offset + 9 * rng.normal(size=(50, 40)), offset + 9 * rng.normal(size=(50, 40))
    merged = OnlineRows.clear(50)
    for begin, end in ((0, 13), (13, 13), (13, 14), (14, 40)):
        merged.merge(state_of(s1[:, begin:end], s2[:, begin:end]))
    check(finish(merged), s1, s2)


def test_rows_without_keys():
    rows = finish(OnlineRows.clear((2, 3)))
    for array, expected in zip(rows, (0, 0, -np.inf, 0, -np.inf), strict=True):
        assert array.shape == (2, 3) and (array == expected).all()
    again = reopen(rows)
    assert (again.ref1 == NO_REFERENCE).all() and (again.sum1 == 0).all() and (again.product == 0).all()


def test_reopen_undoes_finish():
    rng = np.random.default_rng(2)
    s1, s2 = 5 * rng.normal(size=(20, 7)), 5 * rng.normal(size=(20, 7))
    check(finish(reopen(finish(state_of(s1, s2)))), s1, s2)


def test_reopen_takes_any_split_of_reference_and_sum():
    rng = np.random.default_rng(3)
    s1, s2 = 5 * rng.normal(size=(20, 7)), 5 * rng.normal(size=(20, 7))
    rows = finish(state_of(s1, s2))
    moved = RowStats(rows.kl, rows.ref1 + 0.3, rows.logsum1 - 0.3, rows.ref2 - 17.75, rows.logsum2 + 17.75)
    online = reopen(moved)
    assert (online.ref1 == np.rint(online.ref1)).all() and (online.ref2 == np.rint(online.ref2)).all()
    assert (online.sum1 <= 1).all() and (online.sum1 > 0.5).all()
    check(finish(online), s1, s2)


def test_rescale_is_exact():
    np.testing.assert_array_equal(power_of_two(np.array([0.0, -1.0, -60.0, -1.7e38])), [1.0, 0.5, 2.0**-60, 0.0])
    online = state_of(np.array([[1.0, 2.0]]), np.array([[3.0, 1.0]]))
    before = online.sum1.copy()
    online.rebase(online.ref1 + 20, online.ref2 + 3)
    np.testing.assert_array_equal(online.sum1 * 2.0**20, before)


def test_equal_sides_give_zero():
    s = np.random.default_rng(4).normal(size=(30, 21)) * 30
    merged = state_of(s[:, :5], s[:, :5])
    merged.merge(state_of(s[:, 5:], s[:, 5:]))
    assert (finish(merged).kl == 0).all()
