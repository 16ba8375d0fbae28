"""The fuzzer (`python -m tests.fuzz`): some of its cases, and that it draws what it should and catches what is wrong."""

import json

import numpy as np
import pytest

from streamkl_cupy import numpy_backend
from streamkl_cupy.checks import LAYOUTS, SIDES

from . import fuzz, fuzz_cases, fuzz_run, fuzz_workers
from .fuzz_places import PLACES, Place, put
from .fuzz_values import KINDS
from .problems import DTYPES, NUMPY

CASES = 60
RIGHT = numpy_backend.logit_gradients


@pytest.mark.parametrize("index", range(CASES))
def test_a_case(backend, index):
    fuzz_run.run(backend, fuzz_cases.draw(0, index))


def features(drawn: fuzz_cases.FuzzCase) -> set[str]:
    """What is special about a case, in words."""
    case, options = drawn.case, drawn.case.options
    geometry = case.geometry()
    blocks = [block.visible for block in geometry.blocks()]
    heads = {name: array.shape[geometry.head_axis] for name, array in case.arrays.items()}
    rows = isinstance(drawn.weight, np.ndarray) and drawn.weight.ndim > 1
    said = {
        f"layout {options['layout']}",
        case.dtype,
        drawn.values,
        f"reduction {options['reduction']}",
        f"hidden {drawn.hidden}",
        f"q_offset {'vector' if np.ndim(options['q_offset']) else type(options['q_offset']).__name__}",
        *(f"{name} {place.how}" for name, place in drawn.places.items()),
        *(f"gradient of {name}" for name in drawn.wrt),
        f"{len(drawn.wrt)} gradients",
        f"gradients in {drawn.dtype}",
        f"weight rows {drawn.weight.dtype} {drawn.weight_place.how}" if rows else f"weight {type(drawn.weight).__name__}",
        *(f"k{s} {'like q' if heads[f'k{s}'] == heads['q1'] else 'one' if heads[f'k{s}'] == 1 else 'grouped'}" for s in "12"),
    }
    is_so = {
        "causal": options.get("causal"),
        "window": max(options.get("window", (-1, -1))) >= 0,
        "padded queries": "seqlens_q" in options,
        "padded keys": "seqlens_k" in options,
        "empty segment": "cu_seqlens_k" in options and not np.diff(options["cu_seqlens_k"]).all(),
        "D1 not D2": case.arrays["q1"].shape[-1] != case.arrays["q2"].shape[-1],
        "a row that sees nothing": any(not v.any(axis=1).all() for v in blocks),
        "a key that nobody sees": any(not v.any(axis=0).all() for v in blocks),
        "no rows or keys": 0 in case.arrays["q1"].shape or 0 in case.arrays["k1"].shape,
        "many rows or keys": max(geometry.n_q, geometry.n_k) > 300,
        "NaN for rows that see nothing": rows and np.isnan(drawn.weight.astype(float)).any(),
    }
    calls = {name: getattr(drawn, name) for name in ("exact", "identical", "deterministic", "fresh", "workspace", "rebuilt", "shards")}
    return said | {name for name, so in (is_so | calls).items() if so}


EXPECTED = {
    *(f"layout {layout}" for layout in LAYOUTS),
    *DTYPES,
    *KINDS,
    *(f"reduction {reduction}" for reduction in ("none", "sum", "mean")),
    *(f"hidden {value}" for value in (None, np.nan, np.inf, -np.inf)),
    *(f"q_offset {kind}" for kind in ("NoneType", "int", "vector")),
    *(f"{name} {how}" for name in SIDES for how in PLACES),
    *(f"gradient of {name}" for name in SIDES),
    *(f"{count} gradients" for count in (1, 2, 3, 4)),
    *(f"gradients in {dtype}" for dtype in (None, "float32")),
    *(f"weight rows {dtype} {how}" for dtype in NUMPY.values() for how in PLACES),
    *(f"weight {kind}" for kind in ("NoneType", "float", "int", "float32", "ndarray")),
    *(f"k{side} {heads}" for side in "12" for heads in ("like q", "one", "grouped")),
    *("causal", "window", "padded queries", "padded keys", "empty segment", "D1 not D2", "a row that sees nothing"),
    *("a key that nobody sees", "no rows or keys", "many rows or keys", "NaN for rows that see nothing"),
    *("exact", "identical", "deterministic", "fresh", "workspace", "rebuilt", "shards"),
}


def test_every_feature_appears_early():
    seen = set()
    for index in range(600):
        seen |= features(fuzz_cases.draw(0, index))
    assert EXPECTED - seen == set()


