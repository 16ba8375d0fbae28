"""Launches of the Triton kernels: grids, the paper's split rule, scales folded to base 2."""

from __future__ import annotations

import torch
import triton

from . import triton_backward, triton_kernels
from .cases import Case
from .data import Data

LOG2E = 1.4426950408889634
FEW_ROWS = 64
Config = tuple[int, int, int, int]


class Problem:
    """Contiguous (B * H, N, D) views of a case's inputs, its row statistics (base 2) and what every launch passes."""

    def __init__(self, case: Case, data: Data):
        self.case = case
        self.bh = case.batch * case.heads
        self.inputs = [x.reshape(self.bh, *x.shape[2:]) for x in data.inputs]
        self.g = data.grad_kl.reshape(self.bh, case.seqlen_q)
        self.device = self.g.device
        self.kl, self.lse1, self.lse2 = (torch.empty_like(self.g) for _ in range(3))
        self.nq, self.nk = case.seqlen_q, case.seqlen_k
        self.scales = [scale * LOG2E for scale in case.scales]
        self.constants = {
            "D1": case.head_dim1,
            "D2": case.head_dim2,
            "CAUSAL": case.causal,
            # float32 products stay float32; for 16-bit inputs the word means nothing.
            "PRECISION": "ieee" if case.dtype == "float32" else "tf32",
        }

    @property
    def few(self) -> str:
        """A suffix of the kernel's name in the tuner where there are few rows."""
        return " few" if self.nq <= FEW_ROWS else ""

    def splits(self, config: Config) -> int:
        """The paper's rule, floor(target / programs), at most one key tile each and 1 where there are programs enough.

        Its target is 128 or 256; four programs a streaming multiprocessor are more and stream better on a large card.
        """
        target = 4 * _processors(self.device)
        programs = self.bh * triton.cdiv(self.nq, config[0])
        return 1 if programs >= target else max(1, min(target // programs, triton.cdiv(self.nk, config[1])))

    def forward(self, config: Config) -> None:
        bm, bn, warps, stages = config
        splits = self.splits(config)
        chunk = triton.cdiv(triton.cdiv(self.nk, splits), bn) * bn
        splits = triton.cdiv(self.nk, chunk)
        parts = torch.empty((5, splits, self.bh, self.nq), device=self.device) if splits > 1 else self.kl
        triton_kernels.forward_kernel[(triton.cdiv(self.nq, bm), self.bh, splits)](
            *self.inputs, self.kl, self.lse1, self.lse2, parts, *self.scales, self.bh, self.nq, self.nk, self.nk - self.nq, chunk,
            SPLIT=splits > 1, EVEN=self.nk % bn == 0, BM=bm, BN=bn, num_warps=warps, num_stages=stages, **self.constants,
        )  # fmt: skip
        if splits > 1:
            count = self.bh * self.nq
            triton_kernels.merge_kernel[(triton.cdiv(count, 32),)](
                parts, self.kl, self.lse1, self.lse2, count, splits, BLOCK=32, SPLITS=triton.next_power_of_2(splits)
            )

    def dq(self, setting: int, config: Config, dq) -> None:
        bm, bn, warps, stages = config
        triton_backward.dq_kernel[(triton.cdiv(self.nq, bm), self.bh)](
            *self.inputs, self.lse1, self.lse2, self.kl, self.g, dq, *self.scales, self._factor(setting), self.nq, self.nk,
            self.nk - self.nq, SETTING=setting, EVEN=self.nk % bn == 0, BM=bm, BN=bn, num_warps=warps, num_stages=stages,
            **self.constants,
        )  # fmt: skip

    def dk(self, setting: int, config: Config, dk, dq=None) -> None:
        """Writes dK; where a zeroed float32 `dq` is given, adds to that as well (the fused kernel)."""
        bm, bn, warps, stages = config
        even = self.nq % bm == 0 and self.nk % bn == 0
        triton_backward.dk_kernel[(triton.cdiv(self.nk, bn), self.bh)](
            *self.inputs, self.lse1, self.lse2, self.kl, self.g, dk, self.kl if dq is None else dq, *self.scales, self._factor(setting),
            self.nq, self.nk, self.nk - self.nq, SETTING=setting, EVEN=even, FUSED=dq is not None, BM=bm, BN=bn, num_warps=warps,
            num_stages=stages, **self.constants,
        )  # fmt: skip

    def _factor(self, setting: int) -> float:
        # Setting 2's kernel works on base-2 logits.
        return self.case.scales[1] if setting == 1 else self.case.scales[0] / LOG2E

    def gradient(self, name: str, dtype=None):
        index = {"q1": 0, "k1": 1, "q2": 2, "k2": 3}[name]
        return torch.empty_like(self.inputs[index], dtype=dtype)


def _processors(device) -> int:
    if device.type != "cuda":
        return 4
    return torch.cuda.get_device_properties(device).multi_processor_count
