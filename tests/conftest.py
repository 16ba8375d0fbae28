"""The `backend` fixture, the skip of device tests where there is no device, and the report of a run on one."""

from __future__ import annotations

import functools
import os
import pathlib
import tempfile

import hypothesis
import pytest

from . import gpu_report
from .backends import CuPyBackend, NumPyBackend, compile_ahead

COMMON = {"deadline": None, "print_blob": True, "suppress_health_check": list(hypothesis.HealthCheck)}
hypothesis.settings.register_profile("suite", derandomize=True, **COMMON)
hypothesis.settings.register_profile("explore", **COMMON)
hypothesis.settings.load_profile("suite")


@functools.cache
def why_no_device() -> str | None:
    """Why tests marked `gpu` cannot run here; None where they can."""
    from streamkl_cupy.gpu.device import device_info
    from streamkl_cupy.gpu.errors import import_nvrtc

    try:
        import_nvrtc()
        device_info(0)
    except RuntimeError as error:
        return str(error)
    return None


def pytest_collection_modifyitems(items):
    on_device = [item for item in items if item.get_closest_marker("gpu")]
    if on_device and (reason := why_no_device()):
        for item in on_device:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def device():
    """CuPy on device 0, with what the tests launch most compiled ahead."""
    compile_ahead()
    return CuPyBackend()


@pytest.fixture(scope="session", params=["numpy", pytest.param("cupy", marks=pytest.mark.gpu)])
def backend(request):
    """Each test that takes it runs on both backends."""
    return NumPyBackend() if request.param == "numpy" else request.getfixturevalue("device")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """Among workers of pytest-xdist a test marked `alone` has the device to itself, from the setup of its fixtures on."""
    if not (item.get_closest_marker("gpu") and hasattr(item.config, "workerinput")):
        return (yield)
    import fcntl

    with open(pathlib.Path(tempfile.gettempdir()) / f"streamkl_cupy-tests-{os.getuid()}.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX if item.get_closest_marker("alone") else fcntl.LOCK_SH)
        return (yield)


def pytest_configure():
    gpu_report.OUTCOMES.clear()


def pytest_runtest_logreport(report):
    if "gpu" in report.keywords:
        gpu_report.note(report)


def pytest_sessionfinish(session, exitstatus):
    if hasattr(session.config, "workerinput"):  # of pytest-xdist: its controller hears of all tests
        return
    if gpu_report.is_whole_run(session) and exitstatus == 0 and why_no_device() is None:
        gpu_report.write(session)
