"""Plans are kept by what they depend on: not by scales and offsets, which may change at every step."""

import dataclasses

import pytest

from streamkl_cupy.gpu import plans
from streamkl_cupy.problem import Problem

pytest.importorskip("cupy")

from streamkl_cupy.gpu import backward, forward
from streamkl_cupy.gpu.device import DeviceInfo

DEVICES = {
    "portable": DeviceInfo("some A100", (8, 0), "sm_80", 108, 163 << 10, 164 << 10),
    "Hopper": DeviceInfo("some H200", (9, 0), "sm_90", 132, 227 << 10, 228 << 10),
}
BASE = Problem("bhsd", "bfloat16", 2, 8, 8, 8, 512, 640, 128, 64, 0.1, 0.2, True, q_offset=3)
OTHERS = {
    "layout": "bshd",
    "dtype": "float16",
    "batch": 3,
    "heads": 16,
    "heads_k1": 4,
    "heads_k2": 2,
    "seqlen_q": 511,
    "seqlen_k": 512,
    "head_dim1": 64,
    "head_dim2": 128,
    "causal": False,
    "window": (9, -1),
    "has_seqlens_q": True,
    "has_seqlens_k": True,
    "reduction": "mean",
}
RUN_TIME = {"scale1": 0.3, "scale2": 0.4, "q_offset": -7}


@pytest.fixture
def seen():
    """What the function behind `seen.plan` was asked."""

    class Seen(list):
        def __init__(self):
            self.plan = plans.kept(self.choose)

        def choose(self, *arguments):
            self.append(arguments)
            return len(self)

    return Seen()


def test_every_field_is_either_seen_or_a_run_time_number():
    assert {*OTHERS, *RUN_TIME} == {field.name for field in dataclasses.fields(Problem)}


@pytest.mark.parametrize("name", OTHERS)
def test_what_a_plan_may_depend_on_makes_another(seen, name):
    other = dataclasses.replace(BASE, **{name: OTHERS[name]})
    assert (seen.plan(BASE, 0), seen.plan(other, 0), seen.plan(BASE, 0), seen.plan(BASE, 1)) == (1, 2, 1, 3)
    assert seen[1] == (dataclasses.replace(other, scale1=1.0, scale2=1.0, q_offset=0), 0)


@pytest.mark.parametrize("name", RUN_TIME)
def test_a_run_time_number_finds_the_same_plan(seen, name):
    for problem in (BASE, dataclasses.replace(BASE, **{name: RUN_TIME[name]})):
        assert seen.plan(problem, 0) == 1
    assert len(seen) == 1


def test_offsets_that_are_no_number_are_seen(seen):
    kinds = [3, None, "vector", 4]
    assert [seen.plan(dataclasses.replace(BASE, q_offset=kind)) for kind in kinds] == [1, 2, 3, 1]
    assert [problem.q_offset for (problem,) in seen] == [0, None, "vector"]


@pytest.mark.parametrize("device", DEVICES)
def test_ten_thousand_scales_leave_one_plan_each(monkeypatch, device):
    for module in (forward, backward):
        monkeypatch.setattr(module, "device_info", lambda index: DEVICES[device])
        module.plan.cache_clear()
    try:
        for step in range(10_000):
            problem = dataclasses.replace(BASE, scale1=0.1 + 1e-5 * step, q_offset=step)
            forward.plan(problem, 0, True)
            backward.plan(problem, ("q2", "k2"), 0, True, True)
        assert [(module.plan.cache_info().currsize, module.plan.cache_info().misses) for module in (forward, backward)] == [(1, 1)] * 2
    finally:
        for module in (forward, backward):
            module.plan.cache_clear()
