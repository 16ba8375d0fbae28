"""The main job: distil the attention of a real model into a smaller one, with this library's forward and backward.

The teacher is a layer of MiniLM, 12 heads of 32 dimensions, on 409 tokens (data/README.md). The student makes its queries and
keys, 12 heads of 16 dimensions, from the same hidden states with two weight matrices, trained by Adam on the mean KL of a row.
"""

from __future__ import annotations

import argparse
import importlib.resources
import platform
import statistics
import sys
import time
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from scipy.special import softmax

from . import reference
from .api import backward, forward
from .gpu.device import device_info

HEADS, STUDENT_DIM = 12, 16
LEARNING_RATE = 3e-3
REPORTED_STEPS = (1, 10, 50, 100, 200)


class Machine(NamedTuple):
    """Where the attention is computed: NumPy or CuPy as `arrays`, and what to call it."""

    arrays: Any
    backend: str
    device: str

    def to_device(self, array: np.ndarray):
        return self.arrays.asarray(array)

    def to_host(self, array) -> np.ndarray:
        return array if self.arrays is np else self.arrays.asnumpy(array)


def choose_machine(device: str) -> Machine:
    """The machine for "auto", "cpu" or "cuda"; RuntimeError where "cuda" has no usable GPU."""
    if device != "cpu":
        try:
            info = device_info(0)
        except RuntimeError:
            if device == "cuda":
                raise
        else:
            import cupy

            return Machine(cupy, f"CUDA kernels for {info.arch}", info.name)
    return Machine(np, "NumPy backend", _processor())


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
            return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


class Adam:
    """Adam with bias correction, in place on a list of weights."""

    def __init__(self, weights: list, rate: float, beta1: float = 0.9, beta2: float = 0.999, eps: float = 1e-8):
        self.weights, self.rate, self.beta1, self.beta2, self.eps = weights, rate, beta1, beta2, eps
        self.moments = [(0 * w, 0 * w) for w in weights]
        self.steps = 0

    def step(self, gradients: list) -> None:
        self.steps += 1
        correction1, correction2 = 1 - self.beta1**self.steps, 1 - self.beta2**self.steps
        for weight, gradient, (mean, square) in zip(self.weights, gradients, self.moments, strict=True):
            mean += (1 - self.beta1) * (gradient - mean)
            square += (1 - self.beta2) * (gradient**2 - square)
            weight -= self.rate * (mean / correction1) / ((square / correction2) ** 0.5 + self.eps)


class Distillation:
    """Teacher, student and optimiser. Attention inputs are float32 in layout "bshd", on the machine's device.

    Weights and Adam are float64 NumPy arrays in either case: small, and their matrix products would need cuBLAS on a GPU, which
    this library does without.
    """

    def __init__(self, machine: Machine, seed: int):
        with importlib.resources.files("streamkl_cupy.data").joinpath("minilm_attention.npz").open("rb") as file, np.load(file) as sample:
            hidden, q, k = (sample[name].astype(np.float64) for name in ("hidden", "q", "k"))
        rng = np.random.default_rng(seed)
        width = hidden.shape[1]
        self.machine = machine
        self.x = hidden / np.sqrt(np.mean(hidden**2))
        self.teacher = [machine.to_device(a.transpose(1, 0, 2)[None].astype(np.float32, order="C")) for a in (q, k)]
        self.weights = [rng.normal(0, width**-0.5, (width, HEADS * STUDENT_DIM)) for _ in ("query", "key")]
        self.adam = Adam(self.weights, LEARNING_RATE)

    def inputs(self) -> list:
        """q1, k1 of the teacher and q2, k2 of the student."""
        student = [(self.x @ w).astype(np.float32).reshape(1, -1, HEADS, STUDENT_DIM) for w in self.weights]
        return self.teacher + [self.machine.to_device(a) for a in student]

    def step(self) -> float:
        """One update; returns the mean KL before it, in nats."""
        kl, state = forward(*self.inputs(), layout="bshd", reduction="mean")
        grads = backward(state)
        outer = [self.machine.to_host(g).reshape(len(self.x), -1).astype(np.float64) for g in (grads.q2, grads.k2)]
        self.adam.step([self.x.T @ g for g in outer])
        return float(kl)


