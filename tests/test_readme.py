"""README's marked tables hold what bench/results/ holds."""

import json

import pytest

from bench import readme, results, runner
from bench.cases import Case
from bench.cli import main


def document(ms, date="2026-01-02T00:00:00Z", n=4096):
    row = runner.new_row(Case(n, n), "forward", "forward")
    row["results"] = {"streamkl": {"ms": ms, "spread": 0.0, "calls": 3, "tflops": 400.0, "error": 1e-6, "extra_bytes": 1 << 20}}
    row["results"]["triton"] = {"ms": 2 * ms, "speedup": 2.0, "tflops": 200.0}
    machine = {"device": "cuda", "name": "NVIDIA H200", "driver": "580", "versions": {"torch": "2.11.0"}}
    return {
        "schema": 1,
        "machine": machine,
        "run": {"date": date, "command": "", "commit": None, "dirty": None},
        "tuned": {},
        "rows": [row],
    }


MARKED = "before\n<!-- bench:forward:begin -->\nold\n<!-- bench:forward:end -->\nafter\n"


def test_readme_holds_what_the_results_hold():
    text = readme.README.read_text()
    assert readme.regenerate(text, results.committed()) == text


def test_regenerating_twice_changes_nothing():
    once = readme.regenerate(MARKED, [document(1.5)])
    assert "| 1.500 |" in once and "2.00x" in once and "NVIDIA H200" in once and "2026-01-02" in once
    assert once.startswith("before\n") and once.endswith("after\n") and "old" not in once
    assert readme.regenerate(once, [document(1.5)]) == once
    assert readme.regenerate(once, [document(1.6)]) != once


def test_the_later_run_wins_cell_by_cell():
    text = readme.regenerate(MARKED, [document(1.5), document(3.0, n=8192), document(1.25, "2026-02-03T00:00:00Z")])
    assert "1.250" in text and "3.000" in text and "1.500" not in text
    assert "2026-01-02 to 2026-02-03" in text


def test_without_results_or_markers_nothing_changes():
    assert readme.regenerate(MARKED, []) == MARKED
    assert readme.regenerate("plain\n", [document(1.5)]) == "plain\n"
    with pytest.raises(ValueError, match="it takes one of"):
        readme.regenerate("<!-- bench:nonsense:begin -->\n<!-- bench:nonsense:end -->", [])


def test_the_command_refreshes_and_checks(tmp_path, monkeypatch):
    folder = tmp_path / "results"
    folder.mkdir()
    (folder / "a.json").write_text(json.dumps(document(1.5)))
    target = tmp_path / "README.md"
    target.write_text(MARKED)
    monkeypatch.setattr(results, "FOLDER", folder)
    monkeypatch.setattr(readme, "README", target)
    assert main(["readme", "--check"]) == 1
    assert target.read_text() == MARKED
    assert main(["readme"]) == 0
    assert "1.500" in target.read_text()
    assert main(["readme", "--check"]) == 0
