"""Every option of the command line does what its help says."""

import json

import numpy as np
import pytest

from bench import cases, paper, peers, results, runner
from bench.cases import Case
from bench.cli import main, parser
from streamkl_cupy.problem import Problem

from .bench_runs import SMALL, TINY, has, rows_of, run

EXERCISED = {}


def exercises(*options):
    EXERCISED.update(dict.fromkeys(options))
    return lambda function: function


@exercises("--seqlen-q", "--seqlen-k", "--batch", "--heads", "--kv-heads", "--head-dim", "--head-dim2", "--dtype", "--causal", "--window")
@pytest.mark.parametrize(
    ("options", "field", "values"),
    [
        ("--seqlen-q 8,16", "seqlen_q", {8, 16}),
        ("--seqlen-q 8,16", "seqlen_k", {8, 16}),
        ("--seqlen-q 8 --seqlen-k 12,20", "seqlen_k", {12, 20}),
        ("--batch 3", "batch", {3}),
        ("--heads 1,4", "heads", {1, 4}),
        ("--heads 4 --kv-heads 2", "kv_heads", {2}),
        ("--head-dim 8,24", "head_dim1", {8, 24}),
        ("--head-dim 8,24", "head_dim2", {8, 24}),
        ("--head-dim 8 --head-dim2 16,24", "head_dim2", {16, 24}),
        ("--dtype float16,bfloat16", "dtype", {"float16", "bfloat16"}),
        ("--causal no", "causal", {False}),
        ("--causal yes", "causal", {True}),
        ("--causal both", "causal", {False, True}),
        ("--window=4,-1", "window", {(4, -1)}),
    ],
)
def test_options_choose_the_cases(tmp_path, options, field, values):
    rows = rows_of(tmp_path, "forward", *SMALL, "--causal", "no", *options.split())
    assert {getattr(Case.from_json(row["case"]), field) for row in rows} == values
    assert all(row["results"]["streamkl"]["error"] < 1e-4 and "speedup" in row["results"]["dense"] for row in rows), rows


@exercises("--portable")
def test_portable(tmp_path):
    """On the CPU there is one backend; what is checked is that the row says what was asked for."""
    (row,) = rows_of(tmp_path, "forward", *SMALL, "--causal", "no", "--portable")
    assert row["case"]["portable"]
    assert Case.from_json(row["case"]).mask_label() == "full portable"


def test_portable_kernels_are_planned_as_on_another_card(monkeypatch):
    pytest.importorskip("cupy")
    from bench.subject import use_portable_kernels
    from streamkl_cupy.gpu import backward, device, forward
    from streamkl_cupy.gpu.device import DeviceInfo

    monkeypatch.setattr(device, "device_info", lambda index: DeviceInfo("card", (9, 0), "sm_90", 132, 227 << 10, 228 << 10))
    for module in (forward, backward):
        monkeypatch.setattr(module, "device_info", module.device_info)
    use_portable_kernels()
    problem = Problem("bhsd", "bfloat16", 1, 2, 2, 2, 256, 256, 128, 128, 1.0, 1.0)
    assert forward.plan(problem, 0, True).spec.entry == "forward"
    assert [step.spec.entry for step in backward.plan(problem, ("q2", "k2"), 0, True, True)] == ["backward_dq", "backward_dk"]
    for module in (forward, backward):
        module.plan.cache_clear()


@exercises("--wrt", "--deterministic")
def test_wrt_and_deterministic(tmp_path):
    rows = rows_of(tmp_path, "backward", *SMALL, "--causal", "yes", "--wrt", "q2,k2", "k1,q1", "q1,k1,q2,k2", "k2", "--deterministic")
    assert [tuple(row["case"]["wrt"]) for row in rows] == [("q2", "k2"), ("q1", "k1"), cases.SIDES, ("k2",)]
    for row in rows:
        assert row["case"]["deterministic"]
        assert row["results"]["streamkl"]["error"] < 1e-4
        assert row["results"]["dense"]["error"] < 1e-3


@exercises("--peers", "--device")
def test_peers(tmp_path):
    assert rows_of(tmp_path, "forward", *SMALL, "--peers", "none")[0]["results"].keys() == {"streamkl"}
    row = rows_of(tmp_path, "forward", *SMALL, "--peers", "dense,triton")[0]
    assert row["results"].keys() == {"streamkl", "dense"}
    assert row["skipped"] == {"triton": "it runs on cuda"}
    assert set(rows_of(tmp_path, "forward", *SMALL, "--peers", "all")[0]["skipped"]) == set(peers.MODULES) - {"dense"}


@exercises("--repeat", "--seconds-per-cell", "--sustained", "--no-sustained")
def test_repeats_are_bounded(tmp_path):
    shape = ["--seqlen-q", "8", "--head-dim", "8", "--heads", "1", "--causal", "no", "--device", "cpu"]
    row = rows_of(tmp_path, "forward", *shape, "--repeat", "4", "--seconds-per-cell", "5", "--no-sustained")[0]
    assert row["results"]["streamkl"]["calls"] == row["results"]["dense"]["calls"] == 4
    row = rows_of(tmp_path, "forward", *shape, "--repeat", "100", "--seconds-per-cell", "0.000001", "--sustained")[0]
    assert row["results"]["streamkl"]["calls"] == 1
    assert "sustained" not in row  # there is no cuBLAS on a CPU


