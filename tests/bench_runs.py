"""What the tests of the benchmark package share: small runs on the CPU."""

import importlib.util

from bench import results
from bench.cases import Case
from bench.cli import main

TINY = ["--device", "cpu", "--seconds-per-cell", "0.01", "--repeat", "2"]
SMALL = [*TINY, "--seqlen-q", "24", "--head-dim", "16", "--heads", "2"]


def has(module):
    return importlib.util.find_spec(module) is not None


def run(capsys, *argv):
    code = main([str(word) for word in argv])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def rows_of(tmp_path, *argv):
    path = tmp_path / "r.json"
    assert main([*map(str, argv), "--json", str(path)]) == 0
    return results.load(path)["rows"]


def small_case(**fields):
    return Case(
        **{"seqlen_q": 40, "seqlen_k": 56, "heads": 2, "kv_heads": 2, "head_dim1": 16, "head_dim2": 32, "dtype": "float32"} | fields
    )
