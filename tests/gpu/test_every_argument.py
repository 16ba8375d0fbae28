"""The product of tests/test_every_argument.py on a device: every array argument with what can be wrong with a device array.

Nothing is launched, and not a byte changes.
"""

import re

import numpy as np
import pytest

import streamkl_cupy as skl

from .. import test_every_argument as tables
from ..test_every_argument import CALLS, FAULTS, SIDES
from .test_bad_input import moved, refused

pytestmark = pytest.mark.gpu

ON_HOST_ONLY = ("the other byte order", "read-only", "half strides")


class Call(tables.Call):
    """Its arrays on the device, and a workspace of the size that the call takes."""

    def __init__(self, device, kind: str, reduction: str):
        super().__init__(kind, reduction)
        self.arrays = {name: moved(device, array) for name, array in self.arrays.items()}
        if "workspace" in self.arrays:
            inputs = {n: self.arrays[n] for n in (*SIDES, *tables.VECTORS, *tables.ENDS) if n in self.arrays}
            self.arrays["workspace"] = device.bytes(max(skl.workspace_size(**inputs, **self.options, wrt=SIDES), 64))


@pytest.fixture(scope="module")
def calls(device):
    """Good calls, each made once: nothing is ever written to their arrays."""
    return {(kind, reduction): Call(device, kind, reduction) for kind, reduction in CALLS}


@pytest.mark.parametrize(("kind", "reduction", "name", "fault"), [row for row in tables.table() if row.values[3] not in ON_HOST_ONLY])
def test_every_fault_of_every_array(device, calls, kind, reduction, name, fault):
    call, row = calls[kind, reduction], FAULTS[fault]
    spoilt = moved(device, row.spoil(device.get(call.arrays[name])))
    with refused(device, row.error, rf"(?=.*(?:^|[ ,]){re.escape(name)} )(?=.*(?:{row.said}))", *call.arrays.values()):
        call.run(**{name: spoilt})


@pytest.mark.parametrize(("kind", "reduction", "name", "other"), list(tables.overlaps()))
def test_every_output_on_everything_else(device, calls, kind, reduction, name, other):
    call = calls[kind, reduction]
    first, second = call.arrays[name], call.arrays[other]
    at = (first.nbytes - 1) // 16 * 16
    pool = device.bytes(at + second.nbytes + 16)
    placed = {n: pool[begin : begin + a.nbytes].view(a.dtype).reshape(a.shape) for n, a, begin in ((name, first, 0), (other, second, at))}
    with refused(
        device, ValueError, rf"({re.escape(name)} overlaps {re.escape(other)}|{re.escape(other)} overlaps {re.escape(name)});", pool
    ):
        call.run(**placed)


@pytest.mark.parametrize(("kind", "reduction"), CALLS)
def test_without_a_fault_it_runs(device, kind, reduction):
    call = Call(device, kind, reduction)
    call.run()
    device.synchronize()
    assert all(np.isfinite(device.get(a)).all() for n, a in call.arrays.items() if call.written(n) and "logsum" not in n)