def test_every_combination_of_kernels_is_drawn_and_no_other():
    classes = sorted(fuzz_cases.DIMS)
    drawn = set()
    for index in range(1500):
        arrays = fuzz_cases.draw(1, index).case.arrays
        dims = [next((c for c in classes if c >= arrays[name].shape[-1]), None) for name in ("q1", "q2")]
        chunked = arrays["q1"].dtype == np.float32 or None in dims
        drawn.add((arrays["q1"].dtype.name, "chunked" if chunked else tuple(dims)))
    pairs = {(dtype, pair) for dtype in DTYPES[:2] for pair in fuzz_cases.PAIRS}
    assert drawn == pairs | {(dtype, "chunked") for dtype in DTYPES} and len(drawn) == 29


def test_a_case_depends_on_its_seed_and_index_alone():
    first = [fuzz_cases.draw(7, index) for index in range(20)]
    for index in reversed(range(20)):
        again = fuzz_cases.draw(7, index)
        assert str(again) == str(first[index])
        for name, array in again.case.arrays.items():
            assert array.tobytes() == first[index].case.arrays[name].tobytes()
    assert len({str(case) for case in first} | {str(fuzz_cases.draw(8, index)) for index in range(20)}) == 40


@pytest.mark.parametrize("how", PLACES)
def test_places(backend, how):
    """The array comes back as it was, in memory that lies otherwise."""
    array = np.arange(2 * 3 * 5 * 8, dtype=np.float32).reshape(2, 3, 5, 8)
    place = Place(how, 1)
    if how == "expanded":
        array = np.repeat(array[:, :1], 3, axis=1)
    placed = put(backend, array, place)
    np.testing.assert_array_equal(backend.get(placed), array)
    assert (placed.strides == array.strides) == (how == "contiguous")


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("LOG2_E", numpy_backend.LOG2_E * (1 + 1e-4)),
        ("LN2", numpy_backend.LN2 * (1 + 1e-3)),
        ("logit_gradients", lambda terms, s1, s2, scales, hidden, wanted: RIGHT(terms, s1, s2, scales, None, wanted)),
    ],
)
def test_what_is_wrong_is_caught_and_said_how_to_see_it_again(monkeypatch, capsys, tmp_path, name, wrong):
    arguments, report = ["--backend", "numpy", "--seed", "3"], tmp_path / "run.json"
    monkeypatch.setattr(numpy_backend, name, wrong)
    assert fuzz.main([*arguments, "--cases", "30", "--json", str(report)]) == 1
    *failed, summary = capsys.readouterr().out.splitlines()
    written = json.loads(report.read_text())
    assert failed and f"30 cases of seed 3 on numpy, {len(failed)} failed" in summary
    assert (written["cases"], written["failed"], written["seed"]) == (30, len(failed), 3)
    for line, index in zip(failed, written["failed_cases"], strict=True):
        assert line.startswith(f"python -m tests.fuzz --seed 3 --case {index} --backend numpy  # ")
    one = [*arguments, "--case", str(index)]
    assert fuzz.main(one) == 1
    monkeypatch.undo()
    assert fuzz.main(one) == 0


def test_workers_run_each_case_once():
    ran = sorted(fuzz_workers.attempts("numpy", 0, 2, 9))
    assert ran == [(index, None) for index in range(9)]


def test_a_worker_that_dies_fails_its_case_and_is_replaced():
    """Here all of them die at once: there is no such backend."""
    ran = dict(fuzz_workers.attempts("nonsense", 0, 2, 4))
    assert sorted(ran) == [0, 1, 2, 3] and all("the process ended with status 1" in error for error in ran.values())


def test_a_worker_that_hangs_fails_its_case(monkeypatch):
    monkeypatch.setattr(fuzz_workers, "HUNG_SECONDS", 0)
    work = fuzz_workers.attempts("numpy", 0, 1, 10**6)
    index, error = next((i, e) for i, e in work if e)
    work.close()
    assert error == "no answer in 0 seconds" and index >= 0


def test_minutes_end_a_run(capsys):
    assert fuzz.main(["--backend", "numpy", "--minutes", "0.0001"]) == 0
    assert "1 cases of seed 0" in capsys.readouterr().out


@pytest.mark.parametrize("option", [["--minutes", "0"], ["--cases", "-1"], ["--workers", "0"], ["--backend", "abacus"]])
def test_bad_options(option, capsys):
    with pytest.raises(SystemExit):
        fuzz.main(option)
    assert option[0] in capsys.readouterr().err
