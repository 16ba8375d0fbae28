"""Peers against float64, what keeps one away, and memory."""

import math

import numpy as np
import pytest

from bench import accuracy, data, memory, peers, runner
from bench.peers import Skip

from .bench_runs import small_case


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
        (RuntimeError("Triton Error [CUDA]: out of memory"), "out of memory"),
        (RuntimeError("backend='inductor' raised:\nOutOfMemoryError: CUDA: tried to allocate 64.00 GiB"), "out of memory"),
        (RuntimeError("cudaErrorMemoryAllocation"), "out of memory"),
        (RuntimeError("CUBLAS_STATUS_ALLOC_FAILED"), "out of memory"),
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
