"""The benchmark package on the CPU: counts, options, refusals, results, peers, plots. What it says of a GPU is run on one."""

import importlib.util
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from bench import accuracy, cases, data, memory, paper, peers, report, results, runner, timing
from bench.cases import Case, parse_size, parse_sizes, show_size
from bench.cli import main, parser
from bench.peers import Skip
from streamkl_cupy.problem import Problem

ROOT = Path(__file__).resolve().parent.parent
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


# Counts


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


# Options

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
    for command in ("forward", "memory", "few-rows", "backward"):
        picture = tmp_path / f"{command}.png"
        sizes = ["--seqlen-q", "8,16", "--head-dim", "8"]
        assert main([command, *TINY, *sizes, "--plot", str(picture), "--json", str(tmp_path / f"{command}.json")]) == 0
        assert picture.stat().st_size > 10_000
    both = [str(tmp_path / f"{command}.json") for command in ("forward", "few-rows")]
    assert main(["show", *both, "--plot", str(tmp_path / "both.svg")]) == 0
    assert {p.name for p in tmp_path.glob("both*")} == {"both-forward.svg", "both-few-rows.svg"}


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
    # --help below; --check in test_readme.
    assert named - {"--help", "--check"} == set(EXERCISED)


def test_help_is_complete(capsys):
    for command in ("forward", "backward", "memory", "few-rows", "host", "all", "show", "readme"):
        with pytest.raises(SystemExit) as stop:
            main([command, "--help"])
        assert stop.value.code == 0
    out = capsys.readouterr().out
    assert all(name in out for name in EXERCISED)


# Commands


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
    assert "GB/s" in out and out.count("backward setting 1") == 2


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


# Timing


class FakeClock:
    """Calls name themselves and take what they say."""

    def __init__(self):
        self.log = []

    def flush(self):
        self.log.append("flush")

    def once(self, call):
        name, ms = call()
        self.log.append(name)
        return ms

    def block(self, call, count):
        name, ms = call()
        self.log.append((name, count))
        return ms


def test_contenders_take_turns_until_their_budget_is_used():
    clock = FakeClock()
    calls = {"a": lambda: ("a", 10.0), "b": lambda: ("b", 100.0)}
    times = timing.interleaved(clock, calls, seconds=0.4, repeat=5, estimate_ms={"a": 10.0, "b": 100.0})
    assert [entry for entry in clock.log if entry != "flush"] == ["a", "b", "a", "b", "a", "a", "a"]
    assert clock.log[::2] == ["flush"] * 7
    assert len(times["a"].calls) == 5 and times["b"].median == 100.0


def test_sustained_blocks_alternate_and_last_half_a_second():
    clock = FakeClock()

    class Gemm:
        flop, estimate_ms = 2e9, 2.0
        call = staticmethod(lambda: ("gemm", 2.0))

    rates = timing.sustained(clock, lambda: ("kernel", 4.0), 2e9, 4.0, Gemm)
    assert [name for name, _ in clock.log] == ["kernel", "gemm"] * 4
    assert all(count * ms >= 500 for (_, count), ms in zip(clock.log, [4.0, 2.0] * 4, strict=True))
    assert rates.ratio == 0.5 and len(rates.kernel) == timing.ROUNDS


def test_spread_is_half_the_quartile_distance():
    assert timing.Times((1.0, 1.0, 1.0)).spread == 0
    assert timing.Times((9.0, 10.0, 11.0)).spread == pytest.approx(0.05)
    assert timing.Times((9.0,)).spread == 0


# Peers


@pytest.mark.parametrize("mask", [{}, {"causal": True}, {"seqlen_q": 56, "seqlen_k": 40, "causal": True}, {"window": (5, 3)}])
@pytest.mark.parametrize("wrt", [("q2", "k2"), ("q1", "k1")])
@pytest.mark.parametrize("name", ["dense", "torch", "chunked"])
@pytest.mark.parametrize("kv_heads", [2, 1])
def test_peers_agree_with_float64(name, wrt, mask, kv_heads, monkeypatch):
    case = small_case(wrt=wrt, kv_heads=kv_heads, **mask)
    inputs = data.make(case, "cpu")
    checker = checked(case, inputs)
    if name != "dense":
        pytest.importorskip("torch")
        inputs = torch_data(inputs)
    module = peers.load(name)
    if name == "chunked":
        monkeypatch.setattr(module, "CHUNK_BYTES", 4 * 2 * case.seqlen_k * 7)
    prepared = module.prepare(case, inputs)
    assert checker.forward_error(prepared.forward()) < 1e-5
    assert checker.backward_error(prepared.backward()) < 1e-5


def checked(case, inputs):
    from bench.subject import Subject

    checker = accuracy.Checker(case, inputs)
    subject = Subject(case, inputs)
    subject.forward()
    assert checker.state_error(subject.state) < 1e-5
    return checker


def torch_data(inputs):
    import torch

    return data.Data("torch", *(torch.from_numpy(array) for array in (*inputs.inputs, inputs.grad_kl)))


