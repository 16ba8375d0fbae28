"""The paper's kernels in Triton, in Triton's interpreter, and their tuner."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from .bench_runs import has

ROOT = Path(__file__).resolve().parent.parent

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
    if "only 0-dimensional arrays can be converted" in done.stderr:
        pytest.skip("this Triton's interpreter cannot work with this NumPy (2.4 or later)")
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.skipif(not has("torch"), reason="PyTorch is not installed")
def test_every_candidate_is_compiled_before_any_is_timed(monkeypatch):
    import torch

    from bench import triton_tune

    log, candidates = [], [(bm, 64, 4, 2) for bm in range(16, 116)]
    monkeypatch.setattr(triton_tune, "choices", {})
    monkeypatch.setitem(triton_tune.CANDIDATES, "kernel", candidates)
    monkeypatch.setattr(triton_tune, "_time", lambda launch, config: log.append(config) or float(config[0] == 20))
    for name in ("current_device", "set_device", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: 0)

    def launch(config):
        log.append(config)
        if config[0] == 30:
            raise RuntimeError("out of resources")

    assert triton_tune.choose("kernel", "problem", launch) == (16, 64, 4, 2)
    assert log[0] == candidates[0] and sorted(log[:100]) == candidates and log[100:] == candidates
    log.clear()
    assert triton_tune.choose("kernel", "problem", launch) == (16, 64, 4, 2) and log == []
