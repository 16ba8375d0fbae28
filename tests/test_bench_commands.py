"""What each command measures and prints, and what it refuses."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench import report, results
from bench.cli import main

from .bench_runs import SMALL, TINY, rows_of, run

ROOT = Path(__file__).resolve().parent.parent


def test_the_table_and_its_notes(capsys):
    code, out, err = run(capsys, "forward", *SMALL, "--peers", "dense,fla")
    assert code == 0
    header = next(line for line in out.splitlines() if line.startswith("pass"))
    for column in ("N_Q", "ms", "TFLOP/s", "of cuBLAS", "extra", "error", "vs dense"):
        assert column in header
    assert "NumPy backend" in err and "skipped: fla: it runs on cuda (all cases)" in err


def test_progress_needs_no_rich(monkeypatch, capsys):
    from bench.progress import Progress

    monkeypatch.setitem(sys.modules, "rich.progress", None)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    with Progress(2) as progress:
        progress.say("first")
        progress.advance()
        progress.say("second")
    captured = capsys.readouterr()
    assert captured.out == ""
    assert [line.rpartition("] ")[2] for line in captured.err.splitlines()] == ["first", "second"]
    assert captured.err.splitlines()[1].startswith("[2/2")


def test_few_rows_gives_bandwidth(capsys):
    code, out, _ = run(capsys, "few-rows", *TINY, "--seqlen-q", "1,4", "--seqlen-k", "64", "--head-dim", "16")
    assert code == 0
    assert "GB/s" in out and "time / copy" in out and out.count("backward setting 1") == 2


def test_few_rows_are_held_against_a_copy_of_the_same_run(tmp_path):
    rows = rows_of(tmp_path, "few-rows", *TINY, "--seqlen-q", "1", "--seqlen-k", "64", "--head-dim", "16")
    for row in rows:
        assert row["copy"]["gbps"] > 0.1 and "cublas" not in row
        assert report.over_copy(row) == f"{row['copy']['gbps'] / row['results']['streamkl']['gbps']:.2f}"
    assert "copy" not in rows_of(tmp_path, "forward", *SMALL)[0]


def test_memory_command(tmp_path):
    rows = rows_of(tmp_path, "memory", *TINY, "--seqlen-q", "512", "--head-dim", "16", "--heads", "1", "--causal", "no")
    assert [row["direction"] for row in rows] == ["forward", "backward"]
    for row in rows:
        assert row["results"]["dense"]["extra_bytes"] > 512 * 512 * 4 * 2
        assert row["results"]["streamkl"]["extra_bytes"] > 0


def test_host_command(tmp_path):
    rows = rows_of(tmp_path, "host", *TINY, "--seqlen-q", "8", "--head-dim", "8")
    assert [row["framework"] for row in rows] == ["numpy", "torch"]
    times = rows[0]["results"]["numpy"]
    assert all(times[name] > 0 for name in ("forward_first_us", "forward_us", "backward_us", "forward_refill_us", "backward_refill_us"))


def test_all_runs_every_command(tmp_path):
    rows = rows_of(tmp_path, "all", *SMALL, "--causal", "no", "--seqlen-q", "8")
    assert list(dict.fromkeys(row["command"] for row in rows)) == ["forward", "backward", "memory", "few-rows", "host"]
    assert {tuple(row["case"]["wrt"]) for row in rows if row["command"] == "backward"} == {("q2", "k2"), ("q1", "k1")}


def test_show_prints_what_was_stored(tmp_path, capsys):
    path = tmp_path / "r.json"
    main(["forward", *SMALL, "--json", str(path)])
    printed = capsys.readouterr().out
    assert main(["show", str(path)]) == 0
    assert capsys.readouterr().out == printed


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["nonsense"],
        ["forward", "--nonsense"],
        ["forward", "--seqlen-q", "4q"],
        ["forward", "--seqlen-q", "0"],
        ["forward", "--seqlen-k", "1,,2"],
        ["forward", "--batch", "none"],
        ["forward", "--heads", "4", "--kv-heads", "3", "--device", "cpu"],
        ["forward", "--head-dim", "577"],
        ["forward", "--head-dim2", "9999"],
        ["forward", "--dtype", "float64"],
        ["forward", "--causal", "maybe"],
        ["forward", "--window", "3"],
        ["forward", "--window=-2,0"],
        ["backward", "--wrt", "v"],
        ["forward", "--peers", "flashkl"],
        ["forward", "--device", "tpu"],
        ["forward", "--repeat", "0"],
        ["forward", "--seconds-per-cell", "0"],
        ["forward", "--seconds-per-cell", "nan"],
        ["forward", "--json", "/nowhere/r.json"],
        ["forward", "--plot", "r.gif"],
        ["forward", "--plot", "/nowhere/r.png"],
        ["show", "/nowhere/r.json"],
        ["show", __file__],
    ],
)
def test_bad_values_are_refused_in_one_line(argv, capsys):
    try:
        code = main(argv)
    except SystemExit as stop:
        code = stop.code
    captured = capsys.readouterr()
    assert code == 2
    assert captured.out == ""
    assert captured.err.startswith("bench: ") and captured.err.count("\n") == 1


def test_without_a_gpu_cuda_is_refused():
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "bench", "forward", "--device", "cuda"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("bench: --device cuda: ") and done.stderr.count("\n") == 1


def test_a_failing_library_is_reported_and_the_run_goes_on(tmp_path, monkeypatch, capsys):
    from bench import subject

    good = subject.Subject.forward

    def sometimes(self):
        if self.case.seqlen_q == 8:
            raise RuntimeError("launch failed\nat length")
        return good(self)

    monkeypatch.setattr(subject.Subject, "forward", sometimes)
    path = tmp_path / "r.json"
    assert main(["forward", *SMALL, "--causal", "no", "--seqlen-q", "8,16", "--json", str(path)]) == 1
    first, second = results.load(path)["rows"]
    assert first["skipped"]["streamkl"] == "failed: RuntimeError: launch failed"
    assert "ms" in second["results"]["streamkl"]
    assert "launch failed" in capsys.readouterr().err
