"""Sizes, counts of pairs, arithmetic and traffic, and how numbers are written."""

import json

import numpy as np
import pytest

from bench import cases, report
from bench.cases import Case, parse_size, parse_sizes, show_size

from .bench_runs import small_case


def test_sizes_take_suffixes():
    assert parse_sizes("1k,4K,2m,7") == [1024, 4096, 2 * 1024**2, 7]
    assert [show_size(n) for n in (1024, 1000, 1 << 20, 16384, 1536)] == ["1k", "1000", "1m", "16k", "1536"]
    for text in ("", "k", "0", "-1", "1.5k", "4g", "1_0", "²"):
        with pytest.raises(ValueError, match="it takes"):
            parse_size(text)


@pytest.mark.parametrize("lengths", [(7, 7), (5, 9), (9, 5), (1, 6)])
@pytest.mark.parametrize("mask", [{}, {"causal": True}, {"window": (2, 0)}, {"window": (1, 2)}, {"causal": True, "window": (3, -1)}])
def test_visible_pairs_are_exact(lengths, mask):
    nq, nk = lengths
    case = small_case(seqlen_q=nq, seqlen_k=nk, batch=2, **mask)
    left, right = case.window
    distance = np.arange(nk)[None] - (np.arange(nq)[:, None] + nk - nq)
    seen = np.ones((nq, nk), bool)
    if case.causal:
        seen &= distance <= 0
    if left >= 0:
        seen &= distance >= -left
    if right >= 0 and not case.causal:
        seen &= distance <= right
    assert case.pairs == 2 * 2 * seen.sum()


def test_arithmetic_is_counted_in_products():
    case = Case(4096, 4096, heads=16)
    product = 2 * 16 * 4096**2 * 128
    assert case.flop("forward") == 2 * product
    assert case.flop("backward") == 4 * product
    assert Case(4096, 4096, heads=16, wrt=cases.SIDES).flop("backward") == 6 * product
    assert Case(4096, 4096, heads=16, causal=True).flop("forward") == pytest.approx(product, rel=3e-4)
    few = Case(1, 65536, heads=16)
    assert few.traffic("forward") == pytest.approx(2 * 16 * 65536 * 128 * 2, rel=1e-3)
    assert few.traffic("backward") == pytest.approx(3 * 16 * 65536 * 128 * 2, rel=1e-3)


def test_a_case_survives_json():
    case = small_case(causal=True, window=(3, 4), wrt=("q1",), deterministic=True)
    assert Case.from_json(json.loads(json.dumps(case.to_json()))) == case


def test_numbers_are_written_briefly():
    assert [report.milliseconds(ms) for ms in (0.5, 12.345, 433.3)] == ["0.500", "12.35", "433"]
    assert [report.size(n) for n in (20, 33 << 20, 1 << 40)] == ["20 B", "33 MiB", "1 TiB"]