def train(job: Distillation, steps: int) -> list[float]:
    """Runs the steps and prints the KL at some of them. Returns the seconds that each took."""
    columns = TextColumn("distilling"), BarColumn(), MofNCompleteColumn(), TextColumn("KL {task.fields[kl]:.4f}"), TimeRemainingColumn()
    seconds = []
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, redirect_stdout=False, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=steps, kl=float("nan"))
        for step in range(1, steps + 1):
            begin = time.perf_counter()
            kl = job.step()
            seconds.append(time.perf_counter() - begin)
            progress.update(task, advance=1, kl=kl)
            if step in REPORTED_STEPS or step == steps:
                progress.stop()  # takes the bar away, so that it and the line do not mix on one screen
                print(f"step {step:>4}   KL {kl:.4f} nats", flush=True)
                progress.start()
    return seconds


def check(job: Distillation) -> bool:
    """Compares the KL of every row and the gradients, at the trained weights, with the dense float64 reference.

    The bar of a gradient is 1e-5, or twice the error of dense float32 arithmetic: the closer the student comes to its teacher,
    the smaller the difference P_2 - P_1 that a gradient is made of, and float32 logits know it only so well.
    """
    inputs, machine = job.inputs(), job.machine
    _, state = forward(*inputs, layout="bshd", reduction="mean")
    grads = backward(state)
    host = [machine.to_host(a) for a in inputs]
    right = reference.forward(*host, layout="bshd")
    kl_error = np.abs(machine.to_host(state.kl) - right.kl)
    largest = max(np.abs(right.lse1).max(), np.abs(right.lse2).max())
    right_grads = reference.backward(*host, layout="bshd", reduction="mean")
    error, dense_error = 0.0, 0.0
    for got, dense, want in zip((grads.q2, grads.k2), dense_gradients(*host), (right_grads.q2, right_grads.k2), strict=True):
        error = max(error, float(np.linalg.norm(machine.to_host(got) - want) / np.linalg.norm(want)))
        dense_error = max(dense_error, float(np.linalg.norm(dense - want) / np.linalg.norm(want)))
    passed = bool((kl_error <= 1e-5 * right.kl + 5e-6 + 2**-23 * largest).all()) and error <= max(1e-5, 2 * dense_error)
    print(
        f"check against the float64 reference: {'passed' if passed else 'FAILED'}; KL of a row off by {kl_error.max():.1e} nats at most, "
        f"gradients by {error:.1e} (dense float32: {dense_error:.1e})"
    )
    return passed


def dense_gradients(q1, k1, q2, k2) -> tuple[np.ndarray, np.ndarray]:
    """Gradients of the mean row KL for q2 and k2 with all matrices in memory, in float32."""
    by_head = [a.transpose(0, 2, 1, 3) for a in (q1, k1, q2, k2)]
    scale1, scale2 = (np.float32(q.shape[-1] ** -0.5) for q in (q1, q2))
    p1, p2 = (softmax(scale * q @ k.swapaxes(-1, -2), axis=-1) for scale, q, k in ((scale1, *by_head[:2]), (scale2, *by_head[2:])))
    ds = (p2 - p1) * (scale2 / np.float32(p1[..., 0].size))
    return (ds @ by_head[3]).transpose(0, 2, 1, 3), (ds.swapaxes(-1, -2) @ by_head[2]).transpose(0, 2, 1, 3)


def main(arguments: list[str] | None = None) -> int:
    """Runs the job; returns the exit code: 0, 1 where the check fails, 2 where there is no such device."""
    options = _parser().parse_args(arguments)
    try:
        machine = choose_machine(options.device)
    except RuntimeError as error:
        print(f"python -m streamkl_cupy: {error}", file=sys.stderr)
        return 2
    begin = time.perf_counter()
    job = Distillation(machine, options.seed)
    seconds = train(job, options.steps)
    passed = check(job)
    total, step_ms = time.perf_counter() - begin, 1e3 * statistics.median(seconds)
    print(f"{machine.backend} on {machine.device}: {options.steps} steps, {total:.1f} s in all, {step_ms:.2f} ms a step")
    return 0 if passed else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m streamkl_cupy",
        description="Distils real attention: a student of 16 dimensions a head learns the attention of a MiniLM layer of 32, by the mean "
        "row KL(teacher || student). Ends with a check of KL and gradients against a dense float64 reference.",
        epilog="Exit code: 0 if the check passes, 1 if not, 2 for bad arguments or no usable GPU.",
    )
    parser.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="where to run; auto takes a GPU when there is one (default: auto)"
    )
    parser.add_argument("--steps", type=_at_least(1), default=200, help="updates of the student (default: 200)")
    parser.add_argument("--seed", type=_at_least(0), default=0, help="seed of the student's first weights (default: 0)")
    return parser


def _at_least(least: int):
    def integer(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not an integer of at least {least}")
        return value

    return integer
