"""The rows of the tile table for other cards, run on the one at hand."""

import pytest

import streamkl_cupy as skl

from ..oracle import check, make, row_weights
from .forcing import LIKE, planned_like

pytestmark = pytest.mark.gpu

DIMS = [(16, 24), (64, 128), (128, 128), (192, 96), (256, 256)]


@pytest.mark.parametrize("name", LIKE)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("d", DIMS, ids=str)
def test_forced_rows(device, name, dtype, d):
    case = make(21, dtype, batch=2, n=(150, 203), d=d, causal=True)
    with planned_like(name):
        check(device, case, row_weights(case))


@pytest.mark.parametrize("name", LIKE)
@pytest.mark.parametrize("d", [(40, 24), (320, 16)], ids=str)
def test_forced_chunks(device, name, d):
    case = make(22, "float32", batch=1, n=(70, 203), d=d, window=(60, 30))
    with planned_like(name):
        check(device, case, row_weights(case))


@pytest.mark.parametrize("name", LIKE)
def test_few_rows_are_split(device, name):
    case = make(23, "bfloat16", batch=1, n=(5, 6000), d=(128, 128))
    with planned_like(name):
        check(device, case)
        said = str(skl.explain(*(device.put(a) for a in case.arrays.values())))
    assert "sm90" not in said and " 0 x 1 on a part" not in said, said