def test_a_wrong_gradient_is_noticed():
    case = small_case(causal=True)
    inputs = data.make(case, "cpu")
    checker = checked(case, inputs)
    grads = peers.load("dense").prepare(case, inputs).backward()
    for name in grads:
        assert checker.backward_error(grads | {name: grads[name] * 1.1}) > 0.05
    kl = peers.load("dense").prepare(case, inputs).forward()
    assert checker.forward_error(kl * 1.1) > 0.05
    assert math.isinf(checker.forward_error(np.full_like(kl, np.nan)))


class FakePeer:
    NAME, DEVICE, COMPANION = "fake", "cpu", False

    def __init__(self, problem):
        self.problem = problem

    def prepare(self, case, inputs):
        def forward():
            raise self.problem

        return peers.Prepared(forward, forward)


@pytest.mark.parametrize(
    ("problem", "reason"),
    [
        (Skip("no such mask"), "no such mask"),
        (MemoryError(), "out of memory"),
        (type("OutOfMemoryError", (RuntimeError,), {})("2 TiB"), "out of memory"),
        (RuntimeError("boom\nmore"), "failed: RuntimeError: boom"),
    ],
)
def test_what_keeps_a_peer_away_is_its_reason(problem, reason):
    bench = runner.Runner(runner.Plan("cpu", (), 1, 0.01, False), lambda text: None)
    bench.modules["fake"] = FakePeer(problem)
    row = bench.measure(small_case(), "forward", "forward")
    assert row["skipped"] == {"fake": reason}
    assert "ms" in row["results"]["streamkl"]
    assert bench.measure_memory(small_case(), "backward")["skipped"] == {"fake": reason}


def test_a_peer_that_is_wrong_is_not_timed():
    wrong = peers.Prepared(lambda: np.ones((1, 2, 40), np.float32), dict)
    bench = runner.Runner(runner.Plan("cpu", (), 1, 0.01, False), lambda text: None)
    peer = FakePeer(None)
    peer.prepare = lambda case, inputs: wrong
    bench.modules["fake"] = peer
    row = bench.measure(small_case(), "forward", "forward")
    assert row["skipped"]["fake"].startswith("wrong: error") and "fake" not in row["results"]


def test_a_peer_that_would_take_too_long_is_skipped():
    bench = runner.Runner(runner.Plan("cpu", ("dense",), 1, 1.0, False), lambda text: None)
    case = small_case()
    bench._remember("dense", case, "forward", 4e3)
    bench._foresee("dense", case, "forward")
    with pytest.raises(Skip, match="about 8 s"):
        bench._foresee("dense", small_case(seqlen_q=60, seqlen_k=75), "forward")


def test_memory_of_the_cpu_counts_outputs():
    assert memory.peak_extra_bytes(lambda: np.zeros(1 << 20, np.uint8), "cpu") == pytest.approx(1 << 20, rel=0.01)


TRITON_CHECK = """
import torch
from bench import accuracy, data, subject
from bench.cases import Case
from bench.triton_launch import Problem

def check(nq, nk, d1, d2, causal, setting, dtype, form, config, splits):
    case = Case(nq, nk, 1, 1, 1, d1, d2, dtype, causal, wrt=("q2", "k2") if setting == 1 else ("q1", "k1"))
    inputs = data.make(case, "cpu")
    checker = accuracy.Checker(case, inputs)
    ours = subject.Subject(case, inputs)
    ours.forward()
    checker.state_error(ours.state)
    problem = Problem(case, data.Data("torch", *(torch.from_numpy(x) for x in (*inputs.inputs, inputs.grad_kl))))
    assert (problem.splits(config) > 1) == splits
    problem.forward(config)
    side = 3 - setting
    dk = problem.gradient(f"k{side}").fill_(float("nan"))
    if form == "fused":
        dq = problem.gradient(f"q{side}", torch.float32).zero_()
        problem.dk(setting, config, dk, dq)
    else:
        dq = problem.gradient(f"q{side}").fill_(float("nan"))
        problem.dq(setting, config, dq)
        problem.dk(setting, config, dk)
    bound = 1e-5 if dtype == "float32" else 5e-3
    errors = checker.forward_error(problem.kl[None]), checker.backward_error({f"q{side}": dq[None], f"k{side}": dk[None]})
    assert max(errors) < bound, (case, form, errors)

check(32, 64, 16, 32, False, 1, "float32", "separate", (16, 32, 4, 2), True)
check(70, 90, 16, 32, True, 2, "float32", "separate", (16, 32, 4, 2), True)
check(130, 70, 32, 16, True, 1, "float32", "fused", (32, 16, 4, 2), True)
check(300, 48, 16, 16, False, 2, "float16", "fused", (16, 16, 4, 2), False)
"""


@pytest.mark.skipif(not (has("triton") and has("torch")), reason="Triton or PyTorch is not installed")
def test_triton_kernels_in_the_interpreter():
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", TRITON_CHECK], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


# The paper


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


def test_numbers_are_written_briefly():
    assert [report.milliseconds(ms) for ms in (0.5, 12.345, 433.3)] == ["0.500", "12.35", "433"]
    assert [report.size(n) for n in (20, 33 << 20, 1 << 40)] == ["20 B", "33 MiB", "1 TiB"]


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
