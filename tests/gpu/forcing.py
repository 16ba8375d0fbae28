"""Plans as for another device, on the one at hand: how the table's rows for other cards are run on any."""

from __future__ import annotations

import contextlib
import dataclasses

import pytest

KB = 1 << 10
LIKE = {
    "portable": {"capability": (8, 0)},
    "99 KB": {"capability": (8, 6), "shared_memory_per_block": 99 * KB, "shared_memory_per_multiprocessor": 100 * KB},
    "163 KB": {"capability": (8, 0), "shared_memory_per_block": 163 * KB, "shared_memory_per_multiprocessor": 164 * KB},
}


@contextlib.contextmanager
def planned_like(name: str):
    """Within, forward and backward choose their kernels as on a device of LIKE; they are compiled for and run on the real one."""
    from streamkl_cupy.gpu import backward, device, forward

    like = dataclasses.replace(device.device_info(0), **LIKE[name])
    with pytest.MonkeyPatch.context() as patch:
        for module in (forward, backward):
            patch.setattr(module, "device_info", lambda index: like)
            module.plan.cache_clear()
        yield
    for module in (forward, backward):
        module.plan.cache_clear()
