"""The paper's kernels in Triton (`bench/triton_kernels.py`), tuned on this card; the backward separate or fused, whichever is faster."""

from __future__ import annotations

import dataclasses

from ..cases import SETTINGS, Case
from ..data import Data
from . import Prepared, Skip, torch_on_gpu

NAME, DEVICE, COMPANION = "triton", "cuda", False
COMPARED_PAIRS = 16 * 8192 * 8192
"""Up to here both backward forms are timed; beyond, the separate kernels run, as by the paper's rule."""


def available() -> str | None:
    if reason := torch_on_gpu():
        return reason
    try:
        import triton  # noqa: F401
    except ImportError:
        return "Triton is not installed"
    return None


def prepare(case: Case, data: Data) -> Prepared:
    from .. import triton_launch

    _refuse(case)
    problem = triton_launch.Problem(case, data.as_torch())
    tuner = _Tuner(case, problem)
    state = []

    def forward():
        problem.forward(tuner.config("forward"))
        return problem.kl.view(case.batch, case.heads, case.seqlen_q)

    def backward():
        if not state:
            forward()
            state.append(tuner.backward_form())
        return state[0](problem)

    return Prepared(forward, backward, tuner.note)


def _refuse(case: Case) -> None:
    if case.kv_heads != case.heads:
        raise Skip("the paper's kernels share no key heads")
    if case.window != (-1, -1):
        raise Skip("the paper's kernels have no window")
    for size in (case.head_dim1, case.head_dim2):
        if size < 16 or size > 256 or size & (size - 1):
            raise Skip(f"Triton tiles take powers of two from 16 to 256, not head dimension {size}")


class _Tuner:
    """Chooses tiles on a problem of the same kind, cut to the tuner's size, made when it is first needed."""

    def __init__(self, case: Case, problem):
        self.case, self.problem, self._small, self.used = case, problem, None, {}

    @property
    def setting(self) -> int:
        if self.case.wrt not in (("q2", "k2"), ("q1", "k1")):
            raise Skip(f"the paper's backward gives q2,k2 or q1,k1, not {','.join(self.case.wrt)}")
        return 1 if SETTINGS[self.case.wrt] == "setting 1" else 2

    def config(self, kernel: str):
        from .. import triton_tune

        kernel += self.problem.few
        if kernel not in self.used:
            self.used[kernel] = triton_tune.choose(kernel, self._key(kernel), lambda config: self._launch(kernel, config))
            self._small = None
        return self.used[kernel]

    def backward_form(self):
        """The faster of separate and fused kernels, as a call on a problem."""
        separate, fused = self._separate, self._fused
        if self.case.pairs > COMPARED_PAIRS and self.problem.nq > 1024:
            return separate
        times = {form: _least_ms(lambda form=form: form(self.problem)) for form in (separate, fused)}
        return min(times, key=times.get)

    def note(self) -> str:
        return "; ".join(f"{kernel} {bm}x{bn}, {w} warps, {s} stages" for kernel, (bm, bn, w, s) in self.used.items())

    def _separate(self, problem):
        side = 3 - self.setting
        dq, dk = problem.gradient(f"q{side}"), problem.gradient(f"k{side}")
        problem.dq(self.setting, self.config("dq"), dq)
        problem.dk(self.setting, self.config("dk"), dk)
        return self._shaped(side, dq, dk)

    def _fused(self, problem):
        import torch

        side = 3 - self.setting
        dq, dk = problem.gradient(f"q{side}", torch.float32).zero_(), problem.gradient(f"k{side}")
        problem.dk(self.setting, self.config("fused"), dk, dq)
        return self._shaped(side, dq.to(dk.dtype), dk)

    def _shaped(self, side, dq, dk):
        return {f"{x}{side}": grad.view(self.case.shape(f"{x}{side}")) for x, grad in (("q", dq), ("k", dk))}

    def _key(self, kernel: str) -> str:
        case = self._small_case()
        mask = "causal" if case.causal else "full"
        setting = "" if kernel.startswith("forward") else f" setting {self.setting}"
        return f"{case.seqlen_q}x{case.seqlen_k}x{case.batch * case.heads} D {case.head_dim1},{case.head_dim2} {case.dtype} {mask}{setting}"

    def _small_case(self) -> Case:
        from ..triton_tune import TUNED_SIZE

        longest = TUNED_SIZE if self.case.seqlen_q > 64 else 16 * TUNED_SIZE
        return dataclasses.replace(self.case, seqlen_q=min(self.case.seqlen_q, TUNED_SIZE), seqlen_k=min(self.case.seqlen_k, longest))

    def _launch(self, kernel: str, config) -> None:
        import torch

        from .. import data, triton_launch

        if self._small is None:
            case = self._small_case()
            self._small = triton_launch.Problem(case, data.make(case, "cuda", "torch", seed=1))
            self._small.lse1.fill_(12.0)
            self._small.lse2.fill_(12.0)
            self._small.kl.fill_(1.0)
        small, side = self._small, 3 - self.setting
        name = kernel.split()[0]
        if name == "forward":
            small.forward(config)
        elif name == "dq":
            small.dq(self.setting, config, small.gradient(f"q{side}"))
        else:
            dq = small.gradient(f"q{side}", torch.float32) if name == "fused" else None
            small.dk(self.setting, config, small.gradient(f"k{side}"), dq)


def _least_ms(call) -> float:
    import torch

    call()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times = []
    for _ in range(3):
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return min(times)
