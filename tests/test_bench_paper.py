"""The paper's times as data."""

import pytest

from bench import cases, paper
from bench.cases import Case


@pytest.mark.parametrize(
    ("key", "ms"),
    [
        (("forward", None, False, "H200", 16, 16384), 6.9),
        (("forward", None, True, "H200", 32, 524288), 7800),
        (("backward", 1, False, "H200", 16, 16384), 15),
        (("backward", 2, False, "H200", 16, 16384), 13),
        (("backward", 2, True, "A100", 32, 65536), 794),
        (("backward", 1, True, "A100", 16, 4096), 2.0),
    ],
)
def test_the_papers_cells(key, ms):
    assert paper.CELLS[paper.Key(*key)]["streamkl"] == ms


def test_the_papers_table_is_whole():
    assert len(paper.CELLS) == 6 * 8 * 4
    assert paper.CELLS[paper.Key("forward", None, False, "A100", 32, 524288)] == {
        "torch": 507e3,
        "compile": 102e3,
        "fla": 85e3,
        "streamkl": 35e3,
    }
    assert "fla" not in paper.CELLS[paper.Key("backward", 2, False, "H200", 16, 4096)]
    for (*rest, _), cell in paper.CELLS.items():
        assert all(ms > 0 for ms in cell.values()), rest


def test_published_finds_only_what_was_published():
    assert paper.published(Case(16384, 16384), "forward", "H200") == 6.9
    assert paper.published(Case(16384, 16384, batch=2, heads=8, kv_heads=8), "forward", "H200") == 6.9
    assert paper.published(Case(1, 65536), "forward", "H200") == 0.27
    assert paper.published(Case(64, 524288), "backward", "H200") == 14.0
    for other in ({"dtype": "float16"}, {"head_dim2": 64}, {"kv_heads": 4}, {"window": (5, 5)}, {"heads": 8, "kv_heads": 8}):
        assert paper.published(Case(16384, 16384, **other), "forward", "H200") is None
    assert paper.published(Case(16384, 16384, wrt=cases.SIDES), "backward", "H200") is None
