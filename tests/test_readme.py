"""README's marked tables and the figures beside the results hold what bench/results/ holds."""

import dataclasses
import itertools
import json

import pytest

from bench import cells, plots, readme, results, tables
from bench.cases import Case
from bench.cli import main

from .bench_documents import K, document, few_row, grid, memory_row, store, timed_row, whole_run
from .bench_runs import has

NAMES = ("figures", *tables.TABLES)
needs_matplotlib = pytest.mark.skipif(not has("matplotlib"), reason="matplotlib is not installed")


def marked(*names):
    parts = (f"<!-- bench:{name}:begin -->\nold\n<!-- bench:{name}:end -->\n" for name in names)
    return f"before\n{''.join(parts)}after\n"


def one(ms=1.5, date="2026-01-02T00:00:00Z", n=4 * K, **fields):
    return document([timed_row(Case(n, n, **fields), "forward", ms)], date)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty folder of results beside a README with every mark."""
    made = tmp_path / "results"
    made.mkdir()
    (tmp_path / "README.md").write_text(marked(*NAMES))
    monkeypatch.setattr(results, "FOLDER", made)
    monkeypatch.setattr(readme, "README", tmp_path / "README.md")
    return made


# What is committed


def test_readme_and_figures_hold_what_the_results_hold(capsys):
    assert readme.refresh(check=True) == 0, capsys.readouterr().err


def test_readme_has_a_place_for_everything():
    assert {match["name"] for match in readme.MARKED.finditer(readme.README.read_text())} == set(NAMES)


def test_no_committed_result_is_wrong():
    for each in results.committed():
        assert [row["skipped"] for row in each["rows"] if row["skipped"].get("streamkl", "").startswith(("wrong", "failed"))] == []


# Cells


def test_regenerating_twice_changes_nothing():
    once = readme.regenerate(marked("main"), [one(1.5)])
    assert "| 1.500 |" in once and "1.60x" in once and "NVIDIA H200" in once and "2026-01-02" in once
    assert once.startswith("before\n") and once.endswith("after\n") and "old" not in once
    assert readme.regenerate(once, [one(1.5)]) == once
    assert readme.regenerate(once, [one(1.6)]) != once


def test_the_later_run_wins_cell_by_cell():
    text = readme.regenerate(marked("main"), [one(1.5), one(3.0, n=8 * K), one(1.25, "2026-02-03T00:00:00Z")])
    assert "1.250" in text and "3.000" in text and "1.500" not in text
    assert "2026-01-02 to 2026-02-03" in text


def test_the_later_run_wins_whatever_its_file_is_called(folder):
    store(folder, a=one(1.25, "2026-02-03T00:00:00Z"), b=one(1.5))
    assert "1.250" in readme.tables("main", results.committed())


def test_a_forward_is_one_cell_whatever_backward_was_asked_for():
    forward = [one(1.5), one(1.25, wrt=("q1", "k1"), deterministic=True)]
    assert [row["results"]["streamkl"]["ms"] for row, _ in cells.latest(forward)] == [1.25]
    backward = [document([timed_row(Case(64, 64, wrt=wrt), "backward")]) for wrt in (("q2", "k2"), ("q1", "k1"))]
    assert len(cells.latest(backward)) == 2


def test_timed_rows_stand_in_for_memory_rows_that_are_missing():
    case = Case(4 * K, 4 * K)
    timed, measured = timed_row(case, "forward"), memory_row(case, "forward")
    timed["results"]["streamkl"]["extra_bytes"], timed["skipped"]["torch"] = 3 << 20, "out of memory"
    (line,) = lines_of(readme.tables("memory", [document([timed])]))
    assert line["streamkl_cupy"] == "3 MiB" and line["PyTorch"] == "oom"
    (line,) = lines_of(readme.tables("memory", [document([measured]), document([timed], "2026-03-04T00:00:00Z")]))
    assert line["streamkl_cupy"] == "1.75 MiB" and line["PyTorch"] == "7.5 GiB"


def test_a_row_of_before_an_option_is_the_same_cell():
    old = one(1.5)
    del old["rows"][0]["case"]["portable"]
    assert [row["results"]["streamkl"]["ms"] for row, _ in cells.latest([old, one(1.25)])] == [1.25]


def test_without_results_a_part_is_empty_and_without_marks_nothing_changes():
    assert readme.regenerate(marked("main"), []) == marked("main").replace("old\n", "")
    assert readme.regenerate("plain\n", [one(1.5)]) == "plain\n"
    with pytest.raises(ValueError, match="it takes one of"):
        readme.regenerate(marked("nonsense"), [])


# Tables


def lines_of(text):
    """The cells of every line of the first table, by its header."""
    lines = itertools.dropwhile(lambda line: not line.startswith("|"), text.splitlines())
    header, _, *rest = (
        [cell.strip() for cell in line.strip("|").split("|")] for line in itertools.takewhile(lambda line: line.startswith("|"), lines)
    )
    return [dict(zip(header, row, strict=True)) for row in rest]


def test_the_main_table():
    text = readme.tables("main", [whole_run()["h200_grid"]])
    assert text.startswith("B*H 16:") and "<details><summary>B*H 32</summary>" in text
    lines = [line for line in lines_of(text.partition("<details>")[0])]
    assert len(lines) == 3 * 2 * 5
    first = lines[0]
    assert first["pass"] == "forward" and first["N"] == "4k" and first["mask"] == "full" and first["sustained"] == "0.800"
    assert first["vs Triton"] == "1.60x" and first["vs PyTorch"] == "14.0x" and first["vs cuDNN attention"] == "(610 TF)"
    last = lines[-1]
    assert last["pass"] == "backward setting 2" and last["N"] == "64k" and last["mask"] == "causal"
    assert last["vs PyTorch"] == "oom" and last["vs FLA"] == "-"
    assert float(last["ms"]) == pytest.approx(4 * 2 * 16 * 2**31 * 128 / 470e9, rel=1e-3)


def test_what_the_main_table_has_no_place_for():
    documents = list(whole_run().values())
    lines = lines_of(readme.tables("shapes", documents))
    told = [(line["pass"], line["B*H"], line["mask"], line["problem"]) for line in lines]
    assert told == [
        ("forward", "16", "full", "float16"),
        ("forward", "16", "window 4096,0", "-"),
        ("forward", "16", "causal", "16 heads on 4 key heads"),
        ("forward", "32", "full", "D 64"),
        ("backward setting 1", "16", "full deterministic", "-"),
        ("backward both sides", "16", "full", "-"),
    ]
    portable = readme.tables("portable", documents)
    assert "driver 570.2" in portable and "2025-12-01" in portable
    for line in lines_of(portable):
        assert float(line["Hopper kernels ms"]) > 0 and line["faster by"].endswith("x") and line["N"] == "16k"


def test_the_papers_table():
    text = readme.tables("paper", [document(grid(lengths=(16 * K, 64 * K)))])
    ours = lines_of(text)
    assert len(ours) == 3 * 2 * 2 and {line["B*H"] for line in ours} == {"16", "32"}
    ms = grid(lengths=(16 * K,), heads=(16,))[0]["results"]["streamkl"]["ms"]
    assert ours[0]["N 16k"] == f"6.9 / {ms:.3g} = {6.9 / ms:.2f}x"
    triton = lines_of(text.partition("in Triton")[2])
    assert triton[0]["N 16k"] == f"6.9 / {1.6 * ms:.3g} = {6.9 / ms / 1.6:.2f}x"
    few = readme.tables("paper", [document([few_row(Case(1, 64 * K), "forward"), few_row(Case(1, 512 * K), "forward")])])
    assert lines_of(few)[0]["N_K 64k"].startswith("0.27 / ")
    assert readme.tables("paper", [document([memory_row(Case(4 * K, 4 * K), "forward")])]) == ""


def test_the_table_of_few_rows():
    row = few_row(Case(16, 512 * K), "forward")
    row["results"]["streamkl"]["gbps"] = 3500.0
    (line,) = lines_of(readme.tables("few-rows", [document([row])]))
    assert line["GB/s"] == "3500" and line["copy GB/s"] == "4200" and line["time / copy"] == "1.20" and line["vs Triton"] == "1.80x"
    del row["copy"]
    assert "time / copy" not in lines_of(readme.tables("few-rows", [document([row])]))[0]


def test_the_table_of_memory():
    lines = lines_of(readme.tables("memory", [whole_run()["h200_memory"]]))
    assert len(lines) == 3 * 2 * 5
    assert lines[0]["streamkl_cupy"] == "1.75 MiB" and lines[0]["PyTorch"] == "7.5 GiB"
    assert [line["PyTorch"] for line in lines[2:5]] == ["120 GiB", "oom", "oom"]


def test_the_table_of_host_times():
    lines = lines_of(readme.tables("host", [whole_run()["h200_host"]]))
    assert {line["inputs"] for line in lines} == {"cupy", "torch", "jax"}
    assert lines[0]["forward us"] == "41.2" and {line["replay adds us"] for line in lines} == {"2.5", "-"}


def test_each_kind_of_machine_has_a_table_of_its_own():
    other = document([timed_row(Case(4 * K, 4 * K), "forward", 5.0)], name="NVIDIA A100-SXM4-80GB")
    text = readme.tables("main", [one(1.5), other])
    assert text.count("<sub>") == 2 and text.index("1.500") < text.index("NVIDIA H200") < text.index("5.000") < text.index("A100")


# Figures


@needs_matplotlib
def test_the_command_refreshes_and_checks(folder, capsys):
    store(folder, **whole_run())
    before = readme.README.read_text()
    assert main(["readme", "--check"]) == 1
    assert readme.README.read_text() == before and not list(folder.glob("*.svg"))
    assert main(["readme"]) == 0
    text = readme.README.read_text()
    assert "old" not in text and all(f"bench/results/nvidia-h200-{kind}.svg" in text for kind in plots.FIGURES)
    assert {path.name for path in folder.glob("*.svg")} == {f"nvidia-h200-{kind}.svg" for kind in plots.FIGURES}
    assert main(["readme", "--check"]) == 0
    drawn = {path: path.read_bytes() for path in folder.glob("*.svg")}
    assert main(["readme"]) == 0 and {path: path.read_bytes() for path in folder.glob("*.svg")} == drawn
    assert "holds what bench/results/ holds" in capsys.readouterr().err


@needs_matplotlib
def test_a_figure_of_other_results_is_stale(folder, capsys):
    store(folder, **whole_run())
    main(["readme"])
    newer = grid(lengths=(4 * K,), heads=(16,))
    newer[0]["results"]["triton"]["speedup"] = 1.7
    store(folder, newer=document(newer[:1], "2026-03-04T00:00:00Z"))
    capsys.readouterr()
    assert main(["readme", "--check"]) == 1
    said = capsys.readouterr().err
    assert all(name in said for name in ("README.md", "nvidia-h200-tflops.svg", "nvidia-h200-speedup.svg")) and "memory" not in said
    main(["readme"])
    capsys.readouterr()
    (folder / "nvidia-h200-memory.svg").unlink()
    (folder / "nvidia-h200-few-rows.svg").write_text("<svg/>")
    (folder / "old-card-tflops.svg").write_text("<svg/>")
    assert main(["readme", "--check"]) == 1
    said = capsys.readouterr().err
    assert all(name in said for name in ("h200-memory.svg", "h200-few-rows.svg", "old-card-tflops.svg")) and "README.md" not in said
    assert main(["readme"]) == 0 and main(["readme", "--check"]) == 0
    assert not (folder / "old-card-tflops.svg").exists()


def test_figures_show_the_papers_problems_of_one_size():
    documents = list(whole_run().values())
    found = {figure.kind: figure.rows for figure in readme.figures(documents)}
    assert found.keys() == set(plots.FIGURES)
    for kind, rows in found.items():
        cases = [Case.from_json(row["case"]) for row in rows]
        assert {case.heads for case in cases} == {16} and not any(case.portable or case.dtype != "bfloat16" for case in cases), kind
    assert len(found["tflops"]) == 3 * 2 * 5
    assert readme.figures([one(1.5)]) == []  # one length is no curve


def test_the_digest_tells_results_apart():
    rows = grid(lengths=(4 * K,), heads=(16,))
    machine = document([])["machine"]
    digests = {plots.digest(kind, some, machine) for kind in plots.FIGURES for some in (rows, rows[1:])}
    digests.add(plots.digest("tflops", rows, machine | {"name": "another"}))
    again = plots.digest("tflops", json.loads(json.dumps(rows)), machine)
    assert len(digests) == 9 and again in digests


@needs_matplotlib
def test_a_figure_is_the_same_whatever_the_users_settings(tmp_path):
    import matplotlib

    rows, machine = grid(lengths=(4 * K, 8 * K), heads=(16,)), document([])["machine"]
    plots.save("tflops", rows, machine, tmp_path / "a.svg")
    with matplotlib.rc_context({"figure.facecolor": "black", "font.size": 30, "lines.linewidth": 9}):
        plots.save("tflops", rows, machine, tmp_path / "b.svg")
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


def test_documents_for_tests_look_like_real_ones():
    real = results.committed()
    if not real:
        pytest.skip("no run is committed")
    made = whole_run()["h200_grid"]
    assert made.keys() == real[-1].keys() and made["run"].keys() == real[-1]["run"].keys()
    fields = {field.name for field in dataclasses.fields(Case)}
    assert made["rows"][0]["case"].keys() == fields >= real[-1]["rows"][0]["case"].keys()