@exercises("--json")
def test_json_holds_machine_run_and_rows(tmp_path):
    path = tmp_path / "r.json"
    argv = ["forward", *SMALL, "--causal", "no", "--json", str(path)]
    assert main(argv) == 0
    document = json.loads(path.read_text())
    assert document["schema"] == results.SCHEMA
    assert document["machine"]["device"] == "cpu" and document["machine"]["versions"]["numpy"] == np.__version__
    assert document["run"].keys() == {"date", "command", "commit", "dirty"}
    assert document["run"]["command"].endswith("--json r.json") and document["run"]["date"].endswith("Z")
    (row,) = document["rows"]
    assert row.keys() == {"command", "direction", "case", "pairs", "flop", "bytes", "results", "skipped"}
    assert row["results"]["streamkl"].keys() == {"error", "ms", "spread", "calls", "tflops", "gbps", "extra_bytes"}
    assert row["results"]["dense"].keys() == {"error", "ms", "spread", "calls", "tflops", "gbps", "speedup", "extra_bytes"}


def test_json_is_written_after_every_row(tmp_path):
    path = tmp_path / "r.json"
    run = results.Results("cpu", ["forward"], path)
    assert results.load(path)["rows"] == []
    run.add({"command": "forward"})
    assert results.load(path)["rows"] == [{"command": "forward"}]
    assert [p.name for p in tmp_path.iterdir()] == ["r.json"]


@exercises("--explain")
def test_explain_measures_nothing(capsys):
    code, out, _ = run(capsys, "backward", *SMALL, "--explain")
    assert code == 0
    assert "8 * pairs * D" in out and "NumPy" in out and "useful operations" in out
    assert "error" not in out


@exercises("--compare-paper")
def test_compare_paper(capsys):
    code, out, _ = run(capsys, "forward", *SMALL, "--compare-paper")
    assert code == 0
    assert "no published cell was measured" in out
    row = runner.new_row(Case(16384, 16384, causal=True), "forward", "forward")
    row["results"] = {"streamkl": {"ms": 1.9}, "triton": {"ms": 3.8}}
    _, header, (line,) = paper.comparison([row], "NVIDIA H200")
    assert dict(zip(header, line, strict=True))["paper ms"] == "3.8"
    assert line[6:] == ["2.00x", "3.8", "1.00x"]


@exercises("--plot")
@pytest.mark.skipif(not has("matplotlib"), reason="matplotlib is not installed")
def test_plot(tmp_path):
    kinds = {"forward": ("tflops", "speedup"), "memory": ("",), "few-rows": ("",), "backward": ("tflops", "speedup")}
    for command, drawn in kinds.items():
        sizes = ["--seqlen-q", "8,16", "--head-dim", "8", "--plot", str(tmp_path / f"{command}.png")]
        assert main([command, *TINY, *sizes, "--json", str(tmp_path / f"{command}.json")]) == 0
        pictures = [tmp_path / f"{command}{kind and '-'}{kind}.png" for kind in drawn]
        assert sorted(tmp_path.glob(f"{command}*.png")) == sorted(pictures)
        assert all(picture.stat().st_size > 10_000 for picture in pictures)
    both = [str(tmp_path / f"{command}.json") for command in ("forward", "few-rows")]
    assert main(["show", *both, "--plot", str(tmp_path / "both.svg")]) == 0
    assert {p.name for p in tmp_path.glob("both*")} == {"both-tflops.svg", "both-speedup.svg", "both-few-rows.svg"}


@pytest.mark.skipif(not has("matplotlib"), reason="matplotlib is not installed")
def test_plot_of_memory_marks_what_did_not_fit(tmp_path):
    from bench import plots

    rows = []
    for n in (1024, 2048):
        row = runner.new_row(Case(n, n), "forward", "memory")
        row["results"] = {"streamkl": {"extra_bytes": 20 * n}}
        row["skipped"] = {"torch": "out of memory"}
        rows.append(row)
    (file,) = plots.write(rows, {"name": "card", "memory_bytes": 2**37}, tmp_path / "m.svg")
    assert "out of memory" in file.read_text()


def test_every_option_is_exercised():
    named = set()
    for command in parser()._subparsers._group_actions[0].choices.values():
        named |= {option for action in command._actions for option in action.option_strings if option.startswith("--")}
    # --help below; --check in test_readme.py.
    assert named - {"--help", "--check"} == set(EXERCISED)


def test_help_is_complete(capsys):
    for command in ("forward", "backward", "memory", "few-rows", "host", "all", "show", "readme"):
        with pytest.raises(SystemExit) as stop:
            main([command, "--help"])
        assert stop.value.code == 0
    out = capsys.readouterr().out
    assert all(name in out for name in EXERCISED)
