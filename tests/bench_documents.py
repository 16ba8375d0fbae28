"""Result files as a run on a large card would write them, with invented numbers: for tests alone, never in bench/results/."""

import itertools
import json

from bench.cases import SIDES, Case
from bench.runner import new_row

K = 1024
GIB = 1 << 30
SETTINGS = (("q2", "k2"), ("q1", "k1"))
SLOWER = {"triton": 1.6, "compile": 3.4, "torch": 14.0, "chunked": 15.0, "fla": 3.1, "cupy": 9.0}
COPY_GBPS = 4200.0
VERSIONS = {"numpy": "2.5.2", "cupy-cuda13x": "14.2.0", "torch": "2.11.0", "triton": "3.6.0", "fla-core": "0.6.0", "nvrtc": "13.0"}


def document(rows, date="2026-01-02T00:00:00Z", name="NVIDIA H200", **machine):
    about = {"device": "cuda", "name": name, "driver": "580.1", "power_limit_w": 700.0, "memory_bytes": 140 * GIB, "versions": VERSIONS}
    run = {"date": date, "command": "python -m bench", "commit": None, "dirty": False}
    return {"schema": 1, "machine": about | machine, "run": run, "tuned": {}, "rows": rows}


def store(folder, **documents):
    """Writes each to `folder` under its name, as a run would have."""
    for name, each in documents.items():
        (folder / f"{name.replace('_', '-')}.json").write_text(json.dumps(each))


def timed_row(case, direction, ms=None, peers=SLOWER, sustained=0.8):
    row = new_row(case, direction, direction)
    ms = ms or case.flop(direction) / (560e9 if direction == "forward" else 470e9) / (0.8 + 0.2 * case.seqlen_q / (64 * K))
    row["results"]["streamkl"] = entry(case, direction, ms) | {"of_cublas": 0.7}
    row["cublas"] = {"tflops": 780.0}
    row["sustained"] = {"ratio": sustained, "kernel_tflops": [500.0] * 3, "cublas_tflops": [640.0] * 3}
    for name, factor in peers.items():
        if reason := absence(case, name):
            row["skipped"][name] = reason
        else:
            row["results"][name] = entry(case, direction, ms * factor) | {"speedup": factor}
    if peers:
        row["results"]["cudnn"] = {"error": 2e-3, "ms": ms / 2, "spread": 0.01, "calls": 9, "tflops": 610.0}
    return row


def entry(case, direction, ms):
    rates = {"tflops": case.flop(direction) / ms / 1e9, "gbps": case.traffic(direction) / ms / 1e6}
    return {"error": 1.7e-3, "ms": ms, "spread": 0.01, "calls": 20, **rates}


def absence(case, name):
    logits = 4 * case.pairs / GIB
    if name == "fla" and case.wrt == ("q1", "k1"):
        return "its gradient is the student's (setting 1) alone"
    if logits > {"torch": 40, "cupy": 60, "compile": 140, "fla": 140}.get(name, 1e9):
        return "out of memory"
    return "a call would take about 6 s; raise --seconds-per-cell to have it" if name == "chunked" and logits > 200 else None


def memory_row(case, direction):
    row = new_row(case, direction, "memory")
    sizes = {"streamkl": 28 * case.rows, "triton": 40 * case.rows, "torch": 30 * case.pairs, "compile": 9 * case.pairs, "chunked": 6 * GIB}
    gradients = 0 if direction == "forward" else 2 * 2 * 128 * case.rows
    for name, size in sizes.items():
        if size > 140 * GIB:
            row["skipped"][name] = "out of memory"
        else:
            row["results"][name] = {"extra_bytes": size + gradients}
    return row


def few_row(case, direction):
    row = new_row(case, direction, "few-rows")
    ms = case.traffic(direction) / (COPY_GBPS / 1.1 * case.seqlen_k / (case.seqlen_k + 8 * K)) / 1e6
    row["results"] = {"streamkl": entry(case, direction, ms), "triton": entry(case, direction, 1.8 * ms) | {"speedup": 1.8}}
    row["copy"] = {"gbps": COPY_GBPS}
    row["skipped"]["torch"] = "failed: RuntimeError: boom"
    return row


def host_row(framework):
    row = new_row(Case(512, 512), "both", "host") | {"framework": framework}
    fields = ("forward_first_us", "backward_first_us", "forward_us", "backward_us", "forward_refill_us", "backward_refill_us")
    fields = fields[:4] if framework == "jax" else fields
    row["results"][framework] = dict(zip(fields, (210000.0, 330000.0, 41.2, 60.3, 28.0, 39.5), strict=False))
    return row | ({"graph": {"kernels_us": 30.0, "replay_adds_us": 2.5}} if framework == "cupy" else {})


def grid(lengths=(4 * K, 8 * K, 16 * K, 32 * K, 64 * K), heads=(16, 32), row=timed_row, **fields):
    """A row for every pass of the paper's grid."""
    passes = (("forward", SETTINGS[0]), *(("backward", wrt) for wrt in SETTINGS))
    return [
        row(Case(n, n, heads=h, kv_heads=h, causal=causal, wrt=wrt, **fields), direction)
        for (direction, wrt), h, causal, n in itertools.product(passes, heads, (False, True), lengths)
    ]


def whole_run():
    """The documents of a complete run, by file name."""
    few = [
        few_row(Case(q, k * K), direction) for direction in ("forward", "backward") for q in (1, 16, 32, 64) for k in (64, 128, 256, 512)
    ]
    others = [
        timed_row(Case(32 * K, 32 * K, kv_heads=4, causal=True), "forward", peers={}),
        timed_row(Case(16 * K, 16 * K, heads=32, kv_heads=32, head_dim1=64, head_dim2=64), "forward", peers={}),
        timed_row(Case(16 * K, 16 * K, dtype="float16"), "forward", peers={}),
        timed_row(Case(32 * K, 32 * K, window=(4096, 0)), "forward", peers={}),
        timed_row(Case(16 * K, 16 * K, wrt=SIDES), "backward", peers={}),
        timed_row(Case(16 * K, 16 * K, deterministic=True), "backward", peers={}),
    ]
    return {
        "h200_grid": document(grid()),
        "h200_memory": document(grid(heads=(16,), row=memory_row)),
        "h200_few_rows": document(few),
        "h200_host": document([host_row(name) for name in ("cupy", "torch", "jax")]),
        "h200_shapes": document(others),
        "h200_portable": document(
            [timed_row(Case(16 * K, 16 * K, portable=True), d, peers={}, sustained=0.4) for d in ("forward", "backward")],
            "2025-12-01T00:00:00Z",
            driver="570.2",
        ),
    }
