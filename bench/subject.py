"""The library itself, called as a user calls it: public functions only, but for `use_portable_kernels`."""

from __future__ import annotations

import dataclasses

import streamkl_cupy as skl

from .cases import SIDES, Case
from .data import Data
from .peers import Prepared

NAME = "streamkl"


class Subject:
    """The library's calls on a case; `state` is that of the last forward."""

    def __init__(self, case: Case, data: Data):
        self.case, self.data, self.state = case, data, None

    def forward(self):
        kl, self.state = skl.forward(*self.data.inputs, **self.case.options)
        return kl

    def backward(self) -> dict:
        if self.state is None:
            self.forward()
        grads = skl.backward(self.state, self.data.grad_kl, wrt=self.case.wrt, deterministic=self.case.deterministic)
        return {name: grad for name, grad in zip(SIDES, grads, strict=True) if grad is not None}


def prepare(case: Case, data: Data) -> Prepared:
    subject = Subject(case, data)
    return Prepared(subject.forward, subject.backward)


def use_portable_kernels() -> None:
    """From here on the library plans as on a card without Hopper's instructions: how its other kernels are measured on this one."""
    from streamkl_cupy.gpu import backward, device, forward

    for module in (forward, backward):
        module.device_info = lambda index: dataclasses.replace(device.device_info(index), capability=(8, 0))
        module.plan.cache_clear()


def plan(case: Case, data: Data) -> list[str]:
    """What the library says it would run."""
    return str(skl.explain(*data.inputs, wrt=case.wrt, **case.options)).splitlines()
